"""Containment of failures: if a block raises, the layer's own forward runs instead."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fused_remat.autograd.accumulate import sharded_by
from fused_remat.layers.eligibility import parameters_of


def is_contained(layer: nn.Module) -> bool:
    """Return whether the own forward may run: several processes must run the same program."""
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    return distributed.get_world_size() == 1 and sharded_by(layer) is None


class Rescue:
    """The own forward of a fused layer in place of its block's backward, with `count` `roots`."""

    def __init__(
        self, layer: Any, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor | None]
    ) -> None:
        self.layer, self.training = layer, layer.training
        self.count, self._roots = 0, list[Any]()
        #: Index of the block's output among the leaves of the result, its view, and its layout.
        self.result: tuple[int, Any, Any] | None = None
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

    def returned(self, out: Tensor, result: Any) -> None:
        """Note the position of the block's output `out`, or of a view of it, in the `result`."""
        for value in self.arguments.values():
            if type(value) in (tuple, list, dict):
                flat = type(value) is tuple and {Tensor}.issuperset(map(type, value))
                if any(map(_needs_grad, value if flat else tree_leaves(value))):
                    return  # of which no gradient would be returned
        for i, leaf in enumerate((out,) if result is out else tree_leaves(result)):
            if isinstance(leaf, Tensor) and leaf.data_ptr() == out.data_ptr():
                self.result = i, (leaf.size(), leaf.stride(), 0), (out.size(), out.stride())
                return

    def contains(self, error: Exception) -> bool:
        """Return whether the run may continue after this exception of the block."""
        return is_unexpected(error) and is_contained(self.layer)

    def gradients(self, error: Exception, names: tuple[str, ...], dy: Tensor) -> list[Any] | None:
        """Return the gradients of the block's `names`, then of `roots`; None if impossible."""
        layer = self.layer
        if self.result is None or layer.training != self.training:
            return None
        held = [v for v in (*self.arguments.values(), *self._roots) if v is not None]
        if any(_alive(value) is None for value in held):
            return None
        from fused_remat.layers.fallback import Caller

        copies: dict[int, Tensor] = {}

        def copy(leaf: Any) -> Any:
            t = _alive(leaf)
            if not _needs_grad(t):
                return t
            return copies.setdefault(id(t), t.detach().requires_grad_())

        arguments = tree_map(copy, self.arguments)
        state = {f"layer.{name}": copy(p) for name, p in layer.named_parameters()}
        roots = [copies.get(id(t)) for t in self.roots]
        sources = {name: copies.get(id(_alive(t))) for name, t in self.sources.items()}
        wanted = list(dict.fromkeys(t for t in (*sources.values(), *roots) if t is not None))
        if len(wanted) < len({*map(id, sources.values()), *map(id, roots)}):
            return None  # such as the activation function's own tensor
        i, view, (size, stride) = self.result
        cast = contextlib.nullcontext() if self.autocast is None else torch.autocast(*self.autocast)
        with torch.enable_grad(), cast:
            caller = Caller(layer, functools.partial(layer.stock.forward, layer))
            result = torch.func.functional_call(caller, state, (), arguments)
        like = torch.empty_strided(size, stride, dtype=dy.dtype, device=dy.device).copy_(dy)
        y = tree_leaves(result)[i]
        dy = like.as_strided(*view).to(y.dtype)
        found = torch.autograd.grad(y, wanted, dy, allow_unused=True)
        grads = dict(zip(map(id, wanted), found, strict=True))
        layer._block_failed(error)
        # A tensor under two names of the block gets its gradient once.
        ordered = (*(sources.get(name) for name in names), *roots)
        return [None if t is None else grads.pop(id(t), None) for t in ordered]


def _alive(value: Any) -> Any:
    return value() if isinstance(value, weakref.ref) else value


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def is_unexpected(error: Exception) -> bool:
    """Return whether `error` was not raised on purpose: the own forward may succeed."""
    if os.environ.get("FUSED_REMAT_STRICT", "0") not in ("", "0"):
        return False
    # Errors of a device that is out of memory or lost, of this library, of the caller's functions.
    devices = (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError)
    text, callers = str(error), getattr(error, "callers", False)
    deliberate = text.startswith(("fused_remat", "replay check")) or callers
    lost = "CUDA error" in text or "DefaultCPUAllocator" in text
    return not (isinstance(error, devices) or deliberate or lost)
