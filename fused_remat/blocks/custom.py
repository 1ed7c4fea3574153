"""The caller's own activation functions: what they capture, found out by calling them once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def leaves(y: Tensor) -> list[Tensor]:
    """The leaf tensors that require grad and that `y` was computed from, in order of discovery.

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


def probe(fn: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...] | str:
    """The leaves that require grad which `fn` captured, or why a rebuild cannot call it again.

    Calls `fn(x)` once, outside autocast as blocks run and unseen by hooks on saved tensors;
    torch's generators are put back afterwards.

    >>> w = torch.full((3,), 0.1, requires_grad=True)
    >>> probe(lambda x: torch.where(x > 0, x, w * x), torch.zeros(2, 3))
    (tensor([0.1000, 0.1000, 0.1000], requires_grad=True),)
    >>> probe(lambda x: torch.dropout(x, 0.5, True), torch.zeros(2, 3))
    'its activation draws random numbers'
    """
    before = _generator_state(x.device)
    try:
        with torch.autocast(x.device.type, enabled=False), torch.enable_grad(), _unseen():
            y = fn(x)
    except Exception as error:
        return f"its activation fails on an input of shape {tuple(x.shape)} ({error})"
    finally:
        after = _generator_state(x.device)
        drew = not torch.equal(before, after)
        if drew:
            _set_generator_state(x.device, before)
    if drew:
        return "its activation draws random numbers"
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return "its activation changes the shape or dtype of its input"
    return tuple(leaves(y))


def _unseen() -> torch.autograd.graph.saved_tensors_hooks:
    # Detached: a saved output that its own hook returns is never freed.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t)


@contextmanager
def hooks_off(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Take off the tensors' hooks (`Tensor.register_hook`), and put them back afterwards.

    Around an inner backward that yields pieces of their gradients: the outer one runs the hooks,
    once, on the whole.

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


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
