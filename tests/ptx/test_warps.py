"""What the lanes of a warp do together: PTX ISA 9.7.9.6, 9.7.13."""

from __future__ import annotations

import pytest
import torch

from .decode import PTXError
from .kernels import lanes, not_executed, reported, right, run


def of_lanes(body, x, out=None):
    """What body leaves in %r9 of x in %r3, of two warps and two blocks."""
    out = torch.zeros(128, dtype=torch.int32) if out is None else out
    at = "mad.lo.s32 %r2, %r1, 64, %r0;"
    right(
        f"""{at} {lanes(0, 4, lane="%r2")} ld.global.b32 %r3, [%rd31];
        {body}
        {lanes(1, 4, lane="%r2")} st.global.b32 [%rd31], %r9;""", x, out, threads=64, grid=(2,),
    )  # fmt: skip
    return out.tolist()


def draw():
    return torch.randint(-(2**31), 2**31 - 1, (128,), dtype=torch.int32)


SOURCES = {
    "idx": lambda lane, by: by & 31, "bfly": lambda lane, by: lane ^ (by & 31),
    "up": lambda lane, by: lane - (by & 31),
}  # fmt: skip


@pytest.mark.parametrize("how", SOURCES)
def test_shfl(how):
    """PTX ISA 9.7.9.6: beyond the clamp a lane keeps its own."""
    x = draw()
    for by in (0, 1, 3, 16, 31, 33):
        for edge in (0, 7) if how == "up" else (31, 15):
            found = of_lanes(f"shfl.sync.{how}.b32 %r9, %r3, {by}, {edge}, -1;", x)
            for lane in range(128):
                source = SOURCES[how](lane % 32, by)
                inside = source >= edge if how == "up" else source <= edge
                assert found[lane] == x[lane // 32 * 32 + source if inside else lane]


def test_shfl_of_each_lane():
    """Distances may differ between lanes; a value that all have stays."""
    x = draw()
    found = of_lanes("mul.lo.s32 %r4, %r0, 7; shfl.sync.idx.b32 %r9, %r3, %r4, 31, -1;", x)
    assert found == [int(x[n // 32 * 32 + n * 7 % 32]) for n in range(128)]
    assert of_lanes("mov.b32 %r4, 9; shfl.sync.bfly.b32 %r9, %r4, 5, 31, -1;", x) == [9] * 128


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_redux(kind):
    x = draw()
    number = (lambda v: v) if kind == "s32" else (lambda v: v & 0xFFFFFFFF)
    for name, function in {"add": sum, "min": min, "max": max}.items():
        found = of_lanes(f"redux.sync.{name}.{kind} %r9, %r3, 0xffffffff;", x)
        for n in range(128):
            warp = [number(v) for v in x[n // 32 * 32 : n // 32 * 32 + 32].tolist()]
            assert found[n] & 0xFFFFFFFF == function(warp) & 0xFFFFFFFF


def test_elect():
    body = "elect.sync %r4|%p1, -1; selp.b32 %r9, 100, 0, %p1; add.s32 %r9, %r9, %r4;"
    found = of_lanes(body, draw())
    assert found == [100 if n % 32 == 0 else 0 for n in range(128)]
    assert of_lanes("elect.sync _|%p1, -1; selp.b32 %r9, 1, 0, %p1;", draw())[::32] == [1] * 4


def test_fences_do_nothing_else():
    x = draw()
    body = "bar.warp.sync -1; fence.proxy.async.shared::cta; mov.b32 %r9, %r3;"
    assert of_lanes(body, x) == x.tolist()


TOGETHER = [
    "shfl.sync.bfly.b32 %r9, %r0, 1, 31, {};", "redux.sync.add.s32 %r9, %r0, {};",
    "elect.sync %r9|%p2, {};",
]  # fmt: skip


@pytest.mark.parametrize("text", TOGETHER)
def test_all_lanes_take_part(text):
    with pytest.raises(PTXError, match="among the lanes 0xffff"):
        run(text.format("0xffff"))
    right("mov.b32 %r4, -1;" + text.format("%r4"))
    with pytest.raises(PTXError, match="among the lanes %r4"):
        run("mov.b32 %r4, -1; shr.u32 %r4, %r4, %r0;" + text.format("%r4"))
    guarded = "setp.lt.s32 %p1, %r0, {}; @%p1 " + text.format("-1")
    assert "by a part of its lanes" in reported(guarded.format(40), threads=64)
    assert not reported(guarded.format(32), threads=64)


@pytest.mark.parametrize(
    "text", ["vote.sync.any.pred %p1, %p2, -1;", "fence.proxy.tensormap::generic.release.gpu;",
             "shfl.sync.bfly.b32 %r9, %r0, 1, 0x1c1f, -1;", "redux.sync.min.f32 %r9, %r0, -1;",
             "shfl.sync.bfly.b32 %r9|%p1, %r0, 1, 31, -1;", "bar.sync 1, 64;", "bar.arrive 0, 64;",
             "bar.red.popc.u32 %r9, 0, %p1;", "activemask.b32 %r9;",
             "match.any.sync.b32 %r9, %r0, -1;"],
)  # fmt: skip
def test_unknown(text):
    with pytest.raises(PTXError, match=text.split(" ")[0].rstrip(";")):
        run(text)


def test_all_opcodes():
    assert not not_executed("warps")
