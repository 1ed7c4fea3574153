"""Activation functions as callers give them: by name, as a function, or as a module.

A function without a row in `steps.activation` is called again in backward. It has to compute
the same then; what can be found out about that is found out here, by calling it once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fused_remat.ops.draws import Draws, is_ours
from fused_remat.steps import activation as activations
from fused_remat.steps.user_function import Function, leaves

ActivationLike = str | Callable[[Tensor], Tensor]


def has_hooks(module: nn.Module) -> bool:
    """Whether any forward or backward hook is registered on `module` itself.

    >>> has_hooks(nn.Linear(2, 2))
    False
    """
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
    )


def activation_name(activation: Any) -> str | None:
    """The backend's name of a function, or of a module without hooks; None if it has none.

    >>> activation_name(nn.GELU(approximate="tanh")), activation_name(torch.sin)
    ('gelu_tanh', None)
    """
    if isinstance(activation, nn.Module) and has_hooks(activation):
        return None
    return activations.activation_name(activation)


@dataclass(frozen=True)
class Recallable:
    """A function that backward can call again, and the leaves requiring grad that it captured."""

    fn: Function
    captured: tuple[Tensor, ...]


def prepare(activation: Any, x: Tensor, autocast: torch.dtype | None = None) -> Recallable | str:
    """`activation` as backward can call it again, or why it cannot be: a phrase with a verb.

    It is called once, on `x`, as the block will call it: outside autocast, or inside one to the
    dtype `autocast`, and then its result is rounded to that of `x`. Torch's generators are put
    back. A module is called with the parameters and attributes of now. The function returned raises
    RuntimeError when a tensor that it read, and that was there before, was changed in place since.

    >>> w = torch.full((3,), 0.1, requires_grad=True)
    >>> prepare(lambda x: torch.where(x > 0, x, w * x), torch.zeros(2, 3)).captured
    (tensor([0.1000, 0.1000, 0.1000], requires_grad=True),)
    >>> prepare(lambda x: torch.dropout(x, 0.5, True), torch.zeros(2, 3))
    'draws random numbers'
    """
    fn = activation
    if isinstance(activation, nn.Module):
        if any(has_hooks(m) for m in activation.modules()):
            return "has hooks"
        if next(activation.buffers(), None) is not None:
            return "has buffers, which a second call may change"
        fn = _with_state_of_now(activation)
    if autocast is not None:
        fn = _under_autocast(fn, x.device.type, autocast)
    return _try(fn, x.detach().requires_grad_())


def _try(fn: Function, x: Tensor) -> Recallable | str:
    device, start = x.device, time.perf_counter()
    before, reads = _generator_state(device), _Reads()
    try:
        with _without_autocast(x), torch.enable_grad(), _unseen(), reads:
            y = fn(x.clone())  # it may work in place
    except Exception as error:
        return f"fails on an input of shape {tuple(x.shape)} ({error})"
    finally:
        elapsed = time.perf_counter() - start
        if before is None:
            drew = reads.drew
        elif drew := not torch.equal(before, _torch_state(device)):
            drew = is_ours(reads, lambda: _torch_state(device), torch.equal, elapsed)
        if drew and before is not None:
            _set_generator_state(device, before)
    if drew:
        return "draws random numbers"
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return "changes the shape or dtype of its input"
    captured = tuple(t for t in leaves(y) if t is not x)
    del x, y  # what the call itself made goes with them; what is left was there before
    watched = reads.alive()
    if any(_changed(reference, version) for reference, version in watched):
        return "changes a tensor that it captured"
    return Recallable(_guarded(fn, watched), captured)


def _under_autocast(fn: Function, device_type: str, dtype: torch.dtype) -> Function:
    # Without autocast's cache: it would hold copies of what `fn` captured, made without gradients.
    def call(x: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype, cache_enabled=False):
            y = fn(x)
        wide = isinstance(y, Tensor) and y.is_floating_point()
        return y.to(x.dtype) if wide else y  # what takes it next would round it

    return call


class _Reads(Draws):
    """Notes every tensor that an operator is given, and its version, too."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                source = t if t._base is None else t._base
                self._seen.append((weakref.ref(source), source._version))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def alive(self) -> list[tuple[weakref.ref[Tensor], int]]:
        """What still exists, each once, with the version at which it was first read."""
        first: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        for reference, version in self._seen:
            t = reference()
            if t is not None:
                first.setdefault(id(t), (reference, version))
        return list(first.values())


def _changed(reference: weakref.ref[Tensor], version: int) -> bool:
    t = reference()
    return t is not None and t._version != version


def _guarded(fn: Function, watched: list[tuple[weakref.ref[Tensor], int]]) -> Function:
    def call(x: Tensor) -> Tensor:
        for reference, version in watched:
            if _changed(reference, version):
                raise RuntimeError(
                    "a tensor that the activation function captured has been modified by an "
                    f"inplace operation: it was at version {version}; it is {reference()}"
                )
        return fn(x)

    return call


_OWN = frozenset(nn.Module().__dict__) - {"training"}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _OWN}


def _assign(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name in _attributes(module).keys() - attributes.keys():
        del module.__dict__[name]
    module.__dict__.update(attributes)


def _with_state_of_now(module: nn.Module) -> Function:
    """`module` with the parameters and attributes that it and its submodules have now."""
    params: dict[str, Tensor] = dict(module.named_parameters())
    states = [(m, _attributes(m)) for m in module.modules()]

    def call(x: Tensor) -> Tensor:
        later = [(m, _attributes(m)) for m, _ in states]
        try:
            for m, attributes in states:
                _assign(m, attributes)
            made: Tensor = torch.func.functional_call(module, params, (x,))
            if any(_differ(_attributes(m), attributes) for m, attributes in states):
                raise RuntimeError("the activation changes its own attributes")
            return made
        finally:
            for m, attributes in later:
                _assign(m, attributes)

    return call


def _differ(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() != b.keys() or any(a[name] is not b[name] for name in a)


def _unseen() -> Any:
    """Hides the trial from hooks on saved tensors, where there may be any."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    # Detached: a saved output that its own hook returns is never freed.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t)


def _without_autocast(x: Tensor) -> Any:
    kind = x.device.type  # "meta" has no autocast to switch off
    available = torch._C._is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if available else nullcontext()


def _generator_state(device: torch.device) -> Tensor | None:
    """None while a CUDA graph is captured, when PyTorch refuses to say."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return _torch_state(device)


def _torch_state(device: torch.device) -> Tensor:
    """That of torch's default generator for `device`."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
