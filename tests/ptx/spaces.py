"""Global and shared memory: PTX ISA 5.1.4 and 5.1.7, with what hardware does not check.

Every access is held to the bounds of its tensors and to its alignment, and to who wrote and read
the same bytes since which barrier (8, the memory consistency model, as far as barriers of a block
order it): two accesses of different warps, one of them a write, need a barrier between them; of
different blocks nothing orders them. Memory starts as NaN.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from .decode import Instruction, PTXError
from .lanes import UNSIGNED, Array
from .reports import Reports

i8, u1, u8 = np.int64, np.uint8, np.uint64
REGION = 40  # bits of an offset; above them stands a region's number, from 1
#: Actors of a tag: a warp's number plus 1, a warpgroup's wgmma, several warps.
WARPGROUP, SEVERAL = 64, 255
BLOCKS = i8(-1)  # a tag: several blocks


def tag_of(block: Any, epoch: Any, actor: Any) -> Array:
    """Who accesses, since which barrier: block + 1, barriers passed, actor."""
    return (block << REGION) | (epoch << 8) | actor


class Tags:
    """The last write and the last reads of each grain of a memory."""

    def __init__(self, grains: int, warpgroups: bool = False) -> None:
        self.written, self.read_by = np.zeros(grains, i8), np.zeros(grains, i8)
        self.warpgroups = warpgroups

    def clash(self, old: Array, new: Array) -> Array:
        """Whether nothing orders an access by `new` after one by `old`."""
        found, apart = self._relation(old, new)
        if self.warpgroups and found.any():
            found &= ~self._one_warpgroup(old & 255, new & 255)
        return found | apart if apart.any() else found

    @staticmethod
    def _relation(old: Array, new: Array) -> tuple[Array, Array]:
        """Which are of another actor since the same barrier, and which of another block."""
        different = old ^ new
        apart = (different >> REGION) != 0
        if apart.any():
            apart &= old != 0
        return (different.view(u8) - u8(1)) < u8(255), apart

    @staticmethod
    def _one_warpgroup(old: Array, new: Array) -> Array:
        """Who waits for a wgmma knows that it has read for all warps of the warpgroup (CUTLASS's
        pipelines rely on that).

        Before it, what another of its warps has written needs a barrier like any other.
        """
        asynchronous = [(a >= WARPGROUP) & (a < SEVERAL) for a in (old, new)]
        group = np.where(asynchronous[1], new - WARPGROUP, (new - 1) // 4)
        return asynchronous[0] & (old - WARPGROUP == group) & (new != SEVERAL)

    def read(self, at: Array, tag: Array) -> Array:
        """Reads grains `at` (N, k) by `tag` (N, 1): which clash with a write."""
        bad, old = self.clash(self.written[at], tag), self.read_by[at]
        merged = self._merged(old, tag)
        self.read_by[at] = merged
        lost = self.read_by[at] != merged  # several lanes read the same
        if lost.any():
            here, tags = at[lost], np.broadcast_to(tag, at.shape)[lost]
            self.read_by[here] = self._merged(self.read_by[here], tags)
            again = self._merged(self.read_by[here], tags)
            self.read_by[here[again == BLOCKS]] = BLOCKS
        return bad

    @staticmethod
    def _merged(old: Array, new: Array) -> Array:
        """What stands for both reads: the later barrier's, of several warps or blocks."""
        several, apart = Tags._relation(old, new)
        merged = np.where(several, new | SEVERAL, new)
        return np.where(apart, BLOCKS, merged) if apart.any() else merged

    def write(self, at: Array, tag: Array) -> tuple[Array, Array]:
        """Writes grains: which clash with a read, and which with a write."""
        old, tags = self.written[at], np.broadcast_to(tag, at.shape)
        bad = self.clash(self.read_by[at], tag), self.clash(old, tag)
        self.written[at] = tags
        lost = self.written[at] != tags  # several warps write the same
        if lost.any():
            self.written[at[lost]] = self._merged(self.written[at[lost]], tags[lost])
        return bad


