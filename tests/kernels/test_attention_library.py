"""ATen's fused attention: results where it serves, how it is called on CUDA, and who serves what.

On a GPU its three kernels; here the CPU's, and CUDA's as far as tensors without memory show them.
"""

import contextlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import reference
import torch
from attention_calls import attention_call
from places import BF16, DEVICE, ON_GPU, PLACE, assert_bits, at, deterministic, error_of, normal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_remat import ops
from fused_remat.execution.choose import choose
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps import attention_library
from fused_remat.steps import attention_operators as operators
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


def call_of(heads, **options):
    """A call over q, k and v, true where a bool mask excludes."""
    (b, h, m, e), (_, kv, n, _) = heads[0].shape, heads[1].shape
    return attention_call((b, h, kv, m, n, e), **{"true_means": "exclude", **options})


def heads_of(dtype, kv_heads=H, q_len=S, strided=False):
    """q, k and v; as views of a packed projection if `strided`."""
    lengths, counts = (q_len, S, S), (H, kv_heads, kv_heads)
    if strided:
        return [normal(dtype, B, S, 3, H, E)[:, :, 1].transpose(1, 2) for _ in "qkv"]
    return [normal(dtype, B, *size, E) for size in zip(counts, lengths, strict=True)]


def by_library(call, q, k, v, dattn):
    """Output, log-sum-exp, dq, dk and dv of ATen's kernels."""
    assert attention_library.why_not_call(q, v, call) is None
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
#: On a GPU each kernel that serves a call without a mask, alone.
ALONE = [(case, name) for case in RESULTS if "mask" not in case for name in at(list(KERNELS), [])]


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("case, name", [*((case, None) for case in RESULTS), *ALONE], ids=str)
def test_results(case, name, dtype):
    heads, options = RESULTS[case]
    q, k, v = heads_of(dtype, **heads)
    call, dattn = call_of((q, k, v), **options(dtype)), normal(dtype, B * q.shape[2], H * E)
    with sdpa_kernel([KERNELS[name]]) if name else contextlib.nullcontext():
        if name and attention_library.kernel(q, k, v, None, call) != name:
            pytest.skip(f"no {name} kernel here")
        attn, lse, *grads = by_library(call, q, k, v, dattn)
    assert lse.dtype == F32 and lse.numel() == B * H * call.q_len
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    with DEVICE:
        exact = reference.attention(
            *leaves, call.mask, key_padding_mask=call.padding, is_causal=call.spec.window[1] == 0,
            true_means=call.spec.true_means,
        )  # fmt: skip
    exact = exact.transpose(1, 2).reshape(attn.shape)
    truth = exact.detach(), *torch.autograd.grad(exact, leaves, dattn.double())
    for which, mine, true in zip(("attn", "dq", "dk", "dv"), (attn, *grads), truth, strict=True):
        error = error_of(mine, true)
        assert error <= TOLERANCE[dtype], f"relative error of {which} is {error:.1e}"


def test_same_bits_under_deterministic_algorithms():
    heads = heads_of(BF16)
    given = *heads, normal(BF16, B * S, H * E)
    with deterministic():
        first, *others = (by_library(call_of(heads, right=0), *given) for _ in range(5))
    for other in others:
        assert_bits(other, first)


@pytest.mark.parametrize(
    "case", ["plain", "causal", "shared key heads", "padding of a whole sequence"]
)
def test_the_public_function_where_operators_are_not_known(case, monkeypatch):
    """Its backward runs forward again: the same results, on every device."""
    heads, options = RESULTS[case]
    q, k, v = heads_of(F32, **heads)
    call, dattn = call_of((q, k, v), **options(F32)), normal(F32, B * q.shape[2], H * E)
    expected = by_library(call, q, k, v, dattn)
    monkeypatch.setattr(operators, "has", lambda kernel: False)
    monkeypatch.setattr(operators, "has_operator", lambda name: False)
    attn, lse, *grads = by_library(call, q, k, v, dattn)
    assert lse.isnan().all(), "what reads it must not take it for a logsumexp"
    for mine, other in zip((attn, *grads), (expected[0], *expected[2:]), strict=True):
        assert error_of(mine, other) <= TOLERANCE[F32]


# --- how the operators are called

SCHEMAS = [
    line.split("\t") for line in Path(__file__).with_name("schemas.tsv").read_text().splitlines()
]


@pytest.mark.parametrize("version, schema", SCHEMAS, ids=lambda text: text.partition("(")[0])
def test_every_supported_version_has_the_operators_as_they_are_called(version, schema):
    """The committed schemas are those of each version's wheel; of this one, those it has."""
    name = schema.partition("(")[0]
    parsed = torch._C.parse_schema(f"aten::{schema}")
    assert operators.fits(name, parsed)
    if torch.__version__.startswith(version):
        assert str(parsed) == str(getattr(torch.ops.aten, name).default._schema)


