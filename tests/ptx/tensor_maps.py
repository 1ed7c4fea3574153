"""Bulk copies between global memory and shared memory by a tensor map: PTX ISA 5.5 (tensors; 5.5.7
their swizzles), 9.7.9.25.5.2 (cp.async.bulk.tensor), 9.7.9.25.6 (bulk groups).

A load arrives when its mbarrier is polled; a store reads shared memory when its group is waited
for. Hardware stores in granules of 16 bytes, also past the end of a row (triton#11583).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from .decode import Instruction, PTXError
from .lanes import PARAMETERS, UNSIGNED, Array, Mask, Registers, Step
from .mbarriers import barrier_at, few
from .spaces import REGION, Region

if TYPE_CHECKING:
    from .machine import Machine

u4, u8, i4, i8 = np.uint32, np.uint64, np.int32, np.int64
#: Swizzle -> bytes of a row that it spans.
SPAN = {1: 32, 2: 64, 3: 128}


@dataclass
class TensorMap:
    """A tensor as copies see it.

    Attributes:
        base: the tensor.
        shape, strides: in elements, the last dimension contiguous.
        box: what a copy moves.
        swizzle: 0 to 3: none, of 32, 64 or 128 bytes.
        element: bytes.
        address: of the base, in a launch.
    """

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    element: int
    address: int = 0

    def tile(self, corner: list[int]) -> tuple[Array, Array]:
        """Byte offsets in the tensor's region of a box's elements, and which of them exist."""
        at, there = np.full(1, self.address & ((1 << REGION) - 1), i8), np.ones(1, bool)
        for first, count, stride, size in zip(
            corner, self.box, self.strides, self.shape, strict=True
        ):
            index = np.arange(first, first + count)
            at = np.add.outer(at, index * (stride * self.element)).reshape(-1)
            there = np.logical_and.outer(there, (index >= 0) & (index < size)).reshape(-1)
        return at, there

    def spread(self, first: int) -> Array:
        """Where a box's elements are in shared memory, from address `first` on."""
        return swizzled(first + np.arange(int(np.prod(self.box)), dtype=i8) * self.element,
                        self.swizzle)  # fmt: skip


def swizzled(at: Array, kind: int) -> Array:
    """Byte addresses, whose 16-byte columns are exchanged by the rows of 128 bytes they are in."""
    return at ^ (((at >> 7) & ((1 << kind) - 1)) << 4) if kind else at


@dataclass
class _Store:
    lane: int
    group: int
    map: TensorMap
    corner: list[int]
    source: Array  # offsets of the elements in shared memory
    places: Array  # grains
    i: Instruction


@dataclass
class Stores:
    """Those in flight, in order; of each lane how many groups it has committed."""

    committed: Array
    flying: list[_Store] = field(default_factory=list)

    def finish(self, m: Machine) -> None:
        for store in self.flying:
            m.reports.add("a block ends before its bulk store has read shared memory", store.i)
        self.flying = []


def _stores(m: Machine) -> Stores:
    if "stores" not in m.asynchronous:
        m.asynchronous["stores"] = Stores(np.zeros(m.lanes, i8))
    return m.asynchronous["stores"]


def bulk(i: Instruction, k: Registers) -> Step:
    """cp.async.bulk."""
    if i.opcode == "cp.async.bulk.commit_group":

        def commit(m: Machine, mask: Mask) -> None:
            _stores(m).committed[m.taking(mask)] += 1

        return commit
    if i.opcode in ("cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group"):
        left = int(i.operands[0], 0)
        return lambda m, mask: _wait(m, left, mask)
    load = re.fullmatch(
        r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(cta|cluster)\.global"
        r"\.mbarrier::complete_tx::bytes", i.opcode
    )  # fmt: skip
    store = re.fullmatch(
        r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta\.bulk_group", i.opcode
    )
    if not load and not store:
        raise i.unknown()
    tensor, shared = (1, 0) if load else (0, 1)
    name, at = k.read(i.operands[tensor].base, u8), k.address(i.operands[shared], u4)
    corner = k.all(i.operands[tensor].coordinates, i4)
    barrier = k.address(i.operands[2], u4) if load else at

    def step(m: Machine, mask: Mask) -> None:
        maps, corners = m.full(name(m.R)), [m.full(x) for x in corner(m.R)]
        counted = m.full(barrier(m.R))
        for lane, block, first in few(m, at(m.R), mask):
            map_ = m.memory.maps[(int(maps[lane]) >> REGION) - PARAMETERS]
            where = [int(x[lane]) for x in reversed(corners)]
            offsets = _checked(m, i, map_, first) + block * m.shared.pitch
            if load:
                _load(m, i, map_, where, offsets, lane, block, int(counted[lane]))
            else:
                _store(m, i, map_, where, offsets, lane)

    return step


