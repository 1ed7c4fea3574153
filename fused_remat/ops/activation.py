"""Activation functions of the caller: a name, a function, or a module.

Backward calls a function without an entry in `steps.activation` again, so the function has to keep
this contract: for equal inputs it computes equal outputs of the same shape and dtype; it draws no
random numbers and changes nothing but its input; it calls PyTorch's operators only. Tensors that it
captures get gradients. One trial (`prepare`) refuses functions that visibly break the contract; a
captured tensor that is changed in place before backward raises there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from fused_remat.execution.executor import autocast_off
from fused_remat.graph.build import captured_params
from fused_remat.spec import USER_FUNCTION
from fused_remat.steps import activation as activations
from fused_remat.steps.replay import Function, leaves

ActivationLike = str | Callable[[Tensor], Tensor]


class Activation(NamedTuple):
    """An activation as a block takes it."""

    name: str  # a key of `steps.activation.ACTIVATIONS`, or `USER_FUNCTION`
    captured: Mapping[str, Tensor]  # leaves requiring grad that a function reads, by block's names
    functions: Mapping[str, Function]  # one without an entry there, as backward can call it again


def known_activation(activation: ActivationLike, others: str = "their functions") -> str:
    """Return the name in `ACTIVATIONS` of an activation; raise ValueError without one.

    `others` ends the message: what is valid in addition to names.
    """
    name = activation if isinstance(activation, str) else activation_name(activation)
    if name not in activations.ACTIVATIONS:
        valid = ", ".join(activations.ACTIVATIONS)
        raise ValueError(f"unknown activation {activation!r}; valid: {valid}, and {others}")
    return name


def resolve_activation(activation: ActivationLike, x: Tensor, shape: tuple[int, ...]) -> Activation:
    """Return `activation` for a block of `x`; try an unknown function on zeros of `shape`.

    Raises: ValueError for an unknown name and a function that backward cannot call again; TypeError
        for neither a string nor a callable.
    """
    if not isinstance(activation, str) and not callable(activation):
        raise TypeError(f"activation must be a name or a function, got {activation!r}")
    name = activation if isinstance(activation, str) else activation_name(activation)
    if name is not None:
        return Activation(known_activation(name, "functions"), {}, {})
    trial: Any = prepare
    if torch.compiler.is_compiling():
        from fused_remat.autograd import graph_break

        trial = functools.partial(graph_break.eagerly, prepare)
    prepared: Activation | str = trial(activation, x.new_zeros(shape))
    if isinstance(prepared, str):
        raise ValueError(f"backward cannot call this activation function again: it {prepared}")
    return prepared


def activation_name(activation: Any) -> str | None:
    """Return the name in `ACTIVATIONS` of a function or a module without hooks, or None."""
    if isinstance(activation, nn.Module) and has_hooks(activation):
        return None
    return activations.activation_name(activation)


def has_hooks(module: nn.Module) -> bool:
    """Return whether any forward or backward hook is registered on `module` itself."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(module.__dict__[table] for table in tables)


def prepare(activation: Any, x: Tensor, autocast: torch.dtype | None = None) -> Activation | str:
    """Return `activation` as backward can call it again, or why it cannot (a verb phrase).

    One trial on `x` decides. It runs as the block will call the function: outside of autocast, or
    inside autocast to the dtype `autocast`, with the result rounded to the dtype of `x`. A module
    is called with the parameters and attributes that it has now.
    """
    fn = activation
    if isinstance(activation, nn.Module):
        if any(has_hooks(m) for m in activation.modules()):
            return "has hooks"
        if next(activation.buffers(), None) is not None:
            return "has buffers, which a second call may change"
        fn = _with_present_state(activation)
    if autocast is not None:
        fn = _under_autocast(fn, x.device.type, autocast)
    x, watch = x.detach().requires_grad_(), _Watch()
    try:
        with autocast_off(x), torch.enable_grad(), _without_hooks(), watch:
            y = fn(x.clone())  # it may work in place
    except Exception as error:
        if not watch.refused:
            return f"fails on an input of shape {tuple(x.shape)} ({error})"
    if watch.refused:  # even if the function caught the exception
        return watch.refused
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return "changes the shape or dtype of its input"
    captured = [t for t in leaves(y) if t is not x]
    del x, y  # frees the trial's own tensors; the versions of the others remain
    if _modified(watch.versions):
        return "changes a tensor that it captured"
    named = dict(zip(captured_params(len(captured)), captured, strict=True))
    return Activation(USER_FUNCTION, named, {"activation": _guarded(fn, watch.versions)})


