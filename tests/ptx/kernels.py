"""Kernels of a few instructions, to test these alone, and the exact values to hold them to."""

from __future__ import annotations

import functools
import itertools
import math
import re
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from .execute import How, Outcome, Program, TensorMap, execute

#: Opcodes that tests of this process have executed.
EXECUTED: set[str] = set()
_MODULE = """
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel({parameters})
.reqntid {threads}
{{
.reg .pred %p<32>;
.reg .b16 %rs<32>;
.reg .b32 %r<400>;
.reg .b64 %rd<32>;
{body}
ret;
}}
"""


def module(body: str, arguments: Sequence[Any] = (), threads: int = 32) -> str:
    """PTX of a kernel: argument n in %rd<n>, %tid.x in %r0, %ctaid.x in %r1."""
    kinds = {TensorMap: ".align 64 .b8 {}[128]", float: ".f32 {}"}
    names = [f"kernel_param_{n}" for n in range(len(arguments) + 2)]
    given = [kinds.get(type(x), ".u64 {}") for x in [*arguments, 0, 0]]
    lines = [
        f"mov.b64 %rd{n}, {name};\ncvta.param.u64 %rd{n}, %rd{n};"
        if isinstance(x, TensorMap) else f"ld.param.b64 %rd{n}, [{name}];"
        for n, (name, x) in enumerate(zip(names, arguments, strict=False))
        if not isinstance(x, float)
    ]  # fmt: skip
    lines += ["mov.u32 %r0, %tid.x;", "mov.u32 %r1, %ctaid.x;", body]
    declared = [".param " + kind.format(name) for kind, name in zip(given, names, strict=True)]
    return _MODULE.format(
        parameters=",\n".join(declared), threads=threads, body="\n".join(lines)
    )  # fmt: skip


def run(
    body: str, *arguments: Any, threads: int = 32, grid: Sequence[int] = (1,), shared: int = 0,
    **how: Any,
) -> Outcome:  # fmt: skip
    """Executes a kernel."""
    program = Program(module(body, arguments, threads), shared)
    outcome = execute(program, grid, arguments, How(**how))
    EXECUTED.update(outcome.opcodes)
    return outcome


def right(*arguments: Any, **options: Any) -> Outcome:
    """Executes a kernel that nothing is wrong with."""
    outcome = run(*arguments, **options)
    assert not outcome.reports
    return outcome


def reported(*arguments: Any, **options: Any) -> str:
    """What is reported of a kernel."""
    return "\n".join(run(*arguments, **options).reports)


def not_executed(family: str) -> set[str]:
    """The opcodes of our kernels, of a family, that no test of this process has executed."""
    rows = map(str.split, (Path(__file__).parent / "opcodes.txt").read_text().splitlines())
    return {opcode for name, *_, opcode in rows if name == family} - EXECUTED


def lanes(tensor: int, size: int, register: str = "%rd31", lane: str = "%r0") -> str:
    """The address of a lane's element."""
    return f"mad.wide.u32 {register}, {lane}, {size}, %rd{tensor};"


# --- values

_FORMAT = {"f64": "d", "f32": "f", "f16": "e"}
#: Bits of the fraction with its leading one, least exponent.
_PRECISION = {"f64": (53, -1022), "f32": (24, -126), "f16": (11, -14), "bf16": (8, -126)}
_DTYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


@functools.cache
def width(kind: str) -> int:
    """Bits of a type; a predicate is loaded and stored as 32."""
    return 32 if kind == "pred" or kind.endswith("x2") else int(re.findall(r"\d+", kind)[0])


