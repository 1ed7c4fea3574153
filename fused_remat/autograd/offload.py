"""Offload: copies selected saved activations to pinned host memory until backward needs them.

`Policy(offload={"qkv", "input"})` selects them. After a block's forward, a side stream copies them
out while the compute stream runs the next block; the device's memory is freed at the end of that
block's forward, so the last block's stay. When a block's backward begins, those of the block that
ran before it are copied back on the side stream, one layer ahead. What was not started by then is
fetched when it is needed.

Autograd holds the copies on the host (`save_for_backward`), and frees them when it would free the
activations. Where hooks on saved tensors read them, the host waits for the copies; a caller that
reads `grad_fn.saved_tensors` has to synchronize itself. For a tensor that the caller can change,
autograd also holds one without memory that shares its version counter: changing an offloaded input
in place raises, as it does without offload.

Which block ran before is noted per thread, by weak references. Blocks that the present backward
pass does not run are passed over.

Nothing moves on a CPU, inside `torch.utils.checkpoint`, or while a CUDA graph is captured.
`TRANSFERS` maps a device type to its copies.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_remat.autograd.engine import active_hooks, current_pass, in_checkpoint, runs_now

#: How many blocks back the one whose backward is next is looked for.
_LOOK_BACK = 256


class InFlight:
    """The device's side of copies that were started, held until it is safe to read and to free.

    Freed before, its memory could be written by others while it is still copied: `tensors` are read
    by a copy out, or written by a copy back.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> None:
        """Let later computations of the device come after the copies."""

    def synchronize(self) -> None:
        """Block the host until the copies are complete."""

    def settle(self) -> list[Tensor]:
        """Call `wait` and return the tensors; the second time return none."""
        tensors, self._tensors = self._tensors, []
        if tensors:
            self.wait()
        return tensors

    def __del__(self) -> None:
        if self._tensors and not sys.is_finalizing():
            self.settle()


class CudaCopies(InFlight):
    """Copies of memory of `stream`, which started them and waits for `done`."""

    def __init__(
        self, tensors: list[Tensor], stream: torch.cuda.Stream, done: torch.cuda.Event
    ) -> None:
        super().__init__(tensors)
        self._stream, self._done = stream, done

    def wait(self) -> None:
        self._stream.wait_event(self._done)

    def synchronize(self) -> None:
        self._done.synchronize()

    def settle(self) -> list[Tensor]:
        tensors = super().settle()
        for t in tensors:
            now = torch.cuda.current_stream(t.device)
            if now != self._stream:  # backward on another stream than the one that started
                now.wait_event(self._done)
                t.record_stream(now)
        return tensors


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Transfer:
    """Copies between a device and the host, on the side stream of a CUDA device."""

    def is_able(self, device: torch.device) -> bool:
        """Return whether copying is possible now."""
        return not torch.cuda.is_current_stream_capturing()

    def out(self, tensors: list[Tensor]) -> tuple[list[Tensor], InFlight]:
        """Start copying to the host; return the host's tensors and the copies in flight."""
        # Of freed host memory the allocator knows which streams still copy, and lets it wait.
        hosts = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        return hosts, _started(tensors, hosts, tensors)

    def back(self, hosts: list[Tensor], device: torch.device) -> InFlight:
        """Start copying back to the device."""
        with torch.cuda.device(device):
            tensors = [torch.empty_like(host, device=device) for host in hosts]
        return _started(hosts, tensors, tensors)


def _started(sources: list[Tensor], targets: list[Tensor], on_device: list[Tensor]) -> CudaCopies:
    """Start copying `sources` to `targets` once the present stream has come here.

    Until then it may write `sources` on the device, or use the memory that `targets` have now.
    """
    device = on_device[0].device
    stream, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        done = side.record_event()
    return CudaCopies(on_device, stream, done)


#: Transfers by device type; on others nothing moves.
TRANSFERS: dict[str, Transfer] = {"cuda": Transfer()}


def _copy_out(transfer: Transfer, tensors: list[Tensor]) -> tuple[list[Tensor], InFlight]:
    """Start copying out; wait where a hook on saved tensors will read the copies."""
    hosts, copies = transfer.out(tensors)
    if active_hooks() is not None:
        copies.synchronize()
    return hosts, copies


