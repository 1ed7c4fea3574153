"""Arithmetic, comparison, selection, logic, shifts and moves: each on the edges of its types."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch

from .kernels import bits_of, check, exactly, lanes, not_executed, number, right, samples

NAN = math.nan


def divided(a, b):
    if b:
        return a / b
    return NAN if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


def whole(a, b):
    """Towards zero."""
    return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def rest(a, b):
    return None if b == 0 else a - b * whole(a, b)


def least(a, b):
    """PTX ISA 9.7.3.11: the number next to NaN; -0 is less than +0."""
    if a != a or b != b:
        return b if a != a else a
    return min(a, b, key=lambda x: (x, math.copysign(1, x)))


def most(a, b):
    return -least(-a, -b)


def root(x):
    return NAN if x != x or x < 0 else x if x in (0, math.inf) else math.sqrt(x)


def power(x):
    return x if x != x else math.inf if x >= 1025 else 0.0 if x < -1080 else 2.0**x


def add(a, b): return a + b  # fmt: skip


def subtract(a, b): return a - b  # fmt: skip


def multiply(a, b): return a * b  # fmt: skip


def multiply_add(a, b, c): return a * b + c  # fmt: skip


INTEGERS = [
    ("add.s32", "s32 s32 s32", add), ("add.s64", "s64 s64 s64", add),
    ("sub.s32", "s32 s32 s32", subtract), ("sub.s64", "s64 s64 s64", subtract),
    ("mul.lo.s32", "s32 s32 s32", multiply), ("mul.lo.s64", "s64 s64 s64", multiply),
    ("mad.lo.s32", "s32 s32 s32 s32", multiply_add),
    ("mad.lo.s64", "s64 s64 s64 s64", multiply_add),
    ("mul.hi.s32", "s32 s32 s32", lambda a, b: a * b >> 32),
    ("mul.hi.u32", "u32 u32 u32", lambda a, b: a * b >> 32),
    ("mul.wide.s32", "s64 s32 s32", multiply), ("mul.wide.u32", "u64 u32 u32", multiply),
    ("mul.wide.s16", "s32 s16 s16", multiply), ("mul.wide.u16", "u32 u16 u16", multiply),
    ("mad.wide.s32", "s64 s32 s32 s64", multiply_add),
    ("mad.wide.u32", "u64 u32 u32 u64", multiply_add),
    ("div.s32", "s32 s32 s32", whole), ("div.u32", "u32 u32 u32", whole),
    ("div.s64", "s64 s64 s64", whole), ("div.u64", "u64 u64 u64", whole),
    ("rem.s32", "s32 s32 s32", rest), ("rem.u32", "u32 u32 u32", rest),
    ("rem.s64", "s64 s64 s64", rest), ("div.s16", "s16 s16 s16", whole),
    ("neg.s32", "s32 s32", lambda a: -a), ("abs.s32", "s32 s32", abs),
    ("min.s32", "s32 s32 s32", min), ("max.s32", "s32 s32 s32", max),
    ("min.s64", "s64 s64 s64", min), ("max.s64", "s64 s64 s64", max),
    ("min.u32", "u32 u32 u32", min), ("max.u32", "u32 u32 u32", max),
    ("max.relu.s32", "s32 s32 s32", lambda a, b: max(a, b, 0)),
    ("min.relu.s32", "s32 s32 s32", lambda a, b: max(min(a, b), 0)),
    ("popc.b32", "u32 u32", int.bit_count), ("popc.b64", "u32 u64", int.bit_count),
]  # fmt: skip

LOGIC = [
    *((f"{name}.b{n}", f"u{n} u{n} u{n}", f) for n in (16, 32, 64) for name, f in (
        ("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b))),
    ("and.pred", "pred pred pred", lambda a, b: a and b),
    ("or.pred", "pred pred pred", lambda a, b: a or b),
    ("xor.pred", "pred pred pred", lambda a, b: a != b),
    ("not.pred", "pred pred", lambda a: not a), ("mov.pred", "pred pred", lambda a: a),
    ("and.pred d, a, !b", "pred pred pred", lambda a, b: a and not b),
    *((f"not.b{n}", f"u{n} u{n}", lambda a: ~a) for n in (16, 32, 64)),
    *((f"shl.b{n}", f"u{n} u{n} u32", lambda a, by: a << min(by, 64)) for n in (16, 32, 64)),
    *((f"shr.{kind}", f"{kind} {kind} u32", lambda a, by: a >> min(by, 64))
      for kind in ("s16", "u16", "s32", "u32", "s64", "u64")),
    *((f"mov.{sign}{n}", f"u{n} u{n}", lambda a: a) for sign in "ub" for n in (16, 32, 64)),
    *((f"selp.{kind}", f"{kind} {kind} {kind} pred", lambda a, b, p: a if p else b)
      for kind in ("b16", "b32", "b64", "f32", "s32", "u64")),
    ("cvta.to.global.u64", "u64 u64", lambda a: a),
]  # fmt: skip

EXACT = [
    *((f"{name}.{kind}", " ".join([kind] * 3), exactly(f))
      for name, f in (("add", add), ("sub", subtract), ("mul", multiply))
      for kind in ("f32", "f64", "bf16", "f16", "bf16x2", "f16x2")),
    *((f"fma.rn.{kind}", " ".join([kind] * 4), exactly(multiply_add))
      for kind in ("f32", "bf16", "f16", "bf16x2", "f16x2")),
    ("add.ftz.f32", "f32 f32 f32", exactly(add)), ("mul.ftz.f32", "f32 f32 f32", exactly(multiply)),
    ("fma.rn.ftz.f32", "f32 f32 f32 f32", exactly(multiply_add)),
    ("div.rn.f32", "f32 f32 f32", exactly(divided)), ("sqrt.rn.f32", "f32 f32", root),
    *((f"{name}.{kind}", f"{kind} {kind}", f) for name, f in (("abs", abs), ("neg", lambda x: -x))
      for kind in ("f32", "f64", "bf16", "f16", "bf16x2", "f16x2")),
    *((f"{name}.{kind}", f"{kind} {kind} {kind}", f) for name, f in (("min", least), ("max", most))
      for kind in ("f32", "bf16", "f16", "bf16x2", "f16x2")),
]  # fmt: skip

#: With what the manual allows, in units of the last place.
APPROXIMATE = [
    ("div.full.f32", "f32 f32 f32", exactly(divided), 2),
    ("div.approx.f32", "f32 f32 f32", lambda a, b: divided(a, b) if abs(b) < 2**126 else None, 2),
    ("sqrt.approx.f32", "f32 f32", root, 1), ("sqrt.approx.ftz.f32", "f32 f32", root, 1),
    ("ex2.approx.f32", "f32 f32", power, 2), ("ex2.approx.ftz.f32", "f32 f32", power, 2),
]  # fmt: skip


def named(value):
    """Of a function no address, which differs between processes."""
    return "exact" if callable(value) else str(value)


@pytest.mark.parametrize(("opcode", "kinds", "function"), INTEGERS + LOGIC + EXACT, ids=named)
def test_exact(opcode, kinds, function):
    check(opcode, kinds, function)


@pytest.mark.parametrize(("opcode", "kinds", "function", "ulps"), APPROXIMATE, ids=named)
def test_approximate(opcode, kinds, function, ulps):
    check(opcode, kinds, function, ulps=ulps)


def test_fma_is_rounded_once():
    """Products halfway between two numbers, and something far below: up, down, or to even."""
    halfway = {"f32": (2**12 + 1, 2**12 + 1), "bf16": (3, 87), "f16": (3, 683)}
    for kind, (a, b) in halfway.items():
        tiny = {"f32": 2.0**-60, "bf16": 2.0**-100, "f16": 2.0**-24}[kind]
        rows = [[bits_of(kind, x) for x in (s * a, b, c)]
                for s in (1, -1) for c in (0.0, tiny, -tiny)]  # fmt: skip
        assert Fraction(number(kind, rows[0][0])) == a
        assert Fraction(number(kind, rows[0][1])) == b
        check(f"fma.rn.{kind}", " ".join([kind] * 4), exactly(multiply_add), rows=rows)


# --- comparison

COMPARISONS = {
    "eq": lambda a, b: a == b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "ne": lambda a, b: a != b and a == a and b == b, "neu": lambda a, b: a != b,
}  # fmt: skip


@pytest.mark.parametrize("how", COMPARISONS)
def test_setp_floats(how):
    for kind in ("f32", "bf16", "f16"):
        check(f"setp.{how}.{kind}", f"pred {kind} {kind}", COMPARISONS[how])


@pytest.mark.parametrize("kind", ["s16", "s32", "s64", "u16", "u32", "u64"])
def test_setp_integers(kind):
    for how, function in COMPARISONS.items():
        check(f"setp.{how}.{kind}", f"pred {kind} {kind}", function)
        if kind[0] == "u" and how in ("eq", "ne"):
            check(f"setp.{how}.b{kind[1:]}", f"pred {kind} {kind}", function)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("how", COMPARISONS)
def test_setp_pairs(how, kind):
    """A predicate of the lower halves, and one of the upper."""
    a, b = samples(kind)[:16], samples(kind)[-16:]
    pairs = torch.tensor([[x | y << 16 for x, y in zip(s, s[::-1], strict=True)] for s in (a, b)])
    given, out = pairs.repeat(1, 2).to(torch.int32), torch.zeros(32, dtype=torch.int32)
    right(
        f"""{lanes(0, 4)} ld.global.b32 %r3, [%rd31];
        ld.global.b32 %r4, [%rd31+128];
        setp.{how}.{kind}x2 %p1|%p2, %r3, %r4;
        selp.b32 %r5, 1, 0, %p1; selp.b32 %r6, 2, 0, %p2; or.b32 %r5, %r5, %r6;
        {lanes(1, 4)} st.global.b32 [%rd31], %r5;""",
        given, out,
    )  # fmt: skip
    truth = [COMPARISONS[how](number(kind, x), number(kind, y)) for x, y in zip(a, b, strict=True)]
    wanted = [x + 2 * y for x, y in zip(truth, truth[::-1], strict=True)]
    assert out.tolist() == wanted * 2


# --- fields, bytes, tables of bits

FIELD = list(itertools.product(
    (0x80000001, 0x7FFFFFFF, 0xA5C3F096, 0xFFFFFFFF),
    (0, 1, 4, 31, 32, 40, 255, 256 + 8), (0, 1, 8, 31, 32, 33, 64, 255, 256 + 4),
))  # fmt: skip


def field(bits, position, length, signed):
    """PTX ISA 9.7.1.19: bits beyond the highest, and beyond the field, are its sign's."""
    position, length = position & 255, length & 255
    sign = signed and length and bits >> min(position + length - 1, 31) & 1
    return sum((bits >> position + n & 1 if n < length and position + n < 32 else sign) << n
               for n in range(32))  # fmt: skip


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_bfe(kind):
    check(
        f"bfe.{kind}", f"{kind} {kind} u32 u32",
        lambda a, p, n: field(a & 0xFFFFFFFF, p, n, kind == "s32"), rows=FIELD,
    )  # fmt: skip


