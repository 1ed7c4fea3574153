"""The replay check: does backward rebuild, bit for bit, what forward computed?

The first thing to try when a loss looks wrong. Every block copies everything that its forward reads
and computes. Its backward compares what it reads again, runs the whole forward once more and
compares every activation, and compares what the policy's schedule rebuilds. A difference means that
a tensor was changed behind autograd's back (`.data`, numpy memory), an activation function is
impure, a kernel is not deterministic, or a hook on saved tensors loses bits.

It takes the memory of keeping everything and the time of a second forward, and runs the operations
of deterministic mode (no fusions). It waits for the device at every activation, so it is off while
a CUDA graph is captured. It does not see blocks that run as operators (`torch.compile`, selective
checkpointing), nor calls that PyTorch's own forward serves. In the first two cases it warns.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fused_remat.execution.prepare import Execution
from fused_remat.graph.schedule import Step
from fused_remat.random import DropoutMask
from fused_remat.steps.chunk import Chunk
from fused_remat.steps.operations import warn

#: Whether calls are checked: set by `check_replay`, and at import by FUSED_REMAT_CHECK.
ON: bool = os.environ.get("FUSED_REMAT_CHECK", "").lower() not in ("", "0", "false", "no", "off")

#: The records of calls whose backward may yet come: what is called until then may be a replay.
RECORDED: set[weakref.ref[Record]] = set()

_always = ON
_lock = threading.Lock()
_inside = 0


class ReplayError(RuntimeError):
    """Backward found other values than forward computed; the message says which, and where.

    >>> issubclass(ReplayError, RuntimeError)
    True
    """

    __module__ = "fused_remat"


@contextlib.contextmanager
def check_replay() -> Iterator[None]:
    """Check the fused blocks that are called inside, in any thread; backward may run outside.

    To check everything, set FUSED_REMAT_CHECK=1 before `fused_remat` is imported.

    Raises: ReplayError in backward, naming the layer or op, the activation, the first element that
        differs, and both values.

    >>> from fused_remat import ops
    >>> x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    >>> with check_replay():
    ...     y = ops.layer_norm(x, weight)
    >>> weight.data[2] = 3.0
    >>> y.sum().backward()
    Traceback (most recent call last):
    fused_remat.ReplayError: replay check: norm, called at ...: 'norm.weight' differs at \
