"""ATen's fused attention: results where it serves, how it is called on CUDA, and who serves what.

On a GPU its three kernels; here the CPU's, and CUDA's as far as tensors without memory show them.
"""

import pytest
import reference
import torch
from attention_calls import attention_call, call_of
from places import BF16, DEVICE, ON_GPU, PLACE, at, deterministic, error_of, normal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_remat import ops
from fused_remat.execution.choose import choose
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps import attention_aten
from fused_remat.steps.attention import attention_bwd, attention_fwd
from fused_remat.steps.attention_call import attention_key
from fused_remat.triton import attention

pytestmark = pytest.mark.skipif(PLACE == "interpreter", reason="ATen's kernels: in the other run")
F16, F32 = torch.float16, torch.float32
# Relative L2. The kernels round the probabilities and their gradients to the dtype before the next
# product, besides the result, and backward multiplies what forward rounded: about six roundings of
# 1.6e-3 in bfloat16, some of them shared by a whole row. float32: three tf32 products for one.
TOLERANCE = {torch.bfloat16: 1e-2, F16: 1.5e-3, F32: 1e-4}
B, H, S, E = at((2, 8, 1000, 64), (2, 4, 33, 8))
cuda_only = pytest.mark.skipif(not ON_GPU, reason="needs CUDA's kernels")


def bounds_of(*bounds):
    return torch.tensor(bounds, device=DEVICE)


def heads_of(dtype, kv_heads=H, q_len=S, strided=False, batch=B):
    """q, k and v; as views of a packed projection if `strided`."""
    lengths, counts = (q_len, S, S), (H, kv_heads, kv_heads)
    if strided:
        return [normal(dtype, B, S, 3, H, E)[:, :, 1].transpose(1, 2) for _ in "qkv"]
    return [normal(dtype, batch, *size, E) for size in zip(counts, lengths, strict=True)]


def by_library(call, q, k, v, dattn):
    """Output, log-sum-exp, dq, dk and dv of ATen's kernels."""
    assert attention_aten.unsupported_call_reason(q, v, call) is None
    attn, lse = attention_fwd(q, k, v, call)
    grads = tuple(torch.full_like(t, torch.nan) for t in (q, k, v))
    attention_bwd(dattn, q, k, v, attn, lse, call, grads)
    return attn, lse, *grads


