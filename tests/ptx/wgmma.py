"""Asynchronous matrix products of warpgroups: PTX ISA 9.7.15.

A product is computed when it is waited for, from what its operands in shared memory and registers
hold then. Until then its accumulators hold NaN, each register one of its own, by which copies of
them by mov are found again; whatever else reads one is reported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .accumulators import accumulators
from .decode import Instruction, PTXError
from .lanes import Array, Mask, Registers, Step, instruction
from .matrix import WIDEN, product
from .spaces import WARPGROUP
from .tensor_maps import swizzled

if TYPE_CHECKING:
    from .machine import Machine

f4, u2, u4, u8, i8 = np.float32, np.uint16, np.uint32, np.uint64, np.int64
_NAN, _BITS = 0xFFE00000, 21  # quiet NaNs; below them an accumulator's number
#: Mode of a descriptor -> swizzle of `tensor_maps.swizzled`.
_SWIZZLE = {0: 0, 1: 3, 2: 2, 3: 1}


@dataclass
class _Chain:
    """Accumulators that products in flight add to: their values (n / 2, lanes)."""

    first: int  # number of the first one's NaN
    values: Array


@dataclass
class _Operand:
    """A matrix in shared memory, of each warpgroup: addresses (warpgroups, rows, 16), grains."""

    at: Array
    places: Array  # (warpgroups, n)


@dataclass
class _Product:
    """One wgmma, of the warpgroups that have yet to wait for it.

    Attributes:
        a: in shared memory, or the registers' numbers and what they held.
        adds: of each warpgroup, whether it adds to the accumulators.
        group: of each warpgroup, counted from its first.
    """

    i: Instruction
    chain: _Chain
    a: _Operand | list[tuple[int, Array]]
    b: _Operand
    kind: str
    adds: Array
    flying: Array
    group: Array


@dataclass
class Products:
    """Those in flight, in order; of each warpgroup how many groups it has committed."""

    committed: Array
    flying: list[_Product] = field(default_factory=list)
    chains: dict[int, _Chain] = field(default_factory=dict)  # by the number of any of its NaNs
    numbers: int = 0

    def finish(self, m: Machine) -> None:
        if self.flying:
            m.reports.add("a wgmma that nobody waited for", None)


def _of(m: Machine) -> Products:
    if "wgmma" not in m.asynchronous:
        m.asynchronous["wgmma"] = Products(np.zeros(m.lanes // 128, i8))
    return m.asynchronous["wgmma"]


def checked(
    step: Step, i: Instruction, k: Registers, pending: set[str], unfenced: set[int]
) -> Step:
    """The step; where it reads registers that may be pending, it reports those that are."""
    if i.line in unfenced:

        def early(m: Machine, mask: Mask) -> None:
            m.reports.add("registers of a wgmma are used before it without wgmma.fence", i)
            step(m, mask)

        return early
    read = [k.index[name] for n, name in i.names if n != 0 and name in pending]
    if not read or i.parts[0] == "mov" or i.opcode.startswith("wgmma"):
        return step

    def run(m: Machine, mask: Mask) -> None:
        if "wgmma" in m.asynchronous and m.asynchronous["wgmma"].chains:
            chains = m.asynchronous["wgmma"].chains
            for n in read:
                x = m.full(m.R[n])[m.taking(mask)][:1]
                if x.size and x[0] >> _BITS == _NAN >> _BITS and int(x[0] - _NAN) in chains:
                    m.reports.add("an accumulator is read before its wait", i)
        step(m, mask)

    return run


@instruction("wgmma")
def _wgmma(i: Instruction, k: Registers) -> Step:
    if i.opcode == "wgmma.fence.sync.aligned":
        return lambda m, mask: None
    if i.opcode == "wgmma.commit_group.sync.aligned":

        def commit(m: Machine, mask: Mask) -> None:
            groups = m.whole(mask, 128, i)
            _of(m).committed[slice(None) if groups is None else groups] += 1

        return commit
    if i.opcode == "wgmma.wait_group.sync.aligned":
        left = int(i.operands[0], 0)
        accumulated = sorted(k.index[name] for name in accumulators(k.code))
        return lambda m, mask: _wait(m, left, mask, accumulated, i)
    return _product(i, k)


def _product(i: Instruction, k: Registers) -> Step:
    shape = re.fullmatch(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", i.opcode
    )
    if shape is None or i.guard:
        raise i.unknown()
    columns, kind = int(shape[1]), shape[2]
    d, a, b, adds, sign_a, sign_b, *transposed = i.operands
    if (sign_a, sign_b) != ("1", "1"):
        raise i.unknown("with signs")
    in_registers = isinstance(a, tuple)
    flags = [bool(int(x)) for x in transposed]
    transpose_a, transpose_b = (False, *flags) if in_registers else flags or (False, False)
    registers = [k.index[name] for name in d]
    first = [k.index[name] for name in a] if in_registers else k.read(a, u8)
    second, adding = k.read(b, u8), k.read(adds, np.bool_)

    def step(m: Machine, mask: Mask) -> None:
        these, groups = _of(m), m.whole(mask, 128, i)
        on = np.ones(m.lanes // 128, bool) if groups is None else groups
        chain = _chain_of(m, these, registers, mask)
        left: Any = (
            [(n, m.full(m.R[n])) for n in first]
            if in_registers
            else _operand(m, i, first(m.R), 64, transpose_a, on)
        )
        right = _operand(m, i, second(m.R), columns, transpose_b, on)
        adds = m.full(adding(m.R))[::128]
        these.flying.append(
            _Product(i, chain, left, right, kind, adds, on.copy(), these.committed.copy())
        )
        m.counts["multiply-adds"] += 64 * columns * 16 * int(on.sum())

    return step


def _chain_of(m: Machine, these: Products, registers: list[int], mask: Mask) -> _Chain:
    """The accumulators of a product, which hold their NaNs from now on."""
    lanes = m.taking(mask)
    head = m.full(m.R[registers[0]])[lanes]
    number = int(head[0]) - _NAN
    if head[0] >> _BITS == _NAN >> _BITS and number in these.chains and (head == head[0]).all():
        chain = these.chains[number]
        given = [m.full(m.R[n])[lanes][0] for n in registers]
        if [int(x) for x in given] == [_NAN + chain.first + j for j in range(len(registers))]:
            return chain
    values = np.stack([m.full(m.R[n]) for n in registers])
    for group in np.flatnonzero(_pending(values[0, ::128])):  # adds to what others compute
        old = these.chains.get(int(values[0, group * 128]) - _NAN)
        if old is not None and (mask is None or mask[group * 128]):
            some = slice(group * 128, group * 128 + 128)
            values[:, some] = old.values[:, some]
            for p in these.flying:  # what is left of the old chain is this one's
                if p.chain is old and p.flying[group]:
                    raise PTXError("products of one accumulator in two orders")
    if these.numbers + len(registers) >= 1 << _BITS:
        these.numbers = 0
    chain = _Chain(these.numbers, values)
    these.numbers += len(registers)
    these.chains |= {chain.first + j: chain for j in range(len(registers))}
    for j, n in enumerate(registers):
        nan = np.full(m.lanes, _NAN + chain.first + j, u4)
        m.R[n] = nan if mask is None else np.where(mask, nan, m.R[n])
    return chain


def _pending(x: Array) -> Array:
    return x >> _BITS == _NAN >> _BITS


def _operand(
    m: Machine, i: Instruction, descriptor: Array, rows: int, transposed: bool, on: Array
) -> _Operand:
    d = m.full(descriptor)[::128]
    d = np.where(on, d, d[np.flatnonzero(on)[0]])  # others have none
    if ((d >> u8(49)) & u8(7)).any():
        raise i.unknown("with a base offset")
    at = np.stack([_addresses(int(x), rows, transposed) for x in d])
    if (at[on] + 2 > m.shared.size).any() or (at[on] < 0).any():
        raise PTXError(f"{i}: outside of shared memory")
    at = np.where(on[:, None, None], at, 0) + m.base[::128][:, None, None]
    starts = (at[:, ::8] if transposed else at[:, :, ::8]).reshape(len(at), -1, 1)
    places = (starts + np.arange(0, 16, m.shared.grain)) // m.shared.grain
    operand = _Operand(at, places.reshape(len(at), -1))
    m.shared.start_read(operand.places[on], _tags(m)[on], i, "wgmma")
    return operand


@functools.lru_cache(256)
def _addresses(descriptor: int, rows: int, transposed: bool) -> Array:
    """The elements (rows, 16) that a descriptor names, by 9.7.15.5.1.2.

    Rows of a core matrix are 16 bytes; `transposed`: along the rows, not along k.
    """
    start, lead, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    kind = _SWIZZLE[descriptor >> 62]
    pitch = {0: 16, 1: 32, 2: 64, 3: 128}[kind]
    row, k = np.arange(rows)[:, None], np.arange(16)
    if kind == 0 and not transposed:
        at = start + row // 8 * stride + row % 8 * 16 + k // 8 * lead + k % 8 * 2
    elif kind == 0:
        at = start + row // 8 * stride + row % 8 * 2 + k % 8 * 16 + k // 8 * lead
    elif not transposed:
        at = start + row // 8 * stride + row % 8 * pitch + k * 2
    else:
        per = pitch // 2
        at = start + row // per * lead + row % per * 2 + k % 8 * pitch + k // 8 * stride
    return swizzled(at, kind)


def _tags(m: Machine) -> Array:
    """Of the asynchronous accesses of each warpgroup (warpgroups, 1)."""
    return (m.own[::128] >> 8 << 8 | (WARPGROUP + m.warp_of[::128] // 4))[:, None]


def _wait(m: Machine, left: int, mask: Mask, registers: list[int], i: Instruction) -> None:
    """All but the last `left` groups of each warpgroup are computed."""
    these, groups = _of(m), m.whole(mask, 128, i)
    ready = []
    for p in these.flying:
        done = p.flying & (p.group < these.committed - left)
        ready.append((p, done if groups is None else done & groups))
    for run in _runs([(p, done) for p, done in ready if done.any()]):
        _compute(m, [p for p, _ in run], np.flatnonzero(run[0][1]))
    for p, done in ready:
        p.flying = p.flying & ~done
    these.flying = [p for p in these.flying if p.flying.any()]
    _deliver(m, these, registers)


def _runs(ready: list[tuple[_Product, Array]]) -> Iterator[list[tuple[_Product, Array]]]:
    """Products that follow each other along k, of the same accumulators: computed as one."""
    run: list[tuple[_Product, Array]] = []
    for p, done in ready:
        if run and not (p.chain is run[0][0].chain and p.adds.all() and (done == run[0][1]).all()):
            yield run
            run = []
        run.append((p, done))
    if run:
        yield run


def _compute(m: Machine, run: list[_Product], which: Array) -> None:
    """Of the warpgroups `which`; the operands are read now."""
    lanes = (which[:, None] * 128 + np.arange(128)).reshape(-1)
    halves, (first, tags) = m.shared.views[2], (run[0], _tags(m)[which])
    a = np.concatenate([_left(m, p, which, lanes, halves) for p in run], 2)
    b = np.concatenate([halves[p.b.at[which] >> 1] for p in run], 2).swapaxes(1, 2)
    columns = b.shape[2]
    c = first.chain.values[:, lanes].view(f4).reshape(columns // 8, 2, 2, -1, 4, 8, 4)
    c = np.ascontiguousarray(c.transpose(3, 4, 1, 5, 0, 6, 2)).reshape(-1, 64, columns)
    c = np.where(first.adds[which][:, None, None], c, f4(0))
    made = product(*(WIDEN[first.kind](np.ascontiguousarray(x)) for x in (a, b)), c)
    made = made.reshape(-1, 4, 2, 8, columns // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
    first.chain.values[:, lanes] = np.ascontiguousarray(made).reshape(columns // 2, -1).view(u4)
    for p in run:
        for operand in (p.a, p.b):
            if isinstance(operand, _Operand):
                m.shared.end_read(operand.places[which], tags)


def _left(m: Machine, p: _Product, which: Array, lanes: Array, halves: Array) -> Array:
    """a (warpgroups, 64, 16), from shared memory or from registers."""
    if isinstance(p.a, _Operand):
        return halves[p.a.at[which] >> 1]
    found, given = (np.stack([x[lanes] for x in some]) for some in (
        [m.full(m.R[n]) for n, _ in p.a], [x for _, x in p.a]
    ))  # fmt: skip
    if (found != given).any():
        m.reports.add("a register of a wgmma is overwritten before its wait", p.i)
    a = found.view(u2)
    a = a.reshape(2, 2, -1, 4, 8, 4, 2).transpose(2, 3, 1, 4, 0, 5, 6)
    return np.ascontiguousarray(a).reshape(-1, 64, 16)


def _deliver(m: Machine, these: Products, registers: list[int]) -> None:
    """Registers whose products have all been computed get their values."""
    if not these.chains:
        return
    busy: dict[int, Array] = {}
    for p in these.flying:
        busy[id(p.chain)] = busy.get(id(p.chain), False) | p.flying
    for n in registers:
        x = m.R[n]
        heads = x[::128]
        pending = _pending(heads)
        if not pending.any():
            continue
        made = np.array(m.full(x))
        for number in np.unique(heads[pending] - u4(_NAN)):
            chain = these.chains.get(int(number))
            if chain is None:
                continue
            ready = pending & (heads == u4(_NAN) + number)
            if id(chain) in busy:
                ready = ready & ~busy[id(chain)]
            lanes = np.repeat(np.broadcast_to(ready, (m.lanes // 128,)), 128)
            made = np.where(lanes, chain.values[int(number) - chain.first], made)
        m.R[n] = made
    alive = set(busy)
    these.chains = {n: c for n, c in these.chains.items() if id(c) in alive}
