"""wgmma, by the manual's layouts of registers and of shared memory: PTX ISA 9.7.15."""

from __future__ import annotations

import pytest
import torch

from .decode import PTXError
from .kernels import lanes, not_executed, reported, right, run
from .test_matrix import registers
from .test_tensor_maps import FENCE, between, swizzled

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
#: Parts of 16 bytes that a swizzle spans -> mode of a descriptor, swizzle of a tensor map.
MODE, SWIZZLE = {1: 0, 8: 1, 4: 2, 2: 3}, {1: 0, 2: 1, 4: 2, 8: 3}
A, B = 1024, 9216  # in shared memory, of at most 128 bytes for a row
OPEN, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
DONE = "wgmma.wait_group.sync.aligned 0;"


class Layout:
    """A canonical layout of 9.7.15.5.1.2.1.3, of `rows` along m or n and 16 along k, in bytes."""

    def __init__(self, major: str, span: int, rows: int) -> None:
        self.major, self.span, self.rows = major, span, rows
        if major == "k":
            self.lead, self.stride = (rows * 16, 128) if span == 1 else (0, 128 * span)
        else:
            self.lead, self.stride = (rows * 16, 128) if span == 1 else (256 * span, 128 * span)

    def place(self, row: int, k: int) -> int:
        """((8,m),(8,2k)):((8·span,SBO),(1,LBO)) and ((8,span,m),(8,k)):((1,8,LBO),(8·span,SBO))."""
        span = self.span
        if self.major == "k":
            step = self.lead if span == 1 else 16
            at = row % 8 * 16 * span + row // 8 * self.stride + k % 8 * 2 + k // 8 * step
        elif span == 1:
            at = row % 8 * 2 + row // 8 * self.stride + k % 8 * 16 + k // 8 * self.lead
        else:
            at = row % 8 * 2 + row // 8 % span * 16 + row // 8 // span * self.lead
            at += k % 8 * 16 * span + k // 8 * self.stride
        return swizzled(at, SWIZZLE[span])

    def descriptor(self, at: int) -> int:
        """9.7.15.5.1.2.2."""
        encode = lambda x: (x & 0x3FFFF) >> 4  # noqa: E731
        fields = encode(at) | encode(self.lead) << 16 | encode(self.stride) << 32
        return fields | MODE[self.span] << 62

    def put(self, memory: torch.Tensor, at: int, matrix: torch.Tensor) -> None:
        """Elements (rows, 16) into an image of shared memory."""
        places = [self.place(row, k) for row in range(self.rows) for k in range(16)]
        memory[(at + torch.tensor(places)) // 2] = matrix.view(torch.int16).flatten()


def held(matrix: torch.Tensor) -> torch.Tensor:
    """What each of 128 lanes holds of A or D: figures 148 and 149, whose pairs are the same."""
    count = matrix.numel() // 128
    places = [
        (lane // 32 * 16 + lane % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2)
        for lane in range(128) for i in range(count)
    ]  # fmt: skip
    rows, columns = torch.tensor(places).T
    return matrix[rows, columns].view(128, count)


def fill(size):
    """An image of shared memory, the argument 0, to shared memory."""
    return f"""
    shl.b32 %r2, %r0, 4;
    {lanes(0, 16)}
    $FILL:
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd31];
    st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}};
    add.s32 %r2, %r2, 2048; add.s64 %rd31, %rd31, 2048;
    setp.lt.s32 %p1, %r2, {size};
    @%p1 bra $FILL;
    """


def elements(tensor, first, count, what="ld"):
    at = lanes(tensor, 4 * count)
    for n in range(count):
        place, register = f"[%rd31+{4 * n}]", f"%r{first + n}"
        both = f"{register}, {place}" if what == "ld" else f"{place}, {register}"
        at += f"{what}.global.b32 {both};\n"
    return at


def multiply(n, kind, a, b, adds="%p2", flags="0, 0", d=100):
    """a is a descriptor, or the first of four registers; the descriptor b."""
    left = registers(int(a[2:]), 4) if a.startswith("%r") and a[2:].isdigit() else a
    flags = flags.split(", ")[1] if left[0] == "{" else flags
    return (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {registers(d, n // 2)}, "
        f"{left}, {b}, {adds}, 1, 1, {flags};\n"
    )


def case(n, kind, left, right_):
    """Small integers, of which every sum is exact, and their image in shared memory."""
    draw = lambda *shape: torch.randint(-8, 9, shape).to(DTYPES[kind])  # noqa: E731
    a, b, c = draw(64, 16), draw(n, 16), draw(64, n).float()
    size = -(-(B + 128 * n) // 2048) * 2048
    memory = torch.full((size // 2,), -1, dtype=torch.int16)
    right_.put(memory, B, b)
    if left is not None:
        left.put(memory, A, a)
    return a, b, c, memory


def started(memory, b, a=None):
    """Shared memory filled, descriptors in %rd20 and %rd21, what wgmma needs before it."""
    text = fill(2 * len(memory)) + FENCE + "bar.sync 0;\n"
    if a is not None:
        text += f"mov.b64 %rd20, {a.descriptor(A)};"
    return text + f"mov.b64 %rd21, {b.descriptor(B)}; mov.pred %p2, -1; mov.pred %p3, 0;"


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("n", [8, 16, 32, 64, 128, 256])
def test_sizes(n, kind):
    """D = A·B + D, and D = A·B where the predicate is false."""
    left, right_ = Layout("k", 8, 64), Layout("k", 8, n)
    a, b, c, memory = case(n, kind, left, right_)
    for adds in ("%p2", "%p3", "1", "0") if n == 16 else ("1",):
        given, out = held(c), torch.zeros(128, n // 2)
        outcome = right(
            elements(1, 100, n // 2) + started(memory, right_, left) + OPEN
            + multiply(n, kind, "%rd20", "%rd21", adds) + COMMIT + DONE
            + elements(2, 100, n // 2, "st"),
            memory, given, out, threads=128, shared=2 * len(memory),
        )  # fmt: skip
        wanted = a.float() @ b.float().T + (c if adds in ("%p2", "1") else 0)
        assert torch.equal(out, held(wanted))
        assert outcome.counts["multiply-adds"] == 64 * n * 16


@pytest.mark.parametrize("spans", [(1, 1), (2, 4), (4, 8), (8, 2), (8, 8)])
@pytest.mark.parametrize("majors", ["kk", "km", "mk", "mm"])
def test_layouts(majors, spans):
    """Every swizzle, along k and along m or n."""
    layouts = [Layout(*x, 64) for x in zip(majors, spans, strict=True)]
    a, b, _, memory = case(64, "bf16", *layouts)
    out = torch.zeros(128, 32)
    flags = ", ".join(str(int(major == "m")) for major in majors)
    right(
        started(memory, layouts[1], layouts[0]) + OPEN
        + multiply(64, "bf16", "%rd20", "%rd21", "0", flags) + COMMIT + DONE
        + elements(1, 100, 32, "st"),
        memory, out, threads=128, shared=2 * len(memory),
    )  # fmt: skip
    assert torch.equal(out, held(a.float() @ b.float().T))


@pytest.mark.parametrize("major", ["k", "m"])
def test_a_in_registers(major):
    right_ = Layout(major, 8, 64)
    a, b, _, memory = case(64, "f16", None, right_)
    given, out = held(a).view(torch.int32), torch.zeros(128, 32)
    right(
        elements(1, 50, 4) + started(memory, right_) + OPEN
        + multiply(64, "f16", "%r50", "%rd21", "%p3", f"0, {int(major == 'm')}") + COMMIT + DONE
        + elements(2, 100, 32, "st"),
        memory, given, out, threads=128, shared=2 * len(memory),
    )  # fmt: skip
    assert torch.equal(out, held(a.float() @ b.float().T))


def test_steps_along_k():
    """A swizzled line of 128 bytes has four: each starts 32 bytes later."""
    left, right_ = Layout("k", 8, 64), Layout("k", 8, 16)
    a, b, *_ = case(16, "bf16", left, right_)
    for step in range(1, 4):
        shifted = [Layout("k", 8, rows) for rows in (64, 16)]
        for layout in shifted:
            layout.place = lambda row, k, step=step: swizzled(
                row % 8 * 128 + row // 8 * 1024 + 32 * step + k * 2, 3
            )
        image = torch.full((8192,), -1, dtype=torch.int16)
        shifted[0].put(image, 0, a)
        shifted[1].put(image, 8192, b)
        out = torch.zeros(128, 8)
        right(
            fill(16384) + FENCE + f"""bar.sync 0;
            mov.b64 %rd20, {left.descriptor(32 * step)};
            mov.b64 %rd21, {right_.descriptor(8192 + 32 * step)};"""
            + OPEN + multiply(16, "bf16", "%rd20", "%rd21", "0") + COMMIT + DONE
            + elements(1, 100, 8, "st"),
            image, out, threads=128, shared=16384,
        )  # fmt: skip
        assert torch.equal(out, held(a.float() @ b.float().T))


def test_warpgroups_and_blocks():
    """Each has its own rows of A; a warpgroup may go its own way."""
    left, right_ = Layout("k", 8, 64), Layout("k", 8, 32)
    a, b, _, memory = case(32, "bf16", left, right_)
    out = torch.full((2, 256, 16), -1.0)
    for branch, most in (("", 2), ("setp.ge.s32 %p4, %r0, 128;\n@%p4 bra $OUT;\n", 1)):
        out.fill_(-1)
        right(
            started(memory, right_, left) + branch + OPEN
            + multiply(32, "bf16", "%rd20", "%rd21", "0") + COMMIT + DONE
            + "mad.lo.s32 %r0, %r1, 256, %r0;" + elements(1, 100, 16, "st") + "\n$OUT:\n",
            memory, out, threads=256, grid=(2,), shared=2 * len(memory),
        )  # fmt: skip
        wanted = held(a.float() @ b.float().T)
        for block in out:
            assert torch.equal(block[:128], wanted)
            assert torch.equal(block[128:], wanted) if most == 2 else (block[128:] == -1).all()


def test_chains():
    """Sums in flight, then a copy of them, then others of the same registers."""
    left, right_ = Layout("k", 8, 64), Layout("k", 8, 8)
    a, b, _, memory = case(8, "bf16", left, right_)
    out, copy = torch.zeros(128, 4), torch.zeros(128, 4)
    one = multiply(8, "bf16", "%rd20", "%rd21", "1")
    moved = "".join(f"mov.b32 %r{200 + n}, %r{100 + n};" for n in range(4))
    right(
        started(memory, right_, left) + OPEN + one.replace(", 1, 1, 1,", ", 0, 1, 1,") + one
        + COMMIT + one + COMMIT + DONE + moved + OPEN + one + one + COMMIT + DONE
        + elements(1, 100, 4, "st") + elements(2, 200, 4, "st"),
        memory, out, copy, threads=128, shared=2 * len(memory),
    )  # fmt: skip
    product = a.float() @ b.float().T
    assert torch.equal(copy, held(3 * product))
    assert torch.equal(out, held(5 * product))


# --- reports

LEFT, RIGHT = Layout("k", 8, 64), Layout("k", 8, 8)
MEMORY = torch.zeros((B + 1024) // 2, dtype=torch.int16)
START = started(MEMORY, RIGHT, LEFT)
ZEROS = "".join(f"mov.b32 %r{n}, 0;" for r in (100, 110) for n in range(r, r + 4))
ONE = multiply(8, "bf16", "%rd20", "%rd21")
OTHER = multiply(8, "bf16", "%rd20", "%rd21", d=110)
FULL = ZEROS + START + OPEN + ONE + COMMIT
USE = "add.f32 %r3, %r{}, %r{};"
WRITE = "shl.b32 %r2, %r0, 4; st.shared.v4.b32 [%r2+1024], {%r4, %r5, %r6, %r7};"


def said(text):
    return reported(text, MEMORY, threads=128, shared=2 * len(MEMORY))


def test_accumulators_are_read_after_the_wait():
    early = "an accumulator is read before its wait"
    assert not said(FULL + DONE + USE.format(100, 101))
    assert early in said(FULL + USE.format(100, 101) + DONE)
    assert early in said(FULL + USE.format(3, 103) + DONE)
    assert early in said(FULL + "mov.b32 %r300, %r102;" + USE.format(300, 300) + DONE)
    assert not said(FULL + USE.format(110, 111) + DONE)  # of no product
    assert "a wgmma that nobody waited for" in said(FULL)
    assert "a wgmma that nobody waited for" in said(FULL.replace(COMMIT, "") + DONE)


def test_groups():
    early = "an accumulator is read before its wait"
    both = FULL + OTHER + COMMIT + "wgmma.wait_group.sync.aligned LEFT;"
    assert not said(both.replace("LEFT", "1") + USE.format(100, 101) + DONE)
    assert early in said(both.replace("LEFT", "1") + USE.format(110, 111) + DONE)
    assert early in said(both.replace("LEFT", "2") + USE.format(100, 101) + DONE)
    assert not said(both.replace("LEFT", "0") + USE.format(110, 101))


def test_operands_stay_until_the_wait():
    late = "write where an asynchronous read is in flight"
    assert not said(FULL + DONE + "bar.sync 0;" + WRITE)
    assert not said(FULL + DONE + WRITE)  # all warps of the warpgroup have waited
    assert late in said(FULL + "bar.sync 0;" + WRITE + DONE)
    held_ = ZEROS + START + "mov.b32 %r50, 0; mov.b32 %r51, 0; mov.b32 %r52, 0; mov.b32 %r53, 0;"
    held_ += OPEN + multiply(8, "bf16", "%r50", "%rd21") + COMMIT
    assert not said(held_ + DONE + "mov.b32 %r52, 1;")
    found = said(held_ + "mov.b32 %r52, 1;" + DONE)
    assert "a register of a wgmma is overwritten before its wait" in found


def test_warpgroups_share_an_operand():
    """They start together; one waits before the other. Writing needs a barrier after both."""
    body = FULL + """setp.ge.s32 %p4, %r0, 128;
    @%p4 bra $SECOND;
    """ + DONE + "bra.uni $ON;\n$SECOND:\n" + DONE + "HERE\n$ON:\nAFTER"  # fmt: skip
    write = "shl.b32 %r2, %r0, 2; st.shared.b32 [%r2+9216], %r0;"

    def found(text):
        return reported(text, MEMORY, threads=256, shared=2 * len(MEMORY))

    assert not found(between(body, "").replace("AFTER", "bar.sync 0;" + write))
    assert "race: shared write after read" in found(between(body, write).replace("AFTER", ""))


def test_operands_are_known():
    """Written before a barrier, and a proxy fence."""
    fenced, met = FENCE + "bar.sync 0;", "bar.sync 0;"
    assert fenced in FULL
    assert "wgmma without fence.proxy.async" in said(FULL.replace(fenced, met) + DONE)
    assert not said(FULL.replace(fenced, met + FENCE) + DONE)
    assert "race: shared read after write" in said(FULL.replace(fenced, FENCE) + DONE)


def test_registers_are_known():
    """9.7.15.7.1: wgmma.fence after the last use of accumulators, and of A; not between sums."""
    missing = "registers of a wgmma are used before it without wgmma.fence"
    assert missing in said(FULL.replace(OPEN, "") + DONE)
    assert missing in said(FULL.replace(OPEN, "").replace(ZEROS, OPEN + ZEROS) + DONE)
    again = FULL + DONE + "HERE" + ONE + COMMIT + DONE
    assert not said(between(again, ""))
    assert missing in said(between(again, USE.format(100, 101)))
    assert not said(between(again, USE.format(110, 111)))
    assert not said(between(again, USE.format(100, 101) + OPEN))
    loop = """mov.b32 %r60, 0;
    $LOOP:
    HERE
    add.s32 %r60, %r60, 1; setp.lt.s32 %p5, %r60, 3;
    @%p5 bra $LOOP;
    """
    inside, use = ONE + COMMIT + DONE, USE.format(100, 101)
    assert not said(between(ZEROS + START + OPEN + loop, inside))
    assert missing in said(between(ZEROS + START + OPEN + loop, inside + use))
    assert not said(between(ZEROS + START + loop, OPEN + inside + use))
    given = "".join(f"mov.b32 %r{n}, 0;" for n in range(50, 54))
    left = multiply(8, "bf16", "%r50", "%rd21") + COMMIT + DONE
    assert missing in said(ZEROS + START + OPEN + given + left)
    assert not said(ZEROS + START + given + OPEN + left)


def test_warpgroups_are_whole():
    part = "setp.lt.s32 %p4, %r0, 64;\n@%p4 bra $OUT;\n" + OPEN + ONE + COMMIT + DONE + "\n$OUT:\n"
    assert "by a part of its lanes" in said(ZEROS + START + part)
    with pytest.raises(PTXError, match="outside of shared memory"):
        run(FULL.replace(f"{LEFT.descriptor(A)};", f"{LEFT.descriptor(B)};"), MEMORY,
            threads=128, shared=2 * len(MEMORY))  # fmt: skip


@pytest.mark.parametrize(
    "text", [ONE.replace("1, 1, 0, 0", "-1, 1, 0, 0"), ONE.replace("k16.f32", "k16.f16"),
             ONE.replace("k16.f32.bf16.bf16", "k8.f32.tf32.tf32"), "@%p1 " + ONE],
)  # fmt: skip
def test_unknown(text):
    with pytest.raises(PTXError, match="unknown opcode wgmma"):
        run(text, threads=128)


def test_all_opcodes():
    assert not not_executed("wgmma")
