"""The replay check: does backward rebuild, bit for bit, what forward computed?

Use it first when a loss looks wrong. Every block copies everything that its forward reads and
computes. Its backward compares what it reads again, runs the entire forward again and compares
every activation, and compares what the policy's schedule rebuilds. A difference means that a tensor
was changed behind autograd's back (`.data`, numpy memory), an activation function is impure, a
kernel is not deterministic, or a hook on saved tensors loses bits.

It takes the memory of keeping everything and the time of a second forward, and runs the operations
of deterministic mode (no fusions). It synchronizes at every activation, so it is off while a CUDA
graph is captured. It does not cover blocks that run as operators (`torch.compile`, selective
checkpointing), with a warning, nor calls that fall back to PyTorch's own forward.
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

from fused_remat.execution.observe import CHECKS
from fused_remat.execution.prepare import Execution
from fused_remat.graph.schedule import Step
from fused_remat.random import DropoutMask
from fused_remat.steps.chunk import Chunk
from fused_remat.steps.operations import warn

#: How often the check was switched on: by the environment, and by contexts that are active.
_count = int(os.environ.get("FUSED_REMAT_CHECK", "").lower() not in ("", "0", "false", "no", "off"))
CHECKS.update(["on"] * _count)
_lock = threading.Lock()


class ReplayError(RuntimeError):
    """Backward computed other values than forward; the message describes the first one.

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
(index 2): forward read 1, backward 3
    """
    global _count
    with _lock:
        _count += 1
        CHECKS.add("on")
    try:
        yield
    finally:
        with _lock:
            _count -= 1
            if not _count:
                CHECKS.discard("on")


def record_of(
    execution: Execution, names: Sequence[str], tensors: Sequence[Tensor | None]
) -> Record | None:
    """Return a record for a call, or None for tensors without values and under capture."""
    x = tensors[0]
    assert x is not None
    if x.device.type == "meta" or isinstance(x, torch._subclasses.FakeTensor):
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        warn("the replay check is off while a CUDA graph is captured")
        return None
    return Record(execution, names, tensors)


class _Part(NamedTuple):
    """An activation in one chunk: its group of sequences, and its tokens of that group."""

    name: str
    seqs: tuple[int, int]
    lo: int
    rows: int


class Record:
    """Copies of everything that one call of a block reads and computes, to compare with."""

    def __init__(
        self, execution: Execution, names: Sequence[str], tensors: Sequence[Tensor | None]
    ) -> None:
        self.execution, self.names = execution, names
        self.caller = _caller(execution.call.graph.kind)
        self.tensors = [None if t is None else t.detach().clone() for t in tensors]
        self._output: Tensor | None = None
        self._parts: dict[_Part, Tensor] = {}  # in the order of computation
        CHECKS.add(weakref.ref(self, CHECKS.discard))

    def note(self, step: Step, chunk: Chunk) -> None:
        """Copy what a step of forward has computed."""
        self._parts.update((part, value.clone()) for part, value in _computed(step, chunk))

    def note_output(self, out: Tensor) -> None:
        if self.execution.plan.keeps_output:
            self._output = out.clone()

    def compare(self, step: Step, chunk: Chunk) -> None:
        """Raise ReplayError if a step computed again another bit than `note` copied."""
        for part, value in _computed(step, chunk):
            self._compare(part.name, self._parts[part], value, ("forward", "rebuilt"), part)

    def compare_given(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the call's tensors, compared: copies where backward does not read them.

        Raises: ReplayError if one bit differs from what forward read.
        """
        for name, t, copy in zip(self.names, tensors, self.tensors, strict=True):
            if t is not None and copy is not None:
                self._compare(name, copy, t, ("forward read", "backward"))
        pairs = zip(tensors, self.tensors, strict=True)
        return [copy if t is None else t for t, copy in pairs]

    def compare_kept(self, out: Tensor | None, kept: Sequence[Tensor | None]) -> None:
        """Raise ReplayError if the output or an activation was not kept bit for bit."""
        if out is not None and self._output is not None:
            self._compare("output", self._output, out, ("forward", "kept"))
        parts_of: dict[str, list[_Part]] = defaultdict(list)
        for part in self._parts:
            parts_of[part.name].append(part)
        for (name, _), value in zip(self.execution.kept_chunks(), kept, strict=True):
            part = parts_of[name].pop(0)
            if value is not None:
                self._compare(name, self._parts[part], value, ("forward", "kept"), part)

    def _compare(
        self,
        name: str,
        before: Tensor,
        now: Tensor,
        labels: tuple[str, str],
        part: _Part | None = None,
    ) -> None:
        """Raise ReplayError if one bit differs; `labels` name the two values."""
        bits = [t.detach().contiguous().view(_BITS[t.element_size()]) for t in (before, now)]
        if torch.equal(*bits):
            return
        first = int((bits[0] != bits[1]).flatten().to(torch.uint8).argmax())
        index = tuple(map(int, np.unravel_index(first, before.shape)))
        where = f"index {', '.join(map(str, index))}" if index else "its only element"
        digits = 17 if before.dtype == torch.float64 else 9  # enough to be unique
        values = [t[index].item() for t in (before, now)]
        old, new = [f"{v:.{digits}g}" if type(v) is float else str(v) for v in values]
        if old == new:  # two NaNs
            old, new = [f"{v} (bits {int(b[index]):#x})" for v, b in zip(values, bits)]  # noqa: B905
        raise ReplayError(
            f"replay check: {self.caller}: {name!r} differs at "
            f"({where if part is None else self._where(part, now, first)}): "
            f"{labels[0]} {old}, {labels[1]} {new}"
        )

    def _where(self, part: _Part, value: Tensor, index: int) -> str:
        """Return the sequence and token of an element.

        `value` is a matrix of tokens, or lse: (sequences, heads, tokens).
        """
        seq_len, width = self.execution.lengths[part.name], value.numel() // part.rows
        if value.dim() == 2 and value.shape[0] == part.rows:
            row, column = divmod(index, width)
            (sequence, token), kind = divmod(part.lo + row, seq_len), "channel"
        else:
            sequence, rest = divmod(index, width * seq_len)
            (column, token), kind = divmod(rest, seq_len), "head"
        return f"sequence {part.seqs[0] + sequence}, token {token}, {kind} {column}"


