"""What is read of TTGIR and SASS: on small texts, and on two real kernels."""

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from bench.audit import cases as audit_cases
from bench.audit import command as audit
from bench.audit import machine_code
from bench.audit.attention import launches_of, variants
from fused_remat.triton import attention
from fused_remat.triton.tables import AttentionTile

LAYOUTS = """
#mma = #ttg.nvidia_mma<{{versionMajor = {}, versionMinor = 0, warpsPerCTA = {}, instrShape = {}}}>
%a = {} %x, %y, %z : tensor<64x64xbf16, #b> * tensor<64x64xbf16, #b> -> tensor<64x64xf32, #mma> loc
"""
WARPGROUP, WARPS = "ttng.warp_group_dot", "tt.dot"


@pytest.mark.parametrize(
    ("version", "warps", "shape", "dot", "times"),
    [
        (3, [4, 1], [16, 64, 16], WARPGROUP, 1),
        (3, [8, 1], [16, 64, 16], WARPGROUP, 2),
        (3, [4, 2], [16, 32, 16], WARPGROUP, 1),
        (3, [8, 2], [16, 64, 16], WARPGROUP, 4),
        (2, [4, 2], [16, 8], WARPS, 1),
        (2, [1, 4, 2], [1, 16, 8], WARPS, 1),
        (2, [8, 1], [16, 8], WARPS, 2),
        (2, [1, 16], [16, 8], WARPS, 2),
    ],
)
def test_warps_that_cover_a_tile_more_than_once_repeat_it(version, warps, shape, dot, times):
    assert machine_code.repetition(LAYOUTS.format(version, warps, shape, dot)) == times


def listing(*lines):
    """SASS of instructions 16 bytes apart."""
    code = (f"        /*{16 * i:04x}*/    {line} ;  /* 0x0 */" for i, line in enumerate(lines))
    return "\n".join(["		Function : kernel", *code])


#: A loop from 0x10 to 0x90 whose wait tries again at 0xb0; and a loop of loads around it.
LOOP = listing(
    "LDG.E R1, [R2.64]",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R2",
    "@!P1 BRA 0xb0",
    "LDS.128 R4, [R5]",
    "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR12], R24",
    "HGMMA.64x32x16.F32.BF16 R24, R8, gdesc[UR12], R24, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "MUFU.EX2 R3, R3",
    "STL [R1], R3",
    "@P0 BRA 0x10",
    "@P2 BRA 0x0",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R2",
    "@!P1 BRA 0xb0",
    "BRA 0x30",
)


def test_a_loop_its_clocks_and_what_bounds_it():
    """Of the innermost one; the block out of line that tries again ends no loop."""
    code = machine_code.instructions(LOOP)
    (body,) = machine_code.loops(code)
    assert [one.kind for one in body][1:6] == ["BRA", "LDS", "HGMMA", "HGMMA", "WARPGROUP"]
    row = machine_code.examine("", LOOP, 90, 8)
    (loop,) = row["loops"]
    a_b, b = 2 * 16 * (64 + 32), 2 * 16 * 32  # the second takes its rows from registers
    assert loop["tensor"] == 2 * 2 * 64 * 32 * 16 / 2048
    assert loop["shared"] == (2 * (a_b + b) + 8 * 512) / 128
    assert (loop["special"], loop["issue"]) == (8 * 2, 2 * 11), "and the way back"
    assert (loop["bound"], loop["share"]) == ("shared", 0.667)
    assert loop["spills"] == 1
    assert machine_code.tensor_share(row["loops"]) == 0.667


def test_instructions_of_other_tensor_cores():
    """A warp's (mma.sync), and a thread's, which a register describes (tcgen05)."""
    warps = machine_code.instructions(listing("HMMA.16816.F32.BF16 R4, R8, R2, R4"))
    assert machine_code.clocks(warps, 80, 4)["tensor"] == 4 * 16 * 8 * 16 / 1024
    described = ["UMOV UR39, 0x8400490", "UTCHMMA gdesc[UR2], gdesc[UR4], tmem[UR6], idesc[UR39]"]
    found = machine_code.clocks(machine_code.instructions(listing(*described)), 100, 4)
    assert found["tensor"] == 128 * 256 * 16 / 4096
    assert found["shared"] == 2 * 16 * (128 + 256) / 128


def test_specialized_warps_are_not_read():
    row = machine_code.examine("ttg.warp_specialize(%a)", LOOP, 90, 8)
    assert row == {"repetition": 1, "loops": None}
    assert machine_code.tensor_share(None) is None


@pytest.mark.parametrize(("block_n", "times"), [(64, 2), (128, 1)])
def test_a_real_kernel_that_repeats_and_one_that_does_not(block_n, times, monkeypatch):
    """dk and dv: two warpgroups on 64 keys both compute the scores of all of them."""
    tile = AttentionTile(64, block_n, 8, 2)
    monkeypatch.setattr(attention, "attention_tile", lambda *_, **__: tile)
    dtype, at = audit.DTYPES["bf16"], audit_cases.target(90)
    launches = dict(launches_of(64, variants(dtype)["causal"], at, dtype))
    case = audit_cases.Case("dkdv", launches["attention_dkdv_bwd"], True, True)
    row = audit.examine(case, 90) | {"target": "sm_90 bf16"}
    assert row["repetition"] == times
    assert any("2 times" in said for said in audit.complaints(row, 90, None)) == (times == 2)
    assert all(re.search("tensor|shared|issue", loop["bound"]) for loop in row["loops"])
    assert all(0.3 < loop["share"] <= 1 and not loop["spills"] for loop in row["loops"])
