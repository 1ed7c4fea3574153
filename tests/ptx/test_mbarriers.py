"""mbarrier objects: PTX ISA 9.7.13.15."""

from __future__ import annotations

import pytest
import torch

from . import mbarriers
from .decode import PTXError
from .kernels import lanes, not_executed, reported, right, run

FIRST = "setp.eq.s32 %p1, %r0, 0; mov.b32 %r2, global_smem;"
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r2], {};"
ARRIVE = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {};"
WAIT = """
{{
.reg .pred complete;
waitLoop:
mbarrier.try_wait.parity.shared::cta.b64 complete, [%r2], {};
@!complete bra.uni waitLoop;
}}
"""
INVAL = "@%p1 mbarrier.inval.shared::cta.b64 [%r2];"
READY = FIRST + INIT.format(1) + "bar.sync 0;"
ALONE = "@%p1 " + ARRIVE.format(0)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(mbarriers, "_POLLS", 20)


def test_phases():
    """Their parity alternates; a wait for the phase before returns at once."""
    out = torch.zeros(64, dtype=torch.int32)
    text = READY
    for phase in (0, 1, 0, 1):
        text += ALONE + WAIT.format(phase)
        text += f"mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], {phase ^ 1};"
        text += "selp.b32 %r4, 1, 0, %p2; shl.b32 %r5, %r5, 1; or.b32 %r5, %r5, %r4;bar.sync 0;"
    text = "mov.b32 %r5, 0;" + text + "bar.sync 0;" + INVAL
    right(text + lanes(0, 4) + "st.global.b32 [%rd31], %r5;", out, threads=64, shared=8)
    assert out.tolist() == [0] * 64  # the current phase is not over


def test_counts_arrivals():
    """A warp's lanes, and then the other's."""
    text = FIRST + INIT.format(64) + "bar.sync 0;" + ARRIVE.format(0) + WAIT.format(0)
    right(text, threads=64, shared=8)
    with pytest.raises(PTXError, match="waits for ever"):
        run(text.replace(", 64;", ", 65;"), threads=64, shared=8)
    found = reported(text.replace(", 64;", ", 63;"), threads=64, shared=8)
    assert not found  # the last one is of the next phase
    late = FIRST + INIT.format(1) + "bar.sync 0;" + "@%p1 " + ARRIVE.format(16)
    with pytest.raises(PTXError, match="waits for ever"):
        run(late + WAIT.format(0), shared=8)  # of bytes that never come
    assert "more arrivals than the mbarrier counts" in reported(late + ALONE, shared=8)


def test_nobody_arrives():
    with pytest.raises(PTXError, match=r"try_wait.*waits for ever"):
        run(READY + WAIT.format(0), shared=8)
    right(READY + WAIT.format(1), shared=8)  # the phase before the first


def test_one_warp_waits_for_another():
    """Whichever runs first."""
    text = READY + """shr.u32 %r3, %r0, 5; setp.eq.s32 %p3, %r3, 1; setp.eq.s32 %p4, %r0, 32;
    @%p3 bra $ARRIVES;
    """ + WAIT.format(0) + """
    bra.uni $OUT;
    $ARRIVES:
    @%p4 """ + ARRIVE.format(0) + "\n$OUT:\n"  # fmt: skip
    for order in (0, 1, -1):
        right(text, threads=64, shared=8, order=order)


def test_initialisation_is_known():
    assert not reported(READY + ALONE + WAIT.format(0), threads=64, shared=8)
    found = reported(FIRST + INIT.format(1) + ALONE + WAIT.format(0), threads=64, shared=8)
    assert "race: mbarrier" in found
    with pytest.raises(PTXError, match="there is no mbarrier at 0"):
        run(FIRST + ALONE, shared=8)
    twice = reported(READY + INIT.format(1), shared=8)
    assert "an mbarrier is there already" in twice
    assert not reported(READY + INVAL + INIT.format(1), shared=8)


def test_each_block_has_its_own():
    right(READY + ALONE + WAIT.format(0) + ALONE + WAIT.format(1), grid=(3,), shared=8)


@pytest.mark.parametrize(
    "text", ["mbarrier.arrive.shared::cta.b64 %rd5, [%r2];", "mbarrier.init.shared.b64 [%r2], 1;",
             "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r2], 0;"],
)  # fmt: skip
def test_unknown(text):
    with pytest.raises(PTXError, match=text.split(" ")[0]):
        run(text, shared=8)


def test_all_opcodes():
    assert not not_executed("mbarriers")
