"""Bulk copies by a tensor map: PTX ISA 5.5, 9.7.9.25.5, 9.7.9.25.6."""

from __future__ import annotations

import itertools

import pytest
import torch

from . import mbarriers
from .decode import PTXError
from .execute import TensorMap
from .kernels import lanes, not_executed, reported, right, run
from .test_mbarriers import ARRIVE, READY, WAIT

#: 5.5.7: which of a line's 16-byte parts is where, line after line of 128 bytes.
PIECES = {
    0: ["01234567"],
    1: ["01234567", "10325476"],
    2: ["01234567", "10325476", "23016745", "32107654"],
    3: [
        "01234567", "10325476", "23016745", "32107654",
        "45670123", "54761032", "67452301", "76543210",
    ],
}  # fmt: skip
BITS = {1: "b8", 2: "b16", 4: "b32"}
DTYPE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def swizzled(byte, swizzle):
    """Where a byte of a box is, from its start on."""
    line, piece, rest = byte // 128, byte % 128 // 16, byte % 16
    row = PIECES[swizzle][line % len(PIECES[swizzle])]
    return line * 128 + row.index(str(piece)) * 16 + rest


def of(x, box, swizzle=0):
    """The map of a tensor."""
    return TensorMap(x, tuple(x.shape), tuple(x.stride()), box, swizzle, x.element_size())


def boxed(box, swizzle, size):
    """For each element of a box its index, and its place in shared memory in elements."""
    for n, index in enumerate(itertools.product(*map(range, box))):
        yield index, swizzled(n * size, swizzle) // size


def coordinates(corner):
    """Registers that hold them, the innermost first; and what fills these."""
    names = [f"%r{40 + n}" for n in range(len(corner))]
    moves = [f"mov.b32 {r}, {c};" for r, c in zip(names, reversed(corner), strict=True)]
    return ", ".join(names), " ".join(moves)


def load(corner, at=1024):
    names, moves = coordinates(corner)
    kind = f"tensor.{len(corner)}d.shared::cta.global.mbarrier::complete_tx::bytes"
    return f"""{moves} mov.b32 %r3, {at};
    @%p1 cp.async.bulk.{kind} [%r3], [%rd0, {{{names}}}], [%r2];
    """


def store(corner, at=1024):
    names, moves = coordinates(corner)
    kind = f"tensor.{len(corner)}d.global.shared::cta.bulk_group"
    return f"""{moves} mov.b32 %r3, {at};
    @%p1 cp.async.bulk.{kind} [%rd0, {{{names}}}], [%r3];
    """


def copied(count, size, to_shared, tensor=1):
    """Elements of a tensor to shared memory, from byte 1024 on, or back."""
    register = "%rs1" if size < 4 else "%r6"
    kind = BITS[size]
    steps = [
        f"ld.shared.{kind} {register}, [%r5];", f"st.global.{kind} [%rd31], {register};",
    ]  # fmt: skip
    if to_shared:
        steps = [s.replace("shared", "x").replace("global", "shared").replace("x", "global")
                 for s in steps]  # fmt: skip
        steps = [f"ld.global.{kind} {register}, [%rd31];", f"st.shared.{kind} [%r5], {register};"]
    return f"""
    mov.b32 %r4, %r0;
    $COPY:
    mul.lo.s32 %r5, %r4, {size}; add.s32 %r5, %r5, 1024;
    {lanes(tensor, size, lane="%r4")}
    setp.lt.s32 %p5, %r4, {count};
    @%p5 {steps[0]} @%p5 {steps[1]}
    add.s32 %r4, %r4, 64; setp.lt.s32 %p6, %r4, {count};
    @%p6 bra $COPY;
    """


FENCE = "fence.proxy.async.shared::cta;"
COMMIT, DONE = "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 0;"
CASES = [  # shape of the tensor and of the box, corner, swizzle, bytes of an element
    ((100,), (32,), (64,), 0, 4),
    ((10, 64), (8, 64), (0, 0), 3, 2), ((10, 64), (8, 64), (4, 16), 3, 2),
    ((10, 32), (8, 32), (-3, 8), 2, 2), ((20, 16), (16, 16), (6, -8), 1, 2),
    ((9, 32), (8, 32), (2, 0), 3, 4), ((40, 32), (16, 32), (30, 0), 1, 1),
    ((2, 6, 64), (2, 4, 64), (1, 4, 0), 3, 2), ((3, 5, 2, 16), (1, 4, 1, 16), (2, 3, 1, 8), 1, 2),
    ((2, 2, 2, 2, 32), (1, 2, 1, 2, 16), (1, 1, 0, -1, 24), 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "box", "corner", "swizzle", "size"), CASES, ids=str)
