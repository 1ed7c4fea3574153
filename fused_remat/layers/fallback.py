"""The alternative to the fused path: a layer's own forward under `torch.utils.checkpoint`.

As under `torch.utils.checkpoint.checkpoint(use_reentrant=False)`, backward calls the submodules
again, so their forward hooks fire again, and attributes have the values of that second call. The
parameters, their versions and the training flags are those of forward. A forward that updates
buffers in training is not repeated, and runs without checkpointing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from fused_remat.execution.executor import changed
from fused_remat.layers.eligibility import PLAIN, wants_grad
from fused_remat.layers.record import record_of


class Caller(nn.Module):
    """A module for `functional_call`, whose forward is `forward`, with the layer's tensors."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self._forward = forward

    def forward(self, *args: Any, **arguments: Any) -> Any:
        return self._forward(*args, **arguments)


def without_changes(
    layer: nn.Module, run: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """Return `run(arguments)`, a checkpointed forward of `layer`, and the tensors that it changes.

    A second forward would change them again. If the first call of a layer changes any, they and
    the random state are restored; in later calls nothing runs.
    """
    outer = _hooks_outside()
    if outer is not None and getattr(outer[0], "__module__", "") == checkpoint.__module__:
        return run(arguments), []  # a checkpoint around the layer repeats it anyway
    known, training = record_of(layer).changes, layer.training
    if known.get(training):
        return None, known[training]
    is_first = training not in known
    if is_first:  # a change of a tensor with a gradient could not be undone
        copied = {id(t): t.clone() for t in arguments.values() if wants_grad(t)}
        arguments = {n: copied.get(id(t), t) for n, t in arguments.items()}
    args = {n: t for n, t in arguments.items() if type(t) is Tensor and not t.is_inference()}
    state = [*_state(layer), *((name, args, name, t) for name, t in args.items())]
    copies = [t.clone() if is_first and not t.requires_grad else t for *_, t in state]
    versions = [t._version for *_, t in state]
    device = _device_of(layer)
    random = generator_states(device) if is_first else []
    out, names = run(arguments), list[str]()
    for (path, owner, name, t), version, copy in zip(state, versions, copies, strict=True):
        # An attribute that is assigned again (the last attention map) is no state of the next call.
        replaced = owner.get(name) is not t and "_buffers" not in owner
        if t._version != version or replaced:
            names.append(path)
            if is_first:
                owner[name] = t
                t.detach().copy_(copy)
    if names and is_first:
        set_generator_states(random, device)
    known[training] = names
    return out, names


def _state(layer: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Yield the path, owner, name and value of tensors of a layer that are not parameters."""
    for path, module in layer.named_modules():
        for owner in (module._buffers, vars(module)):
            for name, t in owner.items():
                if isinstance(t, Tensor) and not (t.requires_grad or t.is_inference()):
                    yield f"{path}.{name}".lstrip("."), owner, name, t


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators from which operations on a device draw."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.random.get_rng_state(), *own]


def set_generator_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Set the states that `generator_states` returned."""
    cpu, *cuda = states
    torch.random.set_rng_state(cpu)
    for state in cuda:
        torch.cuda.set_rng_state(state, device)


def _device_of(layer: nn.Module) -> torch.device:
    return next((t.device for t in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))


def kept_by(layer: nn.Module, out: Any, arguments: Mapping[str, Any]) -> str:
    """Return what the graph of `out`, of a plain call of `layer`, keeps: each storage once."""
    if _hooks_outside() is not None:  # a checkpoint's, or of offloading
        return "its activations"
    parameters = (*layer.parameters(), *layer.buffers())
    own = {t.untyped_storage().data_ptr() for t in parameters if type(t) in PLAIN}
    held: dict[int, int] = {}
    seen = {t.grad_fn for t in tree_leaves(arguments) if isinstance(t, Tensor)} | {None}
    waiting = [t.grad_fn for t in tree_leaves(out) if isinstance(t, Tensor)]
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for name in [name for name in dir(node) if name.startswith("_raw_saved_")]:
            for saved in tree_leaves(getattr(node, name)):
                t: Any = getattr(saved, "data", None)  # no tensor if hooks inside have packed it
                if type(t) in PLAIN and t.layout is torch.strided:  # a DTensor has no storage
                    held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return f"{sum(n for key, n in held.items() if key not in own) / 2**20:.1f} MiB"


def _hooks_outside() -> Any:
    """Return the active hooks on saved tensors, a pair, or None."""
    autograd: Any = torch._C._autograd
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    enabled = getattr(autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
    return None if top is None or not enabled() else top(True)


def checkpointed(
    layer: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]
) -> Any:
    """Run a layer's `forward(**arguments)` under non-reentrant checkpoint.

    Backward calls it with the parameters and training flags of now, and raises RuntimeError if a
    tensor was changed in place since, or has another shape, dtype or device.
    """
    # Sharded parameters (DTensors, and ZeRO-3's, which are empty until they are gathered) are left
    # to the hooks that gather them, which backward calls again; parameters that forward changes and
    # restores (adapters that add to weights), to the layer, as under PyTorch's checkpoint.
    record, device = record_of(layer), _device_of(layer)
    named = () if record.swaps_parameters else layer.named_parameters()
    params = {n: p for n, p in named if type(p) in PLAIN and not hasattr(p, "ds_id")}
    versions = [p._version for p in params.values()]
    states = generator_states(device) if params else []
    # `run` holds no tensor: checkpoint saves them, checks their versions, and lets hooks move them.
    leaves, tree = tree_flatten_with_path((dict(arguments), params))
    keys: list[Any] = [path[1] for path, _ in leaves]  # after the index of the dict
    names, flat = [key.key for key in keys], [value for _, value in leaves]
    kinds = [_kind(value) for value in flat]
    training = [(module, module.training) for module in layer.modules()]
    caller = Caller(layer, forward)
    is_first = True

    def run(*values: Any) -> Any:
        nonlocal is_first
        arguments, state = tree_unflatten(values, tree)
        if is_first:
            is_first = False
            return forward(**arguments)
        for name, kind, value in zip(names, kinds, values, strict=True):
            if kind is not None and kind != _kind(value):
                raise changed(name, kind, value)
        state = {f"layer.{n}": p for n, p in state.items()}
        with _training_flags(training):
            return torch.func.functional_call(caller, state, (), arguments)

    out = checkpoint(run, *flat, use_reentrant=False)
    if [p._version for p in params.values()] == versions:
        return out
    record.swaps_parameters = True
    set_generator_states(states, device)
    return checkpointed(layer, forward, arguments)


def _kind(value: Any) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
    plain = type(value) in PLAIN
    return (tuple(value.shape), value.dtype, value.device) if plain else None


@contextlib.contextmanager
def _training_flags(flags: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set training flags of modules inside, and restore them afterwards."""
    before = [(module, module.training) for module, _ in flags]
    try:
        for module, training in flags:
            module.training = training
        yield
    finally:
        for module, training in before:
            module.training = training


_lock = threading.Lock()
_count = 0
_before = True


@contextlib.contextmanager
def without_inference_kernels() -> Iterator[None]:
    """Make PyTorch's layers call their submodules inside, in evaluation as well."""
    # The switch is PyTorch's own, for the process: the last of several threads inside restores it.
    global _count, _before
    with _lock:
        if _count == 0:
            _before = torch.backends.mha.get_fastpath_enabled()
        _count += 1
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _lock:
            _count -= 1
            if _count == 0:
                torch.backends.mha.set_fastpath_enabled(_before)