def number(kind: str, bits: int) -> Any:
    """The value of bits."""
    size = width(kind)
    if kind == "bf16":
        return struct.unpack("f", struct.pack("I", bits << 16))[0]
    if kind in _FORMAT:
        return struct.unpack(_FORMAT[kind], bits.to_bytes(size // 8, "little"))[0]
    if kind == "pred":
        return bool(bits)
    return bits - (1 << size) if kind[0] == "s" and bits >> (size - 1) else bits


def bits_of(kind: str, value: Any) -> int:
    """The bits of a value, rounded to the nearest: integers modulo their size."""
    if kind == "bf16":
        return bits_of("f32", nearest(value, kind)) >> 16
    if kind in _FORMAT:
        return int.from_bytes(struct.pack(_FORMAT[kind], nearest(value, kind)), "little")
    return int(value) & ((1 << width(kind)) - 1)


def nearest(x: float | Fraction, kind: str) -> float:
    """Rounded once, from the exact number, ties to even."""
    if isinstance(x, float) and (x == 0 or not math.isfinite(x)):
        return x
    bits, least = _PRECISION[kind]
    exact = Fraction(x)
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(exact)
    unit = Fraction(2) ** (max(exponent, least) - bits + 1)
    rounded = round(exact / unit) * unit
    size = math.inf if abs(rounded) >= Fraction(2) ** (2 - least) else abs(float(rounded))
    return -size if x < 0 else size


def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in rational numbers; in floating point where these cannot express it."""

    def value(*xs: float) -> Any:
        exact = all(map(math.isfinite, xs)) and function(*map(Fraction, xs))
        return exact if isinstance(exact, Fraction) and exact else function(*xs)

    return value


def flushed(kind: str, x: float) -> float:
    """Subnormal numbers as zeros."""
    small = kind in _PRECISION and abs(x) < 2.0 ** _PRECISION[kind][1]
    return math.copysign(0.0, x) if small else x


def samples(kind: str) -> list[int]:
    """Bits of values at the edges of a type."""
    size = width(kind)
    if kind == "pred":
        return [0, 1]
    if kind in _PRECISION:
        least = _PRECISION[kind][1]
        one, step = bits_of(kind, 1.0), bits_of(kind, 2.0**least)
        positive = [0, 1, step - 1, step, one, one + 1, bits_of(kind, 3.0), bits_of(kind, 0.3),
                    bits_of(kind, math.inf) - 1, bits_of(kind, math.inf)]  # fmt: skip
        return [*positive, *(x | 1 << (size - 1) for x in positive), bits_of(kind, math.nan)]
    top = 1 << (size - 1)
    values = [0, 1, 2, 7, size - 1, size, top - 1, 0x5A96C3B1 % top]
    return [*values, *(-x & (2 * top - 1) for x in values[1:]), top]


def each(template: str, into: str, of: Sequence[str], rows: Sequence[Sequence[int]]) -> list[int]:
    """What an instruction gives for each row of operands, which are bits: "add.s32 d, a, b"."""
    names, lines = {}, []
    prefix = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}
    columns = [list(column) for column in zip(*rows, strict=True)]
    count = -(-len(rows) // 32) * 32
    tensors = []
    for n, (kind, column) in enumerate(zip([into, *of], [[], *columns], strict=True)):
        size, letter = width(kind), "dabc"[n]
        data = torch.zeros(count, dtype=torch.int64)
        data[: len(column)] = torch.tensor([number(f"s{size}", x) for x in column]).long()
        tensors.append(data.to(_DTYPES[size]))
        names[letter] = f"{prefix[size]}{20 + n}"
        lines.append(lanes(n, size // 8, f"%rd{10 + n}"))
        if n:
            lines.append(f"ld.global.b{size} {names[letter]}, [%rd{10 + n}];")
            if kind == "pred":
                lines.append(f"setp.ne.b32 %p{n}, {names[letter]}, 0;")
                names[letter] = f"%p{n}"
    stored = names["d"]
    if into == "pred":
        names["d"] = "%p9"
    place = re.compile(r"(?<=[ ,!])[abcd](?=[,;]|$)")
    lines.append(place.sub(lambda m: names[m[0]], template) + ";")
    if into == "pred":
        lines.append(f"selp.b32 {stored}, 1, 0, %p9;")
    size = width(into)
    lines.append(f"st.global.b{size} [%rd10], {stored};")
    right("\n".join(lines), *tensors, threads=count)
    return [x & ((1 << size) - 1) for x in tensors[0].tolist()[: len(rows)]]


def same(kind: str, found: int, wanted: int, ulps: int = 0) -> bool:
    """Equal bits, or both NaN, or so many units of the last place apart."""
    if kind not in _PRECISION:
        return found == wanted
    x, y = number(kind, found), number(kind, wanted)
    if math.isnan(x) or math.isnan(y):
        return math.isnan(x) and math.isnan(y)
    return found == wanted or (abs(found - wanted) <= ulps and math.isfinite(x))


def check(
    template: str, signature: str, function: Callable[..., Any], *, ulps: int = 0,
    rows: Sequence[Sequence[int]] | None = None,
) -> None:  # fmt: skip
    """Holds an instruction to a function of Python's numbers, on the edges of its types.

    `template`: "add.s32", or with its operands; `signature`: types of result and operands;
    `function`: gives an exact number, rounded here, an integer, taken modulo its size, or None
    where the manual is silent. With .ftz, operands and results are flushed here.
    """
    packed = "x2 " in signature
    kinds = signature.split()
    opcode, _, operands = template.partition(" ")
    operands = operands or ", ".join("dabc"[: len(kinds)])
    into, *of = [kind.removesuffix("x2") for kind in kinds]
    if rows is None:
        every = list(itertools.product(*map(samples, of)))
        rows = every[:: max(1, len(every) // 250)]
    if packed:
        turned = [*rows[1:], rows[0]]
        both = [[x | y << 16 for x, y in zip(*pair)] for pair in zip(rows, turned)]  # noqa: B905
        found = each(f"{opcode} {operands}", kinds[0], kinds[1:], both)
        rows, found = [*rows, *turned], [x >> shift & 0xFFFF for shift in (0, 16) for x in found]
    else:
        found = each(f"{opcode} {operands}", into, of, rows)
    flush = flushed if "ftz" in opcode else lambda kind, x: x
    for row, bits in zip(rows, found, strict=True):
        values = [flush(kind, number(kind, x)) for kind, x in zip(of, row, strict=True)]
        wanted = function(*values)
        if wanted is not None:
            expected = bits_of(into, wanted)
            expected = bits_of(into, flush(into, number(into, expected)))
            assert same(into, bits, expected, ulps), (opcode, values, wanted, hex(bits))
