"""8-bit formats: quantizing, dequantizing and loading give the bits of `formats.py` everywhere."""

import pytest
import torch
from places import (
    BF16,
    DEVICE,
    ON_GPU,
    PLACE,
    assert_bits,
    at,
    compiled,
    deterministic,
    error_of,
    ids,
    mask_of,
    misaligned,
    normal,
    run,
    served,
)  # fmt: skip
from tiers import pairwise

from fused_remat import formats, random
from fused_remat.execution.choose import choose
from fused_remat.formats import Quantized
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.fused import mlp_up_fwd
from fused_remat.steps.operations import OPERATIONS
from fused_remat.steps.storage import QuantizeCall, dequantize, quantize
from fused_remat.triton import pointwise, storage, tables
from fused_remat.triton.tables import Tile

F16, F32 = torch.float16, torch.float32
DTYPES = compiled([BF16, F16, F32], [F32, BF16])
# Rows and width: one element; less than a block, more; odd; whole blocks.
SHAPES = at(
    [(4096, 8192), (1030, 1000), (515, 63), (1, 1)],
    [(1, 1), (5, 63), (3, 130), (7, 1000), (40, 256)],
    [(70, 1024), (33, 1000), (67, 63), (1, 1)],
)
STORED = pytest.mark.parametrize("stored", sorted(storage.KERNELS))


def call_of(stored, rows, width, row0=2**32 - 3):
    """How to quantize; stochastic rounding gets rows around 2**32."""
    if not formats.FORMATS[stored].seeded:
        return QuantizeCall(stored)
    key = random.site_keys(torch.tensor(-7, device=DEVICE))[random.MLP]
    return QuantizeCall(stored, random.Uniform(key, row0, rows, width))


def exact_parts(x, call):
    """What `formats.quantize` gives, on the CPU as on this device."""
    parts, uniform = formats.quantize(x, call.stored, call.uniform), call.uniform
    if DEVICE.type == "cpu":
        return parts
    if uniform is not None:
        uniform = random.Uniform(uniform.site_key.cpu(), uniform.row0, *x.shape)
    on_cpu = formats.quantize(x.cpu(), call.stored, uniform)
    check_parts(parts, tuple(part.to(DEVICE) for part in on_cpu))
    return parts


def of_many_sizes(rows, width, dtype):
    """Rows of all magnitudes, with a stride, zeros, and rows that are not finite or tiny."""
    x = misaligned(normal(F32, rows, width) * normal(F32, rows, 1).mul(4).exp())
    x[:, ::7] = 0.0
    if rows > 4:
        x[1, 0], x[2, -1], x[3], x[4] = torch.nan, -torch.inf, 0.0, x[4].sign() * 1e-31
    return x.to(dtype)


def quantized(x, stored="int8"):
    call = call_of(stored, *x.shape)
    return Quantized(stored, formats.quantize(x, stored, call.uniform), x.shape[1], x.dtype)


def check_parts(found, exact):
    """Equal bits; all NaNs are equal."""
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)


@STORED
@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("shape", SHAPES, **ids)
def test_the_bits_of_the_format(shape, dtype, stored):
    x, call = of_many_sizes(*shape, dtype), call_of(stored, *shape)
    exact = exact_parts(x, call)
    check_parts(served(quantize, x, call), exact)
    packed = Quantized(stored, exact, shape[1], dtype)
    check_parts(served(dequantize, packed), packed.tensor())
    packed = quantized(normal(dtype, *shape), stored)
    assert torch.equal(run(dequantize, packed), packed.tensor())
    if PLACE != "aten":  # parts inside larger vectors
        wholes = [torch.full((p.numel() + 32,), 77, dtype=p.dtype, device=DEVICE) for p in exact]
        parts = tuple(w[16:-16].view(p.shape) for w, p in zip(wholes, exact, strict=True))
        storage.quantize_int8(x, call, parts).run()
        check_parts(parts, exact)
        for whole in wholes:
            assert (whole[:16] == 77).all() and (whole[-16:] == 77).all(), "written outside"


@STORED
def test_the_ends_of_the_line(stored):
    """Steps that are subnormal or nearly infinite, and values next to a boundary."""
    levels = torch.arange(256.0, device=DEVICE).view(2, 128) - 128.0
    x = torch.cat([levels * 1e-37, levels / 128 * 3.4e38, levels + 0.4375, levels * 1e-31])
    call = call_of(stored, *x.shape)
    check_parts(served(quantize, x, call), exact_parts(x, call))