@dataclass(eq=False)
class OffloadRecord:
    """The copies of one call of a block."""

    transfer: Transfer
    device: torch.device
    node: weakref.ref[Any]  # the call's autograd node
    indices: Sequence[int]  # of the copied tensors among those that the call saves
    hosts: Sequence[weakref.ref[Tensor]]  # the copies on the host, which autograd holds
    # What the device has: what has not left, or, with the copies that it was made of, what was
    # brought back. At most one: appending and popping are atomic, and backward may run in several
    # threads.
    present: list[tuple[list[Tensor] | None, InFlight]]
    markers: int  # how many saved tensors at the end stand for tensors of the caller
    before: Reference  # the call that ran before, in the same thread on the same device

    def returned(self, saved: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return what the call saved, on the device, from what autograd saved.

        Starts fetching for the block before this one, if this backward pass runs it.
        """
        restored = list(saved[: len(saved) - self.markers])
        hosts: list[Any] = [saved[index] for index in self.indices]
        # Before those of the block before: the copies are made in the order of their start.
        copies = self._fetched(hosts) or self.transfer.back(hosts, self.device)
        self._start_before()
        for index, t in zip(self.indices, copies.settle(), strict=True):
            restored[index] = t
        return restored

    def _fetched(self, hosts: Sequence[Tensor]) -> InFlight | None:
        """Return copies that have not left, or were fetched for these hosts, or None."""
        of, copies = self.take()
        is_own = of is None or all(a is b for a, b in zip(of, hosts, strict=True))
        return copies if is_own else None

    def take(self) -> tuple[list[Tensor] | None, InFlight | None]:
        """Remove and return what the device holds."""
        try:
            return self.present.pop()
        except IndexError:
            return None, None

    def _start_before(self) -> None:
        call = self.before()
        for _ in range(_LOOK_BACK):
            if call is None:
                return
            if runs_now(call.node()):
                return call._start()
            call = call.before()

    def _start(self) -> None:
        """Start fetching from the host, unless autograd or a hook holds other tensors."""
        hosts = [host for ref in self.hosts if (host := ref()) is not None]
        if self.present or len(hosts) < len(self.hosts):
            return
        self.present.append((hosts, self.transfer.back(hosts, self.device)))
        # A pass may end before it comes to this block. (One that raises leaves it there until the
        # graph goes, or another pass comes.)
        at_end = functools.partial(_release, weakref.ref(self))
        torch.autograd.Variable._execution_engine.queue_callback(at_end)


#: A weak reference to a call, or to none.
Reference = Callable[[], OffloadRecord | None]


def _release(reference: Reference) -> None:
    """Free what the device has of a call, once the device comes to this point."""
    record = reference()
    if record is not None and (copies := record.take()[1]) is not None:
        copies.settle()


#: By device, the last call that moved something in this thread.
_LAST = threading.local()


def move(
    node: Any,
    offload: Collection[str],
    names: Sequence[str],
    saves: list[Tensor | None],
    callers: Collection[str],
) -> tuple[OffloadRecord | None, list[Tensor | None]]:
    """Start moving those of `saves` whose names are in `offload`, in a call's forward.

    The caller can change the tensors `callers`. Returns a record, or None if nothing moves, and
    what to save instead.
    """
    moving: dict[int, Tensor] = {
        i: t
        for i, (name, t) in enumerate(zip(names, saves, strict=True))
        if t is not None and name in offload and _is_movable(t)
    }
    if not moving or current_pass() != -1 or in_checkpoint():
        return None, saves
    indices, leaving = list(moving), list(moving.values())
    device = leaving[0].device
    transfer = TRANSFERS.get(device.type)
    if transfer is None or not transfer.is_able(device):
        return None, saves
    markers = [_marker(t) for i, t in moving.items() if names[i] in callers]
    hosts, copies = _copy_out(transfer, leaving)
    for index, host in zip(indices, hosts, strict=True):
        saves[index] = host
    last: Reference = vars(_LAST).get(str(device), lambda: None)
    _release(last)
    record = OffloadRecord(
        transfer, device, weakref.ref(node), indices, [weakref.ref(host) for host in hosts],
        [(None, copies)], len(markers), last,
    )  # fmt: skip
    vars(_LAST)[str(device)] = weakref.ref(record)
    return record, [*saves, *markers]


def _is_movable(t: Tensor) -> bool:
    """Return whether `t` is a plain tensor with values and without gaps between elements.

    Its copy then has its strides.
    """
    if type(t) not in (Tensor, torch.nn.Parameter) or not t.numel() or t.is_inference():
        return False
    return t.is_contiguous() or torch.empty_like(t, device="meta").stride() == t.stride()


def _marker(t: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of `t`, but not its memory."""
    marker = t.detach()
    marker.data = t.new_empty(0)
    return marker


#: What the last operator has still in flight, by device. Backward's is called in another thread;
#: what one thread drops for another is settled by its stream.
_HELD: dict[torch.device, InFlight] = {}


def start_out(tensors: list[Tensor]) -> tuple[list[Tensor], InFlight]:
    """Start copying from a device that has a transfer, for an operator.

    Raises: RuntimeError while a CUDA graph is captured.
    """
    transfer = TRANSFERS[tensors[0].device.type]
    if not transfer.is_able(tensors[0].device):
        raise RuntimeError(
            "fused_remat: a compiled block with Policy(offload=...) copies tensors to the host, "
            "which a CUDA graph cannot record; capture a block without offload"
        )
    return _copy_out(transfer, tensors)


def hold(copies: InFlight | None, device: torch.device) -> None:
    """Free what the last operator had in flight, and hold `copies` until the next."""
    last = _HELD.pop(device, None)
    if last is not None:
        last.settle()
    if copies is not None:
        _HELD[device] = copies


def fetched(hosts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Fetch the tensors of an operator to the device."""
    return TRANSFERS[device.type].back(hosts, device).settle() if hosts else []