def test_a_schema_that_differs_is_noticed():
    schema = SCHEMAS[0][1]
    name = schema.partition("(")[0]
    assert {row[1].partition("(")[0] for row in SCHEMAS} == set(operators.SIGNATURES)
    for old, new in (
        ("Tensor query", "Tensor q"), ("float? scale=None", "float scale"), ("Tensor key, ", ""),
        (", *,", ", int more, *,"), ("dropout_p", "dropout"),
    ):  # fmt: skip
        changed = torch._C.parse_schema("aten::" + schema.replace(old, new))
        assert operators.fits(name, changed) == (new == "float scale"), new


CALLS = {
    "flash": {},
    "flash causal": {"right": 0},
    "flash window": {"right": 0, "left": 8},
    "flash varlen": {"cu": True},
    "cudnn": {},
    "cudnn masked": {"mask": True},
    "efficient": {},
    "efficient masked": {"mask": True},
}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("case", CALLS)
def test_operators_are_called_as_their_schemas_say(case, kv_heads):
    """On tensors without memory: shapes and dtypes."""
    options, name = dict(CALLS[case]), case.split()[0]
    if name == "efficient" and kv_heads < 4:
        pytest.skip("is called for each member of a group")
    with FakeTensorMode():
        b, m, n = (1, 50, 50) if "cu" in options or "right" in options else (2, 33, 50)
        q = torch.empty(b, 4, m, 64, dtype=BF16, device="cuda")
        k, v = (torch.empty(b, kv_heads, n, 64, dtype=BF16, device="cuda") for _ in range(2))
        if options.pop("cu", None):
            options |= dict.fromkeys(
                ("cu_q", "cu_k"), torch.empty(4, dtype=torch.int32, device="cuda")
            )
        bias = (
            torch.empty(b, 1, m, n, dtype=BF16, device="cuda")
            if options.pop("mask", None)
            else None
        )
        call = call_of((q, k), **options)
        attn, lse = operators.forward(name, q, k, v, call, bias)
        grads = operators.backward(name, attn, q, k, v, attn, lse, call, bias)
    assert attn.shape == q.shape and attn.dtype == BF16
    assert lse.shape == q.shape[:3] and lse.dtype == F32
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def recorded(monkeypatch, name, forward):
    """Calls of an operator, which `forward` stands for."""
    calls = []

    def stand_in(*args, **named):
        calls.append((args, named))
        return forward(*args, **named)

    monkeypatch.setattr(operators, "_aten", SimpleNamespace(**{name: stand_in}))
    return calls


@pytest.mark.parametrize("name", KERNELS)
def test_backward_gives_kernels_dense_lse_and_output(name, monkeypatch):
    """They ignore the strides of both; heads that share a key head are slices."""

    def backward(do, q, k, v, *rest, **_):
        return (q, k, v, None)[: 4 if name == "efficient" else 3]

    operator = "_flash_attention" if name == "flash" else f"_scaled_dot_product_{name}_attention"
    calls = recorded(monkeypatch, f"{operator}_backward", backward)
    half = slice(None, None, 2)
    q, lse = torch.randn(2, 8, 33, 16)[:, half], torch.randn(2, 8, 33)[:, half]
    o = torch.randn(2, 33, 8, 16).transpose(1, 2)[:, half]
    operators.backward(name, o, q, q, q, o, lse, call_of((q, q)), None)
    ((args, _),) = calls
    o, lse = args[5:7] if name == "efficient" else args[4:6]
    assert lse.is_contiguous() and (o if name == "flash" else o.transpose(1, 2)).is_contiguous()


