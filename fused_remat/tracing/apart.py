"""Runs a layer with other tensors, so that the layer and its arguments stay as they are."""

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
from fused_remat.layers.warn import listed
from fused_remat.tracing.state import get, shared_by
from fused_remat.tracing.values import SHIFT, SideEffect, Unreadable, attributes, map_tree

#: Attributes of a layer that is traced: its record, what it was traced as, and notes of that.
NOTES = (*RECORD, "_last", "_notes")


def _prefixed(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"layer.{name}": tensor for name, tensor in named.items()}


def replica(module: nn.Module, deep: bool = False) -> Any:
    """A module with the same tensors and attributes, whose tensors may be replaced: threads that
    call the module do not see it. `deep`: tensor attributes may be changed in place, too, and notes
    of conversion are left out.
    """
    # Not by the class: FSDP's makes another one.
    made: dict[nn.Module, Any] = {old: object.__new__(type(old)) for old in module.modules()}
    for old, new in made.items():
        params = parameters_of(old, recurse=False) if deep else {}
        for name, value in old.__dict__.items():
            noted = deep and name in NOTES
            if name not in old._parameters and not noted:  # FSDP1 has some in both
                new.__dict__[name] = value if name in params else _copied(value, made, deep)
        modules = {n: None if m is None else made[m] for n, m in old._modules.items()}
        tensors = {"_parameters": {**old._parameters}, "_buffers": {**old._buffers}}
        new.__dict__.update(tensors, _modules=modules)
    return made[module]


def _copied(value: Any, made: Mapping[nn.Module, Any], deep: bool) -> Any:
    """An attribute for a replica, of whose modules it speaks then; other objects are the same."""
    kind = type(value)
    if isinstance(value, nn.Module):
        return made.get(value, value)
    if kind is types.MethodType:
        return types.MethodType(value.__func__, _copied(value.__self__, made, deep))
    if kind is functools.partial:
        args, named = (_copied(part, made, deep) for part in (value.args, value.keywords))
        return functools.partial(_copied(value.func, made, deep), *args, **named)
    if kind is dict:
        return {key: _copied(part, made, deep) for key, part in value.items()}
    if kind in (list, tuple):
        return kind([_copied(part, made, deep) for part in value])
    if kind is set:
        return {*value}
    if deep and kind is Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def call_with(
    module: nn.Module, tensors: dict[str, Tensor], args: Any, kwargs: dict[str, Any]
) -> Any:
    """The module on arguments, with these tensors as its own."""
    return torch.func.functional_call(replica(module), tensors, args, kwargs)


def run_with(
    layer: nn.Module,
    forward: Callable[..., Any],
    named: Mapping[str, Tensor],
    given: Mapping[str, Any],
) -> Any:
    """`forward(**given)`, a method of `layer`, with the tensors `named` as its own."""
    return torch.func.functional_call(Caller(layer, forward), _prefixed(named), (), dict(given))


@contextlib.contextmanager
def forward_only() -> Iterator[None]:
    """Let code run as in training, but keep nothing for a backward pass.

    Raises: Unreadable in a backward pass inside.
    """
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_dropped, _no_backward):
        yield


def _dropped(_: Tensor) -> None:
    return None


def _no_backward(_: Any) -> Tensor:
    raise Unreadable("its forward runs a backward pass")


def check_effects(layer: nn.Module, forward: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise SideEffect if a call that is not traced changes more than its result.

    `forward`, a function of the layer's class, runs on a replica with copies of the arguments.
    What else it raises is left to the layer's own forward.
    """
    mine = replica(layer, deep=True)
    params = parameters_of(layer)
    named = {name: p.detach().requires_grad_(p.requires_grad) for name, p in params.items()}
    named |= {name: _cloned(b) for name, b in layer.named_buffers()}
    copied = map_tree(dict(given), _cloned)

    def watched(**given: Any) -> None:
        with unchanged([*map(vars, mine.modules()), given], shared_by(mine), named):
            types.MethodType(forward, mine)(**given)

    try:
        with forward_only():
            run_with(mine, watched, named, copied)
    except SideEffect:
        raise
    except Exception:
        pass


def _cloned(leaf: Any) -> Any:
    """Return a copy of a tensor, which may be changed in place, and anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad).clone()


