"""ATen's fused attention: results where it serves, how it is called on CUDA, and who serves what.

On a GPU its three kernels; here the CPU's, and CUDA's as far as tensors without memory show them.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from attention_calls import attention_call
from places import BF16, DEVICE, ON_GPU, PLACE, assert_bits, at, deterministic, error_of, normal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_remat import ops
from fused_remat.execution.choose import choose
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps import attention_library
from fused_remat.steps.attention import attention_bwd, attention_fwd
from fused_remat.steps.attention_call import attention_key
from fused_remat.triton import attention, tables

pytestmark = pytest.mark.skipif(PLACE == "interpreter", reason="ATen's kernels: in the other run")
F16, F32 = torch.float16, torch.float32
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Relative L2. The kernels round the probabilities and their gradients to the dtype before the next
# product, besides the result, and backward multiplies what forward rounded: about six roundings of
# 1.6e-3 in bfloat16, some of them shared by a whole row. float32: three tf32 products for one.
TOLERANCE = {torch.bfloat16: 1e-2, F16: 1.5e-3, F32: 1e-4}
B, H, S, E = at((2, 8, 1000, 64), (2, 4, 33, 8))
cuda_only = pytest.mark.skipif(not ON_GPU, reason="needs CUDA's kernels")


def make_call(q_len=S, kv_len=S, kv_heads=H, causal=False, mask=None, padding=None, keeps=False):
    """A call without dropout."""
    return attention_call(
        (B, H, kv_heads, q_len, kv_len, E), right=0 if causal else -1, mask=mask, padding=padding,
        true_means="attend" if keeps else "exclude",
    )  # fmt: skip


def exact_attention(q, k, v, call, bias):
    """softmax(scale * q kᵀ + bias) v in the dtype of q; 0 for a row that sees nothing."""
    group = call.spec.num_heads // call.spec.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = call.spec.scale * q @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    if call.spec.window[1] == 0:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return (scores.masked_fill(nothing, 0.0).softmax(-1) @ v).masked_fill(nothing, 0.0)


def by_library(call, q, k, v, dattn):
    """Output, log-sum-exp, dq, dk and dv of ATen's kernels."""
    assert attention_library.why_not_call(q, v, call) is None
    attn, lse = attention_fwd(q, k, v, call)
    grads = tuple(torch.full_like(t, torch.nan) for t in (q, k, v))
    attention_bwd(dattn, q, k, v, attn, lse, call, grads)
    return attn, lse, *grads


def heads_of(call, dtype, strided=False):
    """q, k, v and the gradient of the output; as views of a packed projection if `strided`."""

    def heads(count, length):
        if strided:
            return normal(dtype, B, length, 3, count, E)[:, :, 1].transpose(1, 2)
        return normal(dtype, B, count, length, E)

    q, k = heads(call.spec.num_heads, call.q_len), heads(call.spec.num_kv_heads, call.kv_len)
    return q, k, heads(call.spec.num_kv_heads, call.kv_len), normal(dtype, B * call.q_len, H * E)


def check(call, dtype, bias=None, strided=False):
    """Output and gradients of ATen's kernels."""
    *heads, dattn = heads_of(call, dtype, strided)
    attn, lse, *grads = by_library(call, *heads, dattn)
    assert lse.dtype == F32 and lse.numel() == B * H * call.q_len
    leaves = [t.double().requires_grad_() for t in heads]
    exact = exact_attention(*leaves, call, bias).transpose(1, 2).reshape(attn.shape)
    truth = exact.detach(), *torch.autograd.grad(exact, leaves, dattn.double())
    for name, mine, true in zip(("attn", "dq", "dk", "dv"), (attn, *grads), truth, strict=True):
        error = error_of(mine, true)
        assert error <= TOLERANCE[dtype], f"relative error of {name} is {error:.1e}"


@contextlib.contextmanager
def only(name):
    """PyTorch may take this kernel alone; skips where it does not serve this device."""
    with sdpa_kernel([KERNELS[name]]):
        q = normal(F16, B, H, S, E)
        if attention_library.kernel(q, *make_call()) != name:
            pytest.skip(f"no {name} kernel here")
        yield


