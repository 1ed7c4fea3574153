"""Loads and stores of global and shared memory and of parameters: PTX ISA 9.7.9.8, 9.7.9.11."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Instruction
from .lanes import PARAMETERS, SIGNED, UNSIGNED, Array, Mask, Registers, Step, instruction, only
from .spaces import REGION

if TYPE_CHECKING:
    from .machine import Machine

_VECTOR = {"v2": 2, "v4": 4, "v8": 8}


class Access:
    """What a load or store names: space, element, how many, registers and address."""

    def __init__(self, i: Instruction, k: Registers, registers: Any, address: Any) -> None:
        self.space = i.parts[1].split("::")[0]
        self.registers = registers if isinstance(registers, tuple) else (registers,)
        self.size, self.signed = int(re.findall(r"\d+", i.type)[-1]) // 8, i.type[0] == "s"
        only(i, i.parts[1], *_VECTOR)
        number = next((_VECTOR[p] for p in i.parts if p in _VECTOR), 1)
        if number != len(self.registers):
            raise i.unknown()
        if self.space in ("global", "shared"):
            wide = np.uint64 if self.space == "global" else np.uint32
            self.address = k.address(address, wide)


@instruction("ld")
def _load(i: Instruction, k: Registers) -> Step:
    access = Access(i, k, *i.operands)
    dtype = (SIGNED if access.signed else UNSIGNED)[access.size]
    writes = [k.write(text, dtype) for text in access.registers]
    if access.space == "param":
        if len(writes) > 1:
            raise i.unknown()
        return _parameter(i, k, access, writes[0], dtype)
    load = {"global": load_global, "shared": load_shared}.get(access.space)
    if load is None:
        raise i.unknown()

    def step(m: Machine, mask: Mask) -> None:
        found = load(m, i, access.address(m.R), access.size, len(writes), mask)
        for write, x in zip(writes, found, strict=True):
            write(m, x.view(dtype), mask)

    return step


def _parameter(i: Instruction, k: Registers, access: Access, write: Any, dtype: Any) -> Step:
    address = k.address(i.operands[1], np.uint64)

    def step(m: Machine, mask: Mask) -> None:
        at = address(m.R)
        found = np.zeros(at.size, dtype)
        for place in np.unique(at if mask is None or at.size == 1 else at[mask]):
            number, offset = (int(place) >> REGION) - PARAMETERS, int(place) & 0xFFFF
            raw = m.parameters[number].view(np.uint8)[offset : offset + access.size]
            found[at == place] = raw.view(dtype)[0]
        write(m, found, mask)

    return step


def load_global(
    m: Machine, i: Instruction, address: Array, size: int, count: int, mask: Mask
) -> list[Array]:
    """`count` elements of `size` bytes that stand side by side."""
    if address.size == 1 and mask is None:
        lanes, tag = slice(None), m.uniform_tag()
    else:
        lanes = m.taking(mask)
        address, tag = m.full(address)[lanes], m.tag[lanes][:, None]
    if m.how.count:
        m.count_sectors("load", lanes, address, size * count)
    found = [np.empty(address.size, UNSIGNED[size]) for _ in range(count)]
    for some in m.memory.split(address):
        region, at = m.memory.locate(address[some], size * count, i)
        m.memory.note_read(region, at, size * count, tag[some], i)
        for n, x in enumerate(found):
            x[some] = region.views[size][at // size + n]
    return [m.spread(x, lanes) for x in found]


def load_shared(
    m: Machine, i: Instruction, address: Array, size: int, count: int, mask: Mask
) -> list[Array]:
    lanes = m.taking(mask)
    at = m.shared.locate(m.full(address)[lanes], m.base[lanes], size * count, i)
    if m.how.count:
        m.count_banks(lanes, at, size * count)
    m.shared.note_read(at, size * count, m.own[lanes][:, None], i)
    view, first = m.shared.views[size], at // size
    return [m.spread(view[first + n], lanes) for n in range(count)]


@instruction("st")
def _store(i: Instruction, k: Registers) -> Step:
    access = Access(i, k, i.operands[1], i.operands[0])
    reads = k.all(access.registers, UNSIGNED[access.size])
    store = {"global": _store_global, "shared": _store_shared}.get(access.space)
    if store is None:
        raise i.unknown()

    def step(m: Machine, mask: Mask) -> None:
        lanes = m.taking(mask)
        values = [m.full(x)[lanes] for x in reads(m.R)]
        store(m, i, m.full(access.address(m.R))[lanes], access.size, values, lanes)

    return step


def _store_global(
    m: Machine, i: Instruction, address: Array, size: int, values: list[Array], lanes: Any
) -> None:
    total = size * len(values)
    if m.how.count:
        m.count_sectors("store", lanes, address, total)
    for some in m.memory.split(address):
        region, at = m.memory.locate(address[some], total, i)
        region.changed = True
        given = [x[some] for x in values]
        same = _put(region.views[size], at // size, given)
        m.memory.note_write(region, at, total, m.tag[lanes][some][:, None], i, same)
        check_one_value(m, i, region.views[size], at // size, given)


def _store_shared(
    m: Machine, i: Instruction, address: Array, size: int, values: list[Array], lanes: Any
) -> None:
    total = size * len(values)
    at = m.shared.locate(address, m.base[lanes], total, i)
    if m.how.count:
        m.count_banks(lanes, at, total)
    same = _put(m.shared.views[size], at // size, values)
    m.shared.note_write(at, total, m.own[lanes][:, None], i, same)
    check_one_value(m, i, m.shared.views[size], at // size, values)


def _put(view: Array, first: Array, values: list[Array]) -> Array:
    """Writes; which wrote what was there already."""
    same = np.ones(first.shape, bool)
    for n, x in enumerate(values):
        same &= view[first + n] == x
    for n, x in enumerate(values):
        view[first + n] = x
    return same


def check_one_value(
    m: Machine, i: Instruction, view: Array, first: Array, values: list[Array]
) -> None:
    """What has been written is there, and no other lane's value."""
    for n, x in enumerate(values):
        lost = view[first + n] != x
        if lost.any():
            m.reports.add("race: one instruction writes different values", i, lost.sum())
