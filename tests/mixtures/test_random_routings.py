"""Random mixtures of experts against plain PyTorch, and the losses of a router."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_moe import moe_weights, plain_moe

from fused_remat import ops
from fused_remat.autograd import run_block
from fused_remat.execution.prepare import chunks_of
from fused_remat.graph.build import block_graph
from fused_remat.moe_spec import MoESpec, RouterSpec
from fused_remat.policies import PRESETS, Policy
from fused_remat.report.allocations import measure_allocations
from fused_remat.spec import BlockSpec, BranchSpec
from fused_remat.steps.replay import At
from fused_remat.steps.routing import Routing, route

WIDTH, HIDDEN = 6, 4


def run(spec: MoESpec, x: torch.Tensor, weights: dict[str, Any], policy: str) -> torch.Tensor:
    router = spec.router
    return ops.moe(
        x, weights["router.weight"], weights["experts_up.weight"], weights["experts_down.weight"],
        top_k=router.top_k, scores=router.scores, normalize=router.normalize, scale=router.scale,
        correction=weights.get("router.correction"), groups=router.groups,
        top_groups=router.top_groups, best=router.best, weighs_input=spec.weighs_input,
        policy=policy, backend="eager",
    )  # fmt: skip


def drawn(choice: random.Random, seed: int) -> tuple[MoESpec, torch.Tensor, dict[str, Any]]:
    experts = choice.randint(1, 9)
    groups = choice.choice([n for n in range(1, experts + 1) if experts % n == 0])
    top_groups = choice.randint(1, groups)
    size = experts // groups
    most = top_groups * size
    router = RouterSpec(
        experts=experts, top_k=choice.choice([1, most, choice.randint(1, most)]),
        scores=choice.choice(["softmax", "sigmoid", "top_k_softmax"]),
        normalize=choice.random() < 0.5, scale=choice.choice([1.0, 2.5]), groups=groups,
        top_groups=top_groups, best=choice.randint(1, size), corrected=choice.random() < 0.3,
    )  # fmt: skip
    spec = MoESpec(router=router, weighs_input=choice.random() < 0.2)
    weights = moe_weights(spec, WIDTH, HIDDEN, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = choice.randint(1, 20)
    x = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    if choice.random() < 0.3:  # all tokens go to the same experts; others are empty
        x = x[:1] + 1e-3 * x
    with torch.no_grad():
        weights["router.weight"] *= choice.choice([0.5, 1.0, 3.0])
    return spec, x.requires_grad_(), weights


def test_200_random_routings() -> None:
    choice = random.Random(0)
    for seed in range(200):
        spec, x, weights = drawn(choice, seed)
        leaves = [x, *[t for t in weights.values() if t.requires_grad]]
        expected, _ = plain_moe(spec, x, weights)
        dy = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))
        truth = torch.autograd.grad(expected, leaves, dy)
        bits = []
        for preset in ("full", "full", sorted(PRESETS)[seed % len(PRESETS)]):
            y = run(spec, x, weights, preset)
            bits.append((y, *torch.autograd.grad(y, leaves, dy)))
        # Sums in another order; 1e-9 is far above rounding in float64.
        for found, right in zip(bits[0], (expected, *truth), strict=True):
            torch.testing.assert_close(
                found, right, rtol=1e-9, atol=1e-9, msg=lambda m, s=(seed, spec): f"{s}: {m}"
            )
        assert all(map(torch.equal, bits[1], bits[0]))
        assert all(map(torch.equal, bits[2], bits[0]))


def with_drops(spec: MoESpec, dropped: torch.Tensor, mark: int) -> Any:
    """Return the graph of a mixture without the pairs `dropped` (T, E), and its functions.

    The router's function returns the number `mark` for them, of no expert.
    """
    graph = block_graph(BlockSpec(kind="moe", branches=(BranchSpec(op=spec),), residual=False))
    nodes = [
        replace(n, router=None, function="route") if isinstance(n, Routing) else n
        for n in graph.nodes
    ]

    def function(at: At, xs: Any, tensors: Any, known: torch.Tensor | None) -> Any:
        experts, correction = spec.router.experts, [*tensors, None][0]
        if known is not None:  # any weight does for a dropped pair
            known = known.clamp(max=experts - 1)
            return route(spec.router, xs[0], correction, known)
        weights, chosen = route(spec.router, xs[0], correction)
        own = dropped[at.first : at.first + at.batch * at.tokens]
        return weights, torch.where(own.gather(1, chosen), mark, chosen)

    return replace(graph, nodes=tuple(nodes)), {"route": function}


def test_dropped_pairs_of_100_random_routings() -> None:
    choice = random.Random(1)
    for seed in range(100):
        spec, x, weights = drawn(choice, seed)
        scores = choice.choice(["softmax", "sigmoid"])
        spec = replace(spec, router=replace(spec.router, scores=scores, normalize=False))
        generator = torch.Generator().manual_seed(seed)
        dropped = torch.rand(len(x), spec.router.experts, generator=generator)
        dropped = dropped < choice.choice([0.1, 0.5, 1.0])
        leaves = [x, *[t for t in weights.values() if t.requires_grad]]
        expected, _ = plain_moe(spec, x, weights, dropped)
        dy = torch.randn(x.shape, dtype=x.dtype, generator=generator)
        truth = torch.autograd.grad(expected, leaves, dy)
        graph, functions = with_drops(spec, dropped, choice.choice([-1, spec.router.experts]))
        for save in (set(), {"experts_up"}, {"router", "routing", "experts_up"}):
            with chunks_of(choice.choice([3, 1 << 20])):
                tensors = {**weights, "input": x[None]}
                y = run_block(graph, Policy(save=save), tensors, functions=functions)[0]
                found = (y, *torch.autograd.grad(y, leaves, dy))
            for a, b in zip(found, (expected, *truth), strict=True):
                torch.testing.assert_close(
                    a, b, rtol=1e-9, atol=1e-9, msg=lambda m, s=(seed, save, spec): f"{s}: {m}"
                )


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_of_transformers(masked: bool) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = tuple([torch.randn(12, 5) * (i + 1) for i in range(3)])
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 3:] = 0
    given = mask if masked else None
    theirs = mixtral.load_balancing_loss_func(layers, 5, 2, given)
    torch.testing.assert_close(ops.load_balancing_loss(layers, 2, given), theirs)


def test_losses_of_several_layers() -> None:
    layers = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 5), (4, 5))]
    tokens = torch.cat([logits.reshape(-1, 5) for logits in layers])
    for loss in (ops.router_z_loss, lambda logits: ops.load_balancing_loss(logits, 2)):
        torch.testing.assert_close(loss(layers), loss(tokens))
        with pytest.raises(ValueError, match="one layer at least, got none"):
            loss(())
        with pytest.raises(TypeError, match="got None; call the model with output_router_logits"):
            loss(None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"router_logits\[1\] must be a Tensor, got NoneType"):
            loss([layers[0], None])  # type: ignore[list-item]
        with pytest.raises(RuntimeError, match=r"router_logits is torch\.int64, expected"):
            loss(torch.ones(3, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"differ in their number of experts: \[4, 5\]"):
        ops.load_balancing_loss([tokens, tokens[:, :4]], 2)


def test_transients_are_those_of_one_expert() -> None:
    tokens, experts, width = 256, 16, 64
    x = torch.eye(experts, width).repeat(tokens // experts, 1)  # token t goes to expert t % E
    router = torch.eye(experts, width)
    up, down = torch.randn(experts, 2 * width, width), torch.randn(experts, width, width)
    with torch.no_grad():
        found = measure_allocations(lambda: ops.moe(x, router, up, down, top_k=1, backend="eager"))
    assert found.peak - found.net < tokens * experts * width * 4


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 2)], ids=str)
def test_router_logits_are_the_blocks_own(shape: tuple[int, ...]) -> None:
    spec = MoESpec(router=RouterSpec(experts=4, top_k=2))
    weights = moe_weights(spec, WIDTH, HIDDEN)
    x = torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)
    leaves = [x, *weights.values()]
    z, expected = plain_moe(spec, x.reshape(-1, WIDTH), weights)
    loss = z.square().sum() + expected.logsumexp(-1).square().sum()
    truth = torch.autograd.grad(loss, leaves)
    for preset in sorted(PRESETS):
        y, logits = ops.moe(
            x, weights["router.weight"], weights["experts_up.weight"],
            weights["experts_down.weight"], top_k=2, return_router_logits=True, policy=preset,
        )  # fmt: skip
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
        loss = y.square().sum() + logits.logsumexp(-1).square().sum()
        for a, b in zip(torch.autograd.grad(loss, leaves), truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
