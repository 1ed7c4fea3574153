"""What autograd saves while a model runs: by layer and by name, each storage counted once.

Storages are held weakly: what is recorded here is freed when it would be without a record.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fused_remat.execution.observe import OBSERVERS, BlockRun
from fused_remat.graph.schedule import kept_bytes

#: Name of what non-reentrant `torch.utils.checkpoint` holds: the arguments of what it wraps.
CHECKPOINT = "checkpoint"
_UNNAMED = "saved"


@dataclass(eq=False, slots=True)
class Saved:
    """One storage that autograd saved.

    Attributes:
        layer: the index of the layer that was running, -1 outside any.
        name: of a fused block's graph, or of autograd's, as "AddmmBackward0.mat1".
        fused: whether it is of a fused block's graph.
        shape, dtype: of the tensor that was saved first; no shape if it is nested.
        nbytes: of the storage.
        is_input: whether it was passed to the model.
        offloaded: whether it is a copy on the host of what was on the device.
        by: indices of all layers that saved it.
    """

    layer: int
    name: str
    fused: bool
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    nbytes: int
    is_input: bool
    offloaded: bool = False
    by: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Held:
    """A tensor as it is packed: found again in the graph by its identity."""

    tensor: Tensor
    order: int
    saved: list[Saved] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Block:
    """A call of a fused block: the names of what it saves, and the bytes that it should keep."""

    names: dict[StorageWeakRef, str]
    offloaded: frozenset[StorageWeakRef]
    predicted: Mapping[str, int]
    counted: bool = False


class SavedRecord:
    """Context manager around a forward: records what is saved in it.

    Args:
        exclude: tensors whose storages do not count: parameters and buffers.
        inputs: tensors to be marked as passed by the caller.

    Attributes:
        layer: the index of the layer that runs; the caller sets it. -1 is none.
        predicted: by layer, then by name, the bytes that its fused blocks' graphs ask for, those
            that are offloaded included.

    >>> x = torch.randn(8, 4, requires_grad=True)
    >>> record = SavedRecord(inputs=[x])
    >>> with record:
    ...     y = (x * x).exp()
    >>> for saved in record.named([y]):
    ...     print(saved.name, saved.nbytes, saved.is_input)
    MulBackward0.other 128 True
    ExpBackward0.result 128 False
    """

    def __init__(self, exclude: Iterable[Tensor] = (), inputs: Iterable[Tensor] = ()) -> None:
        self.layer = -1
        self.predicted: dict[int, dict[str, int]] = {}
        self._exclude = {key for t in exclude for key in _storages(t)}
        self._inputs = {key for t in inputs for key in _storages(t)}
        self._saved: dict[StorageWeakRef, Saved] = {}
        self._order = itertools.count()
        self._block: _Block | None = None
        self._thread = threading.get_ident()  # hooks on saved tensors are its alone
        pack: Callable[[Tensor], _Held] = self._pack
        if "torch._dynamo" in sys.modules:  # else nothing can be compiled, and it is slow to load
            pack = torch.compiler.disable(pack)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def __enter__(self) -> SavedRecord:
        self._hooks.__enter__()  # may raise: hooks can be disabled
        OBSERVERS.append(self._observe)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        OBSERVERS.remove(self._observe)
        self._block = None

    def claim(self, tensors: Iterable[Tensor]) -> None:
        """Count to the layer that begins what a checkpoint around it has saved of its inputs."""
        for key in (key for t in tensors for key in _storages(t)):
            saved = self._saved.get(key)
            if saved is not None and saved.layer == -1 and saved.name == CHECKPOINT:
                saved.layer = self.layer

    def named(self, outputs: Iterable[Tensor]) -> list[Saved]:
        """What is still held, in order, named after the graph that made `outputs`."""
        names = sorted(_names(outputs), key=lambda name: name[0].order)
        for held, name in names:
            for saved in held.saved:
                if saved.name == _UNNAMED:
                    saved.name = name
        return [saved for key, saved in self._saved.items() if not key.expired()]

    def _observe(self, invocation: BlockRun) -> None:
        if threading.get_ident() != self._thread:
            return
        names = {key: name for name, t in _block_tensors(invocation) for key in _storages(t)}
        hosts = frozenset(key for _, t in invocation.offloaded for key in _storages(t))
        self._block = _Block(names, hosts, _predicted(invocation))

    def _pack(self, t: Tensor) -> _Held:
        held = _Held(t, next(self._order))
        name_else = CHECKPOINT if _saving_module() == "torch.utils.checkpoint" else _UNNAMED
        for key, nbytes in _storages(t).items():
            name = self._fused_name(key)
            if key in self._exclude or not nbytes:
                continue
            saved = self._saved.get(key)
            if saved is None:
                saved = self._saved[key] = Saved(
                    self.layer, name or name_else, name is not None,
                    None if t.is_nested else tuple(t.shape), t.dtype, nbytes, key in self._inputs,
                    self._block is not None and key in self._block.offloaded,
                )  # fmt: skip
            saved.by.add(self.layer)
            held.saved.append(saved)
        return held

    def _fused_name(self, key: StorageWeakRef) -> str | None:
        """The block's name of what is saved now; counts what the block predicts, once.

        Not earlier: of a block under a checkpoint nothing is saved.
        """
        block = self._block
        if block is None or key not in block.names:
            return None
        if not block.counted:
            block.counted = True
            predicted = self.predicted.setdefault(self.layer, {})
            for name, nbytes in block.predicted.items():
                predicted[name] = predicted.get(name, 0) + nbytes
        return block.names[key]


def _saving_module() -> str:
    """Name of the module that runs what saves a tensor; called by `SavedRecord._pack`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("torch._dynamo"):
        frame = frame.f_back  # torch.compiler.disable's
    return str(frame.f_globals["__name__"])


