"""Experts in kernels against their bodies in float64: routes, layouts, divisions of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from places import BF16, at, check_error, compiled, ids, normal, run, served
from torch import Tensor

from fused_remat.moe_spec import ExpertsSpec
from fused_remat.steps import experts
from fused_remat.steps.experts import experts_order
from fused_remat.steps.stacks import Adapter, Into, Operands, Order, Stack, StackGrads
from fused_remat.triton.experts import unsupported_reason

F32 = torch.float32
#: Tokens, width, hidden width, experts, experts of a token.
SIZES = {
    "even": at((1024, 512, 256, 8, 2), (48, 32, 32, 4, 2), (40, 32, 32, 4, 2)),
    "odd": at((1000, 328, 200, 16, 4), (37, 21, 19, 7, 3), (33, 40, 24, 5, 3)),
    "all": at((256, 128, 128, 4, 4), (20, 16, 16, 3, 3), (16, 32, 16, 3, 3)),
}
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "swiglu": ({}, False),
    "swiglu transposed": ({"transposed": True}, True),
    "clamped": (
        {
            "activation": "clamped_swish", "interleaved": True, "transposed": True, "limit": 1.5,
            "alpha": 1.7,
        },
        True,
    ),
    "interleaved": ({"interleaved": True}, False),
    "relu2": ({"activation": "relu2", "gated": False}, True),
}  # fmt: skip


def chosen_of(how: str, tokens: int, experts: int, top_k: int) -> Tensor:
    """Experts of each token: random; one of them all; half of them none; or some dropped."""
    scores = torch.rand(tokens, experts)
    if how == "one":
        scores[:, 1] += 2.0
        return scores.topk(top_k).indices if top_k > 1 else torch.ones(tokens, 1).long()
    if how == "empty":
        scores[:, : experts - top_k] -= 2.0
    chosen = scores.topk(top_k).indices
    return (
        torch.where(torch.rand(chosen.shape) < 0.3, experts, chosen) if how == "dropped" else chosen
    )


class Problem:
    def __init__(self, sizes: str, kind: str, how: str, dtype: torch.dtype, wide: bool = False):
        torch.manual_seed(0)
        tokens, d, f, e, k = SIZES[sizes]
        options, has_bias = KINDS[kind]
        self.spec = ExpertsSpec(experts=e, top_k=k, **options)
        c, weight_dtype = f * (2 if self.spec.gated else 1), F32 if wide else dtype
        self.x, self.dy = normal(dtype, tokens, d), normal(dtype, tokens, d)
        chosen = chosen_of(how, tokens, e, k).to(self.x.device)
        self.order: Order = experts_order(chosen, e)
        self.weights = torch.rand(tokens, k, device=self.x.device)

        def stack(out: int, columns: int) -> Stack:
            shape = (columns, out) if self.spec.transposed else (out, columns)
            matrix = normal(weight_dtype, e, *shape, scale=columns**-0.5)
            bias = normal(weight_dtype, e, out) if has_bias else None
            return Stack(matrix, bias, self.spec.transposed)

        self.up, self.down = stack(c, d), stack(d, f)

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        return self.up, self.down

    def double(self) -> Any:
        other = object.__new__(Problem)
        other.spec, other.order = self.spec, self.order
        other.x, other.dy, other.weights = (t.double() for t in (self.x, self.dy, self.weights))
        other.up, other.down = (
            s._replace(weight=s.weight.double(), bias=None if s.bias is None else s.bias.double())
            for s in self.stacks
        )
        return other

    def kept(self) -> slice:
        return slice(0, int(self.order.ends[-1]))

    def grads(self, dtype: torch.dtype, fresh: bool) -> list[StackGrads]:
        def into(t: Tensor | None) -> Into | None:
            if t is None:
                return None
            value = torch.nan if fresh else 1.0
            wide = dtype if t.dim() > 2 or dtype == torch.float64 else F32
            return Into(torch.full(t.shape, value, dtype=wide, device=t.device), fresh, not fresh)

        return [StackGrads(into(s.weight), into(s.bias)) for s in self.stacks]


def forward(p: Any, call: Any) -> tuple[Tensor, ...]:
    pre = call(experts.experts_up_fwd, p.spec, p.x, None, p.order, p.up)
    y = call(experts.experts_down_fwd, p.spec, pre, p.weights, p.order, p.down)
    return pre, y, call(experts.experts_fwd, p.spec, p.x, p.weights, p.order, *p.stacks)


def backward(p: Any, call: Any, pre: Tensor | None, grads: Any, needs: Any) -> tuple[Any, ...]:
    read = Operands(p.spec, p.dy, p.x, pre, p.weights, p.order, *p.stacks, *needs)
    return call(experts.experts_bwd, read, *grads)


def poisoned_run(function: Any, *args: Any) -> Any:
    """Run it as `run` does; rows of dropped pairs stay NaN, which nothing may read."""

    def empty(*shape: Any, real: Any = torch.empty, **options: Any) -> Tensor:
        x = real(*shape, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        return served(function, *args)


def by_body(function: Any, *args: Any) -> Any:
    return function(*args)


#: Sizes, kind, division of tokens, whether stacks are float32 where rows have 16 bits (autocast).
EXECUTED = [
    ("even", "swiglu", "random", False), ("even", "clamped", "one", False),
    ("odd", "clamped", "dropped", False), ("odd", "relu2", "dropped", False),
]  # fmt: skip
CASES = [
    *[pytest.param(*case, marks=pytest.mark.executed) for case in EXECUTED],
    ("odd", "swiglu transposed", "empty", False), ("odd", "interleaved", "random", False),
    ("all", "relu2", "random", False), ("even", "swiglu", "dropped", False),
    ("even", "swiglu", "random", True), ("odd", "clamped", "random", True),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", compiled([BF16], [F32, BF16]), **ids)
@pytest.mark.parametrize("sizes, kind, how, wide", CASES)
def test_values_and_gradients(sizes, kind, how, wide, dtype):
    p = Problem(sizes, kind, how, dtype, wide)
    exact = p.double()
    truth = forward(exact, by_body)
    call = poisoned_run if how == "dropped" else run
    found = forward(p, call)
    for name, mine, true in zip(("pre", "down", "fused"), found, truth, strict=True):
        check_error(*((mine[p.kept()], true[p.kept()]) if name == "pre" else (mine, true)), 4, name)
    rounded = found[0].double()  # a limit is passed or not by what is rounded
    for pre, fresh in ((None, True), (found[0], False)):
        kept = None if pre is None else pre.clone()
        expected, wanted = exact.grads(torch.float64, fresh), (True, True)
        made = p.grads(dtype if fresh else F32, fresh)
        true = backward(exact, by_body, rounded, expected, wanted)
        mine = backward(p, call, pre, made, wanted)
        for name, a, b in zip(("dx", "dweights"), mine, true, strict=True):
            check_error(a, b, 4, name, dtype)
        for a, b in zip(made, expected, strict=True):
            check_error(a.weight.grad, b.weight.grad, 4, "weight", dtype)
            if a.bias is not None:
                check_error(a.bias.grad, b.bias.grad, 4, "bias", dtype)
        if pre is not None:
            assert pre[p.kept()].equal(kept[p.kept()])


def test_what_kernels_do_not_take_has_a_reason():
    p = Problem("even", "swiglu", "random", BF16)

    def reason(spec=p.spec, up=p.up, x=p.x):
        return unsupported_reason(experts.key(spec, x, p.order, up, p.down))

    assert reason() is None
    low = Adapter(p.up.weight[:, :1], p.up.weight[:, :, :1], 1.0)
    assert "adapters" in reason(up=p.up._replace(adapters=(low,)))
    assert "input" in reason(dataclasses.replace(p.spec, weighs_input=True))
    assert "'tanhshrink'" in reason(dataclasses.replace(p.spec, activation="tanhshrink"))
    assert "float64" in reason(x=p.x.double())
