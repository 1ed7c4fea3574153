"""A user's own activation function: it runs in forward, and again under autograd in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def leaves(y: Tensor) -> list[Tensor]:
    """The leaf tensors that require gradients and that `y` was computed from.

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
    """Disable the tensors' hooks (`Tensor.register_hook`) in the context.

    For a nested backward that computes parts of their gradients: the outer backward runs the hooks
    once, on the whole gradient.

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


@contextmanager
def _callers_code() -> Iterator[None]:
    """Mark exceptions that are raised inside as those of the caller's code."""
    try:
        yield
    except Exception as error:
        error.callers = True  # type: ignore[attr-defined]
        raise


def _checked(y: Tensor, x: Tensor) -> Tensor:
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(
            f"the activation function must keep shape and dtype; it returned {tuple(y.shape)} "
            f"{y.dtype} for {tuple(x.shape)} {x.dtype}"
        )
    return y


def forward(function: Function, x: Tensor) -> Tensor:
    """function(x), called with a copy: the function may work in place, and x may be kept."""
    with torch.no_grad(), _callers_code():
        return _checked(function(x.clone()), x)


def backward(
    function: Function, dy: Tensor, x: Tensor, captured: Mapping[str, Tensor], wanted: list[str]
) -> tuple[tuple[Tensor, bool] | None, dict[str, Tensor]]:
    """The gradient of x, and those of captured tensors by name, of the names in `wanted`.

    "" in `wanted` is x. Its gradient comes with whether it may be overwritten; it is None if not
    wanted.

    Raises: RuntimeError if the function reads a differentiable tensor that is not captured.
    """
    with torch.enable_grad(), _callers_code():
        x = x.detach().requires_grad_()
        y = _checked(function(x.clone()), x)
    # Compared by edge: hooks return a saved tensor as another object.
    known = {torch.autograd.graph.get_gradient_edge(t) for t in (x, *captured.values())
             if t.requires_grad}  # fmt: skip
    stray = [t for t in leaves(y) if torch.autograd.graph.get_gradient_edge(t) not in known]
    if stray:
        raise RuntimeError(
            "fused_remat: in backward, the activation function read a tensor of shape "
            f"{tuple(stray[0].shape)} that it did not read in forward; it must read the same "
            "tensors both times"
        )
    sources = {n: t for n, t in {"": x, **captured}.items() if n in wanted}
    grads: tuple[Tensor | None, ...] = (None,) * len(sources)
    if y.requires_grad:
        # The graph is retained for the next tile: captured tensors may have a graph of their own.
        with hooks_off(captured.values()):
            grads = torch.autograd.grad(
                y, list(sources.values()), dy, retain_graph=True, allow_unused=True
            )
    found = dict(zip(sources, grads, strict=True))
    dx = found.pop("", None)
    # Tiles are summed in float32. Copied, since autograd may return an expanded tensor.
    params = {
        name: grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        for name, grad in found.items()
        if grad is not None
    }
    if "" not in wanted:
        return None, params
    if dx is None:
        return (torch.zeros_like(x), True), params
    # dx may be dy itself, or a view of it.
    return (dx, dx is not dy and dx._base is None and 0 not in dx.stride()), params