# --- loaded by activations


# In 16 bits, to which both ways round; interpreted, float32 has the same bits as well.
LOADED = [F32, BF16] if PLACE == "interpreter" else [BF16]


@pytest.mark.parametrize("act", pointwise.PAIRS)
@pytest.mark.parametrize("dtype", LOADED, **ids)
@pytest.mark.parametrize("shape", compiled(SHAPES[:2], SHAPES[1:3]), **ids)
def test_activations_of_quantized_inputs(shape, dtype, act):
    """The same bits as if they were dequantized before."""
    x, mask = quantized(normal(dtype, *shape)), mask_of(*shape, 0.3)
    dy, plain = compiled(normal(dtype, *shape), normal(dtype, shape[1]).expand(shape)), x.tensor()
    for drop in (mask, None):
        y = run(activation_fwd, act, None, plain, drop)
        dx = run(activation_bwd, act, dy, None, plain, drop, False)
        assert_bits([run(activation_fwd, act, None, x, drop)], [y])
        assert_bits(run(activation_bwd, act, dy, None, x, drop, False), dx)
        assert_bits(run(activation_bwd, act, dy.contiguous().clone(), None, x, drop, True), dx)


@pytest.mark.parametrize("act", at(list(pointwise.PAIRS), ["silu"]))
@pytest.mark.parametrize("which", ["gate", "up", "both"])
@pytest.mark.parametrize("needs_grad", at(["both"], ["both", "gate", "up"]))
@pytest.mark.parametrize("dtype", LOADED, **ids)
@pytest.mark.parametrize("shape", compiled(SHAPES[:2], [(33, 130)]), **ids)
def test_gated_activations_of_quantized_inputs(shape, dtype, needs_grad, which, act):
    gate, up, dy = (normal(dtype, *shape) for _ in range(3))
    mask, marks = mask_of(*shape, 0.3), (needs_grad != "up", needs_grad != "gate")
    packed = quantized(gate) if which != "up" else gate, quantized(up) if which != "gate" else up
    plain = tuple(x.tensor() if isinstance(x, Quantized) else x for x in packed)
    assert_bits([run(activation_fwd, act, *packed, mask)], [run(activation_fwd, act, *plain, mask)])
    if not marks[0]:
        packed, plain = (packed[0], None), (plain[0], None)
    found = run(activation_bwd, act, dy, *packed, mask, False, marks)
    assert_bits(found, run(activation_bwd, act, dy, *plain, mask, False, marks))
    assert tuple(t is not None for t in found) == marks


def said_of(function, *args):
    return choose(function, "triton", OPERATIONS[function].key(*args)).reason(*args)


@pytest.mark.gpu
def test_formats_without_kernels_are_atens():
    x = normal(F32, 5, 130)
    for stored in sorted(set(formats.FORMATS) - storage.KERNELS):
        packed = Quantized(stored, served(quantize, x, QuantizeCall(stored)), 130, x.dtype)
        assert torch.equal(served(dequantize, packed), packed.tensor())
        assert served(activation_fwd, "relu", None, packed, None).shape == x.shape
        for said in (
            said_of(dequantize, packed),
            said_of(activation_fwd, "relu", None, packed, None),
        ):
            assert stored in said and f"no kernel for {stored}" in said
    packed = quantized(x)
    assert said_of(quantize, x, QuantizeCall("int8")) == "kernel pack_int8_fwd, int8"
    assert said_of(dequantize, packed) == "kernel unpack_int8_fwd, int8"
    said = said_of(activation_fwd, "gelu", None, packed, None)
    assert said == "pointwise kernel, from int8"


# --- in the end of a product

