"""What machine code costs: repeated matrix work, and clocks of its loops, from TTGIR and SASS.

Clocks are those of a multiprocessor for an iteration of one block, if nothing else held it up: each
unit takes its work over its documented rate, and the slowest unit bounds the loop. Not counted:
latency, bank conflicts, caches and memory, so the sum is a lower bound.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

#: Architecture -> fused multiply-adds of 16-bit tensor cores with float32 sums, in a clock of a
#: multiprocessor; for 86, 89 and 120 those of professional GPUs, which GeForce halves.
TENSOR_RATES = {
    80: 1024, 86: 512, 87: 1024, 89: 512, 90: 2048, 100: 4096, 103: 4096, 120: 512, 121: 512,
}  # fmt: skip
#: Lanes a clock of the other units: special functions and conversions (on sm_103 twice as many);
#: integers, comparisons and selections; products of integers, and on sm_80 all of floating point.
LANES = {"special": 16, "integer": 64, "multiply": 64}
_SPECIAL = ("MUFU", "F2F", "F2I", "I2F", "I2FP", "FRND", "POPC", "FLO")
_INTEGER = (
    "LOP3", "IADD3", "VIADD", "SHF", "ISETP", "FSETP", "SEL", "FSEL", "PRMT", "LEA", "F2FP",
    "IMNMX", "VIMNMX", "FMNMX", "PLOP3", "SGXT", "BMSK", "IABS",
)  # fmt: skip
_MULTIPLY = ("IMAD",)
_FLOAT = ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2")
_MATRIX = ("HMMA", "HGMMA", "UTCHMMA")
_LOADS = ("LDG", "LDGSTS", "UTMALDG")
_SHARED_BYTES = 128  # a clock
#: Instructions that do work: a loop without any only waits.
_WORK = (*_SPECIAL, *_INTEGER, *_FLOAT, *_MATRIX, "LDS", "LDSM", "LDG", "STS", "STSM", "STG")


class Instruction(NamedTuple):
    address: int
    predicate: str
    name: str  # with its suffixes, as HGMMA.64x256x16.F32.BF16
    operands: str

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]


def instructions(sass: str) -> list[Instruction]:
    """Return the instructions of the listing's last function."""
    pattern = r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z][A-Z0-9_.x]*)([^;]*)"
    found = re.findall(pattern, sass[sass.rfind("Function :") + 1 :], re.M)
    return [Instruction(int(at, 16), *rest) for at, *rest in found]


def repetition(ttgir: str) -> float:
    """Return how often warps compute an element of a product at most; 1 if none is repeated.

    Of the warps' instructions in the layout, which cover a tile again where it is too small. A
    product of one thread (tcgen05) and one without tensor cores repeat nothing.
    """
    layouts = {}
    for name, version, warps, shape in re.findall(
        r"^(#\w+) = #ttg.nvidia_mma<\{versionMajor = (\d).*?warpsPerCTA = \[([\d, ]+)\].*?"
        r"instrShape = \[([\d, ]+)\]",
        ttgir, re.M,
    ):  # fmt: skip
        sizes = [int(n) for n in shape.split(",")]
        one = sizes[:2] if version == "3" else sizes[-2:]
        layouts[name] = [n * int(w) for n, w in zip(one, warps.split(",")[-2:], strict=True)]
    most = 1.0
    products = r"= (?:tt\.dot|ttng\.warp_group_dot) .*-> tensor<(?:\d+x)?(\d+)x(\d+)xf32, (#\w+)>"
    for rows, columns, layout in re.findall(products, ttgir):
        tile = int(rows), int(columns)
        over = (max(1.0, n / size) for n, size in zip(layouts.get(layout, tile), tile, strict=True))
        most = max(most, prod(over))
    return most


def _target(one: Instruction) -> int | None:
    found = re.search(r"\b0x([0-9a-f]+)\s*$", one.operands)
    return int(found[1], 16) if found and one.kind == "BRA" else None


def _blocks(code: Sequence[Instruction]) -> tuple[list[range], list[list[int]]]:
    """Return runs of instructions without a branch, and the blocks that may follow each."""
    at = {one.address: i for i, one in enumerate(code)}
    leaders, regions, ends = {0}, {}, {}
    for i, one in enumerate(code):
        goal = _target(one)
        if one.kind == "BSSY":
            name, _, place = one.operands.partition(",")
            regions[name.strip()] = at.get(int(place, 16))
        elif one.kind == "BSYNC":
            goal = code[regions.get(one.operands.strip()) or i + 1].address
        if goal in at or one.kind in ("EXIT", "RET"):
            ends[i] = at.get(goal, -1) if goal is not None else -1
            leaders |= {i + 1, ends[i]} - {-1}
    starts = sorted(n for n in leaders if n < len(code))
    spans = [range(a, b) for a, b in itertools.pairwise([*starts, len(code)])]
    number = {span.start: n for n, span in enumerate(spans)}
    after = []
    for n, span in enumerate(spans):
        last = code[span[-1]]
        always = span[-1] in ends and not last.predicate and "," not in last.operands
        goals = [number[ends[span[-1]]]] if ends.get(span[-1], -1) >= 0 else []
        after.append(goals + ([n + 1] if not always and n + 1 < len(spans) else []))
    return spans, after


