"""The caller's own activation functions: what they capture, found out by calling them once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


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


@dataclass(frozen=True)
class Probed:
    """A function that a rebuild can call again, and the leaves requiring grad that it captured."""

    fn: Function
    captured: tuple[Tensor, ...]


def probe(fn: Function, x: Tensor) -> Probed | str:
    """What `fn` captured, found by calling `fn(x)` once, or why a rebuild cannot call it again.

    The call is outside autocast, as blocks run, and unseen by hooks on saved tensors; torch's
    generators are put back afterwards. The function returned raises RuntimeError when a tensor that
    its derivative reads, and that was there before the call, has been changed in place since.

    >>> w = torch.full((3,), 0.1, requires_grad=True)
    >>> probe(lambda x: torch.where(x > 0, x, w * x), torch.zeros(2, 3)).captured
    (tensor([0.1000, 0.1000, 0.1000], requires_grad=True),)
    >>> probe(lambda x: torch.dropout(x, 0.5, True), torch.zeros(2, 3))
    'its activation draws random numbers'
    """
    before = _generator_state(x.device)
    x = x.detach().requires_grad_()
    saved: list[tuple[weakref.ref[Tensor], int]] = []

    def note(t: Tensor) -> Tensor:
        source = t._base if t._base is not None else t
        saved.append((weakref.ref(source), source._version))
        return t.detach()  # a saved output that its own hook returns is never freed

    try:
        unseen = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
        with torch.autocast(x.device.type, enabled=False), torch.enable_grad(), unseen:
            y = fn(x.clone())  # it may work in place
    except Exception as error:
        return f"its activation fails on an input of shape {tuple(x.shape)} ({error})"
    finally:
        drew = not torch.equal(before, _generator_state(x.device))
        if drew:
            _set_generator_state(x.device, before)
    if drew:
        return "its activation draws random numbers"
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return "its activation changes the shape or dtype of its input"
    captured = tuple(t for t in leaves(y) if t is not x)
    del x, y  # what the call itself made goes with them; what is left was captured
    return Probed(_guarded(fn, [(t, version) for t, version in saved if t() is not None]), captured)


def _guarded(fn: Function, watched: list[tuple[weakref.ref[Tensor], int]]) -> Function:
    def call(x: Tensor) -> Tensor:
        for reference, version in watched:
            t = reference()
            if t is not None and t._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(t.shape)} that the activation function captured has "
                    f"been modified by an inplace operation: it is at version {t._version}, "
                    f"expected {version}"
                )
        return fn(x)

    return call


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