def _unpack(held: _Held) -> Tensor:
    return held.tensor


def _storages(t: Tensor) -> dict[StorageWeakRef, int]:
    """The storages of `t` and their bytes; several for sparse tensors and wrapper subclasses."""
    if is_traceable_wrapper_subclass(t):
        inner, _ = t.__tensor_flatten__()
        held = [getattr(t, name) for name in inner]
        parts = [part for part in held if isinstance(part, Tensor)]  # a DTensor has its mesh
    elif t.layout is torch.sparse_coo:
        parts = [t._indices(), t._values()]
    elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [t.crow_indices(), t.col_indices(), t.values()]
    elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [t.ccol_indices(), t.row_indices(), t.values()]
    elif t.layout is not torch.strided:  # mkldnn: opaque
        return {}
    else:
        storage = t.untyped_storage()
        return {StorageWeakRef(storage): storage.nbytes()}
    return {key: nbytes for part in parts for key, nbytes in _storages(part).items()}


def _block_tensors(invocation: BlockRun) -> Iterator[tuple[str, Tensor]]:
    """What a block saves, by name; of an activation, each of its pieces."""
    execution, _, tensors, output, kept, saves, offloaded = invocation
    yield from offloaded
    for name, t, saved in zip(execution.call.graph.tensors, tensors, saves, strict=True):
        if t is not None and saved:
            yield name, t
    if execution.plan.keeps_output:
        yield "output", output
    yield from zip((name for name, _ in execution.pieces()), kept, strict=True)


def _predicted(invocation: BlockRun) -> Mapping[str, int]:
    call, execution, tensors = invocation.call, invocation.execution, invocation.tensors
    given = {n: t for n, t in zip(call.graph.tensors, tensors, strict=True) if t is not None}
    shapes = {name: tuple(t.shape) for name, t in given.items()} | {**execution.shapes}
    sizes = {name: given[name].element_size() for name in call.graph.inputs}
    first = call.graph.inputs[0]
    kept = dict(kept_bytes(call.graph, call.save, call.needs_grad, shapes, sizes[first], sizes))
    for name, saved in zip(call.graph.tensors, invocation.saves, strict=True):
        if not saved:
            kept.pop(name, None)
        elif name in given and name in (*call.graph.inputs, "seed"):  # in a segment always
            kept.setdefault(name, given[name].numel() * given[name].element_size())
    return kept


def _names(outputs: Iterable[Tensor]) -> Iterator[tuple[_Held, str]]:
    """What `SavedRecord` packed, and autograd's names of it, walking back from `outputs`.

    Nothing is unpacked: what other hooks packed (a checkpoint's, say) is left alone.
    """
    waiting = [t.grad_fn for t in outputs]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for attribute in _raw_attributes(type(node)):
            raw = getattr(node, attribute)
            name = f"{node.name()}.{attribute.removeprefix('_raw_saved_')}"
            parts = raw if isinstance(raw, (tuple, list)) else (raw,)
            for i, part in enumerate(parts):
                held = getattr(part, "data", None)
                if isinstance(held, _Held):
                    yield held, name if part is raw else f"{name}[{i}]"


@functools.cache
def _raw_attributes(node: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
