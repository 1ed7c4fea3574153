"""`Replay`: a step whose function runs again in backward, under autograd.

It stands for what no other step computes: a mixer, experts, a convolution, a chain of pointwise
operations, a user's own activation. It keeps nothing: backward rebuilds the inputs that the
function reads, as for any step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fused_remat.steps.chunk import spans
from fused_remat.steps.node import Inputs, Mask, Node, Params, Shapes
from fused_remat.steps.residual import dropout

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


Function = Callable[[Tensor], Tensor]
#: Tensors whose gradients are complete at the same time, in this order.
Parts = Sequence[Collection[str]]

# Elements of a function's inputs and result that run at a time: temporaries stay in a CPU's cache.
_CACHED, _DEVICE = 1 << 18, 1 << 24


class At(NamedTuple):
    """The part of a call for which a function runs: `batch` sequences of `tokens` tokens each."""

    batch: int
    tokens: int
    first: int  # the number of the part's first token; the same in forward and in backward


@dataclass(frozen=True, kw_only=True)
class Replay(Node):
    """name = mask * function(inputs, tensors), a matrix (tokens, columns)."""

    xs: Inputs  # the activations that the function reads
    tensors: Params = ()  # the tensors of the block that it reads
    mask: Mask = ""
    # the name of the function in `Pass.functions`, called with the part (`At`), a list of the
    # inputs as matrices, and a list of the tensors. It must neither change them nor read
    # other tensors that need gradients.
    function: str
    # if True, it is called with the one input, and reads the tensors by itself (a closure, a
    # module's parameters); they are params of the block so that they get gradients
    captures: bool = False
    what: str  # what the function is, for messages and to distinguish graphs
    columns: int = 0  # the width of the result; 0 for that of the input
    # for each input, those of the inputs and tensors whose gradients depend on its value.
    # Where no gradient of these is needed, backward calls the function with zeros instead.
    needed_for: tuple[tuple[str, ...], ...] = ()
    batched: tuple[str, ...] = ()  # those of the tensors whose first dimension is the batch
    tokenwise: bool = False  # whether each token's result depends on that token alone
    # as in `Node`
    chooses: bool = False  # type: ignore[misc]
    widens: bool = False  # type: ignore[misc]
    # the tensors, by the function's operations that read them last, from its last one
    stages: tuple[tuple[str, ...], ...] = ()

    @property
    def per_sequence(self) -> bool:  # type: ignore[override]
        return not self.tokenwise

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return {}  # the function runs under autocast, as it would outside a block

    @property
    def description(self) -> tuple[str, str]:
        return f"{self.what}; backward runs it again, under autograd", ""

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        pairs = zip(self.xs, self.needed_for, strict=True)
        xs = [x for x, readers in pairs if not set(readers).isdisjoint(needs_grad)]
        return (*xs, *self.masks)

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return self.tensors

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return self.columns or widths[self.xs[0]]

    def _run(
        self, chunk: Chunk, at: At, xs: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> Tensor:
        function = chunk.owner.functions[self.function]
        return _called(function, xs[0]) if self.captures else function(at, xs, tensors)

    def _tensors(self, chunk: Chunk) -> list[Tensor | None]:
        first, last = chunk.seqs
        return [
            t[first:last] if t is not None and name in self.batched else t
            for name, t in zip(self.tensors, map(chunk.param, self.tensors), strict=True)
        ]

    def _spans(self, chunk: Chunk) -> list[tuple[At, slice]]:
        """Return the rows that run at a time.

        They are few where no token depends on another, so that temporaries stay small.
        """
        rows, widths = chunk.rows_of(self.name), chunk.owner.widths
        width = sum([widths[name] for name in (self.name, *self.xs)])
        step = max(1, (_CACHED if chunk.owner.device.type == "cpu" else _DEVICE) // max(width, 1))
        first = chunk.first_row(self.name)
        if rows <= step or self.captures or not self.tokenwise:
            batch, tokens = 1, rows
            if chunk.parent is None:
                batch = chunk.seqs[1] - chunk.seqs[0]
                tokens = chunk.owner.execution.lengths[self.name]
            return [(At(batch, tokens, first), slice(None))]  # a memory has other rows
        return [(At(1, hi - lo, first + lo), slice(lo, hi)) for lo, hi in spans(rows, step)]

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        tensors, parts, y = self._tensors(chunk), self._spans(chunk), out
        for at, rows in parts:
            xs = [chunk[name][rows] for name in self.xs]
            with torch.no_grad():
                made = self._run(chunk, at, xs, tensors).to(chunk.dtype_of(self.name))
            if y is None and len(parts) == 1:
                memory = [x.untyped_storage().data_ptr() for x in xs]
                own = made.is_contiguous() and made.untyped_storage().data_ptr() not in memory
                y = made if own else made.clone(memory_format=torch.contiguous_format)
                break
            y = chunk.empty(self.name) if y is None else y
            y[rows].copy_(made)
        assert y is not None
        mask = chunk.mask(self.mask)
        chunk.put(self.name, y if mask is None else torch.mul(y, mask.tensor()).to(y.dtype))

    def in_order(self, names: Collection[str]) -> Parts:
        return [[name for name in stage if name in names] for stage in self.stages[:-1]]

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        for _ in self.backward_in_parts(chunk, dy, owned, needs_grad, ()):
            pass

    def backward_in_parts(
        self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str], parts: Parts
    ) -> Iterator[None]:
        """Run `backward`, but yield when the gradients of each of the `parts` are complete."""
        if (mask := chunk.mask(self.mask)) is not None:
            dy = chunk.ops[dropout](dy, mask)
        given = [
            t if t is None or self.captures else t.detach().requires_grad_(name in needs_grad)
            for name, t in zip(self.tensors, self._tensors(chunk), strict=True)
        ]
        calls, whole = self._spans(chunk), dict[str, Tensor]()
        first = parts if len(calls) == 1 else ()
        for at, rows in calls:
            part = chunk, at, rows, given, dy[rows], needs_grad, first
            for name, grad, mine in self._grads(*part):
                if grad is None:
                    yield
                elif name in self.tensors:
                    self._add_param_grad(chunk, name, grad, mine, len(calls) > 1)
                elif len(calls) == 1:
                    chunk.add_grad(name, grad, mine)
                else:
                    if name not in whole:
                        alone = owned and len(needs_grad) == 1 and grad.dtype == dy.dtype
                        same = alone and self.columns == grad.shape[1]
                        whole[name] = dy if same else chunk.empty(name)
                    whole[name][rows].copy_(grad)
        for name, grad in whole.items():
            chunk.add_grad(name, grad, True)
        yield from [None] * (len(parts) - len(first))

    def _leaves(
        self, chunk: Chunk, rows: slice, dy: Tensor, needs_grad: Collection[str]
    ) -> list[Tensor]:
        """Return rows of the inputs as leaves; zeros where backward reads no value."""
        read, xs = self.needs(needs_grad), list[Tensor]()
        for name in self.xs:
            if name in read:
                x = chunk[name][rows].detach()
            else:  # one row stands for all, with the strides within it
                row = dy.new_zeros((1, chunk.owner.widths[name]), dtype=chunk.dtype_of(name))
                count = chunk.rows_of(name) if rows == slice(None) else len(dy)
                x = row.expand(count, -1)
            xs.append(x.requires_grad_(name in needs_grad))
        return xs

    def _grads(
        self,
        chunk: Chunk,
        at: At,
        rows: slice,
        given: Sequence[Tensor | None],
        dy: Tensor,
        needs_grad: Collection[str],
        first: Parts,
    ) -> Iterator[tuple[str, Tensor | None, bool]]:
        """Yield gradients of some rows' inputs and of the tensors, and whether each may be changed.

        Each is held here until the next one is taken: those of experts are large. Those `first`
        come before others, with None after each part; the graph is kept until the last.
        """
        xs = self._leaves(chunk, rows, dy, needs_grad)
        named = zip((*self.xs, *self.tensors), (*xs, *given), strict=True)
        wanted = {name: t for name, t in named if t is not None and name in needs_grad}
        with torch.enable_grad():
            try:
                y = self._run(chunk, at, xs, given)
            except RuntimeError:
                if set(self.xs) <= set(self.needs(needs_grad)):
                    raise
                y = self._run(chunk, at, [x.contiguous() for x in xs], given)  # views across rows
        if self.captures:
            _check_captured(y, (*xs, *given))
        edge = torch.autograd.graph.get_gradient_edge(y) if y.requires_grad else None
        dy = dy.to(y.dtype)
        del y  # its value is not needed
        rest = [name for name in wanted if not any(name in part for part in first)]
        parts = [[name for name in part if name in wanted] for part in first]
        for names in (*parts, rest):
            asked = [wanted[name] for name in names]
            grads: list[Tensor | None] = [None] * len(names)
            if edge is not None and names:
                # Captured tensors may have a graph of their own, which the next tile needs.
                keep = self.captures or names is not rest
                with hooks_off(asked):
                    grads[:] = torch.autograd.grad(edge, asked, dy, keep, allow_unused=True)
            held = (dy, *xs, *given, *grads)
            memory = [t.untyped_storage().data_ptr() for t in held if t is not None]
            del held
            for name in names:
                grad = grads.pop(0)
                if grad is not None and name in self.tensors:
                    yield name, grad, _owns(grad, memory)
                elif grad is not None:
                    x = grad.contiguous()
                    yield name, x, x is not grad or _owns(grad, memory)
                elif name in self.xs:
                    like = wanted[name]
                    yield name, torch.zeros_like(like, memory_format=torch.contiguous_format), True
            grad = None
            if names is not rest:
                yield "", None, False

    def _add_param_grad(
        self, chunk: Chunk, name: str, grad: Tensor, owned: bool, partial: bool
    ) -> None:
        owner = chunk.owner
        partial = partial or owner.partial
        dtype = torch.promote_types(grad.dtype, torch.float32) if partial else grad.dtype
        tensor = owner.tensors[name]
        assert tensor is not None
        if name not in self.batched or grad.shape == tensor.shape:
            chunk.add_param_grad(name, grad.to(dtype, copy=not owned))
            return
        if name not in owner.param_grads:
            owner.param_grads[name] = torch.zeros(tensor.shape, dtype=dtype, device=grad.device)
        owner.param_grads[name][chunk.seqs[0] : chunk.seqs[1]].add_(grad)


@dataclass(frozen=True, kw_only=True)
class Reorder(Replay):
    """name = the tokens of each sequence in another order, such as window after window.

    The function returns the rows of its one input in the order of a call's number of tokens.
    """

    @functools.cached_property
    def _known(self) -> dict[tuple[int, torch.device], tuple[Tensor, Tensor]]:
        return {}

    @property
    def description(self) -> tuple[str, str]:
        return "tokens in another order", "tokens in their former order"

    def _orders(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the order of the tokens of a sequence, and its inverse."""
        owner = chunk.owner
        tokens, device = owner.execution.lengths[self.name], owner.device
        if (tokens, device) not in self._known:
            function, at = owner.functions[self.function], At(1, tokens, 0)
            order = order_of(lambda x: function(at, [x], ()), tokens, owner.widths[self.name])
            if order is None:
                raise RuntimeError(f"{self.name} does not reorder {tokens} tokens")
            self._known[tokens, device] = order.to(device), order.argsort().to(device)
        return self._known[tokens, device]

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        order, _ = self._orders(chunk)
        y = chunk.empty(self.name) if out is None else out
        chunk.put(self.name, _reordered(chunk[self.xs[0]], order, y))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        _, order = self._orders(chunk)
        chunk.add_grad(self.xs[0], _reordered(dy, order, torch.empty_like(dy)), owned=True)

    def backward_in_parts(
        self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str], parts: Parts
    ) -> Iterator[None]:
        return Node.backward_in_parts(self, chunk, dy, owned, needs_grad, parts)


