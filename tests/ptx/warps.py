"""What the lanes of a warp do together, and fences: PTX ISA 9.7.9.6 (shfl), 9.7.13 (parallel
synchronization: vote, redux, elect, fences), 9.7.12.7 (griddepcontrol)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .decode import Instruction
from .lanes import Mask, Registers, Step, dtype_of, instruction

if TYPE_CHECKING:
    from .machine import Machine

u4, i8 = np.uint32, np.int64
ALL = 0xFFFFFFFF
_LANE = np.arange(32)


def _nothing(m: Machine, mask: Mask) -> None:
    """What this machine does in order anyway, or a hint."""


@instruction("membar", "nanosleep", "griddepcontrol", "prefetch")
def _hint(i: Instruction, k: Registers) -> Step:
    return _nothing


@instruction("fence")
def _fence(i: Instruction, k: Registers) -> Step:
    if i.opcode in ("fence.proxy.async", "fence.proxy.async.shared::cta"):

        def step(m: Machine, mask: Mask) -> None:
            lanes = m.taking(mask)
            m.shared.fence(m.own[lanes], m.block_of[lanes])

        return step
    if i.parts[1] == "proxy":
        raise i.unknown()
    return _nothing


def _members(i: Instruction, k: Registers, text: str) -> None:
    """Triton has all lanes of a warp take part."""
    if k.constant(text, np.dtype(u4))[0] != ALL if text not in k.index else False:
        raise i.unknown(f"among the lanes {text}")


@instruction("shfl")
def _shuffle(i: Instruction, k: Registers) -> Step:
    """Each lane reads another's; where that is beyond the clamp, its own."""
    into, given, distance, clamp, members = i.operands
    _members(i, k, members)
    how, edge = i.parts[2], int(clamp, 0)
    if i.type != "b32" or "|" in into or edge >> 8:
        raise i.unknown()
    write, read, far = k.write(into, u4), k.read(given, u4), k.read(distance, u4)
    moves = {
        "bfly": lambda n: _LANE ^ n, "up": lambda n: _LANE - n, "down": lambda n: _LANE + n,
        "idx": lambda n: n + 0 * _LANE,
    }  # fmt: skip

    def step(m: Machine, mask: Mask) -> None:
        x, n = read(m.R), far(m.R).astype(i8) & 31
        m.whole(mask, 32, i)
        if x.size > 1:
            source = moves[how](n.reshape(-1, 32) if n.size > 1 else n)
            inside = source >= edge if how == "up" else source <= edge
            source = np.broadcast_to(np.where(inside, source, _LANE), (m.warps, 32))
            x = np.take_along_axis(x.reshape(-1, 32), source, 1).reshape(-1)
        write(m, x, mask)

    return step


_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
               "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip


@instruction("redux")
def _reduce(i: Instruction, k: Registers) -> Step:
    dtype, function = dtype_of(i.type), _REDUCTIONS[i.parts[2]]
    read, write = k.read(i.operands[1], dtype), k.write(i.operands[0], dtype)

    def step(m: Machine, mask: Mask) -> None:
        m.whole(mask, 32, i)
        x = m.full(read(m.R)).reshape(-1, 32)
        write(m, np.repeat(function.reduce(x, axis=1, dtype=dtype), 32), mask)

    return step


@instruction("vote")
def _vote(i: Instruction, k: Registers) -> Step:
    if i.parts[2] != "ballot":
        raise i.unknown()
    read, write = k.read(i.operands[1], np.bool_), k.write(i.operands[0], u4)

    def step(m: Machine, mask: Mask) -> None:
        m.whole(mask, 32, i)
        bits = m.full(read(m.R)).reshape(-1, 32).astype(u4) << _LANE.astype(u4)
        write(m, np.repeat(np.bitwise_or.reduce(bits, 1), 32), mask)

    return step


@instruction("elect")
def _elect(i: Instruction, k: Registers) -> Step:
    """The first lane of each warp."""
    leader, chosen = i.operands[0].split("|")
    writes = k.write(leader.strip(), u4), k.write(chosen.strip(), np.bool_)

    def step(m: Machine, mask: Mask) -> None:
        m.whole(mask, 32, i)
        writes[0](m, np.zeros(1, u4), mask)
        writes[1](m, m.R[m.program.registers.index["%laneid"]] == 0, mask)

    return step
