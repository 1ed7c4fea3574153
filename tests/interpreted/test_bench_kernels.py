"""Triton providers of `python -m bench kernels` under Triton's interpreter: ours, and Liger's."""

import pytest
import torch
import triton.language as tl
from kernel_problems import PROBLEMS
from places import target

from bench.kernels.attention import FORMS
from bench.kernels.ops import MLP, Mlp
from bench.kernels.problem import contests, ways_of
from bench.measure.contest import Rig, admit, check

RIG = Rig(torch.device("cpu"), torch.float32, True, target(), ends=0.0)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in FORMS])
def test_our_triton_providers_are_right_both_ways(name):
    """All forms of attention are in the dry run of `python -m bench gpu`."""
    torch.manual_seed(0)
    op, made = PROBLEMS[name]
    ours = [n for n in op if n.startswith("fused_remat") and op[n].needs == "triton"]
    for direction, contest in contests(op, made(RIG), ["aten", *ours]):
        rows = admit(contest)
        assert ours and all("check" in rows[provider] for provider in ours), (direction, rows)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "mlp"])
def test_liger_is_right_both_ways(name, floats_are_tensors, monkeypatch):
    """Of MLPs with SiLU: its GELU calls CUDA's tanh, which nothing interprets."""
    pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed")
    torch.manual_seed(0)
    if name == "mlp":
        provider, problem = MLP["liger"], Mlp(RIG, True, "silu", 2, 50, 24, 40)
    else:
        problem, provider = PROBLEMS[name][1](RIG), PROBLEMS[name][0]["liger"]
        monkeypatch.setattr(f"liger_kernel.ops.{name}.rsqrt", lambda x: 1.0 / tl.sqrt(x))
    monkeypatch.setattr(type(provider), "unsupported_reason", lambda provider, device: None)
    for direction, way in ways_of(provider, problem).items():
        truth = problem.truth(direction)
        for _ in range(2):  # on the same inputs, whatever it writes to
            found = way.run(way.prepare(0))
            assert check({key: found[key] for key in truth}, truth)
