"""Loads and stores, and what is reported of them: PTX ISA 9.7.9.8, 9.7.9.11, chapter 8."""

from __future__ import annotations

import pytest
import torch

from .kernels import lanes, not_executed, reported, right, run

CLASS = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}
DTYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def vector(size, count):
    """Modifiers of an access, and registers from number 8 on."""
    names = [f"{CLASS[size]}{8 + n}" for n in range(count)]
    kind = f"v{count}.b{size}" if count > 1 else f"b{size}"
    return kind, "{" + ", ".join(names) + "}" if count > 1 else names[0]


@pytest.mark.parametrize(
    ("size", "count"), [(s, n) for s in CLASS for n in (1, 2, 4) if s * n <= 128]
)
def test_elements_and_vectors(size, count):
    """Through shared memory, where each lane reads what another warp wrote."""
    kind, registers = vector(size, count)
    bytes_ = size * count // 8
    x = torch.randint(-(2 ** (size - 1)), 2 ** (size - 1) - 1, (64, count), dtype=DTYPES[size])
    out = torch.zeros_like(x)
    right(
        f"""{lanes(0, bytes_)} ld.global.{kind} {registers}, [%rd31];
        mul.lo.s32 %r3, %r0, {bytes_}; mov.b32 %r4, global_smem; add.s32 %r3, %r3, %r4;
        st.shared.{kind} [%r3+64], {registers};
        bar.sync 0;
        xor.b32 %r5, %r0, 63; mul.lo.s32 %r6, %r5, {bytes_};
        ld.shared.{kind} {registers}, [%r6+64];
        {lanes(1, bytes_)} st.global.{kind} [%rd31], {registers};""",
        x, out, threads=64, shared=64 * bytes_ + 64,
    )  # fmt: skip
    assert torch.equal(out, x.flip(0))


def test_signs_of_loads():
    """PTX ISA 9.4.1: a register that is wider is filled by the type."""
    x, out = torch.tensor([-2], dtype=torch.int8), torch.zeros(2, dtype=torch.int64)
    right(
        """ld.global.s8 %r3, [%rd0]; cvt.s64.s32 %rd8, %r3; st.global.b64 [%rd1], %rd8;
        ld.global.u8 %r3, [%rd0]; cvt.s64.s32 %rd8, %r3; st.global.b64 [%rd1+8], %rd8;""", x, out,
    )  # fmt: skip
    assert out.tolist() == [-2, 254]


def test_parameters():
    """Whole, in parts, of a sign, as a float, and by an address of the lane."""
    out = torch.zeros(6, 32, dtype=torch.int64)
    right(
        f"""{lanes(0, 8)}
        st.global.b64 [%rd31], %rd1;
        ld.param.b32 %r3, [kernel_param_1+4]; cvt.u64.u32 %rd8, %r3;
        st.global.b64 [%rd31+256], %rd8;
        ld.param.s32 %rd9, [kernel_param_2]; st.global.b64 [%rd31+512], %rd9;
        ld.param.b32 %r3, [kernel_param_3]; cvt.u64.u32 %rd8, %r3; st.global.b64 [%rd31+768], %rd8;
        mov.b64 %rd10, kernel_param_1; mov.b64 %rd11, kernel_param_2;
        setp.lt.u32 %p1, %r0, 7; selp.b64 %rd12, %rd10, %rd11, %p1;
        ld.param.b64 %rd13, [%rd12]; st.global.b64 [%rd31+1024], %rd13;
        @%p1 ld.param.b32 %rd13, [%rd12+4]; st.global.b64 [%rd31+1280], %rd13;""",
        out, 0x123456789ABCDEF0, -5, 1.5,
    )  # fmt: skip
    whole, high = 0x123456789ABCDEF0, 0x12345678
    assert out[:4, 9].tolist() == [whole, high, -5, 0x3FC00000]
    assert out[4].tolist() == [whole] * 7 + [-5] * 25
    assert out[5].tolist() == [high] * 7 + [-5] * 25