def order_of(function: Callable[[Tensor], Tensor], tokens: int, width: int) -> Tensor | None:
    """Return the order in which a function returns the rows of a matrix; None if it does more."""
    x = torch.arange(tokens * width, dtype=torch.float64).view(tokens, width)
    y = function(x)
    if y.shape != x.shape or y.dtype != x.dtype:
        return None
    order = y[:, 0].long() // width
    return order if y.equal(x[order]) and len(order.unique()) == tokens else None


def _reordered(x: Tensor, order: Tensor, out: Tensor) -> Tensor:
    by_sequence = [t.unflatten(0, (-1, len(order))) for t in (x, out)]
    torch.index_select(by_sequence[0], 1, order, out=by_sequence[1])
    return out


def _owns(grad: Tensor, memory: Sequence[int]) -> bool:
    """Return whether a gradient fills its memory, which no other tensor of `memory` has."""
    storage = grad.untyped_storage()
    fills = storage.nbytes() == grad.numel() * grad.itemsize
    return fills and memory.count(storage.data_ptr()) == 1


def leaves(y: Tensor) -> list[Tensor]:
    """Return the leaf tensors that require gradients and that `y` was computed from."""
    if y.grad_fn is None:
        return [y] if y.requires_grad else []
    variables: list[Tensor] = []
    seen, todo = {y.grad_fn}, [y.grad_fn]
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)  # AccumulateGrad has one
        if variable is not None:
            variables.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return variables


