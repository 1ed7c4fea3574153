"""Users' forward hooks under replay: those that only look fire once, those that act run again.

A hook *acts* when it returns something, changes in place what it was given or a parameter or buffer
of the layer, sets an attribute of any module of the layer (as weight_norm does), draws random
numbers, or switches gradients on or off. Not seen, as autograd does not see it either: changes
through `.data` and `.numpy()`.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fused_remat.ops.draws import Draws, is_ours

_TABLES = ("_forward_pre_hooks", "_forward_hooks")
_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

Hook = Callable[..., Any]
Key = tuple[int, str, int]  # module, table, id of the hook


class HookRun:
    """The hooks below `root` in one run of it, and which of them a replay runs again.

    A replay calls hooks of the first run only, also those removed since. Besides the hooks that
    acted it calls what came before the last of them, since a hook may hand things to a later one;
    but PyTorch's own (weight_norm, pruning, FSDP) need no others.

    >>> root = nn.Sequential(nn.ReLU())
    >>> _ = root[0].register_forward_hook(lambda module, args, out: print("called"))
    >>> hooks, x = HookRun(root), torch.ones(1)
    >>> with hooks.first():
    ...     _ = root(x)
    called
    >>> with hooks.again():
    ...     _ = root(x)
    """

    def __init__(self, root: nn.Module) -> None:
        self._all = list(root.modules())
        self._modules = self._all[1:]  # the root's own hooks are called outside
        self._states = [(m, {n: m.__dict__[n].copy() for n in _FLAGS}) for m in self._modules]
        self._hooks: dict[Key, Hook] = {
            (i, table, hook_id): hook
            for i, module in enumerate(self._modules)
            for table in _TABLES
            for hook_id, hook in module.__dict__[table].items()
        }
        self._calls: list[tuple[Key, bool]] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Hooks called inside are watched."""
        watchers = {key: self._watcher(key, hook) for key, hook in self._hooks.items()}
        # Entries change rather than tables: a hook may remove itself, or register another.
        try:
            for (i, table, hook_id), watcher in watchers.items():
                self._modules[i].__dict__[table][hook_id] = watcher
            yield
        finally:
            for (i, table, hook_id), watcher in watchers.items():
                entries = self._modules[i].__dict__[table]
                if entries.get(hook_id) is watcher:
                    entries[hook_id] = self._hooks[i, table, hook_id]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Only the hooks to run again are there, as the first run had them."""
        needed = self._needed()
        now = [(m, {n: m.__dict__[n] for n in _TABLES + _FLAGS}) for m in self._modules]
        try:
            for i, (module, flags) in enumerate(self._states):
                # Checkpoint ends a replay by raising, which is none of a hook's business.
                module.__dict__.update(flags, _forward_hooks_always_called=OrderedDict())
                for table in _TABLES:
                    kept = {k: h for k, h in needed.items() if k[:2] == (i, table)}
                    module.__dict__[table] = OrderedDict((k[2], h) for k, h in kept.items())
            yield
        finally:
            for module, tables in now:
                module.__dict__.update(tables)

    def _watcher(self, key: Key, hook: Hook) -> Hook:
        def watcher(module: nn.Module, *given: Any) -> Any:
            # With other threads about, operators are watched; not PyTorch's own (FSDP's gather).
            watched = threading.active_count() > 1 and not _is_pytorchs(hook)
            draws, start = Draws(), time.perf_counter()
            before = _Seen(self._all, given)
            with draws if watched else contextlib.nullcontext():
                result = hook(module, *given)
            elapsed, after = time.perf_counter() - start, _Seen(self._all, given)
            drew = before.random != after.random and (
                not watched or is_ours(draws, _random_states, operator.eq, elapsed)
            )
            acted = result is not None or drew or before.differs(after)
            self._calls.append((key, acted))
            return result

        return watcher

    def _needed(self) -> dict[Key, Hook]:
        last = -1
        for position, (key, acted) in enumerate(self._calls):
            if acted and not _is_pytorchs(self._hooks[key]):
                last = position
        called = enumerate(self._calls)
        keys = {key for position, (key, acted) in called if acted or position < last}
        return {key: hook for key, hook in self._hooks.items() if key in keys}


def _is_pytorchs(hook: Hook) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def _random_states() -> list[bytes]:
    """Of torch's default generators."""
    states = [torch.get_rng_state().numpy().tobytes()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return states


class _Seen:
    """What a hook can change that a replay needs, at one moment; `random` apart."""

    def __init__(self, modules: list[nn.Module], given: tuple[Any, ...]) -> None:
        objects = tree_leaves(given)
        for module in modules:
            state = module.__dict__
            objects += state.values()
            objects += state["_modules"].values()
            for tensors in (state["_parameters"], state["_buffers"]):
                objects += tensors.values()
        self.objects = objects
        # An inference tensor has no version; it cannot change outside inference mode.
        self.versions = [
            t._version for t in objects if isinstance(t, Tensor) and not t.is_inference()
        ]
        self.grad_mode = torch.is_grad_enabled()
        self.random = _random_states()

    def differs(self, other: _Seen) -> bool:
        return (
            len(self.objects) != len(other.objects)
            or not all(map(operator.is_, self.objects, other.objects))
            or self.versions != other.versions
            or self.grad_mode != other.grad_mode
        )
