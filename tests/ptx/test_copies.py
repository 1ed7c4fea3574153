"""cp.async, which arrives when it is waited for: PTX ISA 9.7.9.25.3."""

from __future__ import annotations

import pytest
import torch

from .decode import PTXError
from .kernels import lanes, not_executed, reported, right, run

COPY = "cp.async.{how}.shared.global [%r3{to}], [%rd31{of}], {size}{taken};"


def copy(to=0, of=0, size=16, taken="", how="ca"):
    return COPY.format(to=f"+{to}", of=f"+{of}", size=size, taken=taken, how=how)


def body(text, size=16):
    """Lane n of x (in %rd31) and of shared memory (in %r3)."""
    return f"{lanes(0, size)} mul.lo.s32 %r3, %r0, {size}; {text}"


def store(size=16):
    kind = {16: "v4.b32", 8: "v2.b32", 4: "b32"}[size]
    names = ", ".join(f"%r{8 + n}" for n in range(size // 4))
    names = "{" + names + "}" if size > 4 else names
    return f"ld.shared.{kind} {names}, [%r3];\n{lanes(1, size)} st.global.{kind} [%rd31], {names};"


DONE = "cp.async.commit_group; cp.async.wait_group 0;"


@pytest.mark.parametrize(("how", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_copies(how, size):
    x = torch.randint(-(2**31), 2**31 - 1, (64, size // 4), dtype=torch.int32)
    for taken, wanted in (("", x), (f", {size}", x), (", 0", 0 * x)):
        out = torch.zeros_like(x)
        text = copy(size=size, how=how, taken=taken) + DONE + store(size)
        right(body(text, size), x, out, threads=64, shared=64 * size)
        assert torch.equal(out, wanted)


def test_lanes_without_a_source():
    """Where nothing is taken the address may be of nothing; zeros arrive."""
    x, out = torch.arange(16, dtype=torch.int32), torch.full((32,), -1, dtype=torch.int32)
    text = "setp.lt.s32 %p1, %r0, 16; selp.b32 %r4, 4, 0, %p1;"
    text += copy(size=4, taken=", %r4") + DONE + store(4)
    right(body(text, 4), x, out, shared=128)
    assert out.tolist() == [*range(16), *[0] * 16]


def test_guards():
    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    text = f"st.shared.b32 [%r3], %r1; setp.lt.s32 %p1, %r0, 7; @%p1 {copy(size=4)}" + DONE
    right(body(text + store(4), 4), x, out, shared=128)
    assert out.tolist() == [*range(7), *[0] * 25]


TWO = copy(of=0, size=4) + "cp.async.commit_group;" + copy(of=128, to=128, size=4)
TWO += "cp.async.commit_group;"
READ = "ld.shared.b32 %r4, [%r3+{}];"
EARLY = "read before a copy has been waited for"


@pytest.mark.parametrize(
    ("text", "early"),
    [
        (copy(size=4) + READ.format(0), True),
        (copy(size=4) + "cp.async.commit_group;" + READ.format(0), True),
        (copy(size=4) + "cp.async.wait_group 0;" + READ.format(0), True),  # of no group yet
        (copy(size=4) + DONE + READ.format(0), False),
        (TWO + "cp.async.wait_group 2;" + READ.format(0), True),
        (TWO + "cp.async.wait_group 1;" + READ.format(0), False),
        (TWO + "cp.async.wait_group 1;" + READ.format(128), True),
        (TWO + "cp.async.wait_group 0;" + READ.format(128), False),
        (TWO + "cp.async.commit_group; cp.async.wait_group 1;" + READ.format(128), False),
        (copy(size=4) + READ.format(128), False),
    ],
)
def test_groups(text, early):
    x = torch.arange(64, dtype=torch.int32)
    assert (EARLY in reported(body(text, 4), x, shared=256)) == early


def test_a_wait_of_some_lanes():
    """Each lane waits for its own copies."""
    x = torch.arange(32, dtype=torch.int32)
    text = copy(size=4) + "setp.lt.s32 %p1, %r0, 16;\n@!%p1 bra $ON;\n" + DONE + "\n$ON:\n"
    assert not reported(body(text + "@%p1 " + READ.format(0), 4), x, shared=128)
    assert EARLY in reported(body(text + READ.format(0), 4), x, shared=128)


def test_other_warps_wait_and_meet():
    x = torch.arange(64, dtype=torch.int32)
    other = "xor.b32 %r5, %r3, 128; ld.shared.b32 %r4, [%r5];"
    text = copy(size=4) + DONE + "{}" + other
    assert not reported(body(text.format("bar.sync 0;"), 4), x, threads=64, shared=256)
    found = reported(body(text.format(""), 4), x, threads=64, shared=256)
    assert "race: shared read after write" in found


def test_memory_of_a_copy_in_flight_is_not_written():
    x = torch.arange(64, dtype=torch.int32)
    write = "st.shared.b32 [%r3], %r0;"
    assert "write where a copy is in flight" in reported(
        body(copy(size=4) + write, 4), x, shared=128
    )
    assert "write where a copy is in flight" in reported(
        body(copy(size=4) + copy(size=4), 4), x, shared=128
    )
    assert not reported(body(copy(size=4) + DONE + write + copy(size=4), 4), x, shared=128)
    text = "{} xor.b32 %r3, %r3, 128; ld.shared.b32 %r4, [%r3]; {}" + copy(size=4)
    after = reported(body(text.format(write + "bar.sync 0;", ""), 4), x, threads=64, shared=256)
    assert "race: shared write after read" not in after  # by the same warp
    text += "xor.b32 %r3, %r3, 128;" + copy(size=4)
    found = reported(body(text.format(write + "bar.sync 0;", ""), 4), x, threads=64, shared=256)
    assert "race: shared write after" in found


def test_bounds_and_alignment():
    x = torch.arange(64, dtype=torch.int32)
    assert "outside of its storage" in reported(body(copy(of=256, size=4), 4), x, shared=256)
    assert "outside of shared memory" in reported(body(copy(to=256, size=4), 4), x, shared=256)
    assert "not aligned" in reported(body(copy(of=4, size=8), 4), x, shared=512)
    assert "not aligned" in reported(body(copy(to=4, size=8), 4), x, shared=512)


@pytest.mark.parametrize(
    "text", [copy(size=4, taken=", 2"), copy(size=16, how="cg.L2::cache_hint"),
             "cp.async.mbarrier.arrive.noinc.shared.b64 [%r3];",
             "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd0], [%r3], 16;"],
)  # fmt: skip
def test_unknown(text):
    x = torch.arange(64, dtype=torch.int32)
    with pytest.raises(PTXError, match=text.split(" ")[0]):
        run(body(text, 4), x, shared=256)


def test_all_opcodes():
    assert not not_executed("copies")