def test_shf():
    def funnel(a, b, n):
        return ((b << 32 | a) << n % 32 >> 32) & 0xFFFFFFFF

    check("shf.l.wrap.b32", "u32 u32 u32 u32", funnel)


def test_prmt():
    """PTX ISA 9.7.9.7, without a mode."""
    draw = random.Random(0)

    def permuted(a, b, selector):
        given, made = (b << 32 | a).to_bytes(8, "little"), []
        for n in range(4):
            choice = selector >> 4 * n & 15
            byte = given[choice & 7]
            made.append((255 if byte & 128 else 0) if choice & 8 else byte)
        return int.from_bytes(bytes(made), "little")

    rows = [[draw.getrandbits(32) for _ in range(3)] for _ in range(64)]
    check("prmt.b32", "u32 u32 u32 u32", permuted, rows=rows)
    check("prmt.b32 d, a, b, 0x5410", "u32 u32 u32", lambda a, b: permuted(a, b, 0x5410))


def test_mov_packs_and_unpacks():
    """PTX ISA 9.7.9.4: the first element is the lowest."""
    halves = "mov.b32 {%rs1, %rs2}, a; mov.b32 d, {%rs2, %rs1}"
    check(f"{halves}", "u32 u32", lambda a: a >> 16 | a << 16)
    check("mov.b64 {%r3, %r4}, a; mov.b64 d, {%r4, %r3}", "u64 u64", lambda a: a >> 32 | a << 32)
    check("mov.b64 {_, %r4}, a; mov.b32 d, %r4", "u32 u64", lambda a: a >> 32)
    check("mov.b16 %rs3, 0x8001; cvt.u32.u16 %r3, %rs3; add.s32 d, a, %r3", "u32 u32",
          lambda a: a + 0x8001)  # fmt: skip


def test_constants():
    """PTX ISA 4.5: hexadecimal, negative, and bits of floating-point numbers."""
    check("add.s32 d, a, -2147483648", "s32 s32", lambda a: a - 2**31)
    check("xor.b64 d, a, 0xFFFFFFFF00000001", "u64 u64", lambda a: a ^ 0xFFFFFFFF00000001)
    check("mul.f32 d, a, 0f3FC00000", "f32 f32", exactly(lambda a: a * Fraction(3, 2)))
    check("mul.f64 d, a, 0d3FF8000000000000", "f64 f64", exactly(lambda a: a * Fraction(3, 2)))
    check("add.bf16 d, a, 0x3F80", "bf16 bf16", exactly(lambda a: a + 1))


def test_all_opcodes():
    assert not not_executed("numbers")
