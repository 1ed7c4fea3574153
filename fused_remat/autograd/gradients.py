"""Gradients as a block's node returns them: rounded, complete, and not differentiable."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor


def rounds(
    tensors: Sequence[Tensor | None],
) -> tuple[torch.dtype, list[torch.dtype | Tensor | None]]:
    """Return the first tensor's dtype, and for each vector that needs a gradient a leaf or dtype.

    The `grad_dtype` of a leaf may change until backward.
    """
    x = tensors[0]
    assert x is not None
    vectors = [t if t is not None and t.dim() == 1 and t.requires_grad else None for t in tensors]
    return x.dtype, [t if t is None or t.is_leaf else t.dtype for t in vectors]


def finish(
    ctx: Any,
    dy: Tensor,
    grads: list[Tensor | None],
    needs_grad: frozenset[str],
    sink: Collection[str] = (),
) -> list[Tensor | None]:
    """Round the gradients of vectors, and fill in zeros for `needs_grad` without influence.

    None stays for tensors that may have no gradient (`Graph.unsure`), and for `sink`.
    """
    if ctx.rounds is not None:
        low, of = ctx.rounds
        vectors = [t if g is not None else None for t, g in zip(of, grads, strict=True)]
        round_vectors(grads, low, [t.grad_dtype if isinstance(t, Tensor) else t for t in vectors])
    graph = ctx.execution.call.graph
    names = zip(graph.tensors, grads, strict=True)
    for name in [name for name, grad in names if grad is None and name in needs_grad]:
        if name not in sink and not (dy.numel() and name in graph.unsure):
            i = graph.tensors.index(name)
            grads[i] = dy.new_zeros(ctx.execution.given[i])
    return grads


def round_vectors(
    grads: list[Tensor | None], low: torch.dtype, dtypes: Sequence[torch.dtype | None]
) -> None:
    """Round float32 gradients of biases and norms to `low`, all in one kernel.

    `dtypes`, one for each of `grads`, selects them. Autograd would launch a kernel for each. It
    rounds matrices itself, and frees one before it rounds the next.
    """
    wide: dict[int, Tensor] = {}
    for i, (grad, dtype) in enumerate(zip(grads, dtypes, strict=True)):
        if dtype is low and grad is not None and grad.dtype is torch.float32 and grad.dim() == 1:
            wide[i] = grad
    if wide:
        rounded = [torch.empty_like(grad, dtype=low) for grad in wide.values()]
        torch._foreach_copy_(rounded, list(wide.values()))
        for i, grad in zip(wide, rounded, strict=True):
            grads[i] = grad


NO_DOUBLE_BACKWARD = (
    "fused_remat: double backward is not supported: the gradients of a fused block cannot be "
    "differentiated"
)


def not_differentiable(grads: list[Tensor | None]) -> list[Tensor | None]:
    """Return gradients that raise when differentiated (backward ran with create_graph=True).

    Not `once_differentiable`: that leaves gradients constant, silently, when dy needs no gradient.
    """
    error = torch._C._functions.DelayedError(NO_DOUBLE_BACKWARD.encode(), len(grads))
    inputs: list[Any] = [None if g is None else g.detach().requires_grad_() for g in grads]
    outputs = error(*inputs)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
