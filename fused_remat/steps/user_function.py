"""A caller's own function as an activation: run in forward, and under autograd in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def leaves(y: Tensor) -> list[Tensor]:
    """The leaf tensors that require grad and that `y` was computed from, in order of discovery.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> [t is w for t in leaves((w * 2).exp())]
    [True]
    """
    if y.grad_fn is None:
        return [y] if y.requires_grad else []
    found: list[Tensor] = []
    seen, todo = {y.grad_fn}, [y.grad_fn]
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)  # AccumulateGrad has one
        if variable is not None:
            found.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return found


@contextmanager
def hooks_off(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Take off the tensors' hooks (`Tensor.register_hook`), and put them back afterwards.

    Around an inner backward that yields pieces of their gradients: the outer one runs the hooks,
    once, on the whole.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> handle = w.register_hook(lambda grad: 10 * grad)
    >>> with hooks_off([w]):
    ...     torch.autograd.grad(w.sum(), w)
    (tensor([1., 1.]),)
    >>> torch.autograd.grad(w.sum(), w)
    (tensor([10., 10.]),)
    """
    held = [(t, t._backward_hooks) for t in tensors if t._backward_hooks]
    for t, _ in held:
        t._backward_hooks = None
    try:
        yield
    finally:
        for t, hooks in held:
            t._backward_hooks = hooks


def _checked(y: Tensor, x: Tensor) -> Tensor:
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(
            f"the activation function must keep shape and dtype: it made {tuple(y.shape)} "
            f"{y.dtype} of {tuple(x.shape)} {x.dtype}"
        )
    return y


def forward(function: Function, x: Tensor) -> Tensor:
    """function(x), of a copy: it may work in place, and x may be kept."""
    with torch.no_grad():
        return _checked(function(x.clone()), x)


def backward(
    function: Function, dy: Tensor, x: Tensor, captured: Mapping[str, Tensor], wanted: list[str]
) -> tuple[tuple[Tensor, bool] | None, dict[str, Tensor]]:
    """The gradients in x, with whether it may be overwritten, None where "" is not in `wanted`; and
    of those of the captured tensors that are, by name.

    Raises: RuntimeError where the function reads other tensors than are captured.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = _checked(function(x.clone()), x)
    # By edge: a saved tensor comes back from hooks as another object.
    known = {torch.autograd.graph.get_gradient_edge(t) for t in (x, *captured.values())
             if t.requires_grad}  # fmt: skip
    stray = [t for t in leaves(y) if torch.autograd.graph.get_gradient_edge(t) not in known]
    if stray:
        raise RuntimeError(
            "fused_remat: the activation function reads a tensor in backward that it did not "
            f"read in forward, of shape {tuple(stray[0].shape)}"
        )
    sources = {n: t for n, t in {"": x, **captured}.items() if n in wanted}
    grads: tuple[Tensor | None, ...] = (None,) * len(sources)
    if y.requires_grad:
        # Kept for the next piece: what the function captured may have a graph of its own.
        with hooks_off(captured.values()):
            grads = torch.autograd.grad(
                y, list(sources.values()), dy, retain_graph=True, allow_unused=True
            )
    found = dict(zip(sources, grads, strict=True))
    dx = found.pop("", None)
    # A sum over pieces in float32; a copy, it may be expanded.
    params = {
        name: grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        for name, grad in found.items()
        if grad is not None
    }
    if "" not in wanted:
        return None, params
    if dx is None:
        return (torch.zeros_like(x), True), params
    # It may be dy itself, or a view of it.
    return (dx, dx is not dy and dx._base is None and 0 not in dx.stride()), params
