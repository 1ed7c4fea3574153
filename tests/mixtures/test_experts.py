"""Steps of experts and routing against plain PyTorch in float64, for every set of kept names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.execution.prepare import chunks_of
from fused_remat.graph.build import BlockBuilder
from fused_remat.moe_spec import ExpertsSpec, RouterSpec
from fused_remat.policies import Policy
from fused_remat.steps.linear import Linear
from fused_remat.steps.mixture import ExpertsDown, ExpertStack, ExpertsUp
from fused_remat.steps.routing import Routing, route

WIDTH, HIDDEN, BATCH, LENGTH = 16, 12, 2, 9


def graph_of(router: RouterSpec, experts: ExpertsSpec, bias: bool) -> Any:
    b = BlockBuilder()
    logits = b.add(Linear(name="router", x="input", weights=("router.weight",), biases=("",)))
    tensors = ("router.correction",) if router.corrected else ()
    weights = b.add(
        Routing(
            name="routing", xs=(logits,), tensors=tensors, function="", what="router",
            needed_for=((logits,),), tokenwise=True, chosen="routing.experts",
            experts=router.experts, top_k=router.top_k, router=router,
        )
    )  # fmt: skip
    up, down = (
        ExpertStack(weight=f"{name}.weight", bias=f"{name}.bias" if bias else "")
        for name in ("up", "down")
    )
    given: Any = {"chosen": "routing.experts", "spec": experts}
    weigh = weights if experts.weighs_input else ""
    pre = b.add(ExpertsUp(name="pre", x="input", weights=weigh, stack=up, **given))
    made = b.add(ExpertsDown(name="experts", pre=pre, weights=weights, stack=down, **given))
    b.sum("output", made, "input")
    return b.graph("moe")


def plain(
    router: RouterSpec, spec: ExpertsSpec, tensors: dict[str, Any], chosen: Tensor | None = None
) -> Tensor:
    """Compute the block by PyTorch: every expert on every token."""
    x = tensors["input"].reshape(-1, WIDTH)
    logits = F.linear(x, tensors["router.weight"])
    weights, chosen = route(router, logits, tensors.get("router.correction"), chosen)
    y = torch.zeros_like(x)
    for e in range(spec.experts):
        up, down = tensors["up.weight"][e], tensors["down.weight"][e]
        up, down = (up.t(), down.t()) if spec.transposed else (up, down)
        w = (weights * (chosen == e)).sum(-1, keepdim=True)
        hit = (chosen == e).any(-1, keepdim=True)
        biases = [None if (b := tensors.get(f"{n}.bias")) is None else b[e] for n in ("up", "down")]
        pre = F.linear(x * w if spec.weighs_input else x, up, biases[0])
        if not spec.gated:
            act = torch.relu(pre).square()
        else:
            gate, linear = (pre[:, ::2], pre[:, 1::2]) if spec.interleaved else pre.chunk(2, 1)
            if spec.activation == "clamped_swish":
                gate = gate.clamp(max=spec.limit)
                linear = linear.clamp(-spec.limit, spec.limit) + 1
                act = gate * torch.sigmoid(gate * spec.alpha) * linear
            else:
                act = F.silu(gate) * linear
        out = F.linear(act, down, biases[1])
        y = y + (out * hit if spec.weighs_input else out * w)
    return tensors["input"] + y.view_as(tensors["input"])


def tensors_for(router: RouterSpec, spec: ExpertsSpec, bias: bool, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    rows, e = HIDDEN * (2 if spec.gated else 1), spec.experts
    up, down = (rows, WIDTH), (WIDTH, HIDDEN)
    up, down = (up[::-1], down[::-1]) if spec.transposed else (up, down)
    tensors = {
        "input": normal(BATCH, LENGTH, WIDTH), "router.weight": normal(e, WIDTH),
        "up.weight": normal(e, *up), "down.weight": normal(e, *down),
    }  # fmt: skip
    if bias:
        tensors |= {"up.bias": normal(e, rows), "down.bias": normal(e, WIDTH)}
    if router.corrected:
        tensors["router.correction"] = normal(e).detach()
    return tensors


def check(router: RouterSpec, spec: ExpertsSpec, bias: bool, save: set[str], seed: int = 0) -> None:
    tensors = tensors_for(router, spec, bias, seed)
    graph = graph_of(router, spec, bias)
    y, z = run_block(graph, Policy(save=save), tensors), plain(router, spec, tensors)
    wanted = {name: t for name, t in tensors.items() if t.requires_grad}
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(y, [*wanted.values()], dy)
    expected = torch.autograd.grad(z, [*wanted.values()], dy)
    torch.testing.assert_close(y, z, rtol=1e-10, atol=1e-10)
    for name, a, b in zip(wanted, found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


ROUTERS = {
    "softmax": RouterSpec(experts=6, top_k=2),
    "normalized": RouterSpec(experts=6, top_k=3, normalize=True, scale=2.5),
    "top_k_softmax": RouterSpec(experts=6, top_k=2, scores="top_k_softmax"),
    "groups": RouterSpec(
        experts=6, top_k=2, scores="sigmoid", normalize=True, groups=3, top_groups=2, best=2,
        corrected=True,
    ),
    "all": RouterSpec(experts=3, top_k=3),
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "swiglu": ({}, False),
    "clamped": (
        {
            "activation": "clamped_swish", "interleaved": True, "transposed": True, "limit": 1.5,
            "alpha": 1.7,
        },
        True,
    ),
    "relu2": ({"activation": "relu2", "gated": False}, False),
    "weighs_input": ({"weighs_input": True, "transposed": True}, False),
}  # fmt: skip
SAVES = [set(), {"pre"}, {"routing", "router"}, {"routing", "router", "pre", "experts"}]


@pytest.mark.parametrize(("router", "kind"), [*itertools.product(sorted(ROUTERS), sorted(KINDS))])
def test_gradients_are_those_of_plain_pytorch(router: str, kind: str) -> None:
    choice, (options, bias) = ROUTERS[router], KINDS[kind]
    spec = ExpertsSpec(experts=choice.experts, top_k=choice.top_k, **options)
    for save in SAVES:
        check(choice, spec, bias, save)


def test_tiles_and_groups() -> None:
    router, (options, bias) = ROUTERS["groups"], KINDS["clamped"]
    spec = ExpertsSpec(experts=6, top_k=2, **options)
    for tokens in (4, LENGTH):
        with chunks_of(tokens):
            check(router, spec, bias, {"pre"})
            check(router, spec, bias, set())