def grains(offsets: Array, size: int, grain: int) -> Array:
    """The grains (N, k) that `size` bytes from each offset touch."""
    return (offsets // grain)[:, None] + np.arange(max(1, size // grain))


class Region:
    """The storage of a tensor, at the alignment that it has in memory, behind some room."""

    def __init__(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self.start, self.grain = 256 + storage.data_ptr() % 256, 4
        self.end = self.start + storage.nbytes()
        self.data = np.full(-(-self.end // 16) * 16, 0xFF, u1)
        self.data[self.start : self.end] = self.bytes
        self.allowed, self.changed = np.zeros(self.data.size, bool), False

    def allow(self, x: Tensor) -> int:
        """Lets the elements of `x` be accessed; the offset of the first one."""
        size = x.element_size()
        self.grain = min(self.grain, size)
        first = self.start + x.storage_offset() * size
        if x.numel():
            strides = (*(s * size for s in x.stride()), 1)
            as_strided(self.allowed[first:], (*x.shape, size), strides)[...] = True
        return first

    @cached_property
    def whole(self) -> bool:
        return bool(self.allowed[self.start : self.end].all())

    @cached_property
    def views(self) -> dict[int, Array]:
        return {size: self.data.view(dtype) for size, dtype in UNSIGNED.items()}

    @cached_property
    def tags(self) -> Tags:
        return Tags(self.data.size // self.grain)

    def back(self) -> None:
        if self.changed:
            self.bytes[:] = self.data[self.start : self.end]


class Global:
    """The tensors of a launch.

    Attributes:
        maps: tensor maps among the parameters, by number.
        touched: sectors that were loaded and stored, where they are counted.
    """

    def __init__(self, reports: Reports) -> None:
        self.regions: list[Region] = []
        self.maps: dict[int, Any] = {}
        self.touched: dict[str, list[Array]] = {"load": [], "store": []}
        self.known: dict[int, int] = {}
        self.reports = reports

    def place(self, x: Tensor) -> int:
        """The address of a tensor's first element."""
        key = x.untyped_storage()._cdata
        if key not in self.known:
            self.known[key] = len(self.regions)
            self.regions.append(Region(x))
        n = self.known[key]
        return ((n + 1) << REGION) + self.regions[n].allow(x)

    def locate(self, address: Array, size: int, i: Instruction) -> tuple[Region, Array]:
        """The region and the offsets of accesses, all to one tensor's storage, after all checks."""
        number = (address >> REGION) - 1
        n = int(number[0])
        if not 0 <= n < len(self.regions) or (number != n).any():
            raise PTXError(f"{i}: the address {int(address[0]):#x} is in no tensor, or in several")
        region, at = self.regions[n], address & ((1 << REGION) - 1)
        outside = (at < region.start) | (at + size > region.end)
        if outside.any():
            example = f"byte {int(at[outside][0]) - region.start} of {region.end - region.start}"
            self.reports.add("outside of its storage", i, outside.sum(), example)
            at = np.where(outside, region.start, at)
            if region.end - region.start < size:
                raise PTXError(f"{i}: {self.reports.lines()[-1]}")
        if (at % size).any():
            self.reports.add("not aligned", i, (at % size != 0).sum(), f"{size} bytes")
            at = at // size * size
        if not region.whole:
            wrong = ~region.allowed[at[:, None] + np.arange(size)].all(1)
            if wrong.any():
                example = f"byte {int(at[wrong][0]) - region.start} of its storage"
                self.reports.add("outside of its tensor", i, wrong.sum(), example)
        return region, at

    def split(self, address: Array) -> list[Array]:
        """Lanes by the tensor that they access: usually all of them."""
        number = address >> REGION
        if (number == number[0]).all():
            return [np.arange(address.size)]
        return [np.flatnonzero(number == n) for n in np.unique(number)]

    def note_read(self, region: Region, at: Array, size: int, tag: Array, i: Instruction) -> None:
        bad = region.tags.read(grains(at, size, region.grain), tag)
        if bad.any():
            self.reports.add("race: global read after write", i, bad.sum())

    def note_write(
        self, region: Region, at: Array, size: int, tag: Array, i: Instruction, same: Array
    ) -> None:
        """`same`: which write the present value; two warps may write equal values."""
        after_read, after_write = region.tags.write(grains(at, size, region.grain), tag)
        if after_read.any():
            self.reports.add("race: global write after read", i, after_read.sum())
        after_write = after_write.any(1) & ~same
        if after_write.any():
            self.reports.add("race: global write after write", i, after_write.sum())


class Shared:
    """The shared memory of the blocks that run together, one after the other.

    Attributes:
        pending: grains that an asynchronous copy has yet to write.
        reading: how many asynchronous operations have yet to read a grain.
        unfenced: tags of writes that the asynchronous proxy may not see yet (PTX ISA 8.6); 0: none.
    """

    def __init__(self, size: int, blocks: int, grain: int, warpgroups: bool, reports: Reports):
        self.size, self.grain, self.reports = size, grain, reports
        self.pitch = -(-max(size, 16) // 1024) * 1024
        self.data = np.full(blocks * self.pitch, 0xFF, u1)
        self.views = {size: self.data.view(dtype) for size, dtype in UNSIGNED.items()}
        count = self.data.size // grain
        self.tags = Tags(count, warpgroups)
        self.pending, self.reading = np.zeros(count, bool), np.zeros(count, np.int16)
        self.copies = self.readers = False  # whether there are any
        self.unfenced = np.zeros(count, i8) if warpgroups else None
        self.written_since = False  # since the last fence

    def locate(self, at: Array, base: Array, size: int, i: Instruction) -> Array:
        """Offsets in the memory of all blocks, after all checks."""
        outside = (at < 0) | (at + size > self.size)
        if outside.any():
            example = f"byte {int(at[outside][0])} of {self.size}"
            self.reports.add("outside of shared memory", i, outside.sum(), example)
            at = np.where(outside, 0, at)
        if (at % size).any():
            self.reports.add("not aligned", i, (at % size != 0).sum(), f"{size} bytes")
            at = at // size * size
        return at + base

    def note_read(self, at: Array, size: int, tag: Array, i: Instruction) -> None:
        places = grains(at, size, self.grain)
        if self.copies and self.pending[places].any():
            self.reports.add("read before a copy has been waited for", i)
        bad = self.tags.read(places, tag)
        if bad.any():
            self.reports.add("race: shared read after write", i, bad.sum())

    def note_write(
        self, at: Array, size: int, tag: Array, i: Instruction, same: Array | None = None
    ) -> None:
        """A write by ordinary instructions, or into which a copy has been started."""
        places = grains(at, size, self.grain)
        if self.copies and self.pending[places].any():
            self.reports.add("write where a copy is in flight", i)
        if self.readers and self.reading[places].any():
            self.reports.add("write where an asynchronous read is in flight", i)
        after_read, after_write = self.tags.write(places, tag)
        if after_read.any():
            self.reports.add("race: shared write after read", i, after_read.sum())
        rows = after_write.any(1) if same is None else after_write.any(1) & ~same
        if rows.any():
            self.reports.add("race: shared write after write", i, rows.sum())
        self.leave_unfenced(places, tag)

    # --- asynchronous operations

    def start_copy(self, places: Array) -> None:
        """From now on the grains are pending, and NaN."""
        self.copies = True
        self.pending[places] = True
        self.data.reshape(-1, self.grain)[places] = 0xFF

    def land(self, at: Array, data: Array, places: Array, tag: Any) -> None:
        """A copy's data (N, bytes) arrive at offsets `at`, as if `tag` had written them."""
        size = data.shape[1]
        self.data.reshape(-1, size)[at // size] = data
        self.pending[places] = False
        self.copies = bool(self.pending.any())
        self.tags.written[places] = tag

    def leave_unfenced(self, places: Array, tag: Any) -> None:
        """The asynchronous proxy does not see a write before a fence."""
        if self.unfenced is not None:
            self.unfenced[places] = np.broadcast_to(tag, places.shape)
            self.written_since = True

    def start_read(self, places: Array, tag: Array, i: Instruction, what: str) -> None:
        """An asynchronous operation reads grains at some time until its wait."""
        if self.copies and self.pending[places].any():
            self.reports.add("read before a copy has been waited for", i)
        self.check_fences(places, i, what)
        bad = self.tags.read(places, tag)
        if bad.any():
            self.reports.add("race: shared read after write", i, bad.sum(), what)
        np.add.at(self.reading, places, 1)
        self.readers = True

    def end_read(self, places: Array, tag: Array) -> None:
        """It has been waited for: whoever waited may write there."""
        np.subtract.at(self.reading, places, 1)
        self.readers = bool(self.reading.any())
        self.tags.read(places, tag)

    def check_fences(self, places: Array, i: Instruction, what: str) -> None:
        if self.unfenced is not None and self.unfenced[places].any():
            self.reports.add(f"{what} without fence.proxy.async", i)

    def fence(self, tag: Array, blocks: Array) -> None:
        """fence.proxy.async by lanes of `tag` in `blocks`.

        It orders their own writes, and those that they know of by a barrier.
        """
        if self.unfenced is None or not self.written_since:
            return
        epochs = np.zeros(self.data.size // self.pitch, i8)
        epochs[blocks] = tag >> 8
        by = np.zeros((epochs.size, 256), bool)
        by[blocks, tag & 255] = True
        places = np.flatnonzero(self.unfenced)
        written, home = self.unfenced[places], places * self.grain // self.pitch
        known = ((written >> 8) == epochs[home]) & by[home, written & 255]
        known |= (written >> 8) < epochs[home]
        self.unfenced[places[known]] = 0
        self.written_since = not known.all()
