"""8-bit blocks in kernels: the bits of `formats.py`, packed, unpacked and loaded packed."""

import pytest
import torch
from poisoned import check_margin, keep_of, poisoned

from fused_remat import formats, random
from fused_remat.backends.base import Packing
from fused_remat.backends.triton import int8, pointwise
from fused_remat.backends.triton.backend import TritonBackend
from fused_remat.formats import Packed

# Rows and width: one element; less than a block, more; odd; whole blocks.
SHAPES = [(1, 1), (5, 63), (3, 130), (7, 1000), (40, 256)]
DTYPES = [torch.float32, torch.float16]
TRITON = TritonBackend()
ids = {"ids": lambda value: str(value).removeprefix("torch.").replace(" ", "")}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def packing(stored, rows, width, row0=2**32 - 3):
    """How to pack; rows about 2**32 where it is stochastic."""
    if not formats.FORMATS[stored].seeded:
        return Packing(stored)
    key = random.site_keys(torch.tensor(-7))[random.MLP]
    return Packing(stored, random.Uniform(key, row0, rows, width))


def of_many_sizes(rows, width, dtype):
    """Rows of all magnitudes, rows apart, with zeros, some rows not finite or next to nothing."""
    x = torch.randn(rows, width + 3)[:, :width] * torch.randn(rows, 1).mul(4).exp()
    x[:, ::7] = 0.0
    if rows > 4:
        x[1, 0], x[2, -1], x[3], x[4] = torch.nan, -torch.inf, 0.0, x[4].sign() * 1e-31
    return x.to(dtype)


def stored_as(x, stored="int8"):
    how = packing(stored, *x.shape)
    return Packed(stored, formats.pack(x, stored, how.uniform), x.shape[1], x.dtype)


def check_parts(found, exact):
    """The same bits; a NaN is one, whatever its bits."""
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)


def surrounded(parts):
    """Parts inside larger vectors, and what `check_surrounded` sees a write beside them by."""
    wholes = [torch.full((p.numel() + 32,), 77, dtype=p.dtype) for p in parts]
    return wholes, [w[16:-16].view(p.shape) for w, p in zip(wholes, parts, strict=True)]


@pytest.mark.parametrize("stored", sorted(int8.KERNELS))
@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("shape", SHAPES, **ids)
def test_the_bits_of_the_format(shape, dtype, stored):
    x, how = of_many_sizes(*shape, dtype), packing(stored, *shape)
    exact = formats.pack(x, stored, how.uniform)
    wholes, parts = surrounded(exact)
    int8.pack_int8(x, how, tuple(parts)).run()
    check_parts(parts, exact)
    for whole in wholes:
        assert (whole[:16] == 77).all() and (whole[-16:] == 77).all(), "written outside"
    check_parts(TRITON.pack(x, how), exact)
    packed = Packed(stored, exact, shape[1], dtype)
    check_parts(TRITON.unpack(packed), packed.tensor())
    y = poisoned(*shape, dtype)
    packed = stored_as(torch.randn(shape).to(dtype), stored)
    int8.unpack_int8(packed, y).run()
    check_margin(y)
    assert torch.equal(y, packed.tensor())


@pytest.mark.parametrize("stored", sorted(int8.KERNELS))
def test_the_ends_of_the_line(stored):
    """Steps that are subnormal or nearly infinite, and values just beside a boundary."""
    levels = torch.arange(256.0).view(2, 128) - 128.0
    x = torch.cat([levels * 1e-37, levels / 128 * 3.4e38, (levels + 0.4375), levels * 1e-31])
    how = packing(stored, *x.shape)
    check_parts(TRITON.pack(x, how), formats.pack(x, stored, how.uniform))


def test_rows_more_than_2_31_elements_apart():
    apart = torch.empty(2**31 + 4096, dtype=torch.float16).as_strided((3, 64), (2**30, 1))
    apart.copy_(torch.randn(3, 64))
    parts = TRITON.pack(apart, Packing("int8"))
    check_parts(parts, formats.pack(apart, "int8"))


