"""Triton providers of `python -m bench kernels` under Triton's interpreter: ours, and Liger's.

That shows that their kernels are called as they want to be; linears and MLPs have a file of their
own.
"""

import pytest
import torch
import triton.language as tl
from poisoned import TARGET

from bench.kernels import attention, dropout, loss, norm, rope
from bench.kernels.attention_problem import Attention
from bench.kernels.problem import contests, through_autograd
from bench.measure.contest import Rig, admit, check

RIG = Rig(torch.device("cpu"), torch.float32, True, TARGET, ends=0.0)
PROBLEMS = {
    "layer_norm": (norm.OP, lambda: norm.Norm(RIG, "layer_norm", 5, 48)),
    "rms_norm": (norm.OP, lambda: norm.Norm(RIG, "rms_norm", 5, 48)),
    "rope": (rope.OP, lambda: rope.Rope(RIG, "rope", 2, 4, 2, 5, 16)),
    "normed rope": (rope.OP, lambda: rope.Rope(RIG, rope.NORMED, 2, 4, 2, 5, 16)),
    "loss": (loss.OP, lambda: loss.Loss(RIG, 21, 16, 75)),
    "dropout": (dropout.OP, lambda: dropout.Dropout(RIG, 33, 48)),
    "shared heads": (attention.OP, lambda: Attention(RIG, "causal", 1, 2, 1, 24, 16)),
}  # other forms of attention are in the dry run of `python -m bench gpu`


@pytest.mark.parametrize("name", PROBLEMS)
def test_our_triton_providers_are_right_both_ways(name):
    op, made = PROBLEMS[name]
    ours = [n for n in op.providers if op.providers[n].needs == "triton" and n != "liger"]
    assert ours[0] == "fused_remat triton"
    for direction, contest in contests(op, made(), ["aten", *ours]):
        rows = admit(contest)
        assert all("check" in rows[provider] for provider in ours), (direction, rows)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "rope"])
def test_liger_is_right_both_ways(name, floats_are_tensors, monkeypatch):
    pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed")
    if name != "rope":  # which CUDA's library of functions computes, that nothing interprets
        monkeypatch.setattr(f"liger_kernel.ops.{name}.rsqrt", lambda x: 1.0 / tl.sqrt(x))
    op, made = PROBLEMS[name]
    problem, provider = made(), op.providers["liger"]
    in_place = bool(provider.traits.get("in_place"))
    for direction, way in through_autograd(
        provider.build(problem), problem, in_place=in_place
    ).items():
        truth = problem.truth(direction)
        for _ in range(2):  # on the same inputs, whatever it writes to
            found = way.run(way.prepare(0))
            assert check({key: found[key] for key in truth}, truth)