@contextmanager
def hooks_off(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Disable the tensors' hooks in a nested backward: the outer one runs them, on the sum."""
    held = [(t, t._backward_hooks) for t in tensors if t._backward_hooks]
    for t, _ in held:
        t._backward_hooks = None
    try:
        yield
    finally:
        for t, hooks in held:
            t._backward_hooks = hooks


def _called(function: Function, x: Tensor) -> Tensor:
    """Return function(x), called with a copy: it may work in place, and x may be kept."""
    try:
        y = function(x.clone())
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError(
                f"the activation function must keep shape and dtype; it returned {tuple(y.shape)} "
                f"{y.dtype} for {tuple(x.shape)} {x.dtype}"
            )
    except Exception as error:
        error.callers = True  # type: ignore[attr-defined]
        raise
    return y


def _check_captured(y: Tensor, known: Sequence[Tensor | None]) -> None:
    """Check that `y` was computed from no other tensors that require gradients than the known."""
    # Compared by edge: hooks return a saved tensor as another object.
    edge_of = torch.autograd.graph.get_gradient_edge
    edges = {edge_of(t) for t in known if t is not None and t.requires_grad}
    for stray in leaves(y):
        if edge_of(stray) not in edges:
            raise RuntimeError(
                "fused_remat: in backward, the activation function read a tensor of shape "
                f"{tuple(stray.shape)} that it did not read in forward; it must read the same "
                "tensors both times"
            )
