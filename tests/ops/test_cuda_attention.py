"""ATen's CUDA attention kernels, as far as can be tested without a GPU: calls, shapes, masks."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from attention_calls import attention_call
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_remat.steps import attention_library


def why_not(q, call):
    """Why no CUDA kernel can serve."""
    return attention_library._why_not_cuda(call, q.shape[3], q.dtype, q.device)


def call_of(q_len, kv_len, mask=None, padding=None):
    """A call, true where a bool mask excludes."""
    sizes = (2, 4, 4, q_len, kv_len, 64)
    means = {"true_means": "exclude"}
    return attention_call(sizes, scale=0.125, mask=mask, padding=padding, **means)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "efficient masked"])
def test_kernels_are_called_as_their_schemas_say(name, dtype, monkeypatch):
    if name in ("flash", "cudnn") and dtype == torch.float32:
        dtype = torch.float16
    monkeypatch.setattr(attention_library, "kernel", lambda *_: name.split()[0])
    with FakeTensorMode():
        q = torch.empty(2, 4, 33, 64, dtype=dtype, device="cuda")
        k, v = (torch.empty(2, 4, 50, 64, dtype=dtype, device="cuda") for _ in range(2))
        mask = torch.empty(33, 50, device="cuda") if "masked" in name else None
        call = call_of(33, 50, mask)
        attn, lse = attention_library.cuda_forward(q, k, v, call, mask)
        grads = attention_library.cuda_backward(attn, q, k, v, attn, lse, call, mask)
    assert attn.shape == q.shape and attn.dtype == dtype
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_backward_gives_kernels_dense_lse_and_output(name, monkeypatch):
    """They ignore the strides of both; heads that share a key head are slices."""
    seen = []

    def backward(do, q, k, v, *rest, **_):
        o, lse = (rest[1], rest[2]) if name == "efficient" else (rest[0], rest[1])
        seen.append(o.transpose(1, 2).is_contiguous() and lse.is_contiguous())
        return (q, k, v, None)[: 4 if name == "efficient" else 3]

    op = {f"_scaled_dot_product_{name}_attention_backward": backward}
    monkeypatch.setattr(attention_library, "_aten", SimpleNamespace(**op))
    monkeypatch.setattr(attention_library, "kernel", lambda *_: name)
    q = torch.randn(2, 8, 33, 16)
    o, lse = torch.randn(2, 33, 8, 16).transpose(1, 2), torch.randn(2, 8, 33)
    half = slice(None, None, 2)
    call = call_of(33, 33)
    attention_library.cuda_backward(o[:, half], q[:, half], q[:, half], q[:, half], o[:, half],
                                    lse[:, half], call, None)  # fmt: skip
    assert seen == [True]


@pytest.mark.parametrize("shape", [(7, 5), (2, 1, 1, 5), (2, 4, 7, 5), (7, 1)], ids=str)
@pytest.mark.parametrize("far", [0.0, -1e4, 1e4])
def test_a_shifted_mask_changes_no_probability(shape, far):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 5, 8)
    mask = torch.randn(shape, dtype=torch.float64) * 5 + far
    mask.view(-1)[0] = -torch.inf
    bias, nothing = attention_library._bias(mask, q, k)
    assert bias.shape == (2, 4, 7, 5) and bias.dtype == q.dtype
    assert bias.stride(-1) == 1 and bias.stride(-2) % 16 == 0
    scores = torch.randn(2, 4, 7, 5, dtype=torch.float64)
    expected = (scores + mask).softmax(-1)
    seen = ~nothing.expand(2, 4, 7, 1)
    found = (scores + bias.double()).softmax(-1)
    torch.testing.assert_close(found * seen, expected.nan_to_num() * seen, atol=1e-5, rtol=1e-5)


def test_rows_that_see_nothing_are_marked_and_harmless():
    mask = torch.zeros(3, 4).masked_fill(torch.tensor([[False], [True], [False]]), -torch.inf)
    q = torch.randn(1, 1, 3, 8)
    bias, nothing = attention_library._bias(mask, q, torch.randn(1, 1, 4, 8))
    assert nothing.flatten().tolist() == [False, True, False]
    assert bias.isfinite().all()


def test_a_16_bit_mask_that_is_not_far_from_0_stays_exact():
    mask, q = torch.randn(3, 4).bfloat16(), torch.randn(1, 1, 3, 8).bfloat16()
    bias, _ = attention_library._bias(mask.float(), q, torch.randn(1, 1, 4, 8))
    assert torch.equal(bias[0, 0], mask)


@pytest.mark.parametrize(
    ("q", "call", "words"),
    [
        (torch.empty(1, 1, 4, 8, dtype=torch.float64), call_of(4, 4), "float64"),
        (torch.empty(1, 1, 4, 20, dtype=torch.bfloat16), call_of(4, 4), "head dim 20"),
        (torch.empty(1, 1, 4, 264), call_of(4, 4), "head dim 264"),
    ],
)
def test_reasons(q, call, words):
    assert words in why_not(q, call)


def test_a_mask_is_not_for_deterministic_mode():
    q, mask = torch.empty(1, 1, 4, 64), torch.zeros(4, 4)
    assert why_not(q, call_of(4, 4, mask)) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert "any order" in why_not(q, call_of(4, 4, mask))
    finally:
        torch.use_deterministic_algorithms(False)


def test_reference_scores_of_a_masked_call():
    """The merged mask that the kernels get is the sum of both of the call's."""
    mask, padding = torch.randn(4, 4), torch.tensor([[False, True, False, False]] * 2)
    merged = attention_library._merged_mask(call_of(4, 4, mask, padding), torch.bfloat16)
    assert merged.dtype == torch.float32
    expected = mask.masked_fill(padding[:, None, None, :], -torch.inf)
    assert torch.equal(merged, expected.expand(merged.shape))
    assert F.softmax(merged, -1).isfinite().all()
