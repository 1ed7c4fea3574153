"""8-bit blocks at real sizes on a GPU: the bits of `formats.py`, whatever packs and loads them."""

import pytest
import torch
from gpu_checks import (
    BF16,
    DEVICE,
    check_written,
    error_of,
    keep_of,
    misaligned,
    normal,
    poisoned,
    sized,
)

from fused_remat import FusedRematCausalLayer, FusedRematLayer, formats, random
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.fused import mlp_up_fwd
from fused_remat.steps.storage import dequantize, quantize

pytest.importorskip("triton", reason="Triton is not installed")

from fused_remat.execution import choose
from fused_remat.formats import Quantized
from fused_remat.steps.storage import QuantizeCall
from fused_remat.triton import pointwise, storage

pytestmark = pytest.mark.gpu
ids = {"ids": lambda value: str(value).removeprefix("torch.").replace(" ", "")}
TRITON = choose._table("triton")
# Rows and width: whole blocks, not, less than one, one element.
SHAPES = [(4096, 8192), (1030, 1000), (515, 63), (1, 1)]
TINY = {4096: (40, 128), 1030: (7, 130), 515: (5, 63), 1: (1, 1)}


def packing(stored, rows, width, row0=2**32 - 3):
    """How to pack; rows about 2**32 where it is stochastic."""
    if not formats.FORMATS[stored].seeded:
        return QuantizeCall(stored)
    key = random.site_keys(torch.tensor(-7, device=DEVICE))[random.MLP]
    return QuantizeCall(stored, random.Uniform(key, row0, rows, width))


def parts_of(x, how):
    """What `formats.quantize` gives, on a CPU as on the device."""
    on_device = formats.quantize(x, how.stored, how.uniform)
    uniform = how.uniform
    if uniform is not None:
        key = uniform.site_key.cpu()
        uniform = random.Uniform(key, uniform.row0, uniform.rows, uniform.width)
    on_cpu = tuple(part.to(DEVICE) for part in formats.quantize(x.cpu(), how.stored, uniform))
    check_parts(on_device, on_cpu)
    return on_cpu


def check_parts(found, exact):
    """The same bits; a NaN is one, whatever its bits."""
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stored", sorted(storage.KERNELS))
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], **ids)
@pytest.mark.parametrize("shape", SHAPES, **ids)
def test_pack_and_unpack(shape, dtype, stored):
    rows, width = sized(*shape, tiny=TINY[shape[0]])
    x = misaligned(normal(dtype, rows, width) * normal(torch.float32, rows, 1).mul(3).exp())
    x = x.to(dtype)
    x[:, ::7] = 0.0
    if rows > 4:
        x[1, 0], x[2, -1], x[3], x[4] = torch.nan, -torch.inf, 0.0, 1e-31
    how = packing(stored, rows, width)
    parts, exact = TRITON[quantize](x, how), parts_of(x, how)
    check_parts(parts, exact)
    packed = Quantized(stored, parts, width, dtype)
    check_parts(TRITON[dequantize](packed), packed.tensor())
    y = poisoned(rows, width, dtype)
    packed = Quantized(stored, TRITON[quantize](normal(dtype, rows, width), how), width, dtype)
    storage.dequantize_int8(packed, y).run()
    check_written(y)


@pytest.mark.parametrize("act", pointwise.PAIRS)
@pytest.mark.parametrize("shape", SHAPES[:2], **ids)
def test_activations_of_packed_inputs(shape, act):
    """As if they were unpacked first, bit for bit: in 16 bits, to which both ways round."""
    rows, width = sized(*shape, tiny=TINY[shape[0]])
    gate, up, dy = (normal(BF16, rows, width) for _ in range(3))
    keep, how = keep_of(rows, width, 0.3), packing("int8", rows, width)
    loaded = [Quantized("int8", TRITON[quantize](x, how), width, BF16) for x in (gate, up)]
    plain = [x.tensor() for x in loaded]
    y, dx = poisoned(rows, width, BF16), poisoned(rows, width, BF16)
    pointwise.act_fwd(loaded[0], act, keep, y).run()
    pointwise.act_bwd(dy, loaded[0], act, keep, dx).run()
    for found in (y, dx):
        check_written(found)
    assert torch.equal(y, TRITON[activation_fwd](act, None, plain[0], keep))
    assert torch.equal(dx, TRITON[activation_bwd](act, dy, None, plain[0], keep, False)[1])
    for packed, same in (
        (loaded, plain), ((loaded[0], up), (plain[0], up)), ((gate, loaded[1]), (gate, plain[1]))
    ):  # fmt: skip
        y, dgate, dup = (poisoned(rows, width, BF16) for _ in range(3))
        pointwise.gated_fwd(*packed, act, keep, y).run()
        pointwise.gated_bwd(dy, *packed, act, keep, dgate, dup).run()
        exact = TRITON[activation_bwd](act, dy, *same, keep, False, (True, True))
        for found, true in zip(
            (y, dgate, dup), (TRITON[activation_fwd](act, *same, keep), *exact), strict=True
        ):
            check_written(found)
            assert torch.equal(found, true)


