"""What the step for a caller's own function needs of autograd: its leaves, and their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

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