def test_stochastic_rounding_is_right_on_average():
    """Between two levels."""
    x = torch.full((64, 1024), 50.3)
    x[:, ::128] = formats.LEVELS  # the largest: steps are 1
    codes, step = TRITON.pack(x, packing("int8_stochastic", *x.shape))
    assert (step == 1.0).all() and set(codes.unique().tolist()) == {51, 52, 127}
    mean = codes[codes < 127].double().sub(1.0 - formats.OFFSET).mean()
    assert abs(mean - 50.3) < 0.01  # five standard deviations of 65024 numbers


@pytest.mark.parametrize("act", pointwise.PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("shape", SHAPES[1:4], **ids)
def test_activations_of_packed_inputs(shape, dtype, act):
    """As if they were unpacked first, bit for bit."""
    x, keep = stored_as(torch.randn(shape).to(dtype)), keep_of(*shape, 0.3)
    dy, plain = torch.randn(shape[1]).to(dtype).expand(shape), x.tensor()
    y, dx = poisoned(*shape, dtype), poisoned(*shape, dtype)
    pointwise.act_fwd(x, act, keep, y).run()
    pointwise.act_bwd(dy, x, act, keep, dx).run()
    for found in (y, dx):
        check_margin(found)
    assert torch.equal(y, TRITON.act_fwd(plain, act, keep))
    assert torch.equal(dx, TRITON.act_bwd(dy, plain, act, keep, False))
    assert torch.equal(TRITON.act_fwd(x, act, None), TRITON.act_fwd(plain, act, None))
    assert torch.equal(TRITON.act_bwd(dx.clone(), x, act, None, True),
                       TRITON.act_bwd(dx, plain, act, None, False))  # fmt: skip


@pytest.mark.parametrize("which", ["gate", "up", "both"])
@pytest.mark.parametrize("wants", ["both", "gate", "up"])
@pytest.mark.parametrize("dtype", DTYPES, **ids)
def test_gated_activations_of_packed_inputs(dtype, wants, which):
    shape = (33, 130)
    gate, up, dy = (torch.randn(shape).to(dtype) for _ in range(3))
    keep = keep_of(*shape, 0.3)
    packed = stored_as(gate) if which != "up" else gate, stored_as(up) if which != "gate" else up
    plain = [x.tensor() if isinstance(x, Packed) else x for x in packed]
    y = poisoned(*shape, dtype)
    pointwise.gated_fwd(*packed, "silu", keep, y).run()
    check_margin(y)
    assert torch.equal(y, TRITON.gated_fwd(*plain, "silu", keep))
    if wants == "up":
        packed, plain = (packed[0], None), (plain[0], None)
    dgate = poisoned(*shape, dtype) if wants != "up" else None
    dup = poisoned(*shape, dtype) if wants != "gate" else None
    pointwise.gated_bwd(dy, *packed, "silu", keep, dgate, dup).run()
    exact = TRITON.gated_bwd(dy, *plain, "silu", keep, False, wants != "gate")
    for found, true in zip((dgate, dup), exact, strict=True):
        assert (found is None) == (true is None)
        if found is not None:
            check_margin(found)
            assert torch.equal(found, true)


def test_formats_without_kernels_are_atens():
    x = torch.randn(5, 130)
    for stored in sorted(set(formats.FORMATS) - int8.KERNELS):
        packed = Packed(stored, TRITON.pack(x, Packing(stored)), 130, x.dtype)
        assert torch.equal(TRITON.unpack(packed), packed.tensor())
        assert TRITON.act_fwd(packed, "relu", None).shape == x.shape
        for route in (TRITON.packing_route(x, stored), TRITON.pointwise_route(packed, "relu")):
            assert stored in route and "no kernel for that format" in route
    packed = stored_as(x)
    assert TRITON.packing_route(x, "int8") == "kernel pack_int8_fwd, int8"
    assert TRITON.packing_route(packed, "int8") == "kernel unpack_int8_fwd, int8"
    assert TRITON.pointwise_route(packed, "gelu") == "pointwise kernel, from int8"
