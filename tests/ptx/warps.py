"""What the lanes of a warp do together, and fences: PTX ISA 9.7.9.6 (shfl), 9.7.13.4 (fence),
9.7.13.12 (redux), 9.7.13.14 (elect)."""

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


@instruction("fence")
def _fence(i: Instruction, k: Registers) -> Step:
    if i.opcode not in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
        raise i.unknown()

    def step(m: Machine, mask: Mask) -> None:
        lanes = m.taking(mask)
        m.shared.fence(m.own[lanes], m.block_of[lanes])

    return step


def _together(i: Instruction, k: Registers) -> Step:
    """Holds an instruction to what Triton writes: all lanes of a warp take part."""
    members = k.read(i.operands[-1], u4)

    def check(m: Machine, mask: Mask) -> None:
        found = members(m.R)
        if (found if found.size == 1 else found[m.taking(mask)]).min() != ALL:
            raise i.unknown(f"among the lanes {i.operands[-1]}")
        m.whole(mask, 32, i)

    return check


@instruction("shfl")
def _shuffle(i: Instruction, k: Registers) -> Step:
    """Each lane reads another's; where that is beyond the clamp, its own."""
    into, given, distance, clamp, _ = i.operands
    together = _together(i, k)
    how, edge = i.parts[2], int(clamp, 0)
    if i.type != "b32" or "|" in into or edge >> 8:
        raise i.unknown()
    write, read, far = k.write(into, u4), k.read(given, u4), k.read(distance, u4)
    move = {
        "bfly": lambda n: _LANE ^ n, "idx": lambda n: n + 0 * _LANE, "up": lambda n: _LANE - n,
    }[how]  # fmt: skip

    def step(m: Machine, mask: Mask) -> None:
        x, n = read(m.R), far(m.R).astype(i8) & 31
        together(m, mask)
        if x.size > 1:
            source = move(n.reshape(-1, 32) if n.size > 1 else n)
            inside = source >= edge if how == "up" else source <= edge
            source = np.broadcast_to(np.where(inside, source, _LANE), (m.warps, 32))
            x = np.take_along_axis(x.reshape(-1, 32), source, 1).reshape(-1)
        write(m, x, mask)

    return step


_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


@instruction("redux")
def _reduce(i: Instruction, k: Registers) -> Step:
    together = _together(i, k)
    dtype, function = dtype_of(i.type), _REDUCTIONS[i.parts[2]]
    if i.type[0] == "f":
        raise i.unknown()
    read, write = k.read(i.operands[1], dtype), k.write(i.operands[0], dtype)

    def step(m: Machine, mask: Mask) -> None:
        together(m, mask)
        x = m.full(read(m.R)).reshape(-1, 32)
        write(m, np.repeat(function.reduce(x, axis=1, dtype=dtype), 32), mask)

    return step


@instruction("elect")
def _elect(i: Instruction, k: Registers) -> Step:
    """The first lane of each warp."""
    together = _together(i, k)
    leader, chosen = i.operands[0].split("|")
    writes = k.write(leader.strip(), u4), k.write(chosen.strip(), np.bool_)

    def step(m: Machine, mask: Mask) -> None:
        together(m, mask)
        writes[0](m, np.zeros(1, u4), mask)
        writes[1](m, m.R[m.program.registers.index["%laneid"]] == 0, mask)

    return step
