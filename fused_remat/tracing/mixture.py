"""The rule by which experts, and the router that chooses them, become the steps of a block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fused_remat.layers.eligibility import parameters_of
from fused_remat.steps.mixture import ExpertAdapter, ExpertsDown, ExpertStack, ExpertsUp
from fused_remat.steps.replay import At
from fused_remat.steps.routing import Routing
from fused_remat.tracing.builder import Build, Builder
from fused_remat.tracing.experts import KnownExperts
from fused_remat.tracing.program import Context, Layout, Operations, Program
from fused_remat.tracing.replays import CHOICES, is_tokenwise, region, sizes_in
from fused_remat.tracing.values import Op, Opaque, Ref, ops_for


@dataclass(frozen=True, eq=False)
class RoutingProgram(Program):
    """The operations of a router: `target` are the weights of a token's experts."""

    chosen: int = -1  # the value of the experts' numbers
    of: Layout | None = None  # its layout

    @functools.cached_property
    def _both(self) -> Operations:
        return Operations(self.ops, (self.target, self.chosen))

    @functools.cached_property
    def known(self) -> tuple[Op, ...]:
        """The operations that compute the weights where the experts are known."""
        producers = {n: op for op in self.ops for n in op.writes}
        found = producers[self.chosen]
        if found.kind == "topk" and len(found.outs) == 2 and found.outs[1] == self.chosen:
            own = replace(
                found, name="gather", run=_gather, outs=found.outs[:1],
                args=(found.args[0], Ref(self.chosen)), kwargs={},
            )  # fmt: skip
            producers |= {n: own for n in own.writes}
        ops, _ = ops_for([self.target], producers, [self.chosen])
        order = {id(op): i for i, op in enumerate(self.ops)}
        return tuple(sorted(ops, key=lambda op: order.get(id(op), order[id(found)])))

    @property
    def chooses(self) -> bool:
        """Whether the weights depend on a choice by values even where the experts are known."""
        return any(op.kind in CHOICES or op.path is not None for op in self.known)

    @functools.cached_property
    def _weights(self) -> Operations:
        ops = Operations(self.known, (self.target,))
        ops.roots.discard(self.chosen)
        return ops

    def run(
        self,
        call: Context,
        at: At,
        xs: Sequence[Tensor],
        tensors: Sequence[Tensor | None],
        chosen: Tensor | None = None,
    ) -> Any:
        """Return the weights and the experts (T, k); `chosen`: the experts, if they are known."""
        assert self.of is not None
        sizes, values = self.given(call, at, xs, tensors)
        runs_all = chosen is None or any(op.path is not None for op in self.known)
        if not runs_all and chosen is not None:
            values[self.chosen] = self.of.value(chosen.long(), sizes)
        (self._both if runs_all else self._weights).run(values, call._replace(sizes=sizes))
        weights = self.layout.matrix(values[self.target], sizes)
        return weights, self.of.matrix(values[self.chosen], sizes) if chosen is None else chosen


def _gather(scores: Tensor, chosen: Tensor) -> Tensor:
    return scores.gather(-1, chosen)


def from_call(t: Builder, number: int, op: Op) -> Build | None:
    """Trace a call of experts, with all that computes its indices and weights."""
    known: KnownExperts = op.info
    x, chosen, weights, *stacks = op.args
    if not all(map(t.live, (x, chosen, weights))) or any(map(t.live, stacks)):
        return None
    layouts = [t.layout(n) for n in (number, x.index, chosen.index, weights.index)]
    if not all(layout is not None and layout.is_last for layout in layouts):
        return None

    def build() -> str:
        spec = known.with_top_k(layouts[2].width)  # type: ignore[union-attr]
        inside = op.inside.rpartition(".")[0]
        input = t.build(x.index)
        routing = _routing(t, inside, x.index, chosen.index, weights.index, spec.experts)
        lows: Any = ([], [])
        for (i, scale), a, b in known.with_updates(stacks):
            low = ExpertAdapter(a=t.param(a.index), b=t.param(b.index), scale=scale)
            lows[i].append(low)
        up, down = (
            ExpertStack(
                weight=(weight := t.param(w.index)), bias="" if b is None else t.param(b.index),
                adapters=tuple(own), packed=t.formats.get(weight),
            )
            for w, b, own in zip(stacks[:4:2], stacks[1:4:2], lows, strict=True)
        )  # fmt: skip
        numbers = routing.chosen
        name = t.unique(op.inside)
        given: Any = {"chosen": numbers, "spec": spec}
        pre = t.add(
            ExpertsUp(
                name=t.unique(f"{name}.up"), x=input, stack=up, role="experts",
                weights=routing.name if spec.weighs_input else "", **given,
            )
        )  # fmt: skip
        return t.add(ExpertsDown(name=name, pre=pre, weights=routing.name, stack=down, **given))

    return build


def _routing(t: Builder, inside: str, x: int, chosen: int, weights: int, experts: int) -> Routing:
    """Add the router that chooses experts for x."""
    ops, sources, params = region(t, (weights, chosen), inside, (x, *t.records.values()))
    layouts: dict[int, Any] = {n: t.layout(n) for n in (*sources, weights, chosen)}
    shapes = [t.recording.shapes[n] for n in params]
    if None in [*layouts.values(), *shapes]:
        raise Opaque(inside, "no size explains the shape of a value of its router")
    xs, top_k = tuple([t.build(n) for n in sources]), layouts[chosen].width
    if len({*xs}) < len(xs):
        raise Opaque(inside, "its router reads one activation in two layouts")
    pairs, of = tuple([(n, layouts[n]) for n in sources]), layouts[chosen]
    program = RoutingProgram(
        tuple(ops), pairs, tuple(params), weights, layouts[weights], chosen=chosen, of=of
    )
    alone = _is_alone(t, program, shapes)
    weighed = {n for op in program.known for n in op.reads}
    name = t.unique(f"{inside}.routing")
    tensors = tuple([t.param(n if n in weighed else _detached(t, n)) for n in params])
    node = Routing(
        name=name, xs=xs, tensors=tensors, function=name, what="weights of the chosen experts",
        role="routing", needed_for=((*xs, *tensors),) * len(xs), chosen=f"{name}.experts",
        experts=experts, top_k=top_k, chooses=program.chooses, tokenwise=alone, per_batch=not alone,
    )  # fmt: skip
    t.add(node)
    t.programs[name], t.widths[name] = program, node.top_k
    return node


def _detached(t: Builder, n: int) -> int:
    """Return a parameter by which experts are chosen alone, without a gradient."""
    if t.recording.sources.get(n) not in parameters_of(t.layer):
        return n
    return t.new_value("detach", Tensor.detach, (Ref(n),), like=n)


def _is_alone(t: Builder, program: Program, shapes: Sequence[Any]) -> bool:
    """Return whether each token is routed alone, so that the block may be cut."""
    plain = Program(program.ops, program.sources, program.params, program.target, program.layout)
    if program.draws or any(op.path is not None for op in program.ops):
        return False
    return not any(map(sizes_in, shapes)) and is_tokenwise(t, plain)