def test_masked_lanes_neither_load_nor_store():
    """They keep their register's value, also where their address is of nothing."""
    x, out = torch.arange(8, dtype=torch.int32), torch.full((32,), -1, dtype=torch.int32)
    right(
        f"""{lanes(0, 4)} {lanes(1, 4, "%rd30")}
        setp.lt.s32 %p1, %r0, 8; setp.ge.s32 %p2, %r0, 6;
        mov.b32 %r3, 77;
        @%p1 ld.global.b32 %r3, [%rd31];
        @!%p2 st.global.b32 [%rd30], %r3;
        setp.eq.s32 %p3, %r0, 31; @%p3 st.global.b32 [%rd30], %r3;""", x, out,
    )  # fmt: skip
    assert out.tolist() == [0, 1, 2, 3, 4, 5, *[-1] * 25, 77]


def test_memory_starts_as_nan():
    out = torch.zeros(32, dtype=torch.int32)
    right(f"ld.shared.b32 %r3, [global_smem]; {lanes(0, 4)} st.global.b32 [%rd31], %r3;", out,
          shared=64)  # fmt: skip
    assert out.tolist() == [-1] * 32
    right(f"{lanes(0, 4)} st.global.b32 [%rd31], %r300;", out)
    assert out.tolist() == [-1] * 32


# --- bounds and alignment

STORE = "{} st.global.b32 [%rd31{}], %r0;"


def test_outside_of_a_tensor():
    x = torch.zeros(32, dtype=torch.int32)
    assert not reported(STORE.format(lanes(0, 4), ""), x)
    assert "outside of its storage: PTX line" in reported(STORE.format(lanes(0, 4), "+4"), x)
    assert "outside of its storage" in reported(STORE.format(lanes(0, 4), "+-4"), x)
    assert "outside of its storage" in reported(
        f"{lanes(0, 4)} ld.global.v2.b32 {{%r3, %r4}}, [%rd31+64];", x
    )
    with pytest.raises(Exception, match="in no tensor"):
        run("mov.b64 %rd5, 16; ld.global.b32 %r3, [%rd5];")


def test_between_the_rows_of_a_strided_tensor():
    storage = torch.zeros(4, 16, dtype=torch.int32)
    x = storage[:, :8]
    row = "shr.u32 %r3, %r0, 3; and.b32 %r4, %r0, 7; mad.lo.s32 %r5, %r3, 16, %r4;"
    assert not reported(row + STORE.format(lanes(0, 4, lane="%r5"), ""), x)
    assert storage[:, :8].flatten().tolist() == list(range(32))
    assert not storage[:, 8:].any()
    found = reported(row + STORE.format(lanes(0, 4, lane="%r5"), "+16"), x)
    assert "outside of its tensor" in found
    assert "16 times, e.g. byte 32 of its storage" in found


@pytest.mark.parametrize("space", ["global", "shared"])
def test_unaligned_vectors(space):
    x = torch.zeros(256, dtype=torch.int32)
    at = {"global": "mad.wide.u32 %rd5, %r0, 16, %rd0;", "shared": "mul.lo.s32 %r5, %r0, 16;"}
    base = {"global": "%rd5", "shared": "%r5"}
    for offset, wrong in ((0, False), (16, False), (8, True), (4, True)):
        access = f"ld.{space}.v4.b32 {{%r6, %r7, %r8, %r9}}, [{base[space]}+{offset}];"
        assert ("not aligned" in reported(at[space] + access, x, shared=1024)) == wrong


def test_outside_of_shared_memory():
    store = "mul.lo.s32 %r3, %r0, 4; st.shared.b32 [%r3{}], %r0;"
    assert not reported(store.format(""), shared=128)
    assert "outside of shared memory" in reported(store.format("+4"), shared=128)
    assert "outside of shared memory" in reported(store.format("+-4"), shared=128)


# --- races

ACROSS = """mul.lo.s32 %r3, %r0, 4; st.shared.b32 [%r3], %r0; {}
xor.b32 %r4, %r3, {}; ld.shared.b32 %r5, [%r4]; {}
st.shared.b32 [%r3], %r5;"""


