"""Control flow of lanes, barriers of blocks, and what is counted: PTX ISA 9.7.12, 9.7.13.1."""

from __future__ import annotations

import pytest
import torch

from . import machine
from .decode import PTXError
from .kernels import lanes, not_executed, reported, right, run

STORE = lanes(0, 4) + "st.global.b32 [%rd31], %r9;"


def result(body, threads=32, **options):
    """What each thread leaves in %r9."""
    blocks = options.get("grid", (1,))[0]
    out = torch.full((threads * blocks,), -1, dtype=torch.int32)
    body += f"\nmad.lo.s32 %r0, %r1, {threads}, %r0;\n" + STORE
    right(body, out, threads=threads, **options)
    return out.tolist()


def test_lanes_part_and_meet_again():
    body = """setp.lt.s32 %p1, %r0, {};
    mov.b32 %r9, 1;
    @%p1 bra $THERE;
    add.s32 %r9, %r9, 10;
    bra.uni $ON;
    $THERE:
    add.s32 %r9, %r9, 100;
    $ON:
    add.s32 %r9, %r9, 1000;"""
    for edge in (0, 5, 32):
        assert result(body.format(edge)) == [1101 if n < edge else 1011 for n in range(32)]


@pytest.mark.parametrize("order", [0, 1, -1])
def test_loops_of_each_lane(order):
    """Trip counts differ, some are none; the inner loop's depend on the outer one's."""
    body = """and.b32 %r3, %r0, 7; mov.b32 %r9, 0; mov.b32 %r4, 0;
    setp.eq.s32 %p1, %r3, 0;
    @%p1 bra $DONE;
    $OUTER:
    mov.b32 %r5, 0;
    $INNER:
    add.s32 %r9, %r9, 1; add.s32 %r5, %r5, 1;
    setp.le.s32 %p2, %r5, %r4;
    @%p2 bra $INNER;
    add.s32 %r4, %r4, 1;
    setp.ge.s32 %p3, %r4, %r3;
    @!%p3 bra $OUTER;
    $DONE:
    add.s32 %r9, %r9, 1;"""
    trips = [n % 8 for n in range(64)]
    assert result(body, threads=64, order=order) == [n * (n + 1) // 2 + 1 for n in trips]


@pytest.mark.parametrize("order", [0, 1, -1])
@pytest.mark.parametrize("edge", [41, 32])
def test_lanes_leave_early(order, edge):
    """PTX ISA 9.7.12.7: a barrier does not wait for them."""
    body = """mov.b32 %r9, 3;
    setp.ge.s32 %p1, %r0, {};
    @%p1 ret;
    bar.sync 0;"""
    wanted = [3] * edge + [-1] * (64 - edge)
    assert result(body.format(edge), threads=64, order=order) == wanted


def test_guards_keep_what_was_there():
    body = """mov.b32 %r9, 5; setp.lt.s32 %p1, %r0, 4; and.b32 %r3, %r0, 1; setp.eq.b32 %p2, %r3, 0;
    @%p1 mov.b32 %r9, 6; @!%p1 add.s32 %r9, %r9, 2;
    @%p2 setp.lt.s32 %p1, %r0, 0;
    @%p1 add.s32 %r9, %r9, 100;"""
    assert result(body) == [6, 106, 6, 106, *[7] * 28]


@pytest.mark.parametrize("options", [{}, {"lanes": 64}, {"lanes": 1}, {"order": 1}, {"order": -1}])
def test_blocks_of_a_grid(options):
    """However many run together, and in any order."""
    out = torch.zeros(3, 2, 2, 64, dtype=torch.int32)
    right(
        f"""mov.u32 %r3, %ctaid.y; mov.u32 %r4, %ctaid.z;
        mov.u32 %r5, %nctaid.x; mov.u32 %r6, %nctaid.y;
        mad.lo.s32 %r7, %r4, %r6, %r3; mad.lo.s32 %r7, %r7, %r5, %r1; mad.lo.s32 %r8, %r7, 64, %r0;
        st.shared.b32 [global_smem], %r7;
        bar.sync 0;
        ld.shared.b32 %r9, [global_smem];
        mad.lo.s32 %r9, %r9, 100, %r0;
        {lanes(0, 4, lane="%r8")} st.global.b32 [%rd31], %r9;""",
        out, threads=64, grid=(2, 2, 3), shared=4, **options,
    )  # fmt: skip
    wanted = torch.arange(12)[:, None] * 100 + torch.arange(64)
    assert torch.equal(out.view(12, 64), wanted.int())


def test_special_registers():
    for name, wanted in {
        "%laneid": [n % 32 for n in range(64)], "%warpid": [n // 32 for n in range(64)],
        "%ntid.x": [64] * 64, "%nctaid.z": [1] * 64, "%tid.y": [0] * 64,
    }.items():  # fmt: skip
        assert result(f"mov.u32 %r9, {name};", threads=64) == wanted


def test_barriers_wait_for_all():
    """Warp 0 loops longer than warp 1; both meet in each round."""
    body = """shr.u32 %r3, %r0, 5; mov.b32 %r4, 0;
    $LOOP:
    setp.eq.s32 %p1, %r3, 0;
    @%p1 st.shared.b32 [global_smem], %r4;
    bar.sync 0;
    ld.shared.b32 %r9, [global_smem];
    bar.sync 0;
    add.s32 %r4, %r4, 1; setp.lt.s32 %p2, %r4, 5;
    @%p2 bra $LOOP;"""
    assert result(body, threads=64, shared=4) == [4] * 64
    assert result(body, threads=64, shared=4, order=-1) == [4] * 64


@pytest.mark.parametrize(("order", "late"), [(0, []), (1, [0]), (-1, [1])])
def test_orders_of_warps(order, late):
    """Without a barrier, a warp that runs before the other finds nothing of it."""
    out = torch.zeros(64, dtype=torch.int32)
    body = f"""shl.b32 %r3, %r0, 2; st.shared.b32 [%r3], %r0;
    xor.b32 %r4, %r3, 128; ld.shared.b32 %r9, [%r4]; {STORE}"""
    run(body, out, threads=64, shared=256, order=order)
    assert out.tolist() == [-1 if n // 32 in late else n ^ 32 for n in range(64)]


def test_loops_without_an_end(monkeypatch):
    monkeypatch.setattr(machine, "_FOREVER", 100)
    with pytest.raises(PTXError, match="runs for ever"):
        run("$LOOP:\nbra.uni $LOOP;")


def test_registers_start_as_nan_and_predicates_false():
    assert result("mov.b32 %r9, %r50;") == [-1] * 32
    assert result("selp.b32 %r9, 1, 0, %p5;") == [0] * 32


def test_counts():
    x = torch.zeros(256, dtype=torch.int32)
    body = f"""setp.lt.s32 %p1, %r0, 32;
    @%p1 bra $ON;
    mul.lo.s32 %r3, %r0, 3;
    $ON:
    {lanes(0, 4)} ld.global.b32 %r4, [%rd31];
    {lanes(0, 32)} setp.lt.s32 %p1, %r0, 8; @%p1 st.global.b32 [%rd31], %r4;
    mul.lo.s32 %r5, %r0, {{}}; st.shared.b32 [%r5], %r4;"""
    outcome = run(body.format(4), x, threads=64, shared=8192, count=True)
    assert outcome.opcodes["mul.lo.s32"] == 1 + 2  # warp 1 alone, then both
    counts = outcome.counts
    assert counts["load sectors"] == counts["touched load sectors"] == 64 * 4 / 32
    assert counts["store sectors"] == 8
    assert counts["shared passes"] == counts["shared passes least"] == 2
    counts = run(body.format(128), x, threads=64, shared=8192, count=True).counts
    assert (counts["shared passes"], counts["shared passes least"]) == (64, 2)


def test_parts_of_a_warp():
    """What all lanes of a warp execute together is reported where some are missing."""
    body = "setp.lt.s32 %p1, %r0, {}; @%p1 shfl.sync.bfly.b32 %r3, %r0, 1, 31, -1;"
    assert "by a part of its lanes" in reported(body.format(16), threads=64)
    assert not reported(body.format(32), threads=64)


def test_barriers_of_parts_of_a_warp():
    """9.7.13.1: all lanes of a warp execute the same bar.sync; those that have left need not."""
    body = """setp.lt.s32 %p1, %r0, {};
    @%p1 bra $OTHER;
    bar.sync 0;
    bra.uni $OUT;
    $OTHER:
    bar.sync 0;
    $OUT:"""
    assert "by a part of its lanes" in reported(body.format(16), threads=64)
    assert not reported(body.format(32), threads=64)


def test_all_opcodes():
    assert not not_executed("machine")
