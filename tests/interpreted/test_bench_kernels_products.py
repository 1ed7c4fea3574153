"""The ops `linear` and `mlp` of `python -m bench kernels` under Triton's interpreter.

Ours, and Liger-Kernel's, which shows that it is called as it wants to be.
"""

import dataclasses

import pytest
import torch
from places import target

from bench.kernels import linear, mlp
from bench.kernels.linear import Linear
from bench.kernels.mlp import Mlp
from bench.kernels.problem import contests, through_autograd
from bench.measure.contest import Rig, admit, check

TARGET = target()

SIZES = 2, 20, 24, 40  # B, S, D, F


@pytest.fixture
def rig():
    torch.manual_seed(0)
    return Rig(torch.device("cpu"), torch.float32, True, TARGET, ends=0.0)


def admitted(op, problem):
    """Rows of our Triton providers by direction."""
    ours = [name for name in op.providers if name.startswith("fused_remat triton")]
    for direction, contest in contests(op, problem):
        ways = {name: contest.ways[name] for name in ours}
        yield direction, admit(dataclasses.replace(contest, ways=ways, absent={}))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("act", [None, "gelu", "gelu_tanh"])
def test_our_linear_is_right(rig, act, bias):
    rows = dict(admitted(linear.OP, Linear(rig, 40, 24, 33, act, bias)))
    assert rows["fwd"]["fused_remat triton"]["check"]["result"] == "y"
    reason = rows["bwd"]["fused_remat triton"]["absent"]
    assert reason.startswith("our backwards take ATen's products")


@pytest.mark.parametrize(("gated", "act"), [(False, "gelu"), (False, "gelu_tanh"), (True, "silu")])
def test_our_mlps_are_right(rig, gated, act):
    for direction, rows in admitted(mlp.OP, Mlp(rig, gated, act, *SIZES)):
        assert set(rows) == {f"fused_remat triton {policy}" for policy in ("full", "none")}
        assert all("check" in row for row in rows.values()), (direction, rows)


@pytest.mark.parametrize("name", ["liger", "liger tiled"])
def test_liger_is_right(rig, name, floats_are_tensors):
    """With SiLU: its GELU calls CUDA's tanh, which nothing interprets."""
    pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed")
    p = Mlp(rig, True, "silu", 2, 50, 24, 40)  # the tiled one takes three pieces
    made = mlp.MLP[name].build(p)
    ways = made if isinstance(made, dict) else through_autograd(made, p)
    for direction, way in ways.items():
        for _ in range(2):  # in what the first call saved, it writes gradients
            found = way.run(way.prepare(0))
            assert set(found) >= set(p.truth(direction))
            assert check({k: found[k] for k in p.truth(direction)}, p.truth(direction))


@pytest.mark.parametrize(("gated", "act"), [(False, "silu"), (True, "tanh")])
def test_liger_says_what_it_has_not(rig, gated, act):
    pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed")
    for name in ("liger", "liger tiled", "liger fused"):
        with pytest.raises(mlp.Absent, match="it has gated MLPs only, of silu"):
            mlp.MLP[name].build(Mlp(rig, gated, act, *SIZES))
