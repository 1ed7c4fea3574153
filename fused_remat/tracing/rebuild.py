"""Values computed from arguments and parameters before a block, and rebuilt in its backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.autograd.partial import not_differentiable
from fused_remat.tracing.isolation import replica
from fused_remat.tracing.program import Modules, run_op, unread_after
from fused_remat.tracing.values import Op


class Rebuild:
    """Operations that run in forward and again in backward, so that none of their results is kept.

    Attributes:
        ops: the operations, which draw no random numbers.
        outs: the numbers of the values that they run for.
        roots: by number, the values that they read and none of them computes.
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
        self.modules, self.autocast = modules_of(ops, layer), autocast_of(x.device.type)
        numbers = {n for op in ops for n in op.reads} - {n for op in ops for n in op.outs}
        self.roots = {n: values[n] for n in numbers}
        self.versions = [t._version for t in self.roots.values()]

    def shares(self, value: Tensor) -> bool:
        """Return whether a value is a view of a root, so that a rebuild saves nothing."""
        pointer = value.untyped_storage().data_ptr()
        return any(t.untyped_storage().data_ptr() == pointer for t in self.roots.values())

    def run(self, roots: Mapping[int, Any]) -> list[Tensor]:
        """Return the values `outs`."""
        values = {**roots}
        with self.autocast():
            for op, unread in zip(self.ops, unread_after(self.ops, self.outs), strict=True):
                run_op(op, values, self.modules, self.sizes, self.dtype)
                for number in unread:
                    del values[number]
        return [values[n] for n in self.outs]

    def in_backward(self, transposed: bool = False) -> Tensor:
        """Return the first of the values `outs`, or its transpose.

        Raises: RuntimeError if a root was modified since forward.
        """
        if [t._version for t in self.roots.values()] != self.versions:
            raise RuntimeError(
                "fused_remat: an argument or a buffer from which a layer computes its mask was "
                "modified by an inplace operation between forward and backward"
            )
        with torch.no_grad():
            (value,) = self.run(self.roots)
        return value.t() if transposed else value

    def attached(self) -> Sequence[Tensor]:
        """Return the values `outs`, differentiable in `roots`."""
        values: Sequence[Tensor] = _Attached.apply(self, *self.roots.values())
        return values


class _Attached(torch.autograd.Function):
    """The values of a `Rebuild`, of which autograd keeps the roots alone."""

    @staticmethod
    def forward(ctx: Any, rebuild: Rebuild, *roots: Tensor) -> tuple[Tensor, ...]:
        ctx.rebuild = rebuild
        ctx.save_for_backward(*roots)
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in rebuild.run(rebuild.roots)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        creates_graph = torch.is_grad_enabled()
        rebuild, needs = ctx.rebuild, ctx.needs_input_grad[1:]
        pairs = zip(ctx.saved_tensors, needs, strict=True)
        roots = [t.detach().requires_grad_(need) for t, need in pairs]
        with torch.enable_grad():
            values = rebuild.run(dict(zip(rebuild.roots, roots, strict=True)))
        pairs = zip(values, grads, strict=True)
        outs = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
        if not outs:
            return (None,) * (1 + len(roots))
        ys, dys = zip(*outs, strict=True)
        inputs = [t for t in roots if t.requires_grad]
        root_grads = iter(torch.autograd.grad(ys, inputs, dys, allow_unused=True))
        result = [next(root_grads) if need else None for need in needs]
        return (None, *(not_differentiable(result) if creates_graph else result))


def modules_of(ops: Sequence[Op], layer: nn.Module) -> Modules:
    """Return the submodules that operations call, by path, with their present attributes."""
    paths = [op.path for op in ops if op.path is not None]
    return {path: replica(layer.get_submodule(path)) for path in paths}.__getitem__


def autocast_of(device: str) -> Callable[[], Any]:
    """Return a function that makes a context with the present autocast."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return functools.partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device))
    return contextlib.nullcontext
