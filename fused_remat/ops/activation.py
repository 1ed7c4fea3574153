"""Activation functions as callers give them: by name, as a function, or as a module.

Backward calls a function that has no row in `steps.activation` again, so it has to compute the same
then. `prepare` calls it once beforehand to find out what can be known about that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from fused_remat.steps.user_function import Function, leaves

ActivationLike = str | Callable[[Tensor], Tensor]


class Activation(NamedTuple):
    """An activation as a block takes it.

    Attributes:
        name: a row of `steps.activation.ACTIVATIONS`, or `USER_FUNCTION`.
        captured: the leaves requiring grad that a function reads, by the block's names.
        functions: the function, if it has no row, as backward can call it again.
    """

    name: str
    captured: Mapping[str, Tensor]
    functions: Mapping[str, Function]


def resolve_activation(
    activation: ActivationLike, x: Tensor, shape: tuple[int, ...], names_only: str = ""
) -> Activation:
    """`activation` for a block of `x`; a function without a row is tried on zeros of `shape`.

    `names_only`: what takes activations with a row only, for the message.

    Raises: ValueError for an unknown name, a function that backward cannot call again, and one
        without a row where `names_only`; TypeError for what is neither a string nor callable.
    """
    if isinstance(activation, str):
        if activation not in activations.ACTIVATIONS:
            valid = ", ".join(activations.ACTIVATIONS)
            raise ValueError(f"unknown activation {activation!r}; valid: {valid}, or a function")
        return Activation(activation, {}, {})
    if not callable(activation):
        raise TypeError(f"activation must be a name or a function, got {activation!r}")
    name = activation_name(activation)
    if name is not None:
        return Activation(name, {}, {})
    if names_only:
        valid = ", ".join(activations.ACTIVATIONS)
        raise ValueError(
            f"{names_only} takes the name of an activation, got {activation!r}; valid: {valid}"
        )
    token = x.new_zeros(shape)
    found: Activation | str
    if torch.compiler.is_compiling():
        from fused_remat.autograd import graph_break

        found = graph_break.eagerly(prepare, activation, token)
    else:
        found = prepare(activation, token)
    if isinstance(found, str):
        raise ValueError(f"backward cannot call this activation function again: it {found}")
    return found


def activation_name(activation: Any) -> str | None:
    """The row of a function, or of a module without hooks, in `ACTIVATIONS`; None if it has none.

    >>> activation_name(nn.GELU(approximate="tanh")), activation_name(torch.sin)
    ('gelu_tanh', None)
    """
    if isinstance(activation, nn.Module) and has_hooks(activation):
        return None
    return activations.activation_name(activation)


def has_hooks(module: nn.Module) -> bool:
    """Whether any forward or backward hook is registered on `module` itself."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(module.__dict__[table] for table in tables)


def prepare(activation: Any, x: Tensor, autocast: torch.dtype | None = None) -> Activation | str:
    """`activation` as backward can call it again, or why it cannot: a phrase that has a verb.

    It is called once, on `x`, as the block will call it: outside of autocast, or inside autocast to
    the dtype `autocast`, and then its result is rounded to the dtype of `x`. What it draws is put
    back into torch's generator. A module is called with the parameters and attributes that it has
    now. The function returned raises RuntimeError if a tensor that the activation read, and that
    existed before, was changed in place since.

    A function counts as random if it called an operator that draws random numbers, an operator from
    outside of PyTorch, which may, or if torch's generator changed while it ran. Threads share the
    generator: if another one draws at that moment, this call falls back without need, and its
    results are right all the same.

    >>> w = torch.full((3,), 0.1, requires_grad=True)
    >>> prepare(lambda x: torch.where(x > 0, x, w * x), torch.zeros(2, 3)).captured
    {'activation.0': tensor([0.1000, 0.1000, 0.1000], requires_grad=True)}
    >>> prepare(lambda x: x + torch.rand_like(x), torch.zeros(2, 3))
    'draws random numbers: it calls aten.rand_like.default'
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
    return _tried(fn, x.detach().requires_grad_())


def _tried(fn: Function, x: Tensor) -> Activation | str:
    generator, watch = _generator(x.device), _Watch()
    before = None if generator is None else generator.get_state()
    try:
        with autocast_off(x), torch.enable_grad(), _unseen(), watch:
            y = fn(x.clone())  # it may work in place
    except Exception as error:
        return f"fails on an input of shape {tuple(x.shape)} ({error})"
    finally:
        changed = before is not None and not torch.equal(before, generator.get_state())
        # If nothing here drew, another thread may have, and its numbers must not come again.
        if changed and watch.drew:
            generator.set_state(before)
    if watch.drew:
        return watch.drew
    if changed:
        return "draws random numbers, or another thread drew some at the same time"
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return "changes the shape or dtype of its input"
    captured = [t for t in leaves(y) if t is not x]
    del x, y  # what the call itself made is freed with them; what is left existed before
    if _modified(watch.versions):
        return "changes a tensor that it captured"
    named = dict(zip(captured_params(len(captured)), captured, strict=True))
    return Activation(USER_FUNCTION, named, {"activation": _guarded(fn, watch.versions)})


class _Watch(TorchDispatchMode):
    """Notes what the operators of this thread read, and whether one may draw random numbers.

    Attributes:
        drew: "", or what makes the function random, as a phrase.
        versions: of the tensors that still exist, when they were first read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drew = ""
        self.versions = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drew = f"draws random numbers: it calls {func}"
        elif func.namespace not in ("aten", "prims", "prim"):  # may call what no mode sees
            self.drew = f"may draw random numbers: it calls {func}, an operator outside of PyTorch"
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                source = t if t._base is None else t._base
                self.versions.setdefault(source, source._version)
        return func(*args, **(kwargs or {}))


def _modified(versions: Mapping[Tensor, int]) -> list[tuple[int, int]]:
    """Versions, then and now, of tensors that were changed in place since they were read."""
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


def _with_state_of_now(module: nn.Module) -> Function:
    """`module` with the parameters and attributes that it and its submodules have now."""
    own = _copied(module, {})  # other threads may be calling `module`
    states = [(m, dict(vars(m))) for m in own.modules()]

    def call(x: Tensor) -> Tensor:
        made: Tensor = own(x)
        if any(_identities(vars(m)) != _identities(attributes) for m, attributes in states):
            raise RuntimeError("the activation module changes its own attributes when it is called")
        return made

    return call


def _copied(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """A module like `module`, of copies of its submodules, with the same parameters."""
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


def _unseen() -> Any:
    """Hides the trial from hooks on saved tensors, where there may be any."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    # Detached: a saved output that its own hook returns is never freed.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t)


def _generator(device: torch.device) -> Any:
    """torch's default generator; None while a CUDA graph is captured, which forbids reading it."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return (
        None if torch.cuda.is_current_stream_capturing() else torch.cuda.default_generators[index]
    )