def _checked(m: Machine, i: Instruction, map_: TensorMap, first: int) -> Array:
    """The box's place in shared memory."""
    size = int(np.prod(map_.box)) * map_.element
    if first % (1024 if map_.swizzle == 3 else 256 if map_.swizzle else 128):
        m.reports.add("not aligned", i, 1, f"{first}, swizzle {map_.swizzle}")
    if first + size > m.shared.size:
        raise PTXError(f"{i}: a box of {size} bytes at {first} of {m.shared.size}")
    if map_.swizzle and map_.box[-1] * map_.element > SPAN[map_.swizzle]:
        raise PTXError(f"{i}: a box wider than its swizzle")
    return map_.spread(first)


def _grains(m: Machine, map_: TensorMap, at: Array) -> Array:
    """Of a box in shared memory, whose rows are whole 16 bytes."""
    starts = at.reshape(-1, 16 // map_.element)[:, :1]
    return ((starts + np.arange(0, 16, m.shared.grain)) // m.shared.grain).reshape(-1)


def _region(m: Machine, i: Instruction, map_: TensorMap, at: Array) -> Region:
    region = m.memory.regions[(map_.address >> REGION) - 1]
    if at.size and (at.min() < region.start or at.max() + map_.element > region.end):
        raise PTXError(f"{i}: the tensor map reaches beyond its storage")
    if not region.whole and not region.allowed[at].all():
        m.reports.add("outside of its tensor", i, (~region.allowed[at]).sum())
    return region


def _load(
    m: Machine, i: Instruction, map_: TensorMap, corner: list[int], into: Array, lane: int,
    block: int, counted: int,
) -> None:  # fmt: skip
    at, there = map_.tile(corner)
    region = _region(m, i, map_, at[there])
    m.memory.note_read(region, at[there], map_.element, m.tag[lane].reshape(1, 1), i)
    places = _grains(m, map_, into)
    m.shared.check_fences(places, i, "a bulk copy over writes")
    m.shared.note_write(
        places * m.shared.grain, m.shared.grain, m.own[lane].reshape(1, 1), i
    )  # fmt: skip
    m.shared.unfenced[places] = 0  # written by the asynchronous proxy itself
    m.shared.start_copy(places)
    if m.how.count:
        sectors = np.unique(at[there] >> 5) | map_.address >> REGION << REGION
        m.counts["load sectors"] += sectors.size
        m.memory.touched["load"].append(sectors)

    def land() -> int:
        view = region.views[map_.element]
        found = view[np.where(there, at, region.start) // map_.element]
        data = np.where(there, found, UNSIGNED[map_.element](0))
        m.shared.land(into, data.view(np.uint8).reshape(-1, map_.element), places, 0)
        return data.size * map_.element

    barrier_at(m, i, lane, block, counted).copies.append(land)


def _store(
    m: Machine, i: Instruction, map_: TensorMap, corner: list[int], source: Array, lane: int
) -> None:
    at, there = map_.tile(corner)
    _region(m, i, map_, at[there])
    _check_granules(m, i, map_, at, there)
    places = _grains(m, map_, source)
    m.shared.start_read(places, m.own[lane : lane + 1], i, "a bulk store")
    if m.how.count:
        sectors = np.unique(at[there] >> 5) | map_.address >> REGION << REGION
        m.counts["store sectors"] += sectors.size
        m.memory.touched["store"].append(sectors)
    stores = _stores(m)
    stores.flying.append(
        _Store(lane, int(stores.committed[lane]), map_, corner, source, places, i)
    )  # fmt: skip


def _check_granules(m: Machine, i: Instruction, map_: TensorMap, at: Array, there: Array) -> None:
    """Bytes that hardware writes past a row's end are of the tensor's padding, if of anything."""
    if map_.shape[-1] * map_.element % 16 == 0 or not there.any():
        return
    region = m.memory.regions[(map_.address >> REGION) - 1]
    beyond = (at[there][:, None] // 16 * 16 + np.arange(16)).reshape(-1)
    beyond = np.setdiff1d(beyond, (at[there][:, None] + np.arange(map_.element)).reshape(-1))
    beyond = beyond[(beyond >= region.start) & (beyond < region.end)]
    if beyond.size:
        m.reports.add("a bulk store's granules of 16 bytes write past the end", i, beyond.size)


def _wait(m: Machine, left: int, mask: Mask) -> None:
    """All but the last `left` groups of each lane have read shared memory, and written."""
    stores = _stores(m)
    kept = []
    for store in stores.flying:
        if store.group >= stores.committed[store.lane] - left or not (
            mask is None or mask[store.lane]
        ):
            kept.append(store)
            continue
        at, there = store.map.tile(store.corner)
        region, size = _region(m, store.i, store.map, at[there]), store.map.element
        region.changed = True
        given = m.shared.views[size][store.source[there] // size]
        region.views[size][at[there] // size] = given
        tag = m.tag[store.lane].reshape(1, 1)
        same = np.zeros(int(there.sum()), bool)
        m.memory.note_write(region, at[there], size, tag, store.i, same)
        m.shared.end_read(store.places, m.own[store.lane : store.lane + 1])
    stores.flying = kept