def test_loads(shape, box, corner, swizzle, size):
    """What is outside of the tensor is zero."""
    storage = torch.randint(-100, 100, (*shape[:-1], shape[-1] + 16), dtype=DTYPE[size])
    x, count = storage[..., : shape[-1]], torch.Size(box).numel()
    out = torch.full((count,), -1, dtype=DTYPE[size])
    text = READY + "@%p1 " + ARRIVE.format(count * size) + load(corner) + WAIT.format(0)
    right(text + copied(count, size, False), of(x, box, swizzle), out, threads=64, shared=8192)
    for index, place in boxed(box, swizzle, size):
        at = [first + n for first, n in zip(corner, index, strict=True)]
        inside = all(0 <= n < most for n, most in zip(at, shape, strict=True))
        assert out[place] == (x[tuple(at)] if inside else 0)


@pytest.mark.parametrize("wait", [".read", ""])
@pytest.mark.parametrize(("shape", "box", "corner", "swizzle", "size"), CASES, ids=str)
def test_stores(shape, box, corner, swizzle, size, wait):
    """What is outside of the tensor stays."""
    storage = torch.zeros(*shape[:-1], shape[-1] + 16, dtype=DTYPE[size])
    x, count = storage[..., : shape[-1]], torch.Size(box).numel()
    given = torch.randint(-100, 100, (count,), dtype=DTYPE[size])
    text = READY + copied(count, size, True) + FENCE + "bar.sync 0;" + store(corner) + COMMIT
    text += DONE.replace(".read", wait)
    right(text, of(x, box, swizzle), given, threads=64, shared=8192)
    wanted = torch.zeros_like(storage)
    for index, place in boxed(box, swizzle, size):
        at = [first + n for first, n in zip(corner, index, strict=True)]
        if all(0 <= n < most for n, most in zip(at, shape, strict=True)):
            wanted[tuple(at)] = given[place]
    assert torch.equal(storage, wanted)


# --- reports

X, BOX, BYTES = torch.zeros(16, 64, dtype=torch.int16), (8, 64), 1024
EXPECT = "@%p1 " + ARRIVE.format(BYTES)
OWN = "shl.b32 %r7, %r0, 4; add.s32 %r7, %r7, 1024;"  # 16 of the box's bytes for each of 64 lanes
READ = OWN + "ld.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r7];"
WRITE = OWN + "mov.b32 %r8, 0; st.shared.v4.b32 [%r7], {%r8, %r8, %r8, %r8};"


def between(text, steps):
    return text.replace("HERE", steps)


def said(text):
    return reported(text, of(X, BOX, 3), threads=64, shared=4096)


def test_loads_arrive_when_they_are_waited_for():
    start = READY + EXPECT + load((0, 0))
    assert not said(start + WAIT.format(0) + READ)
    assert "read before a copy has been waited for" in said(start + READ + WAIT.format(0))
    assert "write where a copy is in flight" in said(start + WRITE + WAIT.format(0))
    assert "a copy that nobody waited for" in said(start)
    wrong = start.replace(f", {BYTES};", f", {BYTES + 2};")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PTXError, match="waits for ever"):
        patch.setattr(mbarriers, "_POLLS", 20)
        said(wrong + WAIT.format(0))


def test_loads_of_what_others_wrote():
    """A tensor's elements, by a warp that does not load the box; by another block."""
    x, start = torch.zeros_like(X), READY + "setp.ge.s32 %p3, %r0, 32;" + lanes(1, 2)
    text = start + "@%p3 st.global.b16 [%rd31], %rs1; HERE" + EXPECT + load((0, 0)) + WAIT.format(0)

    def found(steps, **options):
        given = of(x, BOX, 3), x
        return reported(between(text, steps), *given, threads=64, shared=4096, **options)

    assert not found("bar.sync 0;")
    assert "race: global read after write" in found("")
    assert "race: global" in found("bar.sync 0;", grid=(2,))


def test_loads_over_what_others_read():
    """A barrier is needed before the memory is used again; reads need no proxy fence."""
    twice = READY + EXPECT + load((0, 0)) + WAIT.format(0) + READ + "HERE" + EXPECT + load((8, 0))
    assert not said(between(twice, "bar.sync 0;") + WAIT.format(1) + READ)
    found = said(between(twice, "") + WAIT.format(1) + READ)
    assert "race: shared write after read" in found


