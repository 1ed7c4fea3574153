"""PyTorch's own forward under checkpoint, replayed on what the first run read.

`torch.utils.checkpoint` alone calls the module again in backward, with whatever parameters,
buffers, modes and hooks it has by then: after `functional_call`, an optimizer step, `eval()`, a
buffer update or `handle.remove()` that is another function, and the gradients would be wrong
without a word.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fused_remat.autograd.replay_check import changed
from fused_remat.layers import eligibility
from fused_remat.ops.activation import activation_name
from fused_remat.ops.draws import Draws, is_ours


class _Caller(nn.Module):
    """Gives `functional_call` a module whose forward is `forward`, over the layer's tensors."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self._forward = forward

    def forward(self, *args: Any) -> Tensor:
        return self._forward(*args)


def _kind(value: Any) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
    plain = type(value) in (Tensor, nn.Parameter)
    return (tuple(value.shape), value.dtype, value.device) if plain else None


@contextlib.contextmanager
def _attributes_restored(layer: nn.Module) -> Iterator[None]:
    before = [(module, module.__dict__.copy()) for module in layer.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.update(attributes)
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]


def checkpointed(layer: nn.Module, forward: Callable[..., Tensor], *args: Any) -> Tensor:
    """`forward(*args)`, a method of `layer`, under non-reentrant checkpoint.

    Backward replays it with the parameters of now (changing one in place raises RuntimeError, and
    so does moving, casting or resizing one), copies of the buffers of now, the training flags of
    now, and the submodules' hooks of now: again those that acted (`HookRun`), while those that only
    look fire once. It leaves attributes of modules as it found them.

    >>> layer = nn.Linear(2, 2)
    >>> y = checkpointed(layer, layer.forward, torch.ones(3, 2))
    >>> y.sum().backward(); layer.bias.grad
    tensor([3., 3.])
    """
    # Sharded ones (DTensor, and ZeRO-3's, which are empty until they are gathered) are left to the
    # hooks that gather them, which the replay calls again.
    plain = [
        (name, p)
        for name, p in layer.named_parameters()
        if type(p) in (Tensor, nn.Parameter) and not hasattr(p, "ds_id")
    ]
    params = {f"layer.{name}": p for name, p in plain}
    buffers = {f"layer.{name}": b.detach().clone() for name, b in layer.named_buffers()}
    count = len(args)
    flat = (*args, *params.values())  # checkpoint saves its tensor arguments, with their versions
    names = (*(f"argument {i}" for i in range(count)), *(name for name, _ in plain))
    kinds = [_kind(value) for value in flat]
    modes = [(module, module.training) for module in layer.modules()]
    hooks = HookRun(layer)
    first = True

    def run(given: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        nonlocal first
        if first:
            first = False
            with hooks.first():
                return forward(*given)
        for name, kind, value in zip(names, kinds, (*given, *tensors), strict=True):
            if kind is not None and kind != _kind(value):
                raise changed(name, kind, value)
        state = dict(zip(params, tensors, strict=True))
        state |= {name: b.clone() for name, b in buffers.items()}
        with _attributes_restored(layer), hooks.again():
            for module, training in modes:
                module.training = training
            out: Tensor = torch.func.functional_call(_Caller(layer, forward), state, given)
            return out

    return checkpoint(lambda *a: run(a[:count], *a[count:]), *flat, use_reentrant=False)  # type: ignore[no-any-return]


#: What the kernel computes for `layer.activation_relu_or_gelu`; at 0 it is not used.
_COMPUTED = {1: "relu", 2: "gelu"}


def is_exact(layer: nn.TransformerEncoderLayer, params: Mapping[str, Tensor | None]) -> bool:
    """Whether the kernel computes what the layer says, in eval and without masks.

    >>> layer = nn.TransformerEncoderLayer(8, 2, activation=nn.GELU(approximate="tanh"))
    >>> is_exact(layer.eval(), {})
    False
    """
    if layer.training or eligibility.why_not_module(layer) is not None:
        return False
    flag = layer.activation_relu_or_gelu
    if flag and _COMPUTED.get(flag) != activation_name(layer.activation):
        return False
    # It crashes on a missing bias or norm weight, unless all are missing.
    return None not in params.values() and not any(eligibility.dropout_ps(layer))


def padded(forward: Callable[..., Tensor], src: Tensor) -> Tensor:
    """`forward` on a strided nested tensor, as one padded batch; nested again.

    >>> src = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    >>> out = padded(lambda x, src_key_padding_mask: x + src_key_padding_mask.sum(), src)
    >>> [tuple(rows.shape) for rows in out.unbind()], out[0][0, 0].item()
    ([(2, 4), (3, 4)], 2.0)
    """
    lengths = [len(sequence) for sequence in src.unbind()]
    x = src.to_padded_tensor(0.0)
    positions = torch.arange(x.shape[1], device=src.device)
    excluded = positions >= torch.tensor(lengths, device=src.device).unsqueeze(1)
    out = forward(x, src_key_padding_mask=excluded)
    rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
    nested: Tensor = torch.nested.as_nested_tensor(rows)
    return nested


_lock = threading.Lock()
_running = 0
_before = True


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Layers called inside run their submodules, whatever the mode.

    The switch is PyTorch's and global: the last of several threads to leave turns it back.

    >>> with off():
    ...     torch.backends.mha.get_fastpath_enabled()
    False
    >>> torch.backends.mha.get_fastpath_enabled()
    True
    """
    global _running, _before
    with _lock:
        if _running == 0:
            _before = torch.backends.mha.get_fastpath_enabled()
        _running += 1
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if _running == 0:
                torch.backends.mha.set_fastpath_enabled(_before)


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
