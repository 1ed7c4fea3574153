"""Bytes that autograd saves, by layer and name.

A record refers to storages weakly, so it does not delay freeing any memory.
"""

from __future__ import annotations

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

from fused_remat.execution.observe import LOSSES, OBSERVERS, BlockRun, LossRun
from fused_remat.layers.fallback import packed_by

#: Name for what non-reentrant `torch.utils.checkpoint` saves: the arguments of what it wraps.
CHECKPOINT = "checkpoint"
_UNNAMED = "saved"


@dataclass(eq=False, slots=True)
class Saved:
    """One storage that autograd saved."""

    layer: int  # index of the layer that was running; -1 outside the layers
    name: str  # in a fused block's graph, or in autograd's ("AddmmBackward0.mat1")
    fused: bool  # whether a fused block saved it
    shape: tuple[int, ...] | None  # of the tensor that was saved first; None if it is nested
    dtype: torch.dtype
    nbytes: int  # of the storage
    is_input: bool  # whether the caller passed it to the model
    offloaded: bool = False  # whether it is a copy in the host's memory
    by: set[int] = field(default_factory=set)  # indices of all layers that saved it


@dataclass(eq=False, slots=True)
class _Held:
    """A packed tensor. The graph holds this object, which identifies the saved storages."""

    tensor: Tensor
    order: int
    saved: list[Saved] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Block:
    """A call of a fused block: names of what it saves, and the bytes its graph predicts."""

    names: dict[StorageWeakRef, str]
    offloaded: frozenset[StorageWeakRef]
    predicted: Mapping[str, int]
    counted: bool = False