def float_mask(dtype):
    """Random; a row that sees nothing, half of it, and one with -1e9 everywhere, for a GPU.

    Beside -1e9 a logsumexp loses the scores: such a row is shifted before the kernel sees it.
    """
    mask = normal(F32, S, S)
    mask[3], mask[5, : S // 2] = -torch.inf, -torch.inf
    if ON_GPU:  # on a CPU such a row is not the fused kernel's
        mask[7] = -1e9
    return mask.to(dtype)


def bool_mask():
    """One for every sequence and head; rows that see nothing."""
    excluded = torch.rand(B, H, S, S, device=DEVICE) < 0.3
    excluded[:, 1, 3:6] = True
    return excluded


def padding_of(*seen):
    """True beyond the first tokens of each sequence."""
    return torch.arange(S, device=DEVICE) >= torch.tensor(seen, device=DEVICE)[:, None]


#: Heads, and options of the call given a dtype.
RESULTS = {
    "plain": ({}, lambda dtype: {}),
    "causal": ({}, lambda dtype: {"right": 0}),
    "strided": ({"strided": True}, lambda dtype: {}),
    "strided, causal": ({"strided": True}, lambda dtype: {"right": 0}),
    "shared key heads": ({"kv_heads": H // 4}, lambda dtype: {}),
    "shared key heads, a mask": ({"kv_heads": H // 4}, lambda dtype: {"mask": normal(dtype, S, S)}),
    "other lengths": ({"q_len": S // 2 + 3}, lambda dtype: {}),
    "a float mask": ({}, lambda dtype: {"mask": float_mask(dtype)}),
    "a float mask and padding": (
        {}, lambda dtype: {"mask": float_mask(dtype), "padding": padding_of(S, S - S // 3)},
    ),
    "a bool mask": ({}, lambda dtype: {"mask": bool_mask()}),
    "a bool mask that keeps": ({}, lambda dtype: {"mask": ~bool_mask(), "true_means": "attend"}),
    "padding of a whole sequence": ({}, lambda dtype: {"padding": padding_of(0, S // 2)}),
}  # fmt: skip
#: Of a GPU's flash kernel alone, in 16 bits.
FOR_FLASH = {
    "a window": ({"kv_heads": H // 4}, lambda dtype: {"left": S // 4, "right": 0}),
    "causal, fewer queries": ({"q_len": S // 2 + 3}, lambda dtype: {"right": 0}),
    "packed sequences": (
        {"kv_heads": H // 4, "batch": 1},
        lambda dtype: {"right": 0, **dict.fromkeys(("cu_q", "cu_k"), bounds_of(7, S // 3, S - 5))},
    ),
}
RESULTS |= at(FOR_FLASH, {})


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("case", RESULTS)
def test_results(case, dtype):
    heads, options = RESULTS[case]
    if case in FOR_FLASH and dtype == F32:
        pytest.skip("flash's, in 16 bits")
    q, k, v = heads_of(dtype, **heads)
    call, dattn = call_of((q, k, v), **options(dtype)), normal(dtype, len(q) * q.shape[2], H * E)
    attn, lse, *grads = by_library(call, q, k, v, dattn)
    assert lse.dtype == F32 and lse.numel() == len(q) * H * call.q_len
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    with DEVICE:
        exact = reference.attention(
            *leaves, call.mask, key_padding_mask=call.padding, window=call.spec.window,
            cu_seqlens_q=call.cu_q, cu_seqlens_k=call.cu_k, true_means=call.spec.true_means,
        )  # fmt: skip
    exact = exact.transpose(1, 2).reshape(attn.shape)
    truth = exact.detach(), *torch.autograd.grad(exact, leaves, dattn.double())
    for which, mine, true in zip(("attn", "dq", "dk", "dv"), (attn, *grads), truth, strict=True):
        error = error_of(mine, true)
        assert error <= TOLERANCE[dtype], f"relative error of {which} is {error:.1e}"


# --- masks


@pytest.mark.parametrize("shape", [(7, 5), (2, 1, 1, 5), (2, 4, 7, 5), (7, 1)], ids=str)
@pytest.mark.parametrize("far", [0.0, -1e4, 1e4])
def test_a_shifted_mask_changes_no_probability(shape, far):
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 5, 8)
    mask = torch.randn(shape, dtype=torch.float64) * 5 + far
    mask.view(-1)[0] = -torch.inf
    bias, nothing = attention_aten._bias(mask, q, k, sinks=False)
    wide = mask[(None,) * (4 - mask.dim())]
    assert torch.equal(nothing, (wide == -torch.inf).all(-1, keepdim=True))
    assert bias.shape == (2, wide.shape[1], 7, 5) and bias.dtype == q.dtype
    assert bias.stride(-1) == 1 and bias.stride(-2) % 16 == 0
    scores = torch.randn(2, 4, 7, 5, dtype=torch.float64)
    expected = (scores + mask).softmax(-1)
    seen = ~nothing.expand(2, 4, 7, 1)
    found = (scores + bias.double()).softmax(-1)
    # The mask less its largest entry is rounded to float32.
    torch.testing.assert_close(found * seen, expected.nan_to_num() * seen, atol=1e-5, rtol=1e-5)


# --- who serves


def pytorch_chooses(monkeypatch, prefer="cudnn"):
    """As PyTorch does on an H200, as far as this file asks: a GPU would be needed to ask it."""
    code = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

    def choice(q, k, v, mask, p, causal, *, scale, enable_gqa):
        if q.dtype == F32 or (mask is not None and prefer == "flash"):
            of = SDPBackend.MATH if enable_gqa else SDPBackend.EFFICIENT_ATTENTION
            return of.value
        return code[prefer].value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(attention_aten, "SDPAParams", lambda *given: given)
    can_flash = lambda given: given[0].dtype != F32  # noqa: E731
    monkeypatch.setattr(attention_aten, "can_use_flash_attention", can_flash)
    attention_aten.kernel_of.cache_clear()


def key_of(dtype=BF16, heads=(4, 4), width=64, s=(64, 64), **options):
    """The key of a call on CUDA tensors without memory."""
    with FakeTensorMode():
        q = torch.empty(2, heads[0], s[0], width, dtype=dtype, device="cuda")
        k = v = torch.empty(2, heads[1], s[1], width, dtype=dtype, device="cuda")
        made = {name: make() if callable(make) else make for name, make in options.items()}
        call = attention_call((2, *heads, *s, width), **{"scale": 0.125, **made})
        return attention_key(q, v, call), (q, k, v, call)


@pytest.mark.parametrize(
    ("width", "dtype", "reason"),
    [(8, torch.float64, "float64"), (20, torch.bfloat16, "head dims (20, 20)"),
     (264, F32, "head dims (264, 264)"), (64, F32, "any order")],
)  # fmt: skip
def test_what_no_kernel_of_cudas_serves(width, dtype, reason, monkeypatch):
    """A mask in deterministic mode; in any mode some dtypes and widths."""
    pytorch_chooses(monkeypatch)
    with FakeTensorMode():
        key, _ = key_of(dtype, width=width, mask=fake(64, 64))
        found = attention_aten.unsupported_reason(key)
        assert found is None if reason == "any order" else reason in found
        with deterministic():
            assert reason in attention_aten.unsupported_reason(key)


def test_the_users_choice_of_kernels_is_asked_for_again(monkeypatch):
    """`sdpa_kernel` changes the key, so that what was chosen without it is not taken."""
    efficient, flash = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION
    keys = [key_of()[0]]
    for backends in ([flash], [efficient, flash], [flash, efficient]):
        with sdpa_kernel(backends, set_priority=True):
            keys.append(key_of()[0])
    assert len(set(keys)) == 4


def route(monkeypatch, prefer="cudnn", arch=90, **options):
    """What the triton backend would run on an H200 or an A100, for tensors without memory."""
    from fused_remat.triton.launch import Target

    monkeypatch.setattr(attention, "target_of", lambda device: Target("cuda", arch, 132))
    pytorch_chooses(monkeypatch, prefer)
    key, given = key_of(**options)
    with FakeTensorMode():
        return choose(attention_fwd, "triton", key).reason(*given)


def fake(*shape, dtype=torch.bool):
    return lambda: torch.empty(shape, dtype=dtype, device="cuda")


LIBRARY, FLASH_SERVES = "ATen's cudnn kernel", "ATen's flash kernel"
OWN = "kernel attention_fwd; attention_dkdv_bwd and attention_dq_bwd: "
NEITHER = "blocks of query rows: "
SERVED = {
    "full": (LIBRARY, {}),
    "causal": (LIBRARY, {"right": 0}),
    "cross": (LIBRARY, {"s": (64, 80)}),
    "dropout": (OWN, {"p": 0.1}),
    "window": (FLASH_SERVES, {"left": 8, "right": 0}),
    "wide window": (OWN, {"left": 8, "right": 0, "width": 128}),
    "wide window, Ampere": (FLASH_SERVES, {"left": 8, "right": 0, "width": 128, "arch": 80}),
    "soft-cap": (OWN, {"softcap": 30.0}),
    "shared heads": (LIBRARY, {"heads": (4, 2)}),
    "widest heads, flash": (FLASH_SERVES, {"width": 256, "prefer": "flash"}),
    "causal cross": (FLASH_SERVES, {"s": (64, 80), "right": 0}),
    "mask": (OWN, {"mask": fake(64, 64)}),
    "mask with gradient": (OWN, {"mask": fake(64, 64, dtype=F32), "mask_grad": True}),
    "padding": (OWN, {"padding": fake(2, 64)}),
    "lengths": (OWN, {"lengths": fake(2, dtype=torch.int32)}),
    "varlen": (FLASH_SERVES, dict.fromkeys(("cu_q", "cu_k"), fake(3, dtype=torch.int32))),
    "odd width": (OWN, {"width": 20}),
    "wide": (NEITHER, {"width": 320}),
    "negative scale": (NEITHER, {"scale": -1.0, "left": 3}),
    "float32": (NEITHER, {"dtype": F32, "p": 0.1}),
}


@pytest.mark.parametrize("name", SERVED)
def test_who_serves_and_says_why(name, monkeypatch):
    expected, options = SERVED[name]
    said = route(monkeypatch, **options)
    assert said.startswith(expected) and ("not triton: " in said) == (expected == NEITHER)


@cuda_only
def test_a_mask_after_pytorchs_own_call_of_the_same_sizes():
    """cuDNN keeps a plan of a call's sizes; in another layout of dout its dq was wrong."""
    q, k, v, dy = (normal(BF16, B, H, S, E).requires_grad_() for _ in range(4))
    mask = ~bool_mask()
    mask[:, 1, 3:6] = True
    truth = torch.autograd.grad(
        torch.nn.functional.scaled_dot_product_attention(q, k, v, mask), (q, k, v), dy
    )
    y = ops.attention(q, k, v, attn_mask=mask, backend="eager")
    for mine, theirs in zip(torch.autograd.grad(y, (q, k, v), dy), truth, strict=True):
        assert error_of(mine, theirs) <= TOLERANCE[BF16]


@cuda_only
@pytest.mark.parametrize("options", ["dropout", "float padding", "lengths", "bool mask", "window"])
def test_no_scores_are_held(options):
    """A matrix of one head's scores would be 32 times a tensor of all heads."""
    length, heads, width = 16384, 8, 64
    kinds = {
        "dropout": {"dropout_p": 0.1, "seed": 3},
        "float padding": {"key_padding_mask": normal(BF16, 1, length)},
        "lengths": {"key_lengths": torch.tensor([length // 2], device=DEVICE)},
        "bool mask": {"attn_mask": torch.rand(length, length, device=DEVICE) < 0.5},
        "window": {"window": (1024, 0)},
    }
    q, k, v = (normal(BF16, 1, heads, length, width).requires_grad_() for _ in range(3))
    dy = normal(BF16, 1, heads, length, width)

    def step():
        y = ops.attention(q, k, v, **kinds[options], backend="triton")
        torch.autograd.grad(y, (q, k, v), dy)

    step()  # compiles
    # Output, three gradients, dout as a matrix of tokens; in a window PyTorch's flash kernel, with
    # dq and dout in float32 besides, 10.1 measured on an H100; a few floats for each row.
    tensors = 10 if options == "window" else 6
    assert measure_allocations(step, DEVICE).peak <= tensors * q.nbytes + 16 * 4 * heads * length
