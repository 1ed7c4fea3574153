"""Blocks of attention on kernels, against the eager backend with the same seed, in float64."""

import pytest
import torch
from places import BF16, DEVICE, ON_GPU, at, error_of, normal
from reference import EXACT_PRESETS

from fused_remat import FusedRematLayer, explain, ops
from fused_remat.execution import choose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, H, KV, S, E = at((2, 8, 4, 1000, 64), (2, 4, 2, 19, 8))
D = H * E
# Interpreted, in float32 too. The error may be 1.5 times the eager backend's in the same dtype, and
# a rounding; float32: sums in another order.
DTYPES = [BF16] if ON_GPU else [BF16, torch.float32]
FLOOR = {torch.bfloat16: 1.6e-3, torch.float16: 4e-4, torch.float32: 1e-5}


def rope(*lead):
    angle = normal(torch.float32, *lead, S, E // 4)
    return angle.cos(), angle.sin()


def bias(shape):
    mask = normal(BF16, *shape)
    return mask.masked_fill(mask > 1.2, -torch.inf)


def bounds():
    shares = torch.tensor([0.0, 0.4, 0.45, 0.8], device=DEVICE)
    return (shares * S).to(torch.int32)


#: Options of a block: seen, dropped, before the heads.
CASES = {
    "dropout": lambda: {"dropout_p": 0.1},
    "bias": lambda: {"attn_mask": bias((1, H, S, S))},
    "masks": lambda: {"attn_mask": bias((B, 1, S, S)), "key_padding_mask": bias((B, S)) > 0.5},
    "window": lambda: {"window": (S // 4, 0)},
    "soft-cap": lambda: {"softcap": 5.0, "is_causal": True},
    "rotary, head norms, shared heads": lambda: {
        "rope": rope(), "q_norm_weight": normal(BF16, E, shift=1.0), "is_causal": True,
        "k_norm_weight": normal(BF16, E, shift=1.0), "kv_heads": KV, "norm": "rms_norm",
        "dropout_p": 0.2, "residual_dropout_p": 0.1,
    },
    "variable lengths": lambda: {
        "rope": rope(1), "cu_seqlens": bounds(), "is_causal": True, "dropout_p": 0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", EXACT_PRESETS if ON_GPU else ["full", "fast"])
def test_errors_are_those_of_the_eager_backend(case, policy, dtype):
    check(case, policy, dtype)


@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_sequences_one_at_a_time(policy, monkeypatch):
    monkeypatch.setattr(choose, "_CPU_TOKENS", 4)
    monkeypatch.setattr(choose, "_DEVICE_TOKENS", 4)
    check("rotary, head norms, shared heads", policy, DTYPES[-1])


def check(case, policy, dtype):
    """Output and gradients of everything that is floating point."""
    options = CASES[case]()
    batch, kv = 1 if "cu_seqlens" in options else B, options.get("kv_heads", H)
    rms = options.get("norm") == "rms_norm"
    weights = {
        "x": normal(BF16, batch, S, D), "norm_weight": normal(BF16, D, shift=1.0),
        "norm_bias": None if rms else normal(BF16, D),
        "qkv_weight": normal(BF16, (H + 2 * kv) * E, D, scale=D**-0.5),
        "qkv_bias": normal(BF16, (H + 2 * kv) * E),
        "proj_weight": normal(BF16, D, D, scale=D**-0.5), "proj_bias": normal(BF16, D),
    }  # fmt: skip
    dy = normal(BF16, batch, S, D)
    tables = options.pop("rope", None)
    p = options.pop("residual_dropout_p", 0.0)

    def results(dtype, backend):
        made = {
            name: t.to(dtype).requires_grad_() if getattr(t, "is_floating_point", bool)() else t
            for name, t in (weights | options).items()
        }
        how = {name: made[name] for name in options}
        if tables is not None:
            wide = torch.promote_types(dtype, torch.float32)
            how["rope"] = tuple(t.to(wide) for t in tables)
        block = [made[name] for name in weights]
        dropout = how.pop("dropout_p", 0.0)
        mask, causal = how.pop("attn_mask", None), how.pop("is_causal", False)
        y = ops.attention_block(
            *block, H, mask, dropout, p, causal, **how, policy=policy, seed=5, backend=backend
        )
        leaves = [t for t in made.values() if getattr(t, "requires_grad", False)]
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    exact, theirs = results(torch.float64, "eager"), results(dtype, "eager")
    for i, (mine, other, true) in enumerate(
        zip(results(dtype, "triton"), theirs, exact, strict=True)
    ):
        error, allowed = error_of(mine, true), 1.5 * error_of(other, true) + FLOOR[dtype]
        assert error <= allowed, f"{i}: {error:.1e} beside {allowed:.1e}"


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_explain_names_the_kernels_of_both_directions(norm_first):
    layer = FusedRematLayer(
        D, H, 4 * D, 0.1, "gelu", batch_first=True, norm_first=norm_first, device=DEVICE,
        dtype=BF16, backend="triton",
    )  # fmt: skip
    text = str(explain(layer, normal(BF16, B, S, D)))
    assert "kernel attention_fwd; attention_dkdv_bwd and attention_dq_bwd: " in text
    assert "not fused" not in text