def flash_in_float64(q, k, v, cu_q, cu_k, max_q, max_k, p, causal, debug, **named):
    """What FlashAttention computes, from its documentation; rows outside sequences are NaN."""
    if cu_q is None:
        of_one = [
            flash_in_float64(*heads, *(torch.tensor([0, len(x)]) for x in heads[:2]), max_q, max_k,
                             p, causal, debug, **named)
            for heads in zip(q, k, v, strict=True)
        ]  # fmt: skip
        return tuple(map(torch.stack, zip(*of_one, strict=True)))
    left, right = named["window_size_left"], 0 if causal else named["window_size_right"]
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan)
    of_q, of_k = (itertools.pairwise(cu.tolist()) for cu in (cu_q, cu_k))
    for (lo, hi), (first, end) in zip(of_q, of_k, strict=True):
        group, n = q.shape[1] // k.shape[1], end - first
        keys, values = (x[first:end].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("ihe,jhe->hij", q[lo:hi], keys) * named["scale"]
        ahead = torch.arange(n) - (torch.arange(hi - lo) + n - (hi - lo))[:, None]
        hidden = (ahead > right) & (right >= 0) | (ahead < -left) & (left >= 0)
        scores = scores.masked_fill(hidden, -torch.inf)
        lse[:, lo:hi] = scores.logsumexp(-1)
        out[lo:hi] = torch.einsum("hij,jhe->ihe", scores.softmax(-1).nan_to_num(), values)
    return out, lse


FLASH = {
    "window": {"left": 3, "right": 0},
    "window on both sides": {"left": 3, "right": 2},
    "causal, fewer queries": {"right": 0, "q_len": 5},
    "varlen causal": {"right": 0, "cu": [2, 5, 5, 9]},
    "varlen window": {"left": 2, "right": 0, "cu": [0, 4, 10]},
}


@pytest.mark.parametrize("case", FLASH)
def test_flash_is_asked_for_what_our_rows_compute(case, monkeypatch):
    """Windows, alignment and sequences mean the same to FlashAttention as to the ATen body."""
    options = dict(FLASH[case])
    length, bounds = options.pop("q_len", 10), options.pop("cu", None)
    q, k, v = (
        torch.randn(1, h, n, 8, dtype=torch.float64) for h, n in ((4, length), (2, 10), (2, 10))
    )
    if bounds is not None:
        options |= dict.fromkeys(("cu_q", "cu_k"), torch.tensor(bounds))
    call = call_of((q, k), **options)
    attn, lse = attention_fwd(q, k, v, call)
    recorded(monkeypatch, "_flash_attention_forward", flash_in_float64)
    found, found_lse = operators.forward("flash", q, k, v, call, None)
    torch.testing.assert_close(found.transpose(1, 2).reshape(attn.shape), attn)
    torch.testing.assert_close(found_lse.reshape(-1), lse.reshape(-1))


@pytest.mark.parametrize("shape", [(7, 5), (2, 1, 1, 5), (2, 4, 7, 5), (7, 1)], ids=str)
@pytest.mark.parametrize("far", [0.0, -1e4, 1e4])
def test_a_shifted_mask_changes_no_probability(shape, far):
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 5, 8)
    mask = torch.randn(shape, dtype=torch.float64) * 5 + far
    mask.view(-1)[0] = -torch.inf
    bias, nothing = attention_library._bias(mask, q, k)
    assert torch.equal(nothing, (mask == -torch.inf).all(-1, keepdim=True))
    assert (
        bias.shape == (2, mask.shape[1] if mask.dim() == 4 else 1, 7, 5) and bias.dtype == q.dtype
    )
    assert bias.stride(-1) == 1 and bias.stride(-2) % 16 == 0
    scores = torch.randn(2, 4, 7, 5, dtype=torch.float64)
    expected = (scores + mask).softmax(-1)
    seen = ~nothing.expand(2, 4, 7, 1)
    found = (scores + bias.double()).softmax(-1)
    torch.testing.assert_close(found * seen, expected.nan_to_num() * seen, atol=1e-5, rtol=1e-5)


def test_a_16_bit_mask_that_is_not_far_from_0_stays_exact():
    mask, q = torch.randn(3, 4).bfloat16(), torch.randn(1, 1, 3, 8).bfloat16()
    bias, _ = attention_library._bias(mask.float(), q, torch.randn(1, 1, 4, 8))
    assert torch.equal(bias[0, 0], mask)


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
    monkeypatch.setattr(attention_library, "SDPAParams", lambda *given: given)
    can_flash = lambda given: given[0].dtype != F32  # noqa: E731
    monkeypatch.setattr(attention_library, "can_use_flash_attention", can_flash)


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
        found = attention_library.why_not(key)
        assert found is None if reason == "any order" else reason in found
        with deterministic():
            assert reason in attention_library.why_not(key)


def test_the_users_choice_of_kernels_is_asked_for_again(monkeypatch):
    """`sdpa_kernel` changes the key, so that what was chosen without it is not taken."""
    efficient, flash = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION
    keys = [key_of()[0]]
    for backends in ([flash], [efficient, flash], [flash, efficient]):
        with sdpa_kernel(backends, set_priority=True):
            keys.append(key_of()[0])
    assert len(set(keys)) == 4


def route(monkeypatch, prefer="cudnn", **options):
    """What the triton backend would run on an H200, for tensors without memory."""
    from fused_remat.triton.launch import Target

    monkeypatch.setattr(attention, "target_of", lambda device: Target("cuda", 90, 132))
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
    "soft-cap": (OWN, {"softcap": 30.0}),
    "shared heads": (LIBRARY, {"heads": (4, 2)}),
    "shared heads, flash": (FLASH_SERVES, {"heads": (4, 2), "prefer": "flash"}),
    "causal cross": (FLASH_SERVES, {"s": (64, 80), "right": 0}),
    "causal cross from the start": (OWN, {"s": (64, 80), "right": 0, "align": "start"}),
    "mask": (LIBRARY, {"mask": fake(64, 64)}),
    "mask that cudnn does not take": (OWN, {"mask": fake(64, 64), "prefer": "flash"}),
    "mask larger than q": (OWN, {"mask": fake(2, 4, 128, 128), "s": (128, 128)}),
    "shared heads and a mask": (LIBRARY, {"mask": fake(64, 64), "heads": (4, 2)}),
    "mask with gradient": (OWN, {"mask": fake(64, 64, dtype=F32), "mask_grad": True}),
    "mask and causal": (OWN, {"mask": fake(64, 64), "right": 0}),
    "padding": (LIBRARY, {"padding": fake(2, 64)}),
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
