"""A layer as the graph of a block, with what is computed before the block at every call."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fused_remat.graph.graph import Graph
from fused_remat.steps.linear import Linear
from fused_remat.tracing.program import Layout, Program, unread_after
from fused_remat.tracing.values import Op, refs


class Piece(NamedTuple):
    """A submodule, or a long chain of operations, that is replayed; and why it was not read."""

    name: str
    why: str


class Plan(NamedTuple):
    """How the operations before a block run, where some of what they read needs gradients.

    Attributes:
        outs: the values that are differentiable and large, or made by way of large ones.
        again: the operations that make these, which backward runs again.
        rest: the operations that make all others, after `again`.
        unread: for each of the rest, the values that nothing reads any more.
    """

    outs: tuple[int, ...]
    again: Sequence[Op]
    rest: Sequence[Op]
    unread: Sequence[Sequence[int]]


#: By number, the shape and the dtype of an activation.
Shapes = dict[int, tuple[tuple[Any, ...], Any]]


@dataclass(eq=False)
class Reading:
    """A layer as the graph of a block.

    Attributes:
        graph: the block.
        before: the operations that are run at every call before the block.
        values: numbers of the values that the block reads besides its inputs, by its names.
        transposed: those of these names that are the transpose of the value.
        programs: the functions of its replays.
        inputs: number and layout of each input of the graph.
        out: the number of the result that the block computes, and its layout.
        result: the layer's result, with `Ref`s.
        given: the numbers of the tensors among the leaves of the arguments.
        sources: parameters, buffers and attributes of the layer by number.
        stand_ins: activations of which `before` reads the shape alone.
        pieces: submodules that are replayed as a whole.
        fixed: names of the layer's tensors whose values decide what the block is.
        fills: by the number of a mask, what scores of keys that it hides are replaced by, so that a
            query that sees none has no gradient; it would have one where the mask is added.
        elements: by the numbers of what `before` makes and autograd can differentiate, how many
            elements it has; infinitely many if that follows from the call, none if it is a view.
    """

    graph: Graph
    before: list[Op]
    values: dict[str, int]
    transposed: set[str]
    programs: dict[str, Program]
    inputs: dict[str, tuple[int, Layout]]
    out: tuple[int, Layout]
    result: Any
    given: list[int | None]
    sources: dict[int, str]
    stand_ins: Shapes
    pieces: tuple[Piece, ...]
    fixed: tuple[str, ...]
    fills: dict[int, float]
    elements: dict[int, float]

    def plan(self, live: frozenset[int], large: int) -> Plan:
        """How `before` runs where the values `live` need gradients; what has as many elements as
        `large` is not kept."""
        plan = self._plans.get((live, large))
        if plan is None:
            others = [n for n in refs(self.result) if n != self.out[0]]
            read = [*self.values.values(), *others, *self.fills]
            reached = {*live}
            for op in self.before if live else ():
                if not reached.isdisjoint(refs((op.args, op.kwargs))):
                    reached.update(n for n in op.outs if n in self.elements)
            outs = [n for n in read if n in reached and self._is_costly(n, large)]
            outs = [*dict.fromkeys(outs)]
            rest = self._makers(read, outs)
            needed = {*read, *(number for number, _ in self.inputs.values())}
            unread = unread_after(rest, needed)
            plan = self._plans[live, large] = Plan(tuple(outs), self._makers(outs), rest, unread)
        return plan

    def _is_costly(self, number: int, large: int) -> bool:
        ops = self.chain(number)
        most = max(
            (self.elements.get(n, 0) for op in ops for n in op.outs if n is not None), default=0
        )
        return most >= large and all(op.path is None for op in ops)

    def _makers(self, numbers: Iterable[int], known: Iterable[int] = ()) -> list[Op]:
        """The operations before the block that make values of those `known`, and of roots."""
        wanted, seen, todo = set[Op](), {*known}, [*numbers]
        makers = {n: op for op in self.before for n in op.outs if n is not None}
        while todo:
            if (n := todo.pop()) not in seen and n in makers:
                wanted.add(makers[n])
                todo += refs((makers[n].args, makers[n].kwargs))
            seen.add(n)
        return [op for op in self.before if op in wanted]

    def chain(self, number: int) -> Sequence[Op]:
        """The operations before the block that make a value; none if one draws random numbers, or
        reads the shape of an activation."""
        if number not in self._chains:
            ops = self._makers([number])
            read = {number, *(n for op in ops for n in refs((op.args, op.kwargs)))}
            fails = any(op.random for op in ops) or not read.isdisjoint(self.stand_ins)
            self._chains[number] = [] if fails else ops
        return self._chains[number]

    @functools.cached_property
    def _chains(self) -> dict[int, Sequence[Op]]:
        return {}

    @functools.cached_property
    def _plans(self) -> dict[tuple[frozenset[int], int], Plan]:
        return {}

    @property
    def draws(self) -> bool:
        """Whether the block draws random numbers."""
        return self.graph.uses_seed or any(p.draws for p in self.programs.values())

    @property
    def mixes(self) -> bool:
        """Whether adapters compute in a dtype of their own."""
        layers = [node for node in self.graph.nodes if isinstance(node, Linear)]
        return any(update.dtype is not None for node in layers for update in node.updates)