def test_races_between_warps():
    both = ACROSS.format("bar.sync 0;", 128, "bar.sync 0;")
    assert not reported(both, threads=64, shared=256)
    first, second = ACROSS.format("", 128, "bar.sync 0;"), ACROSS.format("bar.sync 0;", 128, "")
    assert "race: shared read after write" in reported(first, threads=64, shared=256)
    assert "race: shared write after read" in reported(second, threads=64, shared=256)
    assert not reported(ACROSS.format("", 64, ""), threads=64, shared=256)  # of one warp
    for order in (1, -1):
        assert not reported(both, threads=64, shared=256, order=order)
        assert "race: shared" in reported(first, threads=64, shared=256, order=order)


def test_warps_that_write_the_same():
    store = "and.b32 %r3, %r0, 31; mul.lo.s32 %r4, %r3, 4; st.shared.b32 [%r4], {};"
    assert not reported(store.format("%r3"), threads=64, shared=128)
    assert "different values" in reported(store.format("%r0"), threads=64, shared=128)
    later = "setp.lt.s32 %p1, %r0, 32; @%p1 {} @!%p1 {}"
    store, other = "st.shared.b32 [%r4], %r3;", "st.shared.b32 [%r4], %r0;"
    at = "and.b32 %r3, %r0, 31; mul.lo.s32 %r4, %r3, 4;"
    assert not reported(at + later.format(store, store), threads=64, shared=128)
    found = reported(at + later.format(store, other), threads=64, shared=128)
    assert "race: shared write after write" in found
    both = at + store + "{} setp.ge.s32 %p1, %r0, 32; @%p1 " + other  # warp 0 may be late
    assert "race: shared write after write" in reported(both.format(""), threads=64, shared=128)
    assert not reported(both.format("bar.sync 0;"), threads=64, shared=128)


def test_one_instruction_writes_different_values():
    x = torch.zeros(1, dtype=torch.int32)
    store = "race: one instruction writes different values"
    assert store in reported("st.global.b32 [%rd0], %r0;", x)
    assert store in reported("st.shared.b32 [global_smem], %r0;", shared=16)
    assert not reported("mov.b32 %r3, 5; st.global.b32 [%rd0], %r3;", x)
    assert not reported("setp.eq.s32 %p1, %r0, 3; @%p1 st.global.b32 [%rd0], %r0;", x)
    assert x.item() == 3


def test_races_between_blocks():
    x = torch.zeros(64, dtype=torch.int32)
    own = "mad.lo.s32 %r3, %r1, 32, %r0;" + STORE.format(lanes(0, 4, lane="%r3"), "")
    assert not reported(own, x, grid=(2,))
    assert x.tolist() == list(range(32)) * 2
    assert "race: global read after write" in reported(
        own + "xor.b32 %r4, %r3, 32;" + lanes(0, 4, lane="%r4") + "ld.global.b32 %r5, [%rd31];",
        x, grid=(2,),
    )  # fmt: skip
    for together in (8192, 32):  # two blocks at once, one after the other
        add = f"{lanes(0, 4)} ld.global.b32 %r3, [%rd31]; add.s32 %r3, %r3, 1;"
        found = reported(add + "st.global.b32 [%rd31], %r3;", x, grid=(2,), lanes=together)
        assert "race: global" in found
        assert not reported(add, x, grid=(2,), lanes=together)


def test_reports_say_where():
    x = torch.zeros(32, dtype=torch.int32)
    body = ".loc 1 96 0 // norms.py:96:4 @[ norms.py:20:1 ]\n" + STORE.format("", "+128")
    found = reported("mov.b64 %rd31, %rd0;\n" + body, x).splitlines()[0]
    assert found == (
        "outside of its storage: PTX line 17: st.global.b32, norms.py:96:4: 32 times, "
        "e.g. byte 128 of 128"
    )


def test_all_opcodes():
    assert not not_executed("memory")
