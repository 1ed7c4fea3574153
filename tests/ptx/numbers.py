"""Integer and floating-point arithmetic, comparison, selection, logic and moves.

PTX ISA 9.7.1 (integer), 9.7.3 (floating point), 9.7.4 (half precision), 9.7.6 and 9.7.7 (comparison
and selection), 9.7.8 (logic and shift), 9.7.9.3-4 (mov), 9.7.9.7 (prmt), 9.7.9.20 (cvta).
Approximate functions are as good as numpy's: their errors are not modeled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Instruction
from .lanes import SIGNED, UNSIGNED, Array, Registers, Step, dtype_of, instruction, only, pure

f4, f8, u1, u2, u4, u8, i4, i8 = (
    np.float32, np.float64, np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.int64,
)  # fmt: skip


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(u4) << u4(16)).view(f4)


def f32_to_bf16(x: Array) -> Array:
    """To the nearest, ties to even; NaN to PTX's canonical one."""
    bits = x.astype(f4, copy=False).view(u4)
    rounded = ((bits + (u4(0x7FFF) + ((bits >> u4(16)) & u4(1)))) >> u4(16)).astype(u2)
    return np.where((bits & u4(0x7FFFFFFF)) > u4(0x7F800000), u2(0x7FFF), rounded)


def f32_to_f16(x: Array) -> Array:
    return np.where(np.isnan(x), u2(0x7FFF), x.astype(np.float16).view(u2))


def flushed(x: Array) -> Array:
    """.ftz: subnormal numbers are zeros."""
    bits = x.view(u4)
    return np.where((bits & u4(0x7F800000)) == 0, bits & u4(0x80000000), bits).view(f4)


#: 16-bit types: how bits are widened, and results rounded back.
HALF: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "bf16": (bf16_to_f32, f32_to_bf16),
    "f16": (lambda bits: bits.view(np.float16).astype(f4), f32_to_f16),
}