# Rows, width, depth: every tile of the tables for Hopper, and nothing for tensor descriptors.
PRODUCTS = [(8192, 8192, 512), (2048, 1536, 512), (512, 1024, 256), (64, 520, 64), (515, 1001, 331)]


@pytest.mark.parametrize("stored", [*sorted(storage.KERNELS), "fp8_e4m3"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", PRODUCTS, **ids)
def test_products_pack_what_their_activation_is_of(shape, p, stored):
    """Forward has the same bits whatever is kept, and codes are those of what is kept native."""
    m, n, k = sized(*shape, tiny=(17, 130, 24))
    x, (gate, up) = normal(BF16, m, k), (normal(BF16, n, k, scale=k**-0.5) for _ in range(2))
    bias, keep, how = normal(BF16, n), keep_of(m, n, p) if p else None, packing(stored, m, n)
    given = "gelu", x, None, (up, bias), keep
    y, (pre,), _ = TRITON[mlp_up_fwd](*given, (True,), (None,))
    for needs_grad in (False, True):
        same, (found,), (parts,) = TRITON[mlp_up_fwd](*given, (needs_grad,), (how,))
        assert torch.equal(y, same)
        assert torch.equal(y, TRITON[mlp_up_fwd](*given, (False,), (None,))[0])
        assert (found is not None) == needs_grad and (found is None or torch.equal(found, pre))
        check_parts(parts, TRITON[quantize](pre, how))
    given = "silu", x, (gate, bias), (up, None), keep
    y, pres, _ = TRITON[mlp_up_fwd](*given, (True, True), (None, None))
    assert torch.equal(y, TRITON[mlp_up_fwd](*given, (False, False), (None, None))[0])
    same, nothing, parts = TRITON[mlp_up_fwd](*given, (False, False), (how, how))
    assert torch.equal(y, same) and nothing == (None, None)
    for pre, packed in zip(pres, parts, strict=True):
        check_parts(packed, TRITON[quantize](pre, how))


def layer(kind, policy):
    torch.manual_seed(0)
    d, nhead, hidden = sized(1024, 16, 4096, tiny=(24, 3, 72))
    how = {"dropout": 0.1, "policy": policy, "backend": "triton", "device": DEVICE, "dtype": BF16}
    if kind == "encoder":
        return FusedRematLayer(d, nhead, hidden, batch_first=True, activation="gelu", **how)
    return FusedRematCausalLayer(d, nhead, hidden, **how)


def run(kind, policy):
    """Output and gradients."""
    module, shape = layer(kind, policy), sized(4, 512, 1024, tiny=(2, 7, 24))
    x, dy = (normal(BF16, *shape) for _ in range(2))
    y = module(x.requires_grad_())
    return y.detach(), torch.autograd.grad(y, [x, *module.parameters()], dy)


@pytest.mark.parametrize("policy", ["fast8", "balanced8"])
@pytest.mark.parametrize("kind", ["encoder", "causal"])
def test_layers_that_keep_8_bits(kind, policy):
    """Forward has the bits of every other policy; gradients are off by what codes are."""
    (y, exact), (same, grads) = run(kind, "none"), run(kind, policy)
    assert torch.equal(y, same)
    # Levels are 1 / 126 of the largest of 64 apart: 1 / 250 of it off, about a hundredth of most.
    for found, true in zip(grads, exact, strict=True):
        assert error_of(found, true) < 5e-2, tuple(found.shape)