def _computed(step: Step, chunk: Chunk) -> Iterator[tuple[_Part, Tensor]]:
    """Yield the activations, statistics and dropout masks that a step has put into its chunk."""
    assert step.node is not None
    for name in step.node.makes:
        value: Any = chunk[name]
        value = value.tensor() if isinstance(value, DropoutMask) else value
        yield _Part(name, chunk.seqs, chunk.lo, chunk.rows_of(name)), value


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _caller(kind: str) -> str:
    """Return the block's caller: a layer's qualified name, or an op's kind and the caller's line.

    Of the calling frames, the innermost module is the layer, and the outermost one that contains it
    gives the path.
    """
    modules: list[nn.Module] = []
    is_layer, site = False, ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, package = frame.f_code, str(frame.f_globals.get("__name__", "")).partition(".")[0]
        own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(own, nn.Module):
            if not modules:
                is_layer = package == "fused_remat"
            if not modules or modules[-1] is not own:
                modules.append(own)
        if not site and package not in ("fused_remat", "torch"):
            site = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    if is_layer:
        return _qualified(modules)
    inside = f" in {_qualified(modules)}" if modules else ""
    return f"{kind}, called at {site}{inside}"


def _qualified(modules: Sequence[nn.Module]) -> str:
    """Return the first module's class, and its path in the last module that contains it."""
    inner = modules[0]
    for outer in reversed(modules[1:]):
        for path, module in outer.named_modules():
            if module is inner and path:
                return f"{path} ({type(inner).__name__})"
    return type(inner).__name__