def halves(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function of 16-bit numbers, of two of them in 32 bits."""

    def both(*xs: Array) -> Array:
        low = function(*[(x & u4(0xFFFF)).astype(u2) for x in xs])
        high = function(*[(x >> u4(16)).astype(u2) for x in xs])
        return low.astype(u4) | (high.astype(u4) << u4(16))

    return both


def arithmetic(i: Instruction, k: Registers, function: Callable[..., Array]) -> Step:
    """`function` in the type of the opcode; of 16 bits computed in float32 and rounded."""
    count, kind = len(i.operands) - 1, i.type.removesuffix("x2")
    if "ftz" in i.parts:
        if kind not in ("f32", "bf16"):
            raise i.unknown()
        plain = function
        function = lambda *xs: flushed(plain(*map(flushed, xs)))  # noqa: E731
    if kind in HALF:
        widen, narrow = HALF[kind]
        rounded = lambda *xs: narrow(function(*map(widen, xs)))  # noqa: E731
        if i.type.endswith("x2"):
            return pure(i, k, halves(rounded), u4, *[u4] * count)
        return pure(i, k, rounded, u2, *[u2] * count)
    dtype = dtype_of(i.type)
    return pure(i, k, function, dtype, *[dtype] * count)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """Rounded once: the product is exact in float64, and so are sums, or they are no ties."""
    product = a.astype(f8) * b
    total = product + c
    tie = (total.view(u8) & u8(0x1FFFFFFF)) == u8(0x10000000)
    return (_odd_sum(product, c) if tie.any() else total).astype(f4)


def _odd_sum(a: Array, b: Array) -> Array:
    """a + b in float64; of the two numbers around it the odd one, which is no tie of fewer bits."""
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)
    even = (total.view(u8) & u8(1)) == 0
    beside = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where(even & (np.abs(lost) > 0), beside, total)


def _half_fma(a: Array, b: Array, c: Array) -> Array:
    """Of 16-bit numbers: a float32 that rounds to them as the exact result does."""
    exact = _odd_sum(a.astype(f8) * b, c)
    x = exact.astype(f4)
    bits = x.view(u4) - (np.abs(x) > np.abs(exact))
    return (bits | (x != exact)).astype(u4).view(f4)


def _quotient(a: Array, b: Array) -> Array:
    """Towards zero; a divisor of zero is unspecified, and lanes that are masked have some."""
    b = np.where(b == 0, b.dtype.type(1), b)
    floor = a // b
    return floor + (((a < 0) != (b < 0)) & (floor * b != a)).astype(a.dtype)


_ROUNDING = ("rn", "ftz", "approx", "full", "lo")
_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c,
    "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "sqrt": np.sqrt,
}  # fmt: skip


@instruction(*_ARITHMETIC)
def _arithmetic(i: Instruction, k: Registers) -> Step:
    name = i.parts[0]
    if "wide" in i.parts:
        return _wide(i, k)
    if i.parts in (["mul", "hi", "s32"], ["mul", "hi", "u32"]):
        given = dtype_of(i.type)
        into = i8 if given is i4 else u8
        return pure(
            i, k, lambda a, b: ((a.astype(into) * b.astype(into)) >> into(32)).astype(given),
            given, given, given,
        )  # fmt: skip
    only(i, *_ROUNDING)
    if name == "mad" and i.type[0] == "f":
        raise i.unknown()
    return arithmetic(i, k, _ARITHMETIC[name])


def _wide(i: Instruction, k: Registers) -> Step:
    """mul.wide, mad.wide: a result of twice as many bits."""
    only(i, "wide")
    given = dtype_of(i.type)
    size = np.dtype(given).itemsize
    table = SIGNED if np.dtype(given).kind == "i" else UNSIGNED
    into = table[2 * size]
    if i.parts[0] == "mul":
        return pure(i, k, lambda a, b: a.astype(into) * b.astype(into), into, given, given)
    made = lambda a, b, c: a.astype(into) * b.astype(into) + c  # noqa: E731
    return pure(i, k, made, into, given, given, into)


@instruction("fma")
def _fused(i: Instruction, k: Registers) -> Step:
    only(i, "rn", "ftz")
    if i.type == "f64":
        raise i.unknown()
    return arithmetic(i, k, _fma if i.type == "f32" else _half_fma)


@instruction("div", "rem")
def _division(i: Instruction, k: Registers) -> Step:
    only(i, *_ROUNDING)
    if i.type[0] == "f":
        return arithmetic(i, k, np.divide)
    rest = lambda a, b: a - _quotient(a, b) * b  # noqa: E731
    return arithmetic(i, k, _quotient if i.parts[0] == "div" else rest)


@instruction("min", "max")
def _extremes(i: Instruction, k: Registers) -> Step:
    """Of a number and NaN the number; -0 is less than 0."""
    only(i, "ftz", "relu")
    name = i.parts[0]
    if "relu" in i.parts:
        least = np.minimum if name == "min" else np.maximum
        return arithmetic(i, k, lambda a, b: np.maximum(least(a, b), a.dtype.type(0)))
    if i.type[0] in "su":
        return arithmetic(i, k, np.minimum if name == "min" else np.maximum)
    number, sign = {"min": (np.fmin, np.bitwise_or), "max": (np.fmax, np.bitwise_and)}[name]

    def extreme(a: Array, b: Array) -> Array:
        bits = UNSIGNED[a.itemsize]
        return np.where(a == b, sign(a.view(bits), b.view(bits)).view(a.dtype), number(a, b))

    return arithmetic(i, k, extreme)


# --- comparison and selection

_COMPARED = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda a, b: (a < b) | (a > b), "neu": np.not_equal,
}  # fmt: skip


@instruction("setp")
def _setp(i: Instruction, k: Registers) -> Step:
    """PTX ISA 9.3.1.2: ordered comparisons are false where an operand is NaN, neu is true."""
    only(i, i.parts[1])
    test, kind = _COMPARED[i.parts[1]], i.type
    into = [text.strip() for text in i.operands[0].split("|")]
    half = kind.removesuffix("x2")
    if half in HALF:
        widen, size = HALF[half][0], u4 if kind.endswith("x2") else u2
        given = [k.read(text, size) for text in i.operands[1:3]]
        writes = [k.write(text, np.bool_) for text in into]

        def step(m, mask):
            a, b = (read(m.R) for read in given)
            for write, shift in zip(writes, (0, 16), strict=False):
                parts = [widen((x >> size(shift)).astype(u2)) for x in (a, b)]
                write(m, test(*parts), mask)

        if len(writes) != (2 if kind.endswith("x2") else 1):
            raise i.unknown()
        return step
    dtype = dtype_of(kind)
    if len(into) > 1:
        raise i.unknown("with two results")
    return pure(i, k, test, np.bool_, dtype, dtype)


@instruction("selp")
def _selp(i: Instruction, k: Registers) -> Step:
    bits = UNSIGNED[int(i.type[1:]) // 8]
    return pure(i, k, lambda a, b, p: np.where(p, a, b), bits, bits, bits, np.bool_)


# --- logic and shifts

_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@instruction(*_LOGIC)
def _logic(i: Instruction, k: Registers) -> Step:
    return arithmetic(i, k, _LOGIC[i.parts[0]])


@instruction("shl", "shr")
def _shift(i: Instruction, k: Registers) -> Step:
    """Distances beyond the width give 0, or the sign."""
    dtype = dtype_of(i.type)
    bits = np.dtype(dtype).itemsize * 8
    move = np.left_shift if i.parts[0] == "shl" else np.right_shift

    def shifted(a, n):
        found = move(a, np.minimum(n, u4(bits - 1)).astype(dtype))
        if a.dtype.kind == "i":
            return found
        return np.where(n >= bits, dtype(0), found)

    return pure(i, k, shifted, dtype, dtype, u4)


@instruction("bfe")
def _field(i: Instruction, k: Registers) -> Step:
    """Bits p to p + n; signed ones extend the highest."""
    dtype = dtype_of(i.type)

    def field(a, p, n):
        p, n = np.minimum(p & u4(255), u4(63)), np.minimum(n & u4(255), u4(32))
        wide = a.astype(i8) >> p.astype(i8)
        top = (i8(64) - n.astype(i8)).clip(0, 63)
        shifted = wide << top
        found = shifted >> top if dtype is i4 else (shifted.view(u8) >> top.view(u8)).view(i8)
        return np.where(n == 0, 0, found).astype(dtype)

    return pure(i, k, field, dtype, dtype, u4, u4)


@instruction("shf")
def _funnel(i: Instruction, k: Registers) -> Step:
    """The upper half of two registers, b above a, moved left by n modulo 32."""
    if i.parts[1:] != ["l", "wrap", "b32"]:
        raise i.unknown()

    def funnel(a, b, n):
        both = (b.astype(u8) << u8(32)) | a
        return ((both << (n & u4(31)).astype(u8)) >> u8(32)).astype(u4)

    return pure(i, k, funnel, u4, u4, u4, u4)


@instruction("popc")
def _counts(i: Instruction, k: Registers) -> Step:
    bits = UNSIGNED[int(i.type[1:]) // 8]
    return pure(i, k, lambda a: np.bitwise_count(a).astype(u4), u4, bits)


@instruction("prmt")
def _permute(i: Instruction, k: Registers) -> Step:
    """Four of the eight bytes of two registers; the selector's top bits copy a byte's sign."""
    if i.parts[1:] != ["b32"]:
        raise i.unknown()

    def permuted(a, b, selector):
        both, made = (b.astype(u8) << u8(32)) | a, u4(0)
        for n in range(4):
            choice = (selector >> u4(4 * n)) & u4(15)
            byte = ((both >> ((choice & u4(7)).astype(u8) * u8(8))) & u8(255)).astype(u4)
            sign = np.where(byte & u4(128), u4(255), u4(0))
            made = made | (np.where(choice & u4(8), sign, byte) << u4(8 * n))
        return made

    return pure(i, k, permuted, u4, u4, u4, u4)


# --- moves


@instruction("mov")
def _mov(i: Instruction, k: Registers) -> Step:
    into, given = i.operands
    if i.type == "pred":
        return pure(i, k, lambda a: a, np.bool_, np.bool_)
    size = int(i.type[1:]) // 8
    bits = UNSIGNED[size]
    if isinstance(into, tuple):  # unpack
        part = size // len(into)
        read, writes = k.read(given, bits), [k.write(text, UNSIGNED[part]) for text in into]

        def unpack(m, mask):
            whole = read(m.R)
            for n, write in enumerate(writes):
                write(m, (whole >> bits(8 * part * n)).astype(UNSIGNED[part]), mask)

        return unpack
    if isinstance(given, tuple):
        part = size // len(given)
        reads, write = k.all(given, UNSIGNED[part]), k.write(into, bits)

        def pack(m, mask):
            whole: Any = bits(0)
            for n, x in enumerate(reads(m.R)):
                whole = whole | (x.astype(bits) << bits(8 * part * n))
            write(m, whole, mask)

        return pack
    return pure(i, k, lambda a: a, bits, bits)


@instruction("cvta")
def _address(i: Instruction, k: Registers) -> Step:
    """Generic addresses are those of their space."""
    return pure(i, k, lambda a: a, u8, u8)
