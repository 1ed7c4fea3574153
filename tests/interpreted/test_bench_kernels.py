"""Triton providers of `python -m bench kernels` under Triton's interpreter: ours, and Liger's.

That shows that their kernels are called as they want to be.
"""

import pytest
import torch
import triton.language as tl
from places import target

from bench.kernels import attention, dropout, linear, loss, mlp, norm, rope
from bench.kernels.attention_problem import Attention
from bench.kernels.problem import contests, through_autograd
from bench.measure.contest import Rig, admit, check

TARGET = target()

RIG = Rig(torch.device("cpu"), torch.float32, True, TARGET, ends=0.0)
SIZES = 2, 20, 24, 40  # B, S, D, F
PROBLEMS = {
    "layer_norm": (norm.OP, lambda: norm.Norm(RIG, "layer_norm", 5, 48)),
    "rms_norm": (norm.OP, lambda: norm.Norm(RIG, "rms_norm", 5, 48)),
    "rope": (rope.OP, lambda: rope.Rope(RIG, "rope", 2, 4, 2, 5, 16)),
    "normed rope": (rope.OP, lambda: rope.Rope(RIG, rope.NORMED, 2, 4, 2, 5, 16)),
    "loss": (loss.OP, lambda: loss.Loss(RIG, 21, 16, 75)),
    "dropout": (dropout.OP, lambda: dropout.Dropout(RIG, 33, 48)),
    "shared heads": (attention.OP, lambda: Attention(RIG, "causal", 1, 2, 1, 24, 16)),
    # other forms of attention are in the dry run of `python -m bench gpu`
    **{
        f"linear {act} {bias}": (
            linear.OP,
            lambda act=act, bias=bias: linear.Linear(RIG, 40, 24, 33, act, bias),
        )
        for act in (None, "gelu", "gelu_tanh")
        for bias in (True, False)
    },
    **{
        f"mlp {act}": (mlp.OP, lambda gated=gated, act=act: mlp.Mlp(RIG, gated, act, *SIZES))
        for gated, act in ((False, "gelu"), (False, "gelu_tanh"), (True, "silu"))
    },
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_our_triton_providers_are_right_both_ways(name):
    torch.manual_seed(0)
    op, made = PROBLEMS[name]
    ours = [n for n in op if op[n].needs == "triton" and n != "liger"]
    assert ours and all(n.startswith("fused_remat ") for n in ours)
    for direction, contest in contests(op, made(), ["aten", *ours]):
        rows = admit(contest)
        if op is linear.OP and direction == "bwd":
            reason = rows["fused_remat triton"]["absent"]
            assert reason.startswith("our backwards take ATen's products")
        else:
            assert all("check" in rows[provider] for provider in ours), (direction, rows)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "rope", "mlp liger", "mlp liger tiled"])
def test_liger_is_right_both_ways(name, floats_are_tensors, monkeypatch):
    """Of MLPs with SiLU: its GELU calls CUDA's tanh, which nothing interprets."""
    pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed")
    torch.manual_seed(0)
    if name.startswith("mlp "):  # the tiled one takes three pieces
        provider = mlp.OP[name.removeprefix("mlp ")]
        problem = mlp.Mlp(RIG, True, "silu", 2, 50, 24, 40)
    else:
        op, made = PROBLEMS[name]
        problem, provider = made(), op["liger"]
    if name.endswith("norm"):  # which CUDA's library of functions computes, that nothing interprets
        monkeypatch.setattr(f"liger_kernel.ops.{name}.rsqrt", lambda x: 1.0 / tl.sqrt(x))
    ways, in_place = provider.build(problem), bool(provider.traits.get("in_place"))
    if not isinstance(ways, dict):
        ways = through_autograd(ways, problem, in_place=in_place)
    for direction, way in ways.items():
        truth = problem.truth(direction)
        for _ in range(2):  # on the same inputs, whatever it writes to
            found = way.run(way.prepare(0))
            assert check({key: found[key] for key in truth}, truth)


@pytest.mark.parametrize(("gated", "act"), [(False, "silu"), (True, "tanh")])
def test_liger_says_what_it_has_not(gated, act):
    pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed")
    for name in ("liger", "liger tiled", "liger fused"):
        with pytest.raises(mlp.Absent, match="it has gated MLPs only, of silu"):
            mlp.OP[name].build(mlp.Mlp(RIG, gated, act, *SIZES))
