"""A layer as the graph of a block, with the operations that run before the block at every call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fused_remat.graph.graph import Graph
from fused_remat.steps.linear import Linear
from fused_remat.tracing.program import Layout, Program, unread_after
from fused_remat.tracing.values import Op, ops_for, refs


class ReplayedSubmodule(NamedTuple):
    """A submodule, or a long chain of operations, that is replayed; and why it was not traced."""

    name: str
    why: str


class Plan(NamedTuple):
    """An order of the operations before a block, where some values they read need gradients.

    Attributes:
        outs: the values that are differentiable and large, or computed by way of large ones.
        rebuilt: the operations that compute these, which backward runs again.
        rest: the operations that compute all others, after `rebuilt`.
        unread: for each of the rest, the values that nothing reads after it.
    """

    outs: tuple[int, ...]
    rebuilt: Sequence[Op]
    rest: Sequence[Op]
    unread: Sequence[Sequence[int]]


#: By number, the shape and the dtype of an activation.
Shapes = dict[int, tuple[tuple[Any, ...], Any]]


@dataclass(eq=False)
class TracedBlock:
    """A layer as the graph of a block.

    Attributes:
        graph: the block.
        before: the operations that run at every call before the block.
        values: numbers of the values other than its inputs that the block reads, by its names.
        transposed: those of these names that are the transpose of the value.
        programs: the functions of its replays.
        inputs: number and layout of each input of the graph.
        out: the number of the result that the block computes, and its layout.
        result: the layer's result, with `Ref`s.
        arguments: the numbers of the tensors among the leaves of the arguments; None for others.
        sources: parameters, buffers and attributes of the layer by number.
        stand_ins: activations of which `before` reads the shape alone.
        replayed: submodules that are replayed as one.
        fixed: names of the layer's tensors whose values decide what the block is.
        fills: by the number of a mask, the value that replaces scores of keys that it hides. A
            query that sees no key then has no gradient; it would have one where the mask is added.
        elements: by the numbers of the differentiable results of `before`, the number of their
            elements; infinite if that follows from the call, 0 for a view.
    """

    graph: Graph
    before: list[Op]
    values: dict[str, int]
    transposed: set[str]
    programs: dict[str, Program]
    inputs: dict[str, tuple[int, Layout]]
    out: tuple[int, Layout]
    result: Any
    arguments: list[int | None]
    sources: dict[int, str]
    stand_ins: Shapes
    replayed: tuple[ReplayedSubmodule, ...]
    fixed: tuple[str, ...]
    fills: dict[int, float]
    elements: dict[int, float]

    def __post_init__(self) -> None:
        self._producers = {n: op for op in self.before for n in op.writes}
        self._chains: dict[int, Sequence[Op]] = {}
        self._plans: dict[tuple[frozenset[int], int], Plan] = {}

    def plan(self, live: frozenset[int], large: int) -> Plan:
        """Return how `before` runs where the values `live` need gradients.

        Values with `large` elements or more are not kept.
        """
        plan = self._plans.get((live, large))
        if plan is None:
            read = [*self.values.values(), *self.others, *self.fills]
            reached = {*live}
            for op in self.before if live else ():
                if not reached.isdisjoint(op.reads):
                    reached.update(n for n in op.outs if n in self.elements)
            costly = dict.fromkeys(n for n in read if n in reached and self._is_costly(n, large))
            rest = self._ops(read, costly)
            unread = unread_after(rest, {*read, *(number for number, _ in self.inputs.values())})
            plan = Plan(tuple(costly), self._ops(costly), rest, unread)
            self._plans[live, large] = plan
        return plan

    @property
    def others(self) -> list[int]:
        """The numbers of the values in the result that the block does not compute."""
        return [n for n in refs(self.result) if n != self.out[0]]

    def _is_costly(self, number: int, large: int) -> bool:
        ops = self.chain(number)
        most = max((self.elements.get(n, 0) for op in ops for n in op.writes), default=0)
        return most >= large and all(op.path is None for op in ops)

    def _ops(self, numbers: Any, known: Any = ()) -> list[Op]:
        """Return the operations before the block that compute values from those `known`."""
        ops, _ = ops_for(numbers, self._producers, known)
        return [op for op in self.before if op in ops]

    def chain(self, number: int) -> Sequence[Op]:
        """Return the operations before the block that compute a value, if they can run again.

        None are returned if one draws random numbers, or reads the shape of an activation.
        """
        if number not in self._chains:
            ops = self._ops([number])
            read = {number, *(n for op in ops for n in op.reads)}
            fails = any(op.random for op in ops) or not read.isdisjoint(self.stand_ins)
            self._chains[number] = [] if fails else ops
        return self._chains[number]

    @property
    def draws(self) -> bool:
        """Whether the block draws random numbers."""
        return self.graph.uses_seed or any(p.draws for p in self.programs.values())

    @property
    def mixes_dtypes(self) -> bool:
        """Whether adapters compute in a dtype of their own."""
        layers = [node for node in self.graph.nodes if isinstance(node, Linear)]
        return any(update.dtype is not None for node in layers for update in node.updates)
