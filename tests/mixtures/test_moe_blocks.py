"""Mixtures of experts as branches of blocks, for every preset, against plain PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_moe import moe_weights, plain_moe

from fused_remat.autograd import run_block
from fused_remat.graph.build import block_graph
from fused_remat.moe_spec import MoESpec, RouterSpec
from fused_remat.policies import PRESETS
from fused_remat.spec import BlockSpec, BranchSpec, MLPSpec, NormSpec

WIDTH, HIDDEN, SHARED = 8, 6, 10
SWIGLU = MLPSpec(activation="silu", gated=True)
CLAMPED: dict[str, Any] = {
    "activation": "clamped_swish", "interleaved": True, "transposed": True, "limit": 1.5,
    "alpha": 1.7,
}  # fmt: skip
DEEPSEEK = RouterSpec(
    experts=8, top_k=3, scores="sigmoid", normalize=True, scale=2.5, groups=4, top_groups=2, best=2,
    corrected=True,
)  # fmt: skip
SPECS = {
    "mixtral": MoESpec(router=RouterSpec(experts=4, top_k=2, normalize=True)),
    "qwen2_moe": MoESpec(router=RouterSpec(experts=6, top_k=2), shared=SWIGLU, shared_gate=True),
    "deepseek": MoESpec(router=DEEPSEEK, shared=SWIGLU),
    "gpt_oss": MoESpec(router=RouterSpec(experts=4, top_k=2, scores="top_k_softmax"), **CLAMPED),
    "relu2": MoESpec(
        router=RouterSpec(experts=4, top_k=4), activation="relu2", gated=False,
        shared=MLPSpec(activation="silu"),
    ),
    "llama4": MoESpec(
        router=RouterSpec(experts=4, top_k=1, scores="sigmoid"), weighs_input=True, transposed=True,
        shared=SWIGLU,
    ),
}  # fmt: skip


def check(block: BlockSpec, tensors: dict[str, Any], expected: torch.Tensor) -> None:
    wanted = {name: t for name, t in tensors.items() if t.requires_grad}
    dy = torch.randn(expected.shape, dtype=torch.float64)
    truth = torch.autograd.grad(expected, [*wanted.values()], dy)
    bits = []
    for preset in sorted(PRESETS):
        y = run_block(block_graph(block), preset, tensors, backend="eager")
        found = torch.autograd.grad(y, [*wanted.values()], dy)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        for name, a, b in zip(wanted, found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m)
        bits.append((y, *found))
    for other in bits[1:]:
        assert all(map(torch.equal, other, bits[0]))


@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_mixture_alone(name: str) -> None:
    spec = SPECS[name]
    weights = moe_weights(spec, WIDTH, HIDDEN, SHARED, bias=name == "gpt_oss")
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    y, _ = plain_moe(spec, x.flatten(0, 1), weights)
    block = BlockSpec(kind="moe", branches=(BranchSpec(op=spec),), residual=False)
    check(block, {"input": x, **weights}, y.view_as(x))


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_with_norms_and_a_parallel_mlp(name: str, placement: str) -> None:
    spec, norm = SPECS[name], NormSpec(kind="rms_norm", eps=1e-6)
    branches = [BranchSpec(op=spec, norm=norm, placement=placement)]
    if placement == "pre":
        branches.append(BranchSpec(op=SWIGLU, parallel=True))
    weights = moe_weights(spec, WIDTH, HIDDEN, SHARED)
    number = "1" if placement == "pre" else ""
    shapes = {"gate": (5, WIDTH), "fc1": (5, WIDTH), "fc2": (WIDTH, 5)} if number else {}
    extra = {f"{n}.weight": torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}
    for name in (f"norm{number}", "post") if placement == "sandwich" else (f"norm{number}",):
        extra[f"{name}.weight"] = torch.rand(WIDTH, dtype=torch.float64) + 0.5
    weights |= {name: t.requires_grad_() for name, t in extra.items()}
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)

    def normed(t: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(t, (WIDTH,), weights[f"{name}.weight"], 1e-6)

    flat = x.flatten(0, 1)
    read = flat if placement == "post" else normed(flat, f"norm{number}")
    y, _ = plain_moe(spec, read, weights)
    if placement == "sandwich":
        y = normed(y, "post")
    y = flat + y
    if number:
        act = F.silu(read @ weights["gate.weight"].T) * (read @ weights["fc1.weight"].T)
        y = y + act @ weights["fc2.weight"].T
    y = normed(y, "norm") if placement == "post" else y
    block = BlockSpec(kind="moe_block", branches=tuple(branches))
    check(block, {"input": x, **weights}, y.view_as(x))