class SavedBytes:
    """Context manager that records what autograd saves for backward, each storage once.

    Args:
        exclude: tensors whose storages do not count, such as parameters and the caller's masks.
        inputs: tensors that the caller passes to the model; they are marked.
        on_block: called with `layer` and the run of every fused block that keeps something.

    Attributes:
        layer: index of the layer that is running, set by the caller; -1 outside the layers.
        predicted: bytes that the graphs of fused blocks predict, by layer and name, including
            offloaded ones.

    >>> x = torch.randn(8, 4, requires_grad=True)
    >>> with SavedBytes() as saved:
    ...     y = (x * x).exp()
    >>> saved.total  # x, and the result of exp
    256
    """

    def __init__(
        self,
        exclude: Iterable[Tensor] = (),
        inputs: Iterable[Tensor] = (),
        on_block: Callable[[int, BlockRun], None] | None = None,
    ) -> None:
        self.layer, self._on_block = -1, on_block
        self.predicted: dict[int, dict[str, int]] = {}
        self._exclude = {key for t in exclude for key in _storages(t)}
        self._inputs = {key for t in inputs for key in _storages(t)}
        self._saved: dict[StorageWeakRef, Saved] = {}
        self._order = itertools.count()
        self._block: _Block | None = None
        self._thread = threading.get_ident()  # saved-tensor hooks apply to this thread alone
        pack: Callable[[Tensor], _Held] = self._pack
        if "torch._dynamo" in sys.modules:  # slow to import; without it nothing is compiled
            pack = torch.compiler.disable(pack)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()  # raises if saved-tensor hooks are disabled
        OBSERVERS.append(self._observe)
        LOSSES.append(self._observe_loss)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        OBSERVERS.remove(self._observe)
        LOSSES.remove(self._observe_loss)
        self._block = None

    @property
    def total(self) -> int:
        """Bytes saved so far, including what was freed since."""
        return sum(saved.nbytes for saved in self._saved.values())

    def claim(self, tensors: Iterable[Tensor]) -> None:
        """Attribute inputs that a checkpoint around the current layer saved to that layer."""
        for key in (key for t in tensors for key in _storages(t)):
            saved = self._saved.get(key)
            if saved is not None and saved.layer == -1 and saved.name == CHECKPOINT:
                saved.layer = self.layer

    def named(self, outputs: Iterable[Tensor]) -> list[Saved]:
        """Return the storages that are still alive, named after the graph of `outputs`."""
        packed = [(held, name) for name, held in packed_by(outputs) if isinstance(held, _Held)]
        for held, name in sorted(packed, key=lambda pair: pair[0].order):
            for saved in held.saved:
                if saved.name == _UNNAMED:
                    saved.name = name
        return [saved for key, saved in self._saved.items() if not key.expired()]

    def _observe(self, run: BlockRun) -> None:
        if threading.get_ident() != self._thread:
            return
        names = {key: name for name, t in _block_tensors(run) for key in _storages(t)}
        hosts = frozenset(key for _, t in run.offloaded for key in _storages(t))
        self._block = _Block(names, hosts, _predicted(run))
        if self._on_block is not None:
            self._on_block(self.layer, run)

    def _observe_loss(self, run: LossRun) -> None:
        if threading.get_ident() == self._thread:
            names = {key: name for name, t in run.kept.items() for key in _storages(t)}
            self._block = _Block(names, frozenset(), run.predicted)

    def _pack(self, t: Tensor) -> _Held:
        held = _Held(t, next(self._order))
        unfused = CHECKPOINT if _saving_module() == "torch.utils.checkpoint" else _UNNAMED
        for key, nbytes in _storages(t).items():
            name = self._fused_name(key)
            if key in self._exclude or not nbytes:
                continue
            saved = self._saved.get(key)
            if saved is None:
                saved = self._saved[key] = Saved(
                    self.layer, name or unfused, name is not None,
                    None if t.is_nested else tuple(t.shape), t.dtype, nbytes, key in self._inputs,
                    self._block is not None and key in self._block.offloaded,
                )  # fmt: skip
            saved.by.add(self.layer)
            held.saved.append(saved)
        return held

    def _fused_name(self, key: StorageWeakRef) -> str | None:
        """Return the name in the current block of what is being saved, or None.

        The first saved tensor counts the block's prediction: a block under a checkpoint saves
        nothing, so its prediction must not count.
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


def _predicted(run: BlockRun) -> Mapping[str, int]:
    """Return the bytes that the block's graph predicts it keeps, by name."""
    graph, kept = run.call.graph, run.call.kept_bytes(run.tensors)
    for name, t, saved in zip(graph.tensors, run.tensors, run.saves, strict=True):
        if not saved:
            kept.pop(name, None)
        elif t is not None and name in (*graph.inputs, "seed"):  # also in a segment
            kept.setdefault(name, t.nbytes)
    return kept


def _saving_module() -> str:
    """Return the name of the module whose code saves a tensor; called by `SavedBytes._pack`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("torch._dynamo"):
        frame = frame.f_back  # frames of torch.compiler.disable
    return str(frame.f_globals["__name__"])


def _storages(t: Tensor) -> dict[StorageWeakRef, int]:
    """Return the storages of `t` with their bytes; subclasses may have several."""
    if is_traceable_wrapper_subclass(t):
        inner, _ = t.__tensor_flatten__()
        held = [getattr(t, name) for name in inner]
        parts = [part for part in held if isinstance(part, Tensor)]  # a DTensor also holds a mesh
    elif t.layout is not torch.strided:  # sparse, or opaque as mkldnn's
        return {}
    else:
        storage = t.untyped_storage()
        return {StorageWeakRef(storage): storage.nbytes()}
    return {key: nbytes for part in parts for key, nbytes in _storages(part).items()}


def _block_tensors(run: BlockRun) -> Iterator[tuple[str, Tensor]]:
    """Yield what a block saves, by name; an activation in chunks occurs once for each chunk."""
    execution, _, tensors, output, kept, saves, offloaded = run
    yield from offloaded
    for name, t, saved in zip(execution.call.graph.tensors, tensors, saves, strict=True):
        if t is not None and saved:
            yield name, t
    if execution.plan.keeps_output:
        yield "output", output
    pairs = zip(execution.kept_chunks(), kept, strict=True)
    yield from ((name, t) for (name, _), t in pairs if t is not None)
