"""Attention on a GPU through ops and layers: who serves it, the bits it drops, what it holds."""

import dataclasses

import pytest
import torch
from attention_calls import attention_call as call_of
from gpu_checks import BF16, DEVICE, ON_GPU, error_of, normal, sized, target
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_remat import FusedRematLayer, explain, ops, random
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps.attention import attention_bwd, attention_fwd
from fused_remat.steps.attention_call import attention_key

pytest.importorskip("triton", reason="Triton is not installed")

from fused_remat.triton import attention, tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, H, S, E = sized(2, 8, 1000, 64) if ON_GPU else (2, 2, 24, 16)
KEY = random.site_keys(torch.tensor(3, device=DEVICE))[random.ATTENTION]
#: How far two routes of the same call may be apart in bfloat16: each is off by up to 1e-2.
APART = 2e-2


def attention_call(b, h, length, width, **options):
    """A call that sees everything, but for `options`."""
    return call_of((b, h, h, length, length, width), **options)


def launched(q, k, v, dattn, call):
    """Output, dq, dk and dv of the kernels, full of NaN before."""
    rows = (call.batch * call.q_len, call.spec.num_heads * v.shape[-1])
    out = torch.full(rows, torch.nan, dtype=q.dtype, device=DEVICE)
    lse = torch.full(q.shape[:3], torch.nan, device=DEVICE)
    for launch in attention.forward(q, k, v, call, out, lse, target()):
        launch.run()
    grads = tuple(torch.full_like(t, torch.nan) for t in (q, k, v))
    for launch in attention.backward(dattn, q, k, v, out, lse, call, grads, target()):
        launch.run()
    return out, *grads


# --- dropout


@pytest.mark.parametrize("row0", [0, 2**32 - 3])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [64, 128, 256] if ON_GPU else [16, 32])
def test_all_kernels_drop_the_bits_of_the_definition(length, dtype, causal, row0):
    """Heads as wide as sequences are long, and identities in the place of operands.

    q = 0: every probability is 1 / keys. v = I: the output is the mask. dout = I: dv is it.
    k = v = I, dout = 1: where a key was kept dq is positive, else negative.
    """
    b, h, p = 2, 3, 0.3
    call = attention_call(
        b, h, length, length, p=p, site_key=KEY, row0=row0, right=0 if causal else -1
    )
    rows = b * h * length
    kept = random.keep_scale(KEY, row0, rows, length, p, torch.float64) > 0
    kept = kept.view(b, h, length, length)
    eye = torch.eye(length, dtype=dtype, device=DEVICE).expand(b, h, -1, -1)
    # In a row, (b, query), heads lie side by side.
    one_hot = eye.transpose(1, 2).reshape(b * length, h * length)
    q = torch.zeros_like(eye)
    seen = torch.ones_like(kept)
    seen = seen.tril() if causal else seen
    out, _, _, dv = launched(q, eye, eye, one_hot, call)
    out = out.view(b, length, h, length).transpose(1, 2)
    assert torch.equal(out != 0, kept & seen)
    assert torch.equal(dv.transpose(-1, -2) != 0, kept & seen)
    scaled = torch.where(kept & seen, 1.0 / (1.0 - p), 0.0) / seen.sum(-1, keepdim=True)
    assert error_of(out, scaled) < 5e-3  # the output is rounded once, the probability once
    _, dq, _, _ = launched(q, eye, eye, torch.ones_like(one_hot), call)
    # A row of which all or none was kept has no gradient, up to rounding.
    mixed = seen & (kept & seen).any(-1, keepdim=True) & (~kept & seen).any(-1, keepdim=True)
    assert torch.equal((dq > 0) & mixed, kept & mixed)


def test_ops_take_their_seed_from_the_caller():
    """And so have the kernels' bits: no other kernel draws these."""
    q, k, v = (normal(BF16, B, H, S, E) for _ in range(3))
    y = ops.attention(q, k, v, dropout_p=0.2, is_causal=True, seed=3, backend="triton")
    call = attention_call(B, H, S, E, right=0, p=0.2, site_key=KEY)
    out, *_ = launched(q, k, v, normal(BF16, B * S, H * E), call)
    assert torch.equal(y, out.view(B, S, H, E).transpose(1, 2))


# --- long sequences


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("width", [64, 128])
def test_long_sequences_beside_atens_flash(width, causal):
    length, width = sized(32768, width, tiny=(48, 16))
    heads = 4
    q, k, v = (normal(BF16, 1, heads, length, width) for _ in range(3))
    dattn = normal(BF16, length, heads * width)
    call = attention_call(1, heads, length, width, right=0 if causal else -1)
    found = launched(q, k, v, dattn, call)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        attn, lse = attention_fwd(q, k, v, call)
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        attention_bwd(dattn, q, k, v, attn, lse, call, grads)
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), found, (attn, *grads), strict=True):
        error = error_of(mine, theirs)
        assert error <= APART, f"{name} is off by {error:.1e}"


