"""Matrix instructions of a warp: PTX ISA 9.7.14.5 (fragments .8, mma .14, ldmatrix .15,
stmatrix .16).

Sums are of float32 in the order of a library's product; tensor cores have an order of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .decode import Instruction
from .lanes import Array, Mask, Registers, Step, instruction
from .memory import check_one_value
from .numbers import bf16_to_f32

if TYPE_CHECKING:
    from .machine import Machine

f4, u2, u4, i8 = np.float32, np.uint16, np.uint32, np.int64
#: 16-bit operands in float32.
WIDEN = {"bf16": bf16_to_f32, "f16": lambda bits: bits.view(np.float16).astype(f4)}
_TOGETHER = 32  # products of one step


def product(a: Array, b: Array, c: Array) -> Array:
    """a @ b + c of batches of matrices, in float32."""
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in (c, a, b)]
    return torch.baddbmm(*tensors).numpy()


def products(run: list[Instruction], k: Registers) -> Iterator[Step]:
    """mma.sync instructions that follow each other; at once, unless one needs another."""
    wave: list[Instruction] = []
    written: set[str] = set()
    for i in run:
        d, a, b, c = i.operands
        if i.guard or len(wave) >= _TOGETHER or written & {*a, *b, *c}:
            if wave:
                yield _products(wave, k)
            wave, written = [], set()
        wave.append(i)
        written |= set(d)
    yield _products(wave, k)


def _products(wave: list[Instruction], k: Registers) -> Step:
    i = wave[0]
    shape = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32", i.opcode
    )
    if shape is None or i.guard:
        raise i.unknown()
    unique: list[dict[Any, int]] = [{}, {}]
    places = [
        [known.setdefault(w.operands[n + 1], len(known)) for w in wave]
        for n, known in enumerate(unique)
    ]
    reads = [[k.all(names, u4) for names in known] for known in unique]
    accumulators = [k.all(w.operands[3], u4) for w in wave]
    writes = [[k.write(name, u4) for name in w.operands[0]] for w in wave]

    def step(m: Machine, mask: Mask) -> None:
        m.whole(mask, 32, i)
        stacks = [np.stack([_stack(m, read) for read in some]) for some in (*reads, accumulators)]
        a, b, c = _operands(*stacks, m.warps, WIDEN[shape[1]])
        a, b = (x[at].reshape(-1, *x.shape[2:]) for x, at in zip((a, b), places, strict=True))
        d = product(a, b, c).reshape(len(wave), m.warps, 2, 8, 4, 2)
        d = np.ascontiguousarray(d.transpose(0, 2, 5, 1, 3, 4)).reshape(len(wave), 4, m.lanes)
        for row, registers in zip(d.view(u4), writes, strict=True):
            for x, write in zip(row, registers, strict=True):
                write(m, x, mask)
        warps = m.warps if mask is None else int(mask.sum()) // 32
        m.counts["multiply-adds"] += 16 * 8 * 16 * warps * len(wave)

    return step


def _stack(m: Machine, read: Any) -> Array:
    return np.stack([m.full(x) for x in read(m.R)])


def _operands(a: Array, b: Array, c: Array, warps: int, widen: Any) -> tuple[Array, Array, Array]:
    """Fragments (n, registers, lanes) as matrices (n, warps, rows, columns); c as (n·warps, ...).

    A lane holds rows g and g + 8, g its number / 4, and columns 2t, 2t + 1, t its number % 4.
    """
    a, b = (widen(x.view(u2)) for x in (a, b))
    a = a.reshape(-1, 2, 2, warps, 8, 4, 2).transpose(0, 3, 2, 4, 1, 5, 6)
    b = b.reshape(-1, 2, warps, 8, 4, 2).transpose(0, 2, 1, 4, 5, 3)
    c = c.view(f4).reshape(-1, 2, 2, warps, 8, 4).transpose(0, 3, 1, 4, 5, 2)
    a, b = a.reshape(-1, warps, 16, 16), b.reshape(-1, warps, 16, 8)
    return a, b, c.reshape(-1, 16, 8)


# --- ldmatrix, stmatrix: matrices of 8 rows of 16 bytes, whose addresses lanes 0-7, 8-15, ... give


def _matrices(i: Instruction) -> tuple[int, bool]:
    """How many, and whether they are transposed."""
    count = next((int(p[1]) for p in i.parts if re.fullmatch(r"x[124]", p)), 0)
    if "m8n8" not in i.parts or i.type != "b16" or not count:
        raise i.unknown()
    return count, "trans" in i.parts


def _rows(m: Machine, i: Instruction, address: Array, count: int, mask: Mask) -> tuple[Array, Any]:
    """Byte offsets of rows (warps, 8·count), and the warps that take part."""
    warps = m.whole(mask, 32, i)
    which = slice(None) if warps is None else warps
    at = m.full(address).reshape(-1, 32)[which, : 8 * count]
    base = m.base.reshape(-1, 32)[which, : 8 * count]
    rows = m.shared.locate(at.reshape(-1), base.reshape(-1), 16, i)
    if m.how.count:
        m.count_banks(None, rows, 16, rows=8)
    return rows, which


def _row_tags(m: Machine, count: int, which: Any) -> Array:
    return m.own.reshape(-1, 32)[which, : 8 * count].reshape(-1, 1)


@instruction("ldmatrix")
def _load(i: Instruction, k: Registers) -> Step:
    count, transposed = _matrices(i)
    into = i.operands[0] if isinstance(i.operands[0], tuple) else i.operands[:1]
    writes, address = [k.write(name, u4) for name in into], k.address(i.operands[1], u4)

    def step(m: Machine, mask: Mask) -> None:
        at, which = _rows(m, i, address(m.R), count, mask)
        m.shared.note_read(at, 16, _row_tags(m, count, which), i)
        rows = m.shared.data.reshape(-1, 16).view(u2)[at // 16].reshape(-1, count, 8, 8)
        if transposed:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(u4)  # (warps, count, 8, 4): lane after lane
        lanes = m.taking(mask)
        for n, write in enumerate(writes):
            write(m, m.spread(np.ascontiguousarray(words[:, n]).reshape(-1), lanes), mask)

    return step


@instruction("stmatrix")
def _store(i: Instruction, k: Registers) -> Step:
    count, transposed = _matrices(i)
    given = i.operands[1] if isinstance(i.operands[1], tuple) else i.operands[1:]
    reads, address = k.all(given, u4), k.address(i.operands[0], u4)

    def step(m: Machine, mask: Mask) -> None:
        at, which = _rows(m, i, address(m.R), count, mask)
        words = np.stack([m.full(x).reshape(-1, 8, 4)[which] for x in reads(m.R)], 1)
        rows = np.ascontiguousarray(words).view(u2).reshape(-1, count, 8, 8)
        if transposed:
            rows = rows.swapaxes(2, 3)
        m.shared.note_write(at, 16, _row_tags(m, count, which), i)
        rows = rows.reshape(-1, 8)
        m.shared.data.reshape(-1, 16).view(u2)[at // 16] = rows
        check_one_value(m, i, m.shared.views[8], at // 8, list(rows.view(np.uint64).T))

    return step
