"""Blocks of threads that run together: control flow, barriers, what lanes know, what is counted.

All lanes of several blocks execute an instruction at once. Lanes that have gone different ways run
under masks, those at the earliest basic block first. `How.order` has warps take turns instead.
PTX ISA 9.7.12 (control flow), 9.7.13.1 (bar.sync), 10 (special registers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Instruction, PTXError
from .lanes import Array, Mask, Registers
from .reports import Reports
from .spaces import BLOCKS, SEVERAL, Global, Shared, tag_of

if TYPE_CHECKING:
    from .program import Program

i8, u4 = np.int64, np.uint32
EXIT = 1 << 30
LANES = 8192  # that run together
_FOREVER = 1_000_000  # basic blocks


@dataclass(frozen=True)
class How:
    """How a kernel is executed.

    Attributes:
        count: also count sectors and bank conflicts.
        order: 0: all warps together; 1: warp after warp, each up to the next barrier; -1: from the
            last to the first. Blocks run in the same order.
        lanes: how many run together.
    """

    count: bool = False
    order: int = 0
    lanes: int = LANES


End = Callable[["Machine", Mask], int]


class Machine:
    """Some blocks of a launch.

    Attributes:
        R: registers.
        threads, blocks, lanes, warps: how many, of a block and together.
        block_of, warp_of: of each lane: the block's place among these, the warp within the block.
        tag: of each lane: who accesses memory (`spaces.tag_of`).
        asynchronous: what instruction families keep of operations in flight, by family.
        reached: how many warps have run each basic block.
    """

    def __init__(
        self, program: Program, blocks: Array, grid: Sequence[int], parameters: Sequence[Array],
        memory: Global, how: How, reports: Reports, counts: Counter[str],
    ) -> None:  # fmt: skip
        code = program.code
        self.program, self.parameters, self.memory = program, parameters, memory
        self.how, self.reports, self.counts = how, reports, counts
        self.threads, self.blocks = code.threads, len(blocks)
        self.lanes = self.threads * self.blocks
        self.warps = self.lanes // 32
        thread = np.tile(np.arange(self.threads, dtype=u4), self.blocks)
        self.block_of = np.repeat(np.arange(self.blocks), self.threads)
        self.warp_of = (thread // 32).astype(i8)
        self.number, self.epoch = blocks.astype(i8) + 1, np.ones(self.blocks, i8)
        self.shared = Shared(
            program.shared, self.blocks, program.grain, program.warpgroups, reports
        )
        self.base = (self.block_of * self.shared.pitch).astype(i8)
        self.R = self._registers(blocks, grid, thread)
        self.pc = np.zeros(self.lanes, i8)
        self.waiting, self.stalled = np.zeros(self.lanes, bool), np.zeros(self.lanes, bool)
        unit = self.warp_of // (4 if program.warpgroups else 1)
        self.rank = unit * how.order
        self.asynchronous: dict[str, Any] = {}
        self.reached: Counter[int] = Counter()
        self._tag()

    def _registers(self, blocks: Array, grid: Sequence[int], thread: Array) -> list[Array]:
        """What lanes find: NaN in every register, False in predicates, and special registers."""
        x, y, _ = grid
        along = blocks % x, blocks // x % y, blocks // x // y
        special = {"%tid.x": thread, "%laneid": thread % u4(32), "%warpid": thread // u4(32)}
        special["%ntid.x"] = np.array([self.threads], u4)
        for axis, places, size in zip("xyz", along, grid, strict=True):
            spread = np.repeat(places.astype(u4), self.threads if self.blocks > 1 else 1)
            special |= {f"%ctaid.{axis}": spread, f"%nctaid.{axis}": np.array([size], u4)}
        poison = {w: np.full(1, 0xFF, np.uint8).repeat(w).view(f"u{w}") for w in (1, 2, 4, 8)}
        poison[0] = np.zeros(1, bool)
        zero = np.zeros(1, u4)
        return [
            special.get(name, zero) if name[1:4] in ("tid", "cta", "nct", "nti", "lan", "war")
            else poison[width]
            for name, width in self.program.registers.widths.items()
        ]  # fmt: skip

    def _tag(self) -> None:
        self.tag = tag_of(self.number[self.block_of], self.epoch[self.block_of], self.warp_of + 1)
        self.own = self.tag & ((1 << 40) - 1)  # in shared memory, which is the block's

    # --- control flow

    def run(self) -> None:
        """Until all lanes have left."""
        blocks = self.program.blocks
        at, mask = 0, None if self.how.order == 0 else self._ready()[1]
        for _ in range(_FOREVER):
            steps, end = blocks[at]
            self.reached[at] += self.warps if mask is None else int(_any(mask, 32).sum())
            for step in steps:
                step(self, mask)
            then = end(self, mask)
            if mask is None and 0 <= then < EXIT:
                at = then
                continue
            if then >= 0:
                self.pc[slice(None) if mask is None else mask] = then
            at, mask = self._ready()
            if at == EXIT:
                break
        else:
            raise PTXError(f"{self.program.code.name} runs for ever")
        for finish in self.asynchronous.values():
            finish.finish(self)

    def _ready(self) -> tuple[int, Mask]:
        """The basic block that runs next, and its lanes; EXIT if all have left."""
        ready = ~self.waiting & (self.pc < EXIT)
        if not ready.any():
            return self._ready() if self._release() else (EXIT, None)
        free = ready & ~self.stalled
        if not free.any():
            self.stalled[:] = False
            free = ready
        if self.how.order:
            free = free & (self.rank == self.rank[free].min())
        at = int(self.pc[free].min())
        mask = free & (self.pc == at)
        return at, None if mask.all() else mask

    def go(self, taken: Array, there: int, on: int, mask: Mask) -> int:
        """Lanes that take a branch go there, the others on; -1 if they part."""
        lanes = taken if mask is None else self.full(taken)[mask]
        if lanes.all():
            return there
        if not lanes.any():
            return on
        self.pc = np.where(
            True if mask is None else mask, np.where(taken, there, on), self.pc
        )  # fmt: skip
        return -1

    def barrier(self, on: int, mask: Mask, i: Instruction) -> int:
        """bar.sync 0: a warp's lanes that have not left execute it together."""
        if mask is not None and (_any(mask, 32) & _any(~mask & (self.pc < EXIT), 32)).any():
            self.reports.add("by a part of its lanes", i)
        if mask is None:
            self.epoch += 1
            self._tag()
            return on
        self.waiting |= mask
        self.pc[mask] = on
        self._release()
        return -1

    def _release(self) -> bool:
        """Lets blocks go on whose lanes are all at the barrier, or have left."""
        here = (self.waiting | (self.pc >= EXIT)).reshape(self.blocks, -1).all(1)
        here &= _any(self.waiting, self.threads)
        if here.any():
            self.epoch[here] += 1
            self._tag()
            self.waiting &= ~here[self.block_of]
        return bool(here.any())

    # --- lanes

    def where(self, guard: Array, mask: Mask) -> Mask:
        """The lanes under `mask` where a predicate holds."""
        if guard.size == 1:
            return mask if guard[0] else np.zeros(self.lanes, bool)
        both = guard if mask is None else guard & mask
        return None if np.count_nonzero(both) == self.lanes else both

    def full(self, x: Array) -> Array:
        """An element for each lane."""
        return x if x.size == self.lanes else x.repeat(self.lanes)

    def taking(self, mask: Mask) -> Any:
        """What indexes the lanes that take part."""
        return slice(None) if mask is None else np.flatnonzero(mask)

    def spread(self, x: Array, lanes: Any) -> Array:
        """Results of some lanes as a register's array."""
        if isinstance(lanes, slice):
            return x
        whole = np.zeros(self.lanes, x.dtype)
        whole[lanes] = x
        return whole

    def uniform_tag(self) -> Array:
        """Of an access that all lanes make to one place."""
        if self.blocks > 1:
            return np.array([[BLOCKS]])
        actor = SEVERAL if self.threads > 32 else 1
        return tag_of(self.number, self.epoch, actor).reshape(1, 1)

    def whole(self, mask: Mask, count: int, i: Instruction) -> Array | None:
        """Which warps (warpgroups) of `count` lanes take part; None: all. All of its lanes must."""
        if mask is None:
            return None
        rows = mask.reshape(-1, count)
        if (rows.any(1) != rows.all(1)).any():
            self.reports.add("by a part of its lanes", i)
        return rows.any(1)

    # --- counts

    def count_sectors(self, what: str, lanes: Any, address: Array, size: int) -> None:
        """32-byte sectors that each warp's access touches."""
        warp = np.arange(self.lanes)[lanes] // 32 if address.size > 1 else np.zeros(1, i8)
        first, last = address >> 5, (address + size - 1) >> 5
        key = (warp.astype(np.uint64) << np.uint64(48)) | first.astype(np.uint64) & 0xFFFFFFFFFFFF
        each = np.unique(key).size if (first == last).all() else _spans(warp, first, last)
        if address.size == 1:
            each *= self.warps
        self.counts[f"{what} sectors"] += int(each)
        self.memory.touched[what].append(np.unique(first))

    def count_banks(self, lanes: Any, at: Array, size: int, rows: int = 0) -> None:
        """Passes over shared memory, and those without conflicts: 128 bytes of a warp each.

        `rows`: matrices of 8 rows of 16 bytes, instead of lanes.
        """
        per = 8 if rows else max(1, min(32, 128 // size))  # lanes of a pass
        number = np.arange(at.size) if rows else np.arange(self.lanes)[lanes]
        each = number // per
        words = (at[:, None] >> 2) + np.arange(max(1, size // 4))
        key = np.unique((each[:, None].astype(i8) << 32) | words)
        found, times = np.unique((key >> 32) * 32 + (key & 31), return_counts=True)
        most = np.zeros(int(each.max()) + 1, i8)
        np.maximum.at(most, found // 32, times)
        self.counts["shared passes"] += int(most.sum())
        self.counts["shared passes least"] += int(np.count_nonzero(most))


def _any(mask: Array, count: int) -> Array:
    return mask.reshape(-1, count).any(1)


def _spans(warp: Array, first: Array, last: Array) -> int:
    """Sectors of accesses that touch several each."""
    pairs = np.concatenate([np.stack([warp, first]), np.stack([warp, last])], 1)
    return np.unique(pairs, axis=1).shape[1]


# --- how basic blocks end


def end_of(i: Instruction | None, k: Registers, number: int, labels: dict[str, int]) -> End:
    """Where lanes go from basic block `number`; without an instruction, on."""
    on = number + 1
    if i is None:
        return lambda m, mask: on
    head, guard = i.parts[0], k.read(i.guard, np.bool_) if i.guard else None
    if head in ("bar", "barrier"):
        if i.parts[1] == "warp":
            return lambda m, mask: on
        if i.operands != ("0",) or guard or i.opcode not in ("bar.sync", "barrier.sync"):
            raise i.unknown(" ".join(map(str, i.operands)))
        return lambda m, mask: m.barrier(on, mask, i)
    if head == "bra" and i.operands[0] not in labels:
        raise i.unknown(f"to {i.operands[0]}")
    there = labels[i.operands[0]] if head == "bra" else EXIT
    if guard is None:
        return lambda m, mask: there
    return lambda m, mask: m.go(guard(m.R), there, on, mask)
