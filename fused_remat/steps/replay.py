"""`Replay`: a step that is a function of the caller's, run again in backward under autograd.

It stands for what no other step computes: a mixer, experts, a convolution, a chain of pointwise
operations. It keeps nothing: backward rebuilds the inputs that it reads, as for any step.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fused_remat.steps.node import Input, Node, Params, Shapes
from fused_remat.steps.user_function import hooks_off

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


# Elements of a function's inputs and result that run at a time: temporaries stay in a CPU's cache.
_CACHED, _DEVICE = 1 << 18, 1 << 24


class At(NamedTuple):
    """For which part of a call a function runs: `batch` sequences of `tokens` tokens each.

    Attributes:
        first: the number of the part's first token; the same in forward and in backward.
    """

    batch: int
    tokens: int
    first: int


@dataclass(frozen=True, kw_only=True)
class Replay(Node):
    """name = function(inputs, tensors), a matrix (tokens, columns).

    Attributes:
        xs: the activations that the function reads.
        tensors: the tensors of the block that it reads.
        function: the name of the function in `Pass.functions`, called with the part (`At`), a list
            of the inputs as matrices, and a list of the tensors. It must neither change them nor
            read other tensors that need gradients.
        what: what the function is, for messages and to tell graphs apart.
        columns: the width of the result.
        needed_for: for each input, those of the inputs and tensors whose gradients depend on its
            value. Where none is asked for, backward calls the function with zeros in its place.
        batched: those of the tensors whose first dimension is the batch.
        tokenwise: whether each token's result depends on that token alone.
        chooses: as in `Node`.
        stages: the tensors, by the function's operations that read them last, from its last one.
    """

    xs: tuple[Input, ...] = ()
    tensors: Params = ()
    function: str
    what: str
    columns: int
    needed_for: tuple[tuple[str, ...], ...] = ()
    batched: tuple[str, ...] = ()
    tokenwise: bool = False
    chooses: bool = False  # type: ignore[misc]
    stages: tuple[tuple[str, ...], ...] = ()

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        return self.xs

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
        return tuple([x for x, readers in pairs if not set(readers).isdisjoint(needs_grad)])

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return self.tensors

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return self.columns

    def _at(self, chunk: Chunk) -> At:
        first = chunk.first_row(self.name)
        if chunk.parent is not None:
            return At(1, chunk.rows_of(self.name), first)
        return At(chunk.seqs[1] - chunk.seqs[0], chunk.owner.execution.lengths[self.name], first)

    def _given(self, chunk: Chunk) -> list[Tensor | None]:
        """The tensors; of those with a batch, the chunk's sequences."""
        first, last = chunk.seqs
        return [
            t[first:last] if t is not None and name in self.batched else t
            for name, t in zip(self.tensors, map(chunk.param, self.tensors), strict=True)
        ]

    def _spans(self, chunk: Chunk) -> list[tuple[At, slice]]:
        """The rows that run at a time: a few where no token depends on another, so that what the
        function makes on the way, and autograd keeps, stays small."""
        rows, widths = chunk.rows_of(self.name), chunk.owner.widths
        width = self.columns + sum([widths[x] for x in self.xs])
        step = max(1, (_CACHED if chunk.owner.device.type == "cpu" else _DEVICE) // max(width, 1))
        if rows <= step or not self.tokenwise:
            return [(self._at(chunk), slice(rows))]
        first, starts = chunk.first_row(self.name), range(0, rows, step)
        spans = [(lo, min(lo + step, rows)) for lo in starts]
        return [(At(1, hi - lo, first + lo), slice(lo, hi)) for lo, hi in spans]

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        run, given = chunk.owner.functions[self.function], self._given(chunk)
        parts, y = self._spans(chunk), out
        for at, rows in parts:
            xs = [chunk[name][rows] for name in self.xs]
            with torch.no_grad():
                made = run(at, xs, given).to(chunk.dtype_of(self.name))
            if y is None and len(parts) == 1:
                own = made.is_contiguous() and not any(_share(made, x) for x in xs)
                y = made if own else made.clone(memory_format=torch.contiguous_format)
                break
            y = chunk.empty(self.name) if y is None else y
            y[rows].copy_(made)
        assert y is not None
        chunk.put(self.name, y)

    def in_order(self, names: Collection[str]) -> Sequence[Collection[str]]:
        return [[name for name in stage if name in names] for stage in self.stages[:-1]]

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        for _ in self.backward_in_parts(chunk, dy, owned, needs_grad, ()):
            pass

    def backward_in_parts(
        self,
        chunk: Chunk,
        dy: Tensor,
        owned: bool,
        needs_grad: Collection[str],
        parts: Sequence[Collection[str]],
    ) -> Iterator[None]:
        given = [
            None if t is None else t.detach().requires_grad_(name in needs_grad)
            for name, t in zip(self.tensors, self._given(chunk), strict=True)
        ]
        spans, whole = self._spans(chunk), dict[str, Tensor]()
        first = parts if len(spans) == 1 else ()
        for at, rows in spans:
            for name, grad, mine in self._grads(
                chunk, at, rows, given, dy[rows], needs_grad, first
            ):
                if grad is None:
                    yield
                elif name in self.tensors:
                    self._add_param_grad(chunk, name, grad, mine, len(spans) > 1)
                elif len(spans) == 1:
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

    def _grads(
        self,
        chunk: Chunk,
        at: At,
        rows: slice,
        given: Sequence[Tensor | None],
        dy: Tensor,
        needs_grad: Collection[str],
        first: Sequence[Collection[str]],
    ) -> Iterator[tuple[str, Tensor | None, bool]]:
        """The gradients of some rows' inputs and of the tensors, and whether each may be changed.

        Each is held here until the next one is taken: those of experts are large. Those `first`
        come before others, with None after each part; the graph is kept until the last.
        """
        read, xs = self.needs(needs_grad), list[Tensor]()
        for name in self.xs:
            if name in read:
                x = chunk[name][rows].detach()
            else:  # its value does not matter: one row stands for all, with the strides within it
                shape = len(dy), chunk.owner.widths[name]
                x = torch.zeros(1, shape[1], dtype=chunk.dtype_of(name), device=dy.device)
                x = x.expand(shape)
            xs.append(x.requires_grad_(name in needs_grad))
        wanted = {
            name: t
            for name, t in zip((*self.xs, *self.tensors), (*xs, *given), strict=True)
            if t is not None and t.requires_grad
        }
        run = functools.partial(chunk.owner.functions[self.function], at)
        with torch.enable_grad():
            try:
                y = run(xs, given)
            except RuntimeError:
                if len(read) == len(xs):
                    raise
                y = run([x.contiguous() for x in xs], given)  # for a view across rows
        edge = torch.autograd.graph.get_gradient_edge(y) if y.requires_grad else None
        dy = dy.to(y.dtype)
        del y  # its value is not needed
        rest = [name for name in wanted if not any(name in part for part in first)]
        parts = [[name for name in part if name in wanted] for part in first]
        for names in (*parts, rest):
            asked = [wanted[name] for name in names]
            grads: list[Tensor | None] = [None] * len(names)
            if edge is not None and names:
                keep = names is not rest
                with hooks_off(asked):
                    grads[:] = torch.autograd.grad(
                        edge, asked, dy, retain_graph=keep, allow_unused=True
                    )
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
        """Add to a tensor's gradient; of one with a batch, to that of the chunk's sequences.

        `owned`: `grad` need not be copied before it is added to; `partial`: more will be added.
        """
        owner = chunk.owner
        partial = partial or owner.partial
        dtype = torch.promote_types(grad.dtype, torch.float32) if partial else grad.dtype
        if name not in self.batched:
            chunk.add_param_grad(name, grad.to(dtype, copy=not owned))
            return
        whole = owner.tensors[name]
        assert whole is not None
        if name not in owner.param_grads:
            owner.param_grads[name] = torch.zeros(whole.shape, dtype=dtype, device=grad.device)
        owner.param_grads[name][chunk.seqs[0] : chunk.seqs[1]].add_(grad)


def _owns(grad: Tensor, memory: Sequence[int]) -> bool:
    """Whether a gradient fills its memory, and no other tensor has that, of those at `memory`."""
    storage = grad.untyped_storage()
    fills = storage.nbytes() == grad.numel() * grad.itemsize
    return fills and memory.count(storage.data_ptr()) == 1


def _share(y: Tensor, x: Tensor) -> bool:
    return y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
