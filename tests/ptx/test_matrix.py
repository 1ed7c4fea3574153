"""mma.sync, ldmatrix and stmatrix, by the manual's tables of fragments: PTX ISA 9.7.14.5."""

from __future__ import annotations

import pytest
import torch

from .decode import PTXError
from .kernels import lanes, not_executed, reported, right, run

WARPS = 2
LANES = 32 * WARPS


def registers(first, count):
    return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"


def load(tensor, first, count):
    """A lane's row of `count` 32-bit elements."""
    at = lanes(tensor, 4 * count)
    return at + "\n".join(
        f"ld.global.b32 %r{first + n}, [%rd31+{4 * n}];" for n in range(count)
    )  # fmt: skip


def store(tensor, first, count):
    at = lanes(tensor, 4 * count)
    return at + "\n".join(
        f"st.global.b32 [%rd31+{4 * n}], %r{first + n};" for n in range(count)
    )  # fmt: skip


# --- ldmatrix (9.7.14.5.15), stmatrix (9.7.14.5.16)


def element(lane, which, transposed):
    """Row and column of the elements that a lane holds of a matrix, `which` 0 or 1."""
    row, column = lane // 4, 2 * (lane % 4) + which
    return (column, row) if transposed else (row, column)


def place(warp, matrix, row):
    """Where the rows of matrices are: scattered over the warp's 32 rows of 16 bytes."""
    return 32 * warp + (8 * matrix + row) * 5 % 32