@contextlib.contextmanager
def renumbered(layer: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Attributes of these names that are whole numbers are larger inside, by `SHIFT`."""
    found = [
        (module.__dict__, name, module.__dict__[name])
        for module in layer.modules()
        for name in names
        if type(module.__dict__.get(name)) is int
    ]
    try:
        for own, name, number in found:
            own[name] = number + SHIFT
        yield
    finally:
        for own, name, number in found:
            own[name] = number


@contextlib.contextmanager
def unchanged(
    roots: list[Any], shared: list[tuple[Any, str]], named: Mapping[str, Tensor]
) -> Iterator[None]:
    """Raise SideEffect if code changes what can be reached from `roots`, what classes and modules
    have by the names `shared` and what these hold, or tensors in place; put back what was held.

    Raise Unreadable if it changes parameters alone, as adapters do that add to weights for a call.
    """
    params = {id(own["_parameters"]) for own in roots if "_parameters" in own}
    versions = [t._version for t in named.values()]
    holders, generators = _holders(roots)
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
            found = swapped if id(holder) in params else changed
            found += _put_back(holder, before)
        for owner, name, value in bound:
            if get(owner, name) is not value:
                changed.append(name)
                if isinstance(owner, dict):
                    owner[name] = value
                else:
                    setattr(owner, name, value)
        drew = _drew(states)
    pairs = zip(named.items(), versions, strict=True)
    for (name, t), version in pairs:
        if t._version != version:
            (swapped if t.requires_grad else changed).append(name)
    changed = [name for name in changed if name not in swapped]  # a parameter, and then a buffer
    if changed:
        names = listed([*dict.fromkeys(changed)])
        raise SideEffect(f"its forward changes {names}, which a block would not repeat")
    if swapped:
        raise Unreadable(f"its forward changes parameters ({listed([*dict.fromkeys(swapped)])})")
    if drew:
        raise SideEffect("it draws random numbers outside of PyTorch's default generator")


@functools.cache
def _generators() -> dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]]:
    """By the class of a random generator, what gets the state of one, and what sets it."""
    old, new = numpy.random.RandomState, numpy.random.Generator  # which numpy loads when asked
    return {
        random.Random: (random.Random.getstate, random.Random.setstate),
        torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
        old: (old.get_state, old.set_state),
        new: (lambda g: g.bit_generator.state, lambda g, s: setattr(g.bit_generator, "state", s)),
    }


def _drew(before: list[tuple[Any, Any]]) -> bool:
    """Whether random generators have another state than before, which is set again."""
    changed = [pickle.dumps(_generators()[type(g)][0](g)) != pickle.dumps(s) for g, s in before]
    for generator, state in before if any(changed) else ():
        _generators()[type(generator)][1](generator, state)
    return any(changed)


def _holders(roots: list[Any]) -> tuple[list[tuple[Any, list[Any]]], list[Any]]:
    """All lists, dicts and sets that can be reached, also by attributes, and what they hold; and
    all random generators besides PyTorch's default ones."""
    generators: list[Any] = [random._inst, numpy.random.mtrand._rand]
    found, seen, todo = list[tuple[Any, list[Any]]](), set[int](), [*roots]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (Tensor, type, types.ModuleType)):
            continue
        seen.add(id(value))
        if type(value) in _generators():
            generators.append(value)
        elif isinstance(value, _HOLDERS):
            found.append((value, _items(value)))
            todo += found[-1][1]
        elif isinstance(value, tuple):
            todo += value
        elif hasattr(value, "__dict__"):
            todo.append(vars(value))
        elif _is_object(value):
            found.append((value, _items(value)))
            todo += found[-1][1]
    return found, generators


_HOLDERS = (list, dict, set, deque)


def _is_object(value: Any) -> bool:
    """Whether a value has attributes, and is neither code nor machinery of a library."""
    package = type(value).__module__.partition(".")[0]
    return package not in _LIBRARIES and bool(attributes(value))


_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"} - {"__main__", "types"}


def _items(holder: Any) -> list[Any]:
    if isinstance(holder, _HOLDERS) and not isinstance(holder, dict):
        return [*holder]
    pairs = holder if isinstance(holder, dict) else attributes(holder)
    return [*itertools.chain(*pairs.items())]


def _put_back(holder: Any, before: list[Any]) -> list[str]:
    """What of a list, dict or set is not as it was: the keys, or its class."""
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