# --- routes


MASKED = {
    "dropout": lambda: {"dropout_p": 0.1, "seed": 3},
    "bias": lambda: {"attn_mask": normal(BF16, 1, H, S, S)},
    "window": lambda: {"window": (S // 4, 0)},
    "soft-cap": lambda: {"softcap": 5.0, "is_causal": True},
}


@pytest.mark.skipif(not ON_GPU, reason="on a CPU every call is the kernels'")
@pytest.mark.parametrize("options", MASKED)
def test_who_serves(options, monkeypatch):
    """The kernels what ATen's have not; ATen's what they have, unless the tables say otherwise."""
    seen, forward = [], attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args: seen.append(1) or forward(*args))
    q, k, v = (normal(BF16, B, H, S, E) for _ in range(3))
    plain = attention_call(B, H, S, E)
    ops.attention(q, k, v)
    why = tables.why_own_attention(target(), attention_key(q, v, plain))
    assert bool(seen) == (why is not None)
    seen.clear()
    ops.attention(q, k, v, **MASKED[options]())
    assert seen, "auto is the kernels where ATen's cannot serve"


@pytest.mark.parametrize("options", [o for o in MASKED if o != "bias"])
def test_float32_is_right_whoever_serves_it(options, monkeypatch):
    """On a GPU not the kernels, whose products would be of TF32: so within float32's rounding."""
    if ON_GPU:
        monkeypatch.setattr(attention, "forward", None)  # fails if called
    q, k, v, dy = (normal(torch.float32, B, H, S, E) for _ in range(4))

    def results(dtype, backend):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        y = ops.attention(*leaves, **MASKED[options](), backend=backend)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    exact = results(torch.float64, "eager")
    for mine, true in zip(results(torch.float32, "triton"), exact, strict=True):
        assert error_of(mine, true) <= 1e-5


def weights():
    width = H * E
    return (
        normal(BF16, width, shift=1.0), normal(BF16, width),
        normal(BF16, 3 * width, width, scale=width**-0.5), normal(BF16, 3 * width),
        normal(BF16, width, width, scale=width**-0.5), normal(BF16, width),
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["full", "lean", "fast"])
@pytest.mark.parametrize("options", MASKED)
def test_attention_block(options, policy):
    """The eager backend in float64 is the truth, in bfloat16 the rule: 1.5 of it and a rounding."""
    x, dy, leaves = normal(BF16, B, S, H * E), normal(BF16, B, S, H * E), weights()
    kwargs = MASKED[options]()

    def results(dtype, backend):
        mine = [t.detach().to(dtype).requires_grad_() for t in (x, *leaves)]
        how = dict(kwargs)
        if "attn_mask" in how:
            how["attn_mask"] = how["attn_mask"].detach().to(dtype).requires_grad_()
            mine.append(how["attn_mask"])
        y = ops.attention_block(*mine[:7], H, **how, policy=policy, backend=backend)
        return [y.detach(), *torch.autograd.grad(y, mine, dy.to(dtype))]

    exact, theirs = results(torch.float64, "eager"), results(BF16, "eager")
    for mine, other, true in zip(results(BF16, "triton"), theirs, exact, strict=True):
        assert error_of(mine, true) <= 1.5 * error_of(other, true) + 1.6e-3


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_explain_names_the_kernel_of_a_layer_with_dropout(norm_first):
    layer = FusedRematLayer(
        H * E, H, 4 * H * E, 0.1, "gelu", batch_first=True, norm_first=norm_first, device=DEVICE,
        dtype=BF16, backend="triton",
    )  # fmt: skip
    text = str(explain(layer, normal(BF16, B, S, H * E)))
    assert "kernel attention_fwd" in text and "not fused" not in text


# --- memory


@pytest.mark.skipif(not ON_GPU, reason="reads the allocator of CUDA")
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


def test_gradients_of_masks_need_no_scores():
    """dmask of a mask of keys: (B, 1, 1, S), with the kernels' own gradient, twice the same."""
    mask = normal(BF16, B, 1, 1, S)
    call = attention_call(B, H, S, E, mask=mask, mask_grad=True)
    q, k, v = (normal(BF16, B, H, S, E) for _ in range(3))
    dattn = normal(BF16, B * S, H * E)
    found = []
    for _ in range(2):
        dmask = torch.zeros(mask.shape, device=DEVICE)
        launched(q, k, v, dattn, dataclasses.replace(call, dmask=dmask))
        found.append(dmask)
    assert found[0].any() and torch.equal(*found)