ROWS = """shl.b32 %r3, %r0, 4;
and.b32 %r4, %r0, 31; mul.lo.s32 %r5, %r4, 5; and.b32 %r5, %r5, 31; sub.s32 %r6, %r0, %r4;
add.s32 %r5, %r5, %r6; shl.b32 %r5, %r5, 4;"""


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans):
    x = torch.randint(-(2**15), 2**15, (LANES, 8), dtype=torch.int16)
    out = torch.zeros(LANES, count, 2, dtype=torch.int16)
    right(
        f"""{ROWS} {lanes(0, 16)} ld.global.v4.b32 {registers(8, 4)}, [%rd31];
        st.shared.v4.b32 [%r3], {registers(8, 4)};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers(20, count)}, [%r5];
        {store(1, 20, count)}""",
        x, out, threads=LANES, shared=16 * LANES,
    )  # fmt: skip
    for lane in range(LANES):
        for matrix in range(count):
            for which in (0, 1):
                row, column = element(lane % 32, which, trans)
                assert out[lane, matrix, which] == x[place(lane // 32, matrix, row), column]


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count, trans):
    x = torch.randint(-(2**15), 2**15, (LANES, count, 2), dtype=torch.int16)
    out = torch.zeros(LANES, 8, dtype=torch.int16)
    right(
        f"""{ROWS} {load(0, 20, count)} mov.b32 %r7, 0;
        st.shared.v4.b32 [%r3], {{%r7, %r7, %r7, %r7}};
        bar.sync 0;
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r5], {registers(20, count)};
        bar.sync 0;
        ld.shared.v4.b32 {registers(8, 4)}, [%r3];
        {lanes(1, 16)} st.global.v4.b32 [%rd31], {registers(8, 4)};""",
        x, out, threads=LANES, shared=16 * LANES,
    )  # fmt: skip
    wanted = torch.zeros_like(out)
    for lane in range(LANES):
        for matrix in range(count):
            for which in (0, 1):
                row, column = element(lane % 32, which, trans)
                wanted[place(lane // 32, matrix, row), column] = x[lane, matrix, which]
    assert torch.equal(out, wanted)


def test_reports_of_matrices_in_shared_memory():
    loads = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r8, %r9, %r10, %r11}, [%r3];"
    stores = "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r0};"
    first = "and.b32 %r3, %r0, 31; shl.b32 %r3, %r3, 4;"
    assert not reported(first + loads, shared=512)
    assert "outside of shared memory" in reported(first + loads, shared=496)
    assert "not aligned" in reported(first + "add.s32 %r3, %r3, 8;" + loads, shared=1024)
    found = reported(first + stores + loads, threads=64, shared=512)
    assert "race: shared read after write" in found
    assert "race: one instruction writes different values" in found
    own = "shl.b32 %r3, %r0, 4;"
    assert not reported(own + stores + "bar.sync 0;" + first + loads, threads=64, shared=1024)


# --- mma.sync


def fragment(lane, i, operand):
    """Row and column of element i of a lane: 9.7.14.5.8, of 16-bit operands."""
    group, thread = lane >> 2, lane % 4
    if operand == "a":
        row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
        return row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)
    if operand == "b":
        return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group
    return group if i < 2 else group + 8, thread * 2 + (i & 1)


KINDS = {"bf16": torch.bfloat16, "f16": torch.float16}


def matrices(a, b, c):
    """From what lanes hold: a (16, k), b (k, 8) and c (16, 8) of each warp."""
    whole = [torch.zeros(WARPS, *shape) for shape in ((16, 16), (16, 8), (16, 8))]
    for name, held, matrix in zip("abc", (a, b, c), whole, strict=True):
        for lane in range(LANES):
            for i in range(held.shape[1]):
                matrix[(lane // 32, *fragment(lane % 32, i, name))] = held[lane, i]
    return whole


def held(matrix):
    """What lanes hold of c."""
    rows = [[matrix[(lane // 32, *fragment(lane % 32, i, "c"))] for i in range(4)]
            for lane in range(LANES)]  # fmt: skip
    return torch.tensor(rows)


def operands(kind):
    """Small integers, of which every sum is exact."""
    draw = lambda n: torch.randint(-8, 9, (LANES, n)).float()  # noqa: E731
    return draw(8).to(KINDS[kind]), draw(4).to(KINDS[kind]), draw(4)


def multiply(kind, d, c):
    """a is in %r8 to %r11, b in %r12 and %r13; d and c are the first registers."""
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        f"{registers(d, 4)}, {registers(8, 4)}, {registers(12, 2)}, {registers(c, 4)};\n"
    )


LOADS = load(0, 8, 4) + load(1, 12, 2) + load(2, 16, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_mma(kind):
    a, b, c = operands(kind)
    out = torch.zeros(LANES, 4)
    outcome = right(
        f"""{LOADS}
        {multiply(kind, 20, 16)}
        {store(3, 20, 4)}""",
        a, b, c, out, threads=LANES,
    )  # fmt: skip
    whole_a, whole_b, whole_c = matrices(a.float(), b.float(), c)
    assert torch.equal(out, held(whole_a @ whole_b + whole_c))
    assert outcome.counts["multiply-adds"] == WARPS * 16 * 8 * 16


def test_products_that_follow_each_other():
    """Independent ones, sums, and operands that are overwritten: in the program's order."""
    a, b, c = operands("bf16")
    out, other = torch.zeros(LANES, 4), torch.zeros(LANES, 4)
    sums = [multiply("bf16", 24 + 4 * n, 16) for n in range(40)]
    sums += [multiply("bf16", *two) for two in ((24, 24), (24, 24), (24, 24), (28, 16), (8, 24))]
    right(
        f"{LOADS} {''.join(sums)} {store(3, 8, 4)}"
        f"{store(4, 180, 4)}",
        a, b, c, out, other, threads=LANES,
    )  # fmt: skip
    whole_a, whole_b, whole_c = matrices(a.float(), b.float(), c)
    assert torch.equal(out, held(5 * (whole_a @ whole_b) + whole_c))
    assert torch.equal(other, held(whole_a @ whole_b + whole_c))


def test_mma_of_some_warps():
    a, b, c = operands("f16")
    out = torch.full((LANES, 4), -1.0)
    right(
        f"""{LOADS}
        setp.lt.s32 %p1, %r0, 32;
        @%p1 bra $OUT;
        {multiply("f16", 8, 16)}
        {store(3, 8, 4)}
        $OUT:""",
        a, b, c, out, threads=LANES,
    )  # fmt: skip
    whole_a, whole_b, whole_c = matrices(a.float(), b.float(), c)
    assert torch.equal(out[32:], held(whole_a @ whole_b + whole_c)[32:])
    assert (out[:32] == -1).all()
    part = f"setp.lt.s32 %p1, %r0, 16;\n@%p1 bra $OUT;\n{multiply('f16', 8, 16)}$OUT:"
    assert "by a part of its lanes" in reported(part)


@pytest.mark.parametrize(
    "text",
    [
        "@%p1 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d}, {d}, {b}, {d};",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {d}, {b}, {b}, {d};",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {d}, {d}, {b}, {d};",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16 {b}, [%r3];",
        "stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r3], {b};",
    ],
)
def test_unknown(text):
    filled = text.format(d=registers(8, 4), b=registers(12, 2))
    with pytest.raises(PTXError, match=filled.split(" ")[filled[0] == "@"]):
        run(filled, shared=64)


def test_all_opcodes():
    assert not not_executed("matrix")
