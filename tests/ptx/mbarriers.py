"""mbarrier objects: PTX ISA 9.7.13.15. Copies that a barrier counts arrive when it is polled,
and a first poll fails, so that nothing is there sooner than a wait allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Instruction, PTXError
from .lanes import Array, Mask, Registers, Step, instruction
from .spaces import grains

if TYPE_CHECKING:
    from .machine import Machine

u4, i8 = np.uint32, np.int64
_POLLS = 1000


@dataclass
class Barrier:
    """Phases end when all have arrived and all expected bytes are there."""

    count: int
    left: int
    bytes: int = 0
    phase: int = 0
    polled: int = 0  # times in this phase
    copies: list[Callable[[], int]] = field(default_factory=list)  # each returns its bytes

    def advance(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left, self.polled = self.phase ^ 1, self.count, 0


class Barriers(dict[tuple[int, int], Barrier]):
    """By block and address."""

    def finish(self, m: Machine) -> None:
        for barrier in self.values():
            if barrier.copies:
                m.reports.add("a copy that nobody waited for", None)


def barriers(m: Machine) -> Barriers:
    return m.asynchronous.setdefault("mbarrier", Barriers())


def few(m: Machine, address: Array, mask: Mask) -> Iterator[tuple[int, int, int]]:
    """Lane, block and address of the lanes that take part: one of a block, as a rule."""
    address = m.full(address)
    for lane in range(m.lanes) if mask is None else np.flatnonzero(mask):
        yield int(lane), int(m.block_of[lane]), int(address[lane])


def barrier_at(
    m: Machine, i: Instruction, lanes: Any, block: int, address: int, changes: bool = False
) -> Barrier:
    """The barrier there, used by lanes; to others it `changes` where it begins or ceases to be."""
    found = barriers(m).get((block, address))
    if found is None:
        raise PTXError(f"{i}: there is no mbarrier at {address}")
    _touch(m, i, lanes, block, address, changes)
    return found


def _touch(m: Machine, i: Instruction, lanes: Any, block: int, address: int, changes: bool) -> None:
    """Its eight bytes are memory like any other: a barrier orders uses by several warps."""
    tag = np.atleast_1d(m.own[lanes])[:, None]
    places = grains(np.full(len(tag), address + block * m.shared.pitch), 8, m.shared.grain)
    if not changes:
        bad = m.shared.tags.read(places, tag)
    else:
        bad = np.logical_or(*m.shared.tags.write(places, tag))
    if bad.any():
        m.reports.add("race: mbarrier", i)


@instruction("mbarrier")
def _mbarrier(i: Instruction, k: Registers) -> Step:
    if i.opcode == "mbarrier.try_wait.parity.shared::cta.b64":
        return _try_wait(i, k)
    if i.opcode == "mbarrier.arrive.expect_tx.shared::cta.b64":
        at, bytes_ = k.address(i.operands[1], u4), k.read(i.operands[2], u4)

        def arrive(m: Machine, mask: Mask) -> None:
            expected = m.full(bytes_(m.R))
            for lane, block, address in few(m, at(m.R), mask):
                barrier = barrier_at(m, i, lane, block, address)
                if barrier.left == 0:
                    m.reports.add("more arrivals than the mbarrier counts", i)
                barrier.bytes += int(expected[lane])
                barrier.left -= 1
                barrier.advance()

        return arrive
    at = k.address(i.operands[0], u4)
    if i.opcode == "mbarrier.init.shared::cta.b64":
        count = k.read(i.operands[1], u4)

        def init(m: Machine, mask: Mask) -> None:
            counts = m.full(count(m.R))
            for lane, block, address in few(m, at(m.R), mask):
                made = Barrier(int(counts[lane]), int(counts[lane]))
                _touch(m, i, lane, block, address, True)
                if barriers(m).setdefault((block, address), made) is not made:
                    m.reports.add("an mbarrier is there already", i)

        return init
    if i.opcode != "mbarrier.inval.shared::cta.b64":
        raise i.unknown()

    def invalidate(m: Machine, mask: Mask) -> None:
        for lane, block, address in few(m, at(m.R), mask):
            if barrier_at(m, i, lane, block, address, True).copies:
                m.reports.add("mbarrier invalidated while copies are in flight", i)
            del barriers(m)[block, address]

    return invalidate


def _try_wait(i: Instruction, k: Registers) -> Step:
    """Whether the phase of a parity is over; who polls in vain lets others go on."""
    write = k.write(i.operands[0], np.bool_)
    at, parity = k.address(i.operands[1], u4), k.read(i.operands[2], u4)

    def step(m: Machine, mask: Mask) -> None:
        address, wanted = m.full(at(m.R)), m.full(parity(m.R)) & 1
        done, lanes = np.zeros(m.lanes, bool), np.arange(m.lanes)[m.taking(mask)]
        keys = (m.block_of[lanes] << 32) | address[lanes]
        for key in np.unique(keys):
            here = lanes[keys == key]
            barrier = barrier_at(m, i, here, int(key) >> 32, int(key) & 0xFFFFFFFF)
            for parity_ in np.unique(wanted[here]):
                some = here[wanted[here] == parity_]
                if barrier.phase == parity_:
                    barrier.polled += 1
                    if barrier.polled > _POLLS:
                        raise PTXError(f"{i}: waits for ever")
                    if barrier.polled > 1:
                        for land in barrier.copies:
                            barrier.bytes -= land()
                        barrier.copies.clear()
                        barrier.advance()
                done[some] = barrier.phase != parity_
        m.stalled[lanes[~done[lanes]]] = True
        write(m, done, mask)

    return step