(index 2): forward read 1, backward 3 (1 of 8 elements differs)
    """
    global ON, _inside
    with _lock:
        _inside += 1
        ON = True
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            ON = _always or _inside > 0


def record_of(
    execution: Execution, names: Sequence[str], tensors: Sequence[Tensor | None]
) -> Record | None:
    """A record for a call that begins; None for tensors without values, or captured ones."""
    x = tensors[0]
    assert x is not None
    if x.device.type == "meta" or isinstance(x, torch._subclasses.FakeTensor):
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        warn("the replay check is off while a CUDA graph is captured")
        return None
    return Record(execution, names, tensors)


class _Piece(NamedTuple):
    """An activation in one chunk: its group of sequences, and its tokens of that group."""

    name: str
    seqs: tuple[int, int]
    lo: int
    rows: int


class Record:
    """Copies of everything that one call of a block reads and computes, to compare with.

    Args:
        execution, names, tensors: of the call; `names` those of `tensors`.

    Attributes:
        tensors: copies of what the call was given.
    """

    def __init__(
        self, execution: Execution, names: Sequence[str], tensors: Sequence[Tensor | None]
    ) -> None:
        self.execution, self.names = execution, names
        self.caller = _caller(execution.call.graph.kind)
        self.tensors = [None if t is None else t.detach().clone() for t in tensors]
        self._output: Tensor | None = None
        self._pieces: dict[_Piece, Tensor] = {}  # in the order of computation
        RECORDED.add(weakref.ref(self, RECORDED.discard))

    def note(self, step: Step, frame: Chunk) -> None:
        """Copy what a step of forward has computed."""
        for piece, value in _made(step, frame):
            self._pieces[piece] = value.clone()

    def note_output(self, out: Tensor) -> None:
        if self.execution.plan.keeps_output:
            self._output = out.clone()

    def compare(self, step: Step, frame: Chunk) -> None:
        """Compare what a step has computed again, in backward, from what was kept exactly.

        Raises: ReplayError if one bit differs from what `note` saw.
        """
        execution = frame.owner.execution
        assert isinstance(execution, Execution)
        for piece, value in _made(step, frame):
            self._compare(piece.name, self._pieces[piece], value, ("forward", "rebuilt"), piece)

    def compare_given(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compare the tensors of the call that backward reads again; returns all of them.

        Those that it does not read, None in `tensors`, are the copies.

        Raises: ReplayError if one bit differs from what forward read.
        """
        for name, t, copy in zip(self.names, tensors, self.tensors, strict=True):
            if t is not None and copy is not None:
                self._compare(name, copy, t, ("forward read", "backward"))
        given = zip(tensors, self.tensors, strict=True)
        return [copy if t is None else t for t, copy in given]

    def compare_kept(self, out: Tensor | None, kept: Sequence[Tensor]) -> None:
        """Compare the output, if it is kept, and the activations that are, as they came back.

        Raises: ReplayError if one bit differs from what forward kept.
        """
        said = ("forward", "kept")
        if out is not None and self._output is not None:
            self._compare("output", self._output, out, said)
        pieces: dict[str, list[_Piece]] = defaultdict(list)
        for piece in self._pieces:
            pieces[piece.name].append(piece)
        for (name, _), value in zip(self.execution.pieces(), kept, strict=True):
            piece = pieces[name].pop(0)
            self._compare(name, self._pieces[piece], value, said, piece)

    def _compare(
        self,
        name: str,
        before: Tensor,
        now: Tensor,
        said: tuple[str, str],
        piece: _Piece | None = None,
    ) -> None:
        """Raise ReplayError if one bit differs; `said`: what the two values are called."""
        found = _difference(before, now)
        if found is None:
            return
        index = ", ".join(map(str, _unravel(found.place, before.shape)))
        where = f"(index {index})" if index else "(its only element)"
        if piece is not None:
            where = self._where(piece, now, found.place)
        total, count = before.numel(), found.elements
        raise ReplayError(
            f"replay check: {self.caller}: {name!r} differs at {where}: "
            f"{said[0]} {found.before}, {said[1]} {found.now} ({count} of {total} "
            f"element{'s' if total != 1 else ''} differ{'s' if count == 1 else ''})"
        )

    def _where(self, piece: _Piece, value: Tensor, place: int) -> str:
        """The sequence and token of an element, and which group and tile, if there are several.

        `value` is a matrix of tokens, or lse: (sequences, heads, tokens).
        """
        (first, last), chunks = piece.seqs, self.execution.chunks
        seq_len = self.execution.lengths[piece.name]
        if value.dim() == 2 and value.shape[0] == piece.rows:
            row, channel = divmod(place, value.shape[1])
            sequence, token = divmod(piece.lo + row, seq_len)
            named = {"sequence": first + sequence, "token": token, "channel": channel}
        else:
            shape = (last - first, value.numel() // piece.rows, seq_len)
            sequence, head, token = _unravel(place, shape)
            named = {"sequence": first + sequence, "head": head, "token": token}
        parts = []
        if chunks.group < chunks.batch:
            groups = -(-chunks.batch // chunks.group)
            parts.append(f"group {first // chunks.group + 1} of {groups}")
        if piece.rows < (last - first) * seq_len:
            tiles = -(-(last - first) * chunks.seq_len // chunks.tile)
            parts.append(f"tile {piece.lo // chunks.tile + 1} of {tiles}")
        where = ", ".join(f"{name} {i}" for name, i in named.items())
        return f"({where}) in {', '.join(parts)}" if parts else f"({where})"


def _made(step: Step, frame: Chunk) -> Iterator[tuple[_Piece, Tensor]]:
    """The activations, statistics and dropout multipliers that a step has put into its chunk."""
    assert step.node is not None
    for name in step.node.makes:
        value: Any = frame[name]
        value = value.tensor() if isinstance(value, DropoutMask) else value
        yield _Piece(name, frame.seqs, frame.lo, frame.rows_of(name)), value


class _Difference(NamedTuple):
    """The place of the first element that differs, in order of the indices; how many differ."""

    place: int
    before: str
    now: str
    elements: int


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(_BITS[t.element_size()])


def _difference(before: Tensor, now: Tensor) -> _Difference | None:
    """How the bits of two tensors of one shape and dtype differ; None: they are the same."""
    a, b = _bits(before), _bits(now)
    if torch.equal(a, b):
        return None
    differs = (a != b).flatten()
    place = int(differs.to(torch.uint8).argmax())
    index = _unravel(place, before.shape)
    shown = [_shown(t[index]) for t in (before, now)]
    if shown[0] == shown[1]:  # NaNs, say
        shown = [f"{s} (bits {t[index].item():#x})" for s, t in zip(shown, (a, b), strict=True)]
    return _Difference(place, shown[0], shown[1], int(differs.sum()))


def _shown(element: Tensor) -> str:
    """With the digits that tell it from its neighbours."""
    value, digits = element.item(), 17 if element.dtype == torch.float64 else 9
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(flat, shape)))


def _caller(kind: str) -> str:
    """The caller of the block: a layer's qualified name, or an op's kind and the caller's line.

    Of the calling frames, the innermost module is the layer, and the outermost one that contains it
    gives the path.
    """
    modules: list[nn.Module] = []
    is_layer, site = False, ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, room = frame.f_code, str(frame.f_globals.get("__name__", "")).partition(".")[0]
        own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(own, nn.Module):
            if not modules:
                is_layer = room == "fused_remat"
            if not modules or modules[-1] is not own:
                modules.append(own)
        if not site and room not in ("fused_remat", "torch"):
            site = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    if is_layer:
        return _qualified(modules)
    inside = f" in {_qualified(modules)}" if modules else ""
    return f"{kind}, called at {site}{inside}"


def _qualified(modules: Sequence[nn.Module]) -> str:
    """The first module's class, and its path in the last one that contains it."""
    inner = modules[0]
    for outer in reversed(modules[1:]):
        for path, module in outer.named_modules():
            if module is inner and path:
                return f"{path} ({type(inner).__name__})"
    return type(inner).__name__


def check_unchanged(
    names: Sequence[str],
    shapes: Sequence[torch.Size | None],
    dtypes: Sequence[torch.dtype | None],
    tensors: Sequence[Tensor | None],
    dy: Tensor,
) -> None:
    """Raise RuntimeError if a tensor has another shape, dtype or device than forward found.

    Autograd sees changes in place, but not `p.data = ...`, which is how a module is moved and cast.
    `shapes` and `dtypes` are those of forward, whose device is that of `dy`; `tensors`, of which
    there may be more, are None where backward does not read them.
    """
    # This runs in every backward, so devices are compared in the cheapest way.
    is_cpu, index = dy.is_cpu, dy.get_device()
    for i, (t, shape, dtype) in enumerate(zip(tensors, shapes, dtypes)):  # noqa: B905
        if t is not None and (
            t.dtype is not dtype
            or t.shape != shape
            or (not t.is_cpu if is_cpu else t.get_device() != index)
        ):
            alike = t.dtype is dtype and t.shape == shape
            # A scalar may be on another device, and what the user's own function captured.
            if not (alike and (t.dim() == 0 or names[i].startswith("activation."))):
                raise changed(names[i], (tuple(shape or ()), dtype, dy.device), t)


def changed(
    name: str, was: tuple[tuple[int, ...], torch.dtype | None, torch.device], now: Tensor
) -> RuntimeError:
    """The error for a tensor that had another shape, dtype or device in forward."""
    shape, dtype, device = was
    return RuntimeError(
        f"fused_remat: backward reads {name!r} again, which was {dtype} of shape {shape} on "
        f"{device} in forward, and is {now.dtype} of shape {tuple(now.shape)} on {now.device} now: "
        "do not move, cast or resize tensors between forward and backward"
    )