def test_loads_over_what_others_wrote():
    text = READY + WRITE + "HERE" + EXPECT + load((0, 0)) + WAIT.format(0) + READ
    assert not said(between(text, FENCE + "bar.sync 0;"))
    assert not said(between(text, "bar.sync 0;" + FENCE))
    assert "a bulk copy over writes without fence.proxy.async" in said(between(text, "bar.sync 0;"))
    assert "race: shared write after write" in said(between(text, FENCE))


def test_stores_of_what_others_wrote():
    text = READY + WRITE + "HERE" + store((0, 0)) + COMMIT + DONE
    assert not said(between(text, FENCE + "bar.sync 0;"))
    assert "a bulk store without fence.proxy.async" in said(between(text, "bar.sync 0;"))
    assert "race: shared read after write" in said(between(text, FENCE))
    of_one_warp = "@%p1 " + FENCE + "bar.sync 0;"
    assert "a bulk store without fence.proxy.async" in said(between(text, of_one_warp))


def test_stores_read_until_they_are_waited_for():
    start = READY + WRITE + FENCE + "bar.sync 0;" + store((0, 0)) + COMMIT
    late = "write where an asynchronous read is in flight"
    assert late in said(start + "bar.sync 0;" + WRITE + DONE)
    assert not said(start + DONE + "bar.sync 0;" + WRITE)
    assert "race: shared write after read" in said(start + DONE + WRITE)  # by the other warp
    ends = "a block ends before its bulk store has read shared memory"
    assert ends in said(start)
    assert ends in said(start.replace(COMMIT, "") + DONE)
    one = "cp.async.bulk.wait_group.read 1;"
    assert late in said(start + one + "bar.sync 0;" + WRITE + DONE)
    assert not said(start + COMMIT + one + "bar.sync 0;" + WRITE)
    assert late in said(start + "@!%p1 " + DONE + "bar.sync 0;" + WRITE + DONE)  # by others


def test_granules():
    """triton#11583: rows of other than whole 16 bytes are written up to the next 16."""
    storage = torch.zeros(16, 72, dtype=torch.int16)
    text = READY + WRITE + FENCE + "bar.sync 0;" + store((0, 0)) + COMMIT + DONE
    for width, past in ((64, False), (60, True), (56, False), (1, True)):
        found = reported(text, of(storage[:, :width], BOX, 3), threads=64, shared=4096)
        assert ("a bulk store's granules of 16 bytes write past the end" in found) == past
        assert past or not found
    found = reported(
        text.replace("%r41, 0", "%r41, 8"), of(storage[:, :60], (8, 32), 2), threads=64, shared=4096
    )
    assert ("granules" in found) is False  # the box does not reach the end


def test_bounds_and_alignment():
    start = READY + EXPECT + load((0, 0), 1024 + 128) + WAIT.format(0)
    assert "not aligned" in said(start)
    with pytest.raises(PTXError, match="a box of 1024 bytes at 3200 of 4096"):
        said(READY + EXPECT + load((0, 0), 3200))
    with pytest.raises(PTXError, match="wider than its swizzle"):
        run(READY + EXPECT + load((0, 0)), of(X, BOX, 2), threads=64, shared=4096)


def test_races_with_other_blocks():
    """Two blocks store the same rows, or rows of their own."""
    text = READY + WRITE + FENCE + "bar.sync 0;" + store((0, 0)) + COMMIT + DONE
    own = text.replace("mov.b32 %r41, 0;", "shl.b32 %r41, %r1, 3;")
    options = {"threads": 64, "shared": 4096, "grid": (2,)}
    assert "race: global write after write" in reported(text, of(X, BOX, 3), **options)
    assert not reported(own, of(X, BOX, 3), **options)


@pytest.mark.parametrize(
    "kind", ["async.bulk.tensor.2d.global.shared::cta.tile.bulk_group",
             "async.bulk.tensor.6d.global.shared::cta.bulk_group",
             "async.bulk.prefetch.tensor.2d.L2.global.tile",
             "reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group"],
)  # fmt: skip
def test_unknown(kind):
    with pytest.raises(PTXError, match=f"cp.{kind}"):
        run(f"cp.{kind} [%rd0, {{%r4, %r4}}], [%r3];", of(X, BOX), shared=1024)


def test_all_opcodes():
    assert not not_executed("tensor_maps")