CPU = [None]


@pytest.mark.parametrize("name", at(list(KERNELS), CPU), ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
def test_kernels_without_a_mask(name, causal, dtype, strided):
    with only(name) if name else contextlib.nullcontext():
        check(make_call(causal=causal), dtype, strided=strided)


@pytest.mark.parametrize("name", at(list(KERNELS), CPU), ids=str)
def test_shared_key_heads(name):
    """Query heads of a group are a call each, on slices of everything."""
    with only(name) if name else contextlib.nullcontext():
        check(make_call(kv_heads=H // 4), BF16)


def test_shared_key_heads_with_a_mask():
    mask = normal(BF16, S, S)
    check(make_call(kv_heads=H // 4, mask=mask), BF16, mask.double())


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_float32(causal):
    check(make_call(causal=causal), F32)


def test_other_lengths():
    check(make_call(q_len=S // 2 + 3, kv_len=S), BF16)


def bias_of(excluded):
    zeros = torch.zeros(excluded.shape, device=DEVICE, dtype=torch.float64)
    return zeros.masked_fill(excluded, -torch.inf)


def padding_of(*seen):
    """True beyond the first tokens of each sequence."""
    return torch.arange(S, device=DEVICE) >= torch.tensor(seen, device=DEVICE)[:, None]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["mask", "mask and padding"])
def test_float_masks(dtype, padded):
    """Random; a row that sees nothing, half of it, and one with -1e9 everywhere, for a GPU.

    Beside -1e9 a logsumexp loses the scores: such a row is shifted before the kernel sees it.
    """
    mask = normal(F32, S, S)
    mask[3], mask[5, : S // 2] = -torch.inf, -torch.inf
    if ON_GPU:  # on a CPU such a row is not the fused kernel's
        mask[7] = -1e9
    mask = mask.to(dtype)
    bias = mask.double()
    if ON_GPU:
        bias[7] = 0.0  # the same softmax: -1e9 everywhere changes nothing
    padding = padding_of(S, S - S // 3) if padded else None
    if padding is not None:
        bias = bias + bias_of(padding[:, None, None])
    check(make_call(mask=mask, padding=padding), dtype, bias)


@pytest.mark.parametrize("keeps", [False, True], ids=["excludes", "keeps"])
def test_bool_masks(keeps):
    """One for every sequence and head; rows that see nothing."""
    excluded = torch.rand(B, H, S, S, device=DEVICE) < 0.3
    excluded[:, 1, 3:6] = True
    check(make_call(mask=~excluded if keeps else excluded, keeps=keeps), BF16, bias_of(excluded))


def test_padding_of_a_whole_sequence():
    padding = padding_of(0, S // 2)
    check(make_call(padding=padding), BF16, bias_of(padding[:, None, None]))


def test_same_bits_under_deterministic_algorithms():
    call = make_call(causal=True)
    given = heads_of(call, BF16)
    with deterministic():
        first, *others = (by_library(call, *given) for _ in range(5))
    for other in others:
        assert_bits(other, first)


# --- how CUDA's kernels are called


def call_of(q_len, kv_len, mask=None, padding=None):
    """A call, true where a bool mask excludes."""
    sizes, means = (2, 4, 4, q_len, kv_len, 64), {"true_means": "exclude"}
    return attention_call(sizes, scale=0.125, mask=mask, padding=padding, **means)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32], ids=str)
@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "efficient masked"])
def test_kernels_are_called_as_their_schemas_say(name, dtype, monkeypatch):
    if name in ("flash", "cudnn") and dtype == F32:
        dtype = F16
    monkeypatch.setattr(attention_library, "kernel", lambda *_: name.split()[0])
    with FakeTensorMode():
        q = torch.empty(2, 4, 33, 64, dtype=dtype, device="cuda")
        k, v = (torch.empty(2, 4, 50, 64, dtype=dtype, device="cuda") for _ in range(2))
        mask = torch.empty(33, 50, device="cuda") if "masked" in name else None
        call = call_of(33, 50, mask)
        attn, lse = attention_library.cuda_forward(q, k, v, call, mask)
        grads = attention_library.cuda_backward(attn, q, k, v, attn, lse, call, mask)
    assert attn.shape == q.shape and attn.dtype == dtype
    assert lse.shape == q.shape[:3] and lse.dtype == F32
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", KERNELS)
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
    half = slice(None, None, 2)
    q, lse = torch.randn(2, 8, 33, 16)[:, half], torch.randn(2, 8, 33)[:, half]
    o = torch.randn(2, 33, 8, 16).transpose(1, 2)[:, half]
    attention_library.cuda_backward(o, q, q, q, o, lse, call_of(33, 33), None)
    assert seen == [True]


@pytest.mark.parametrize("shape", [(7, 5), (2, 1, 1, 5), (2, 4, 7, 5), (7, 1)], ids=str)
@pytest.mark.parametrize("far", [0.0, -1e4, 1e4])
def test_a_shifted_mask_changes_no_probability(shape, far):
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
    bias, nothing = attention_library._bias(mask, torch.randn(1, 1, 3, 8), torch.randn(1, 1, 4, 8))
    assert nothing.flatten().tolist() == [False, True, False]
    assert bias.isfinite().all()


def test_a_16_bit_mask_that_is_not_far_from_0_stays_exact():
    mask, q = torch.randn(3, 4).bfloat16(), torch.randn(1, 1, 3, 8).bfloat16()
    bias, _ = attention_library._bias(mask.float(), q, torch.randn(1, 1, 4, 8))
    assert torch.equal(bias[0, 0], mask)


def test_the_mask_of_a_call_is_the_sum_of_both():
    mask, padding = torch.randn(4, 4), torch.tensor([[False, True, False, False]] * 2)
    merged = attention_library._merged_mask(call_of(4, 4, mask, padding), torch.bfloat16)
    assert merged.dtype == F32
    expected = mask.masked_fill(padding[:, None, None, :], -torch.inf)
    assert torch.equal(merged, expected.expand(merged.shape))
    assert merged.softmax(-1).isfinite().all()


# --- who serves


def why_not(q, call):
    """Why no CUDA kernel can serve."""
    return attention_library._why_not_cuda(call, q.shape[3], q.dtype, q.device)


@pytest.mark.parametrize(
    ("width", "dtype", "words"),
    [
        (8, torch.float64, "float64"),
        (20, torch.bfloat16, "head dim 20"),
        (264, F32, "head dim 264"),
    ],
)
def test_reasons(width, dtype, words):
    assert words in why_not(torch.empty(1, 1, 4, width, dtype=dtype), call_of(4, 4))


def test_a_mask_is_not_for_deterministic_mode():
    q, call = torch.empty(1, 1, 4, 64), call_of(4, 4, torch.zeros(4, 4))
    assert why_not(q, call) is None
    with deterministic():
        assert "any order" in why_not(q, call)


def route(monkeypatch, dtype=torch.bfloat16, heads=(4, 4), width=64, s=(64, 64), **options):
    """What the triton backend would run on an H200, for tensors without memory."""
    from fused_remat.triton.launch import Target

    monkeypatch.setattr(attention, "target_of", lambda device: Target("cuda", 90, 132))
    # What PyTorch would choose needs a GPU to ask.
    monkeypatch.setattr(attention_library, "kernel", lambda *_: "cudnn")
    with FakeTensorMode():
        q = torch.empty(2, heads[0], s[0], width, dtype=dtype, device="cuda")
        k = v = torch.empty(2, heads[1], s[1], width, dtype=dtype, device="cuda")
        made = {name: make() if callable(make) else make for name, make in options.items()}
        call = attention_call((2, *heads, *s, width), **{"scale": 0.125, **made})
        key = attention_key(q, v, call)
        return choose(attention_fwd, "triton", key).reason(q, k, v, call)


def fake(*shape, dtype=torch.bool):
    return lambda: torch.empty(shape, dtype=dtype, device="cuda")


LIBRARY = {"full": {}, "causal": {"right": 0}, "cross": {"s": (64, 80)}}
OWN = {
    "dropout": {"p": 0.1},
    "window": {"left": 8, "right": 0},
    "soft-cap": {"softcap": 30.0},
    "shared heads": {"heads": (4, 2)},
    "causal cross": {"s": (64, 80), "right": 0},
    "mask": {"mask": fake(64, 64)},
    "mask with gradient": {"mask": fake(64, 64, dtype=F32), "mask_grad": True},
    "padding": {"padding": fake(2, 64)},
    "lengths": {"lengths": fake(2, dtype=torch.int32)},
    "packed": {"cu_q": fake(3, dtype=torch.int32), "cu_k": fake(3, dtype=torch.int32)},
    "odd width": {"width": 20},
}
NEITHER = {
    "wide": {"width": 320},
    "negative scale": {"scale": -1.0, "left": 3},
    "float32": {"dtype": F32, "p": 0.1},
}


@pytest.mark.parametrize("name", LIBRARY)
def test_plain_calls_are_atens(name, monkeypatch):
    assert route(monkeypatch, **LIBRARY[name]) == "ATen's cudnn kernel"


@pytest.mark.parametrize("name", OWN)
def test_other_calls_are_our_kernels_and_say_why(name, monkeypatch):
    said = route(monkeypatch, **OWN[name])
    assert said.startswith("kernel attention_fwd; attention_dkdv_bwd and attention_dq_bwd: ")


@pytest.mark.parametrize("name", NEITHER)
def test_what_neither_serves_falls_back_and_says_why(name, monkeypatch):
    said = route(monkeypatch, **NEITHER[name])
    assert said.startswith("blocks of query rows: ") and "not triton: " in said


def test_the_library_is_asked_for_nothing_else(monkeypatch):
    """ATen's choice is queried only where its kernels can serve, since a query makes tensors."""
    seen = []
    monkeypatch.setattr(attention_library, "why_not", lambda *_: seen.append(1))
    route(monkeypatch, **OWN["lengths"])
    route(monkeypatch, **OWN["mask"])
    assert not seen


MASKED = {
    "dropout": lambda: {"dropout_p": 0.1, "seed": 3},
    "bias": lambda: {"attn_mask": normal(BF16, 1, H, S, S)},
    "window": lambda: {"window": (S // 4, 0)},
    "soft-cap": lambda: {"softcap": 5.0, "is_causal": True},
}


@cuda_only
@pytest.mark.parametrize("options", MASKED)
def test_who_serves_on_this_gpu(options, monkeypatch):
    """The kernels what ATen's have not; ATen's what they have, unless the tables say otherwise."""
    seen, forward = [], attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args: seen.append(1) or forward(*args))
    q, k, v = (normal(BF16, B, H, S, E) for _ in range(3))
    plain = attention_call((B, H, H, S, S, E))
    ops.attention(q, k, v)
    why = tables.why_own_attention(attention.target_of(DEVICE), attention_key(q, v, plain))
    assert bool(seen) == (why is not None)
    seen.clear()
    ops.attention(q, k, v, **MASKED[options]())
    assert seen, "auto is the kernels where ATen's cannot serve"


@pytest.mark.parametrize("options", [o for o in MASKED if o != "bias"])
def test_float32_is_right_whoever_serves_it(options, monkeypatch):
    """On a GPU not the kernels, whose products would be of TF32: so within float32's rounding."""
    monkeypatch.setattr(attention, "forward", None)  # fails if called
    q, k, v, dy = (normal(F32, B, H, S, E) for _ in range(4))

    def results(dtype, backend):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        y = ops.attention(*leaves, **MASKED[options](), backend=backend)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    exact = results(torch.float64, "eager")
    for mine, true in zip(results(F32, at("triton", "eager")), exact, strict=True):
        assert error_of(mine, true) <= 1e-5


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
    # Output, three gradients, dout as a matrix of tokens; a few floats for each row.
    assert measure_allocations(step, DEVICE).peak <= 6 * q.nbytes + 16 * 4 * heads * length
