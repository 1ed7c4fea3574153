"""What a backward pass asks a block for, and weight gradients that are left for a later one.

Backward is demand-driven within a block; this is the demand that comes from outside. Autograd calls
a node for all gradients or for some: `torch.autograd.grad(loss, inputs)`, `backward(inputs=...)`,
and the zero-bubble schedules of pipeline parallelism, which ask a stage for the gradient of its
input first and for those of its weights when there is nothing else to do. A block that is asked for
some runs the program of those alone, from what it kept for all.

The second of two such passes goes through the inside of the block again. `defer_weight_gradients`
trades that for memory: the first pass keeps the two factors of every weight gradient.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fused_remat.execution.prepare import BlockCall, autocast_on
from fused_remat.graph.schedule import schedule
from fused_remat.steps.chunk import Chunk, Execution, Pass, WeightGrad

_executes: Callable[[Any], bool] = torch._C._will_engine_execute_node

_lock = threading.Lock()

#: Whether passes for inputs hold the factors of weight gradients: inside `defer_weight_gradients`.
ON: int = 0


@contextlib.contextmanager
def defer_weight_gradients() -> Iterator[None]:
    """Backward passes inside that ask for inputs alone hold what the weights' pass will multiply.

    For zero-bubble schedules of `torch.distributed.pipelining`: put it around `schedule.step()`.
    Without it, the pass that asks for weights rebuilds and propagates inside of each block what the
    pass for inputs did already. With it, the pass for inputs, told to keep the graph, holds each
    weight gradient's two factors (the input and the output gradient of each linear layer) until the
    weights' pass has multiplied them, or the graph is freed. Gradients are the same bits. Any
    thread's passes count: autograd runs backward in threads of its own. The factors belong to one
    gradient of the output, unchanged; what changes it behind autograd's back (`.data`) is not seen.

    Units: bytes held by a pre-norm encoder layer of width D with F = 4D, in 16 bits: 32*D a token,
    less what its policy keeps.

    >>> weight = torch.nn.Parameter(torch.ones(3, 8))
    >>> x = torch.ones(2, 4, 8, requires_grad=True)
    >>> from fused_remat import ops
    >>> y = ops.mlp(x, weight, None, torch.ones(8, 3), None, "relu")
    >>> with defer_weight_gradients():
    ...     dy = torch.ones_like(y)
    ...     dx, = torch.autograd.grad(y, x, dy, retain_graph=True)
    ...     dw, = torch.autograd.grad(y, weight, dy)
    >>> dx.shape, dw.shape
    (torch.Size([2, 4, 8]), torch.Size([3, 8]))
    """
    global ON
    with _lock:
        ON += 1
    try:
        yield
    finally:
        with _lock:
            ON -= 1


def asked(ctx: Any) -> frozenset[str]:
    """Which of `ctx.call.needs_grad` the present backward pass takes; all, if it cannot be told.

    The engine knows which nodes a pass executes: those behind a gradient that nobody asked for are
    not among them. An ordinary `backward()` executes every node that it can reach.
    """
    needs_grad: frozenset[str] = ctx.call.needs_grad
    if not issubclass(type(ctx), BackwardCFunction):  # compiled autograd
        return needs_grad
    edges = ctx.next_functions
    try:
        if all(map(_executes, [node for node, _ in edges if node is not None])):
            return needs_grad
    except (RuntimeError, TypeError):  # see `_takes`
        pass
    given = zip(ctx.call.graph.tensors, ctx.execution.given, strict=True)
    names = [name for name, shape in given if shape is not None]
    found = [n for n, (node, _) in zip(names, edges, strict=True) if node is None or _takes(node)]
    return needs_grad.intersection(found) or needs_grad


def _takes(node: Any) -> bool:
    """Whether the pass that runs now takes the gradient that goes to `node`."""
    try:
        return bool(_executes(node))
    except (RuntimeError, TypeError):
        # RuntimeError is its way to say that torch.autograd.grad asks for this leaf's gradient;
        # whatever else it means, a gradient too many is dropped by the engine.
        return True


def narrowed(
    call: BlockCall,
    execution: Execution,
    kept: Sequence[Tensor | None],
    needs_grad: frozenset[str],
    overwrites: bool = True,
) -> tuple[BlockCall, Execution, Sequence[Tensor | None]]:
    """The same call with gradients of `needs_grad` alone, and what of `kept` it reads.

    The pieces are the same, and what is rebuilt is, to the bit. The program for fewer asks for no
    more, so all that it reads was kept. Not `overwrites`: it writes no activation over another.
    """
    tiled, fusions = execution.chunks.tiled, execution.fusions
    plan = schedule(call.graph, call.save, needs_grad, tiled, fusions, overwrites)
    less = replace(execution, plan=plan, needs_grad=needs_grad)
    names = frozenset(plan.kept)
    mine = [t for (name, _), t in zip(execution.pieces(), kept, strict=True) if name in names]
    return replace(call, needs_grad=needs_grad), less, mine


@dataclass(eq=False)
class Deferred:
    """Weight gradients of a block as factors, from a pass that did not ask for them.

    Attributes:
        dy, version: the gradient of the output that they belong to.
        names: what there are gradients of, or none for want of influence.
        products: in the order of their adding up.
        versions: of their factors.
        grads: gradients that are no product, or were made together with another.
    """

    dy: Tensor
    version: int
    names: frozenset[str]
    products: Sequence[WeightGrad]
    versions: Sequence[tuple[int, int]]
    grads: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        dy: Tensor,
        call: BlockCall,
        needs_grad: frozenset[str],
        products: Sequence[WeightGrad],
        grads: list[Tensor | None],
    ) -> Deferred:
        """What a pass for `needs_grad` leaves for a later one; takes it out of its `grads`."""
        rest, found = call.needs_grad.difference(call.graph.inputs), {}
        for i, name in enumerate(call.graph.tensors):
            grad = grads[i]
            if name not in needs_grad and grad is not None:
                found[name], grads[i] = grad, None
        return cls(dy, dy._version, rest, products, _versions(products), found)

    def serves(self, dy: Tensor, needs_grad: Collection[str]) -> bool:
        """Whether these are the gradients of `needs_grad` for this `dy`."""
        same = dy is self.dy and dy._version == self.version
        return same and self.names.issuperset(needs_grad)

    def give(
        self, execution: Execution, needs_grad: Collection[str], into: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """The gradients of `needs_grad`, but of those in `into` added to what is there.

        Raises: RuntimeError if a factor was changed in place since.
        """
        if _versions(self.products) != self.versions:
            raise RuntimeError(
                "fused_remat: a tensor that a weight gradient is to be computed from was modified "
                "by an inplace operation after the backward pass that asked for the input's"
            )
        run = Pass(execution, {}, {}, self.dy, into=into)
        chunk = Chunk(run, (0, 0), (0, 0))
        with torch.autocast(self.dy.device.type, enabled=False) if autocast_on(self.dy) else _NO:
            for name, grad in self.grads.items():
                if name in needs_grad:
                    chunk.add_param_grad(name, grad.clone())  # it may be given again
            for product in self.products:
                if product.name in needs_grad:
                    chunk.add_weight_grad(*product)
        return {name: grad for name, grad in run.param_grads.items() if name not in (into or ())}


_NO = contextlib.nullcontext()


def _versions(products: Sequence[WeightGrad]) -> list[tuple[int, int]]:
    return [(product.dy._version, product.x._version) for product in products]


def asks_inputs(call: BlockCall, needs_grad: frozenset[str]) -> bool:
    """Whether a pass for `needs_grad` asks for inputs alone, of a block that has weights."""
    return needs_grad.issubset(call.graph.inputs) and not call.needs_grad.issubset(
        call.graph.inputs
    )


def asks_weights(call: BlockCall, needs_grad: frozenset[str]) -> bool:
    """Whether a pass for `needs_grad` asks for weights alone, of a block whose inputs need some."""
    return len(needs_grad) < len(call.needs_grad) and needs_grad.isdisjoint(call.graph.inputs)


def with_weights(call: BlockCall, needs_grad: frozenset[str]) -> frozenset[str]:
    """`needs_grad`, and all weights whose gradients the call wants."""
    return needs_grad.union(call.needs_grad.difference(call.graph.inputs))
