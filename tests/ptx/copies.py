"""cp.async: PTX ISA 9.7.9.25.3. A copy arrives when it is waited for, and not before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .decode import Instruction
from .lanes import Array, Mask, Registers, Step, instruction
from .memory import load_global
from .spaces import grains
from .tensor_maps import bulk

if TYPE_CHECKING:
    from .machine import Machine

u4, i8 = np.uint32, np.int64


@dataclass
class _Copy:
    """Of some lanes: where to, what, and the group of each lane, counted from its first."""

    lanes: Array
    at: Array
    data: Array  # (lanes, bytes)
    group: Array

    def some(self, which: Array) -> _Copy:
        return _Copy(self.lanes[which], self.at[which], self.data[which], self.group[which])


@dataclass
class Copies:
    """Those in flight, in order; of each lane how many groups it has committed."""

    committed: Array
    flying: list[_Copy] = field(default_factory=list)

    def finish(self, m: Machine) -> None:
        """A kernel may end with copies that nobody waits for."""


def _of(m: Machine) -> Copies:
    if "cp.async" not in m.asynchronous:
        m.asynchronous["cp.async"] = Copies(np.zeros(m.lanes, i8))
    return m.asynchronous["cp.async"]


@instruction("cp")
def _copy(i: Instruction, k: Registers) -> Step:
    if i.parts[2] == "bulk":
        return bulk(i, k)
    if i.opcode == "cp.async.commit_group":
        return lambda m, mask: _commit(m, mask)
    if i.opcode == "cp.async.wait_group":
        left = int(i.operands[0], 0)
        return lambda m, mask: _wait(m, left, mask)
    if i.opcode not in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
        raise i.unknown()
    into, source = k.address(i.operands[0], u4), k.address(i.operands[1], np.uint64)
    size = int(i.operands[2], 0)
    taken = k.read(i.operands[3] if len(i.operands) > 3 else str(size), u4)

    def step(m: Machine, mask: Mask) -> None:
        _start(m, i, into(m.R), source(m.R), size, taken(m.R), mask)

    return step


def _start(
    m: Machine, i: Instruction, into: Array, source: Array, size: int, taken: Array, mask: Mask
) -> None:
    """Reads its source, of which bytes beyond `taken` are zeros, at once."""
    lanes = m.taking(mask)
    at = m.shared.locate(m.full(into)[lanes], m.base[lanes], size, i)
    taken = m.full(taken)
    if not ((taken == 0) | (taken == size))[lanes].all():
        raise i.unknown("of a part")
    reading = (taken > 0) if mask is None else (taken > 0) & mask
    data = np.zeros((at.size, size // 4), u4)
    if reading.any():
        words = load_global(m, i, m.full(source), 4, size // 4, reading)
        data = np.where(reading[lanes][:, None], np.stack([x[lanes] for x in words], 1), data)
    if m.how.count:
        m.count_banks(lanes, at, size)
    m.shared.note_write(at, size, m.own[lanes][:, None], i)
    words, first = m.shared.views[4], at[:, None] // 4 + np.arange(size // 4)
    words[first] = data
    if (words[first] != data).any():
        m.reports.add("race: one instruction writes different values", i)
    m.shared.start_copy(grains(at, size, m.shared.grain))
    numbers = np.arange(m.lanes)[lanes]
    flying = _of(m)
    flying.flying.append(
        _Copy(numbers, at, data.view(np.uint8), flying.committed[numbers].copy())
    )  # fmt: skip


def _commit(m: Machine, mask: Mask) -> None:
    _of(m).committed[m.taking(mask)] += 1


def _wait(m: Machine, left: int, mask: Mask) -> None:
    """All but the last `left` groups of each lane arrive."""
    flying = _of(m)
    kept = []
    for copy in flying.flying:
        done = copy.group < flying.committed[copy.lanes] - left
        if mask is not None:
            done &= mask[copy.lanes]
        if done.any():
            part = copy.some(done)
            places = grains(part.at, part.data.shape[1], m.shared.grain)
            tag = m.own[part.lanes][:, None]
            m.shared.land(part.at, part.data, places, tag)
            m.shared.leave_unfenced(places, tag)
        if not done.all():
            kept.append(copy.some(~done))
    flying.flying = kept
