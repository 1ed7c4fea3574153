"""cvt: PTX ISA 9.7.9.21."""

from __future__ import annotations

import itertools
import math

import pytest

from .kernels import bits_of, check, each, not_executed, number, samples, width

INTEGERS = ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"]
ROUNDED = {"rzi": math.trunc, "rmi": math.floor}
#: To integers: ties, the ends of 16 and 32 and 64 bits, and a little beyond.
PLACES = [x * sign for sign in (1, -1) for x in (
    0.5, 1.5, 2.5, 0.49999997, 127.5, 255.5, 32767.0, 32767.5, 32768.0, 65535.5, 8388607.5,
    2.0**31, 2.0**31 - 128, 2.0**32, 2.0**63, 2.0**64, 1e30,
)]  # fmt: skip
#: To 16 bits: halfway to the even one below and above, next to it, the largest, subnormal ones.
TIES = [sign | x for sign in (0, 1 << 31) for x in (
    0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x7F7F7FFF, 0x7F7F8000, 0x00008000, 0x00018000,
    0x3F801000, 0x3F803000, 0x3F801001, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x33C00000,
)]  # fmt: skip


@pytest.mark.parametrize(("into", "given"), [*itertools.permutations(INTEGERS, 2)])
def test_integers(into, given):
    """The lowest bits, or extended by the operand's sign."""
    check(f"cvt.{into}.{given}", f"{into} {given}", lambda x: x)


@pytest.mark.parametrize("given", ["s8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_integers_to_floats(given):
    edge = {24, width(given)}
    ties = [(1 << n) + x for n in edge for x in (-1, 1, 3) if n + 1 < width(given)]
    rows = [[x & ((1 << width(given)) - 1)] for x in (*samples(given), *ties, *(-x for x in ties))]
    check(f"cvt.rn.f32.{given}", f"f32 {given}", lambda x: x, rows=rows)


@pytest.mark.parametrize("how", ROUNDED)
@pytest.mark.parametrize("into", ["s8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_floats_to_integers(into, how):
    """Clamped to the type; NaN gives 0, of 64 bits the highest alone."""
    size = width(into)
    low, high = (-(1 << size - 1), (1 << size - 1) - 1) if into[0] == "s" else (0, (1 << size) - 1)

    def whole(x):
        if x != x:
            return 1 << 63 if size == 64 else 0
        return max(low, min(high, ROUNDED[how](x) if math.isfinite(x) else x))

    def clamped(x):
        return int(whole(x)) if abs(x) < math.inf or x != x else high if x > 0 else low

    rows = [[x] for x in (*samples("f32"), *(bits_of("f32", x) for x in PLACES))]
    check(f"cvt.{how}.{into}.f32", f"{into} f32", clamped, rows=rows)
    check(f"cvt.{how}.ftz.{into}.f32", f"{into} f32", clamped, rows=rows)


@pytest.mark.parametrize("how", ROUNDED)
def test_floats_to_whole_floats(how):
    """Zeros keep their sign."""

    def whole(x):
        return math.copysign(float(ROUNDED[how](x)), x) if math.isfinite(x) else x

    rows = [[x] for x in (*samples("f32"), *(bits_of("f32", x) for x in PLACES))]
    check(f"cvt.{how}.f32.f32", "f32 f32", whole, rows=rows)
    check(f"cvt.{how}.ftz.f32.f32", "f32 f32", whole, rows=rows)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_halves(kind):
    check(f"cvt.f32.{kind}", f"f32 {kind}", lambda x: x, rows=[[x] for x in range(0, 1 << 16, 97)])
    rows = [[x] for x in (*samples("f32"), *TIES)]
    check(f"cvt.rn.{kind}.f32", f"{kind} f32", lambda x: x, rows=rows)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_pairs(kind):
    """The first operand becomes the upper half."""
    rows = list(itertools.pairwise([*samples("f32")[:-1], *TIES]))
    found = each(f"cvt.rn.{kind}x2.f32 d, a, b", f"{kind}x2", ["f32", "f32"], rows)
    for (high, low), bits in zip(rows, found, strict=True):
        upper, lower = (bits_of(kind, number("f32", x)) for x in (high, low))
        assert bits == upper << 16 | lower


@pytest.mark.parametrize("opcode", ["cvt.rn.bf16.f32 d, a", "cvt.rn.f16.f32 d, a"])
def test_nan_is_canonical(opcode):
    assert each(opcode, "b16", ["f32"], [[0xFFC00001], [0x7F800001]]) == [0x7FFF, 0x7FFF]


def test_results_in_wider_registers():
    """PTX ISA 9.4.1: extended by the type."""
    found = each("cvt.s8.s32 %rs9, a; cvt.s32.s16 d, %rs9", "s32", ["s32"], [[0x1FF], [0x17F]])
    assert found == [0xFFFFFFFF, 0x7F]
    assert each("cvt.u8.u32 %rs9, a; cvt.s32.s16 d, %rs9", "s32", ["s32"], [[0x1FF]]) == [0xFF]


def test_all_opcodes():
    assert not not_executed("conversions")
