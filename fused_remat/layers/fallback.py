"""The alternative to the fused path: a layer's own forward under `torch.utils.checkpoint`.

If a block raises an exception that nobody expected, that forward runs instead, in backward from the
input that the block kept (`Rescue`).

As under `torch.utils.checkpoint.checkpoint(use_reentrant=False)`, backward calls the submodules
again, so their forward hooks fire again, and attributes have the values of that second call. The
parameters, their versions, the training flags and PEFT's active adapters are those of forward. A
forward that updates buffers in training is not repeated, and runs without checkpointing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from fused_remat.autograd.accumulate import sharded_by
from fused_remat.autograd.engine import active_hooks, in_checkpoint
from fused_remat.execution.executor import changed
from fused_remat.layers.eligibility import PLAIN, needs_grad, parameters_of
from fused_remat.layers.record import record_of

#: Attributes of modules that backward sets as they were in forward; the last two are PEFT's.
_FLAGS = frozenset(("training", "_active_adapter", "_disable_adapters"))

Forward = Callable[..., Any]
#: Runs a forward with arguments, and again in backward.
Checkpoint = Callable[[Forward, Mapping[str, Any]], Any]


class _Caller(nn.Module):
    """A module for `functional_call`, whose forward is `forward`, with the layer's tensors."""

    def __init__(self, layer: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.layer, self._forward = layer, forward

    def forward(self, *args: Any, **arguments: Any) -> Any:
        return self._forward(*args, **arguments)


def run_with(
    layer: nn.Module, forward: Forward, named: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> Any:
    """Call `forward`, a method of `layer`, with the tensors `named` as the layer's own."""
    tensors = {f"layer.{name}": tensor for name, tensor in named.items()}
    return torch.func.functional_call(_Caller(layer, forward), tensors, (), dict(arguments))


def without_changes(
    layer: nn.Module, forward: Forward, run: Checkpoint, arguments: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """Return the result of a layer's `forward(**arguments)`, which `run` checkpoints, and changes.

    Those are the names of tensors that it changes, and a second forward would change again. If the
    first call of a layer changes any, they and the random state are restored; in later calls
    nothing runs.
    """
    if in_checkpoint():
        return run(forward, arguments), []  # a checkpoint around the layer repeats it anyway
    known, training = record_of(layer).changes, layer.training
    if known.get(training):
        return None, known[training]
    is_first = copies_arguments = training not in known
    names = list[str]()

    def watched(**arguments: Any) -> Any:
        if not copies_arguments:
            return forward(**arguments)
        # A change of a tensor with a gradient could not be undone. `run` does not keep the copies.
        copied = {id(t): t.clone() for t in arguments.values() if needs_grad(t)}
        out = forward(**{n: copied.get(id(t), t) for n, t in arguments.items()})
        names[:] = [n for n, t in arguments.items() if id(t) in copied and copied[id(t)]._version]
        return out

    args = {n: t for n, t in arguments.items() if type(t) is Tensor and not t.is_inference()}
    state = [*_state(layer), *((name, args, name, t) for name, t in args.items())]
    # What has gradients is copied above, and an expanded tensor cannot be changed in place.
    copies = [
        t.clone()
        if is_first and not (t.requires_grad or (t.layout is torch.strided and 0 in t.stride()))
        else t
        for *_, t in state
    ]
    contents = _contents(arguments) if is_first else []
    versions = [t._version for *_, t in state]
    device = _device_of(layer)
    random = generator_states(device) if is_first else []
    out = run(watched, arguments)
    copies_arguments = False
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
        _refill(contents)
    known[training] = names
    return out, names


def _state(layer: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Yield the path, owner, name and value of tensors of a layer that are not parameters."""
    for path, module in layer.named_modules():
        for owner in (module._buffers, vars(module)):
            for name, t in owner.items():
                if isinstance(t, Tensor) and not (t.requires_grad or t.is_inference()):
                    yield f"{path}.{name}".lstrip("."), owner, name, t


def _contents(arguments: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the lists and dicts among arguments, each with a copy."""
    return [(value, value.copy()) for value in arguments.values() if type(value) in (list, dict)]


def _refill(contents: list[tuple[Any, Any]]) -> None:
    """Restore the lists and dicts that `_contents` returned."""
    for value, copy in contents:
        value.clear()
        (value.extend if type(value) is list else value.update)(copy)


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


def next_node() -> int:
    """Return the sequence number of the next node of this thread's autograd graph."""
    node = torch.zeros((), requires_grad=True).clone().grad_fn
    return 0 if node is None else node._sequence_nr() + 1


def kept_by(layer: nn.Module, out: Any, since: int) -> str:
    """Return what the nodes behind `out` from `since` on keep for backward: each storage once."""
    if active_hooks() is not None:  # a checkpoint's, or of offloading
        return "its activations"
    parameters = (*layer.parameters(), *layer.buffers())
    own = {t.untyped_storage().data_ptr() for t in parameters if type(t) in PLAIN}
    held: dict[int, int] = {}
    for _, t in packed_by([t for t in tree_leaves(out) if isinstance(t, Tensor)], since):
        # No tensor if hooks inside have packed it; a DTensor has no storage.
        if type(t) in PLAIN and t.layout is torch.strided:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return f"{sum(n for key, n in held.items() if key not in own) / 2**20:.1f} MiB"


def packed_by(outputs: Iterable[Tensor], since: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield what the nodes behind `outputs` from `since` on keep, with autograd's names for it.

    Nothing is unpacked, so the hooks of a checkpoint or of the user do not run.
    """
    seen: set[Any] = {None}
    waiting: list[Any] = [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for attribute in _raw_attributes(node.__class__):
            raw = getattr(node, attribute)
            name = f"{node.name()}.{attribute.removeprefix('_raw_saved_')}"
            parts = raw if isinstance(raw, (tuple, list)) else (raw,)
            for i, part in enumerate(parts):
                yield name if part is raw else f"{name}[{i}]", getattr(part, "data", None)


@functools.cache
def _raw_attributes(node: type) -> list[str]:
    return [name for name in dir(node) if name.startswith("_raw_saved_")]


def checkpointed(layer: nn.Module, forward: Forward, arguments: Mapping[str, Any]) -> Any:
    """Run a layer's `forward(**arguments)` under non-reentrant checkpoint.

    Backward calls it with the parameters and flags of now, and raises RuntimeError if a
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
    # An argument of several names is one object in backward, too.
    of_id = {id(value): name for name, value in arguments.items()}
    same = {name: of_id[id(value)] for name, value in arguments.items()}
    parts = {name: arguments[name] for name in of_id.values()}, params
    flat, tree = tree_flatten(parts)
    names = [name for part in parts for name, value in part.items() for _ in tree_leaves(value)]
    kinds = [_kind(value) for value in flat]
    flags = flags_of(layer)
    # The caller's lists and dicts, to which forward may add; backward passes what they had.
    given, contents = [dict(arguments)], _contents(arguments)

    def run(*values: Any) -> Any:
        if given:
            return forward(**given.pop())
        own, state = tree_unflatten(values, tree)
        for name, kind, value in zip(names, kinds, values, strict=True):
            if kind is not None and kind != _kind(value):
                raise changed(name, kind, value)
        arguments = {name: own[source] for name, source in same.items()}
        with attributes_as(flags):
            return run_with(layer, forward, state, arguments)

    out = checkpoint(run, *flat, use_reentrant=False)
    if [p._version for p in params.values()] == versions:
        return out
    record.swaps_parameters = True
    set_generator_states(states, device)
    _refill(contents)
    return checkpointed(layer, forward, arguments)


def _kind(value: Any) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
    plain = type(value) in PLAIN
    return (tuple(value.shape), value.dtype, value.device) if plain else None


def flags_of(layer: nn.Module) -> list[tuple[Any, str, Any]]:
    """Return the attributes of modules that a forward in backward has to set as they are now."""
    return [
        (module, name, vars(module)[name])
        for module in layer.modules()
        for name in _FLAGS.intersection(vars(module))
    ]


@contextlib.contextmanager
def attributes_as(values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of objects, by name, to other values inside the context."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


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


class Rescue:
    """The own forward of a fused layer instead of its block's backward, with `count` `roots`."""

    def __init__(
        self, layer: Any, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor | None]
    ) -> None:
        self.layer, self.training = layer, layer.training
        self.count, self._roots = 0, list[Any]()
        #: Of each output of the block by name, its index among the leaves of the result, its view,
        #: and its layout; None if one is not there.
        self.results: dict[str, tuple[int, Any, Any]] | None = None
        # Activations and masks live as long as the block or the model keeps them, parameters as
        # long as the layer.
        self.arguments, args = dict(arguments), dict[int, Any]()
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.dtype is not torch.int64:  # positions are small
                self.arguments[name] = weakref.ref(value)
                if value.requires_grad:
                    args[id(value)] = self.arguments[name]
        self.sources: dict[str, Any] = {}
        derived = []
        for name, t in tensors.items():
            if t is not None and t.requires_grad:
                if t.is_leaf or id(t) in args:
                    self.sources[name] = args.get(id(t), t)
                else:
                    derived.append(t)
        if derived:
            self._roots = [weakref.ref(t) for t in self._roots_of(derived, args)]
            self.count = len(self._roots)
        device = tensors["input"].device.type  # type: ignore[union-attr]
        on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        self.autocast = (device, torch.get_autocast_dtype(device)) if on else None

    @property
    def roots(self) -> list[Any]:
        """Tensors from which tensors of the block were computed, and that get gradients instead."""
        return [_alive(t) for t in self._roots]

    def _roots_of(self, derived: list[Tensor], args: Mapping[int, Any]) -> tuple[Tensor, ...]:
        """Return the bases of the block's `derived` tensors; else all possible sources."""
        roots: dict[int, Tensor] = {}
        for t in derived:
            base = t._base
            if base is None or not (base.is_leaf or id(base) in args):
                own = [p for p in parameters_of(self.layer).values() if p.requires_grad]
                roots = {id(p): p for p in (*(ref() for ref in args.values()), *own)}
                break
            roots[id(base)] = base
        for source in self.sources.values():
            roots.pop(id(_alive(source)), None)
        return tuple(roots.values())

    def returned(self, outs: Mapping[str, Tensor], result: Any) -> None:
        """Note the positions of the block's outputs, or of views of them, in the `result`."""
        for value in self.arguments.values():
            if type(value) in (tuple, list, dict):
                flat = type(value) is tuple and {Tensor}.issuperset(map(type, value))
                if any(map(needs_grad, value if flat else tree_leaves(value))):
                    return  # of which no gradient would be returned
        found: dict[str, tuple[int, Any, Any]] = {}
        for i, leaf in enumerate((result,) if isinstance(result, Tensor) else tree_leaves(result)):
            for name, out in outs.items() if isinstance(leaf, Tensor) else ():
                if leaf.data_ptr() == out.data_ptr() and name not in found:
                    found[name] = i, (leaf.size(), leaf.stride(), 0), (out.size(), out.stride())
        self.results = found if len(found) == len(outs) else None

    def contains(self, error: Exception) -> bool:
        """Return whether the run may continue after this exception of the block."""
        return is_contained(self.layer, error)

    def gradients(
        self, error: Exception, names: tuple[str, ...], given: Mapping[str, Tensor | None]
    ) -> list[Any] | None:
        """Return the gradients of the block's `names`, then of `roots`; None if impossible.

        `given`: the gradients of the block's outputs by name.
        """
        layer = self.layer
        if self.results is None or layer.training != self.training:
            return None
        held = [v for v in (*self.arguments.values(), *self._roots) if v is not None]
        if any(_alive(value) is None for value in held):
            return None
        copies: dict[int, Tensor] = {}

        def copy(leaf: Any) -> Any:
            t = _alive(leaf)
            if not needs_grad(t):
                return t
            return copies.setdefault(id(t), t.detach().requires_grad_())

        arguments = tree_map(copy, self.arguments)
        state = {name: copy(p) for name, p in layer.named_parameters()}
        roots = [copies.get(id(t)) for t in self.roots]
        sources = {name: copies.get(id(_alive(t))) for name, t in self.sources.items()}
        wanted = list(dict.fromkeys(t for t in (*sources.values(), *roots) if t is not None))
        if len(wanted) < len({*map(id, sources.values()), *map(id, roots)}):
            return None  # such as the activation function's own tensor
        cast = contextlib.nullcontext() if self.autocast is None else torch.autocast(*self.autocast)
        with torch.enable_grad(), cast:
            forward = functools.partial(layer.stock.forward, layer)
            result = run_with(layer, forward, state, arguments)
        ys, dys, parts = list[Tensor](), list[Tensor](), tree_leaves(result)
        for name, (i, view, (size, stride)) in self.results.items():
            if (grad := given.get(name)) is not None:
                like = torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device)
                ys.append(parts[i])
                dys.append(like.copy_(grad).as_strided(*view).to(parts[i].dtype))
        found = torch.autograd.grad(ys, wanted, dys, allow_unused=True)
        grads = dict(zip(map(id, wanted), found, strict=True))
        layer._block_failed(error)
        # A tensor under two names of the block gets its gradient once.
        ordered = (*(sources.get(name) for name in names), *roots)
        return [None if t is None else grads.pop(id(t), None) for t in ordered]


def _alive(value: Any) -> Any:
    return value() if isinstance(value, weakref.ref) else value


def is_contained(layer: nn.Module, error: Exception) -> bool:
    """Return whether a layer's own forward may run where its block raised `error`."""
    if os.environ.get("FUSED_REMAT_STRICT", "0") not in ("", "0"):
        return False
    # Errors of a device that is out of memory or lost, of this library, of the caller's functions.
    devices = (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError)
    text, callers = str(error), getattr(error, "callers", False)
    deliberate = text.startswith(("fused_remat", "replay check")) or callers
    lost = "CUDA error" in text or "DefaultCPUAllocator" in text
    if isinstance(error, devices) or deliberate or lost:
        return False
    distributed: Any = torch.distributed  # whose processes must run the same program
    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    return distributed.get_world_size() == 1 and sharded_by(layer) is None
