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
    """An order of the operations before a block, where some values they read need gradients."""

    outs: tuple[int, ...]  # differentiable and large, or computed by way of large values
    rebuilt: Sequence[Op]  # compute these, and run again in backward
    rest: Sequence[Op]  # compute all others, after `rebuilt`
    unread: Sequence[Sequence[int]]  # for each of the rest, values that nothing reads after it


#: By number, the shape and the dtype of an activation.
Shapes = dict[int, tuple[tuple[Any, ...], Any]]


@dataclass(eq=False)
class TracedBlock:
    """A layer as the graph of a block."""

    graph: Graph
    before: list[Op]  # run at every call before the block
    values: dict[str, int]  # that the block reads other than its inputs, by its names
    transposed: set[str]  # those of these names that are the transpose of the value
    programs: dict[str, Program]  # the functions of replays
    inputs: dict[str, tuple[int, Layout]]
    out: tuple[int, Layout]  # the result that the block computes
    result: Any  # of the layer, with `Ref`s
    arguments: list[int | None]  # by leaf; None for those that are no tensors
    sources: dict[int, str]  # parameters, buffers and attributes of the layer
    stand_ins: Shapes  # activations of which `before` reads the shape alone
    replayed: tuple[ReplayedSubmodule, ...]
    fixed: tuple[str, ...]  # names of the layer's tensors whose values decide what the block is
    #: By the number of a mask, the value that replaces scores of keys that it hides. A query that
    #: sees no key then has no gradient; it would have one where the mask is added.
    fills: dict[int, float]
    #: Elements of the differentiable results of `before`; infinite if the number follows from the
    #: call, 0 for a view.
    elements: dict[int, float]

    def __post_init__(self) -> None:
        self._producers = {n: op for op in self.before for n in op.writes}
        self._chains: dict[int, Sequence[Op]] = {}
        self._plans: dict[tuple[frozenset[int], int], Plan] = {}

    def plan(self, live: frozenset[int], large: int) -> Plan:
        """Return how `before` runs where `live` need gradients, and `large` values are not kept."""
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
        """Return the operations before the block that compute a value, if all can run again."""
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