# Blocks of one part, of four, several in a tile; and tiles narrower than a block. On a GPU those of
# the tables.
TILES = {
    "one block": Tile(16, 64, 16, 4, 1),
    "parts": Tile(16, 64, 32, 4, 1, parts=2, group=2),
    "blocks": Tile(16, 128, 16, 4, 1),
    "narrow": Tile(16, 32, 16, 4, 1, parts=2),
}
# M, N, K: single, odd, tensor descriptors; for a GPU every tile of the tables for Hopper.
PRODUCTS = at(
    [
        ((8192, 8192, 512), BF16), ((2048, 1536, 512), BF16), ((512, 1024, 256), BF16),
        ((64, 520, 64), BF16), ((515, 1001, 331), BF16),
    ],
    [((1, 1, 1), F32), ((17, 130, 31), BF16), ((20, 136, 16), F32), ((20, 136, 16), BF16)],
    [((256, 512, 64), BF16), ((64, 520, 64), BF16), ((131, 193, 63), BF16), ((67, 264, 72), F16)],
)  # fmt: skip


@pytest.fixture(params=TILES if PLACE == "interpreter" else ["of the tables"])
def tile(request, monkeypatch):
    """Make all products of an MLP's first half take this tile."""
    for kernel in ("linear", "gated_mlp_fwd") if request.param in TILES else ():
        monkeypatch.setitem(tables.TILES[kernel], "interpreter", (TILES[request.param],))


def weights(dtype, n, k):
    return normal(dtype, n, k, scale=k**-0.25), normal(dtype, n)


@pytest.mark.parametrize(
    "product, p, stored, tile",
    at(
        [
            (product, p, stored, "of the tables")
            for product in PRODUCTS
            for p in (0.0, 0.3)
            for stored in (*sorted(storage.KERNELS), "fp8_e4m3")
        ],
        pairwise(
            PRODUCTS, [0.3], ["int8", "int8_stochastic", "fp8_e4m3"],
            list(TILES) if PLACE == "interpreter" else ["of the tables"],
        ),
    ),
    **ids, indirect=["tile"],
)  # fmt: skip
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_product_quantizes_what_its_activation_is_of(product, p, stored, tile, gated):
    """Forward has the same bits whatever is kept, and codes are those of what is kept native.

    In deterministic mode, where PyTorch fills what is not written. On a GPU cuBLAS may make
    products that are kept; it need not add as the kernel does where rows are not whole 16 bytes.
    """
    with deterministic():
        check_quantized(product, p, stored, gated)


def check_quantized(product, p, stored, gated):
    (m, n, k), dtype = product
    gate, up = weights(dtype, n, k) if gated else None, weights(dtype, n, k)
    x, mask, call = normal(dtype, m, k, scale=k**-0.25), mask_of(m, n, p), call_of(stored, m, n)
    given, count = ("silu" if gated else "gelu", x, gate, up, mask), 1 + gated
    none, no, yes = (None,) * count, (False,) * count, (True,) * count
    y, nothing, empty = served(mlp_up_fwd, *given, no, none)
    assert nothing == none and empty == ((),) * count
    same, pres, _ = served(mlp_up_fwd, *given, yes, none)
    if ON_GPU and not gated and (n % 8 or k % 8):
        assert error_of(same, y) < 2**-8  # each is rounded once, by at most 2**-9
        same, pres, _ = served(mlp_up_fwd, *given, yes, (call,) * count)  # by the kernel
    assert torch.equal(y, same) and not any(pre.isnan().any() for pre in pres)
    ways = [(no, (call,) * count), (yes, (call,) * count)]
    if gated:
        int8 = call_of("int8", m, n)
        ways += [((True, False), (None, call)), ((False, True), (int8, call))]
    for kept, calls in ways:
        same, found, parts = served(mlp_up_fwd, *given, kept, calls)
        assert torch.equal(y, same), "the same bits whatever is kept"
        assert_bits(found, [pre if keep else None for pre, keep in zip(pres, kept, strict=True)])
        for mine, pre, how in zip(parts, pres, calls, strict=True):
            check_parts(mine, () if how is None else exact_parts(pre, how))


@pytest.mark.parametrize(
    "tile", ["parts", "narrow"] if PLACE == "interpreter" else ["of the tables"], indirect=True
)
def test_what_is_not_finite(tile):
    x, (weight, bias) = normal(BF16, 20, 16), weights(BF16, 130, 16)
    x[3, 0], bias[129] = torch.nan, torch.inf
    _, (pre,), (parts,) = served(
        mlp_up_fwd, "relu", x, None, (weight, bias), None, (True,), (call_of("int8", 20, 130),)
    )
    check_parts(parts, formats.quantize(pre, "int8"))
    assert parts[1].isnan().sum() == 3 + 19
