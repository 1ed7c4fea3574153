"""Runs of a layer with other tensors that leave the layer, its arguments and modules unchanged."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from fused_remat.layers.eligibility import parameters_of
from fused_remat.layers.fallback import Caller
from fused_remat.layers.record import NOTES as RECORD
from fused_remat.layers.record import listed
from fused_remat.tracing.state import get, shared_by
from fused_remat.tracing.values import SHIFT, SideEffect, Untraceable, attributes, map_tree

#: Attributes of a layer that is traced: its record, its trace, and notes of that.
NOTES = (*RECORD, "_last", "_notes")
_HOLDERS = (list, dict, set, deque)
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"} - {"__main__", "types"}


def replica(module: nn.Module, deep: bool = False) -> Any:
    """Return a module with the same tensors and attributes, whose tensors may be replaced.

    Threads that call the module do not see it. `deep`: tensor attributes may also be changed in
    place, and notes of the conversion are left out.
    """
    # Not by calling the class: FSDP's returns another one.
    copies: dict[nn.Module, Any] = {old: object.__new__(type(old)) for old in module.modules()}
    for old, new in copies.items():
        params = parameters_of(old, recurse=False) if deep else {}
        for name, value in old.__dict__.items():
            is_note = deep and name in NOTES
            if name not in old._parameters and not is_note:  # FSDP1 has some in both
                new.__dict__[name] = value if name in params else _copied(value, copies, deep)
        modules = {n: None if m is None else copies[m] for n, m in old._modules.items()}
        tensors = {"_parameters": {**old._parameters}, "_buffers": {**old._buffers}}
        new.__dict__.update(tensors, _modules=modules)
    return copies[module]


def _copied(value: Any, copies: Mapping[nn.Module, Any], deep: bool) -> Any:
    """Return an attribute for a replica that refers to the replica's modules."""
    kind = type(value)
    copy = functools.partial(_copied, copies=copies, deep=deep)
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if kind is types.MethodType:
        return types.MethodType(value.__func__, copy(value.__self__))
    if kind is functools.partial:
        return functools.partial(copy(value.func), *copy(value.args), **copy(value.keywords))
    if kind is dict:
        return {key: copy(part) for key, part in value.items()}
    if kind in (list, tuple):
        return kind(map(copy, value))
    if kind is set:
        return {*value}
    if deep and kind is Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def call_with(
    module: nn.Module, tensors: dict[str, Tensor], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Call a module with other tensors as its own."""
    return torch.func.functional_call(replica(module), tensors, args, kwargs)


def run_with(
    layer: nn.Module,
    forward: Callable[..., Any],
    named: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
) -> Any:
    """Call `forward`, a method of `layer`, with the tensors `named` as the layer's own."""
    tensors = {f"layer.{name}": tensor for name, tensor in named.items()}
    return torch.func.functional_call(Caller(layer, forward), tensors, (), dict(arguments))


@contextlib.contextmanager
def forward_only() -> Iterator[None]:
    """Let code run as in training, but keep nothing for a backward pass.

    Raises: Untraceable if the code runs a backward pass.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _no_backward)
    with torch.enable_grad(), hooks:
        yield


def _no_backward(_: Any) -> Tensor:
    raise Untraceable("its forward runs a backward pass")


@contextlib.contextmanager
def renumbered(layer: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Add `SHIFT` to the integers among attributes of these names inside the context."""
    numbers = [
        (module.__dict__, name, module.__dict__[name])
        for module in layer.modules()
        for name in names
        if type(module.__dict__.get(name)) is int
    ]
    try:
        for own, name, number in numbers:
            own[name] = number + SHIFT
        yield
    finally:
        for own, name, number in numbers:
            own[name] = number


def check_effects(
    layer: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    """Raise SideEffect if a call that is not traced changes more than its result.

    `forward`, a function of the layer's class, runs on a replica with copies of the arguments.
    Other errors that it raises are left to the layer's own forward.
    """
    copy = replica(layer, deep=True)
    params = parameters_of(layer)
    named = {name: p.detach().requires_grad_(p.requires_grad) for name, p in params.items()}
    named |= {name: _cloned(b) for name, b in layer.named_buffers()}
    copies = map_tree(dict(arguments), _cloned)

    def watched(**arguments: Any) -> None:
        with unchanged([*map(vars, copy.modules()), arguments], shared_by(copy), named):
            types.MethodType(forward, copy)(**arguments)

    try:
        with forward_only():
            run_with(copy, watched, named, copies)
    except SideEffect:
        raise
    except Exception:  # of the layer's own code
        pass


def _cloned(leaf: Any) -> Any:
    """Return a copy of a tensor that may be changed in place, and anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad).clone()


@contextlib.contextmanager
def unchanged(
    roots: list[Any], shared: list[tuple[Any, str]], named: Mapping[str, Tensor]
) -> Iterator[None]:
    """Raise SideEffect if code inside changes something other than its result, and restore that.

    Args:
        roots: objects that must not change, nor anything that can be reached from them.
        shared: names in classes and modules whose values must not change, nor what these hold.
        named: tensors that must not be changed in place.

    Raises: SideEffect; Untraceable if parameters alone change, as by adapters that add to weights
        for a call.
    """
    params = {id(own["_parameters"]) for own in roots if "_parameters" in own}
    versions = [t._version for t in named.values()]
    holders, generators = _reachable(roots)
    bound = [(owner, name, get(owner, name)) for owner, name in shared]
    held = [value for *_, value in bound]
    held += [v for value in held if _is_object(value) for v in attributes(value).values()]
    holders += [(h, _items(h)) for h in held if isinstance(h, _HOLDERS) or _is_object(h)]
    states = [(g, _generators()[type(g)][0](g)) for g in generators]
    changed, swapped = list[str](), list[str]()
    try:
        yield
    finally:
        for holder, before in holders:
            names = swapped if id(holder) in params else changed
            names += _restore(holder, before)
        for owner, name, value in bound:
            if get(owner, name) is not value:
                changed.append(name)
                if isinstance(owner, dict):
                    owner[name] = value
                else:
                    setattr(owner, name, value)
        drew = _restore_generators(states)
    for (name, t), version in zip(named.items(), versions, strict=True):
        if t._version != version:
            (swapped if t.requires_grad else changed).append(name)
    changed = [name for name in changed if name not in swapped]  # a parameter, and then a buffer
    if changed:
        text = listed([*dict.fromkeys(changed)])
        raise SideEffect(f"its forward changes {text}, which a block would not repeat")
    if swapped:
        raise Untraceable(f"its forward changes parameters ({listed([*dict.fromkeys(swapped)])})")
    if drew:
        raise SideEffect("it draws random numbers outside of PyTorch's default generator")


@functools.cache
def _generators() -> dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]]:
    """Return by the class of a random generator how to get and set its state."""
    old, new = numpy.random.RandomState, numpy.random.Generator  # numpy loads them on access
    return {
        random.Random: (random.Random.getstate, random.Random.setstate),
        torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
        old: (old.get_state, old.set_state),
        new: (lambda g: g.bit_generator.state, lambda g, s: setattr(g.bit_generator, "state", s)),
    }


def _restore_generators(before: list[tuple[Any, Any]]) -> bool:
    """Return whether random generators have another state than before, which is restored."""
    changed = [pickle.dumps(_generators()[type(g)][0](g)) != pickle.dumps(s) for g, s in before]
    for generator, state in before if any(changed) else ():
        _generators()[type(generator)][1](generator, state)
    return any(changed)


def _reachable(roots: list[Any]) -> tuple[list[tuple[Any, list[Any]]], list[Any]]:
    """Return the containers and objects that can be reached, with their items, and generators.

    The random generators are those among the objects, Python's and numpy's; not PyTorch's default.
    """
    generators: list[Any] = [random._inst, numpy.random.mtrand._rand]
    holders, seen, todo = list[tuple[Any, list[Any]]](), set[int](), [*roots]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (Tensor, type, types.ModuleType)):
            continue
        seen.add(id(value))
        if type(value) in _generators():
            generators.append(value)
        elif isinstance(value, tuple):
            todo += value
        elif hasattr(value, "__dict__") and not isinstance(value, _HOLDERS):
            todo.append(vars(value))
        elif isinstance(value, _HOLDERS) or _is_object(value):
            holders.append((value, _items(value)))
            todo += holders[-1][1]
    return holders, generators


def _is_object(value: Any) -> bool:
    """Return whether a value has attributes, and belongs to no library's own machinery."""
    package = type(value).__module__.partition(".")[0]
    return package not in _LIBRARIES and bool(attributes(value))


def _items(holder: Any) -> list[Any]:
    if isinstance(holder, _HOLDERS) and not isinstance(holder, dict):
        return [*holder]
    pairs = holder if isinstance(holder, dict) else attributes(holder)
    return [*itertools.chain(*pairs.items())]


def _restore(holder: Any, before: list[Any]) -> list[str]:
    """Restore a container or object; return the keys that had changed, or its class's name."""
    now = _items(holder)
    if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
        return []
    names = [type(holder).__name__]
    if not isinstance(holder, _HOLDERS):
        names = []
        for name, value in zip(before[::2], before[1::2], strict=True):
            if getattr(holder, name, holder) is not value:
                names.append(name)
                setattr(holder, name, value)
    elif isinstance(holder, dict):
        old, new = (dict(zip(i[::2], i[1::2], strict=True)) for i in (before, now))
        names = [str(k) for k in {**old, **new} if old.get(k, holder) is not new.get(k, holder)]
        holder.clear()
        holder.update(old)
    else:
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(before)
    return names