def on_matrices(function: Function, lead: Sequence[int], seq_first: bool = False) -> Function:
    """Return `function`, which takes tensors (*lead, F), as a function of matrices (tokens, F).

    `seq_first`: `lead` is (S, B), and the tokens of a matrix go by sequences.
    """

    def call(up: Tensor) -> Tensor:
        if seq_first:
            y = function(up.view(lead[1], lead[0], -1).transpose(0, 1).contiguous())
            y = y.transpose(0, 1) if y.dim() == 3 else y
        else:
            y = function(up.view(*lead, -1))
        return y.reshape(up.shape) if y.numel() == up.numel() else y

    return call


class _Watch(TorchDispatchMode):
    """A mode that notes the tensors that are read, and stops at operators that may be random."""

    def __init__(self) -> None:
        super().__init__()
        self.versions = WeakTensorKeyDictionary()  # of tensors that still exist, when first read
        self.refused = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refused = f"draws random numbers: it calls {func}"
        elif func.namespace not in ("aten", "prims", "prim"):  # may call what no mode sees
            self.refused = f"may draw random numbers: it calls {func}, which is not PyTorch's"
        if self.refused:
            raise RuntimeError(self.refused)
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                source = t if t._base is None else t._base
                self.versions.setdefault(source, source._version)
        return func(*args, **(kwargs or {}))


def _modified(versions: Mapping[Tensor, int]) -> list[tuple[int, int]]:
    """Return old and new versions of tensors that were changed in place since they were read."""
    return [(then, t._version) for t, then in versions.items() if t._version != then]


def _guarded(fn: Function, versions: Mapping[Tensor, int]) -> Function:
    def call(x: Tensor) -> Tensor:
        for version, now in _modified(versions):
            raise RuntimeError(
                "a tensor that the activation function captured has been modified by an inplace "
                f"operation: it was at version {version} and is at version {now}"
            )
        return fn(x)

    return call


def _under_autocast(fn: Function, device_type: str, dtype: torch.dtype) -> Function:
    # Without autocast's cache: it would hold copies of what `fn` captured, made without gradients.
    def call(x: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype, cache_enabled=False):
            y = fn(x)
        wide = isinstance(y, Tensor) and y.is_floating_point()
        return y.to(x.dtype) if wide else y  # the product that takes it next would round it

    return call


def _with_present_state(module: nn.Module) -> Function:
    """Return a function that calls `module` with its present parameters and attributes."""
    own = _copied(module, {})  # other threads may be calling `module`
    states = [(m, dict(vars(m))) for m in own.modules()]

    def call(x: Tensor) -> Tensor:
        y: Tensor = own(x)
        if any(_identities(vars(m)) != _identities(attributes) for m, attributes in states):
            raise RuntimeError("the activation module changes its own attributes when it is called")
        return y

    return call


def _copied(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a copy of a module and its submodules that shares their parameters."""
    if module not in copies:
        copies[module] = copy = module.__new__(type(module))
        vars(copy).update(vars(module))
        children = {
            n: None if m is None else _copied(m, copies) for n, m in module._modules.items()
        }
        vars(copy).update(_parameters=dict(module._parameters), _modules=children)
    return copies[module]


def _identities(attributes: Mapping[str, Any]) -> dict[str, int]:
    return {name: id(value) for name, value in attributes.items()}


def _without_hooks() -> Any:
    """Return a context that hides the trial from hooks on saved tensors, where hooks may exist."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    # Detached: a saved output that its own hook returns is never freed.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t)
