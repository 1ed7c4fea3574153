"""What a layer makes of its arguments and parameters before its block: made again in backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.autograd.partial import not_differentiable
from fused_remat.tracing.apart import replica
from fused_remat.tracing.program import Modules, run_op, unread_after
from fused_remat.tracing.values import Op, refs


class Again:
    """Operations that are run in forward and again in backward, so that nothing of theirs is kept.

    Attributes:
        ops: the operations, which draw no random numbers.
        outs: the numbers of the values that they are run for.
        roots: by number, what they read that none of them makes.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        outs: tuple[int, ...],
        values: Mapping[int, Any],
        layer: nn.Module,
        sizes: Mapping[str, int],
        x: Tensor,
    ) -> None:
        self.ops, self.outs, self.sizes, self.dtype = ops, outs, sizes, x.dtype
        self.modules, self.precision = modules_of(ops, layer), precision_of(x.device.type)
        read = {n for op in ops for n in refs((op.args, op.kwargs))}
        made = {n for op in ops for n in op.outs}
        self.roots = {n: values[n] for n in read - made}
        self.versions = [t._version for t in self.roots.values()]

    def shares(self, value: Tensor) -> bool:
        """Whether a value is a view of what it is made of, so that nothing is saved."""
        pointer = value.untyped_storage().data_ptr()
        return any(t.untyped_storage().data_ptr() == pointer for t in self.roots.values())

    def run(self, roots: Mapping[int, Any]) -> list[Tensor]:
        """The values `outs`."""
        values = {**roots}
        with self.precision():
            for op, unread in zip(self.ops, unread_after(self.ops, self.outs), strict=True):
                run_op(op, values, self.modules, self.sizes, self.dtype)
                for number in unread:
                    del values[number]
        return [values[n] for n in self.outs]

    def run_again(self, flipped: bool = False) -> Tensor:
        """The first of the values `outs`, or its transpose, in backward.

        Raises: RuntimeError if what it is made of was modified.
        """
        if [t._version for t in self.roots.values()] != self.versions:
            raise RuntimeError(
                "fused_remat: an argument or a buffer of which a layer makes its mask was modified "
                "by an inplace operation between forward and backward"
            )
        with torch.no_grad():
            (made,) = self.run(self.roots)
        return made.t() if flipped else made

    def attached(self) -> Sequence[Tensor]:
        """The values `outs`, differentiable in `roots`."""
        out: Sequence[Tensor] = _Attached.apply(self, *self.roots.values())
        return out


class _Attached(torch.autograd.Function):
    """The values of an `Again`, of which autograd keeps the roots alone."""

    @staticmethod
    def forward(ctx: Any, again: Again, *roots: Tensor) -> tuple[Tensor, ...]:
        ctx.again = again
        ctx.save_for_backward(*roots)
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in again.run(again.roots)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        creates_graph = torch.is_grad_enabled()
        again, needs = ctx.again, ctx.needs_input_grad[1:]
        pairs = zip(ctx.saved_tensors, needs, strict=True)
        roots = [t.detach().requires_grad_(need) for t, need in pairs]
        with torch.enable_grad():
            made = again.run(dict(zip(again.roots, roots, strict=True)))
        pairs = zip(made, grads, strict=True)
        outs = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
        if not outs:
            return (None,) * (1 + len(roots))
        wanted = [t for t in roots if t.requires_grad]
        found = iter(
            torch.autograd.grad(
                [t for t, _ in outs], wanted, [g for _, g in outs], allow_unused=True
            )
        )
        result = [next(found) if need else None for need in needs]
        return (None, *(not_differentiable(result) if creates_graph else result))


def modules_of(ops: Sequence[Op], layer: nn.Module) -> Modules:
    """The submodules that operations call, with their attributes of now."""
    paths = [op.path for op in ops if op.path is not None]
    return {path: replica(layer.get_submodule(path)) for path in paths}.__getitem__


def precision_of(device: str) -> Callable[[], Any]:
    """What makes a context with the autocast of now."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return functools.partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device))
    return contextlib.nullcontext
