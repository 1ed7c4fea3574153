"""Replays: gradients that share memory, held once, and a few tokens at a time."""

from dataclasses import replace

import pytest
import torch

from fused_remat.autograd import run_block
from fused_remat.execution.prepare import chunks_of
from fused_remat.graph.graph import Graph
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps.replay import Replay


class Shared(torch.autograd.Function):
    """y = x + w, whose gradients are one tensor."""

    @staticmethod
    def forward(ctx, x, w):
        return x + w

    @staticmethod
    def backward(ctx, dy):
        grad = 2 * dy
        return grad, grad


#: Functions of x (T, D) and of w (T, D), and what autograd returns of w.
REPLAYED = {
    "dy itself": lambda x, w: x + w,
    "one tensor for two": lambda x, w: 2 * (x + w),
    "one tensor of a function's": Shared.apply,
    "a view": lambda x, w: x + w.view(-1).view(x.shape),
    "expanded": lambda x, w: x + w.sum(),
    "a part of another": lambda x, w: x + torch.cat([w[:1], x[1:]]),
    "its own": lambda x, w: x * w,
}


def replay_of(columns, *tensors, **options):
    """Return a replay of "f" with x and `tensors` that makes the output."""
    return Replay(
        name="output", xs=("input",), tensors=tensors, function="f", what="f", columns=columns,
        needed_for=(("input", *tensors),), **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("rows", [6, 3])
def test_gradients_of_a_replay_share_no_memory(name, rows):
    """Gradients that autograd returns as one tensor, or as a view, are added to without harm."""
    function, (B, S, D) = REPLAYED[name], (2, rows, 4)
    again = replace(replay_of(D, "w"), xs=("mid",), needed_for=(("mid", "w"),))
    first = replace(replay_of(D, "w"), name="mid")
    graph = Graph("replayed", (first, again), ("w",))
    torch.manual_seed(0)
    x, w = (torch.randn(n, D, dtype=torch.float64, requires_grad=True) for n in (B * S, S))
    run = lambda at, xs, tensors: function(xs[0], tensors[0])  # noqa: E731
    dy = torch.randn(B, S, D, dtype=torch.float64)
    with chunks_of(S):
        y = run_block(graph, "full", {"input": x.view(B, S, D), "w": w}, functions={"f": run})
    before = dy.clone()
    got = torch.autograd.grad(y, [x, w], dy)
    expected = torch.stack([function(function(part, w), w) for part in x.view(B, S, D)])
    for mine, other in zip(got, torch.autograd.grad(expected, [x, w], dy), strict=True):
        torch.testing.assert_close(mine, other)
    assert torch.equal(dy, before)


def test_a_replay_holds_each_gradient_once():
    """Experts: gradients of all, and no copies."""
    D, count = 256, 6
    names = tuple(f"w{i}" for i in range(count))
    graph = Graph("experts", (replay_of(D, *names),), names)
    run = lambda at, xs, ws: sum(xs[0] @ w for w in ws)  # noqa: E731
    tensors = {n: torch.randn(D, D, requires_grad=True) for n in names}
    x = torch.randn(1, 4, D, requires_grad=True)
    y = run_block(graph, "full", {"input": x, **tensors}, functions={"f": run})
    dy = torch.ones_like(y)
    wanted = [x, *tensors.values()]
    found = measure_allocations(lambda: torch.autograd.grad(y, wanted, dy))
    assert found.net <= found.peak < 1.1 * count * D * D * 4


def test_a_replay_of_separate_tokens_runs_on_a_few_at_a_time():
    """What autograd keeps of a chain of pointwise operations stays small; results are the same."""
    T, D = 512, 1024
    graph = Graph("pointwise", (replay_of(D, "w", tokenwise=True),), ("w",))

    def chain(x, w):
        for _ in range(8):
            x = torch.exp(-x.abs()) * w
        return x

    torch.manual_seed(0)
    x, w = torch.randn(1, T, D, requires_grad=True), torch.randn(D, requires_grad=True)
    run = lambda at, xs, tensors: chain(xs[0], tensors[0])  # noqa: E731
    y = run_block(graph, "full", {"input": x, "w": w}, functions={"f": run})
    expected = chain(x, w)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    dy = torch.randn_like(y)
    got = []
    peak = measure_allocations(lambda: got.extend(torch.autograd.grad(y, [x, w], dy))).peak
    assert peak < 8 * T * D * 4  # autograd keeps 24 of these
    for mine, other in zip(got, torch.autograd.grad(expected, [x, w], dy), strict=True):
        torch.testing.assert_close(mine, other)