def _dominators(after: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each block, a bit for each block that all paths to it pass."""
    everything = (1 << len(after)) - 1
    found = [1, *([everything] * (len(after) - 1))]
    before: list[list[int]] = [[] for _ in after]
    for n, goals in enumerate(after):
        for goal in goals:
            before[goal].append(n)
    changed = True
    while changed:
        changed = False
        for n in range(1, len(after)):
            now = everything
            for other in before[n]:
                now &= found[other]
            now |= 1 << n
            changed, found[n] = changed or now != found[n], now
    return found


def loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the innermost loops, in order; a wait that tries again is none."""
    spans, after = _blocks(code)
    over = _dominators(after)
    before: list[set[int]] = [set() for _ in after]
    for n, goals in enumerate(after):
        for goal in goals:
            before[goal].add(n)
    bodies: dict[int, set[int]] = {}
    for n, goals in enumerate(after):
        for head in (goal for goal in goals if over[n] >> goal & 1):
            body, todo = bodies.setdefault(head, {head}), [n]
            while todo:
                one = todo.pop()
                if one not in body:
                    body.add(one)
                    todo += before[one]
    works = {n for n, span in enumerate(spans) if any(code[i].kind in _WORK for i in span)}
    again = set().union(*(body for body in bodies.values() if not body & works))
    real = {head: body - again for head, body in bodies.items() if body & works}
    return [
        [code[i] for n in sorted(body) for i in spans[n]]
        for head, body in sorted(real.items())
        if not any(other in body for other in real.keys() - {head})
    ]


def _described(body: Sequence[Instruction], place: int) -> tuple[int, int] | None:
    """Return rows and columns of a UTCHMMA, whose descriptor is moved to a register before."""
    register = re.search(r"idesc\[(\w+)\]", body[place].operands)
    for one in reversed(body[:place]):
        if register and one.kind == "UMOV" and one.operands.split(",")[0].strip() == register[1]:
            value = re.search(r"0x([0-9a-f]+)", one.operands)
            bits = int(value[1], 16) if value else 0
            return (bits >> 24 & 0x1F) * 16, (bits >> 17 & 0x3F) * 8
    return None


def _products(body: Sequence[Instruction], warps: int) -> Iterator[tuple[float, float]]:
    """Yield a block's matrix instructions: multiply-adds, and bytes read of shared memory."""
    shape = None
    for i, one in enumerate(body):
        if one.kind == "HGMMA" and (size := re.search(r"(\d+)x(\d+)x(\d+)", one.name)):
            m, n, k = map(int, size.groups())
            read = 2 * k * (n + m * bool(re.match(r"\s*R\w+, gdesc", one.operands)))
            yield m * n * k * warps / 4, read * warps / 4
        elif one.kind == "HMMA":
            yield 16 * 8 * (16 if ".16816" in one.name else 8) * warps, 0
        elif one.kind == "UTCHMMA" and (shape := _described(body, i) or shape):
            m, n = shape  # 64 rows take as long as 128
            yield max(m, 128) * n * 16, 32 * (n + m * one.operands.lstrip().startswith("gdesc"))


def _shared(one: Instruction) -> int:
    """Return the bytes of shared memory that a warp reads or writes."""
    if one.kind in ("LDSM", "STSM"):
        several = re.search(r"88\.(\d)", one.name)
        return 128 * int(several[1]) if several else 128
    if one.kind in ("LDS", "STS", "LDGSTS"):
        width = re.search(r"\.(64|128)\b", one.name)
        return 4 * int(width[1]) if width else 128
    return 0


def clocks(body: Sequence[Instruction], arch: int, warps: int) -> dict[str, float]:
    """Return the clocks of each unit for an iteration of a block."""
    kinds = [one.kind for one in body]
    made = list(_products(body, warps))
    multiplies = (*_MULTIPLY, *(_FLOAT if arch == 80 else ()))
    units = {"special": _SPECIAL, "integer": _INTEGER, "multiply": multiplies}
    lanes = LANES | ({"special": 32} if arch == 103 else {})
    moved = sum(map(_shared, body)) * warps + sum(read for _, read in made)
    return {
        "tensor": sum(work for work, _ in made) / TENSOR_RATES[arch],
        "issue": len(body) * warps / 4,
        **{
            unit: sum(kinds.count(kind) for kind in names) * 32 * warps / lanes[unit]
            for unit, names in units.items()
        },
        "shared": moved / _SHARED_BYTES,
    }


def _loop(body: Sequence[Instruction], arch: int, warps: int) -> dict[str, Any]:
    units = clocks(body, arch, warps)
    slowest = max(units, key=lambda unit: units[unit])
    return {
        **{unit: round(n) for unit, n in units.items()},
        "bound": slowest,
        "share": round(units["tensor"] / units[slowest], 3),
        "spills": sum(one.kind in ("LDL", "STL") for one in body),
    }


def examine(ttgir: str, sass: str, arch: int, warps: int) -> dict[str, Any]:
    """Return a kernel's "repetition" and its hot "loops".

    Hot is an innermost loop with matrix instructions, or with loads if the kernel has no such
    instructions. "loops" is None, not read, where warps are specialized.
    """
    code = instructions(sass)
    row: dict[str, Any] = {"repetition": repetition(ttgir), "loops": None}
    if "ttg.warp_specialize" in ttgir or any(one.kind in ("BRX", "JMX") for one in code):
        return row
    wanted = _MATRIX if any(one.kind in _MATRIX for one in code) else _LOADS
    hot = [body for body in loops(code) if any(one.kind in wanted for one in body)]
    return row | {"loops": [_loop(body, arch, warps) for body in hot]}


def tensor_share(loops: Iterable[dict[str, Any]] | None) -> float | None:
    """Return the least share of the tensor cores in a hot loop with matrix work, or None."""
    return min((one["share"] for one in loops or () if one["tensor"]), default=None)
