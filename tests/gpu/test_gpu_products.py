"""Products with fused ends at real sizes on a GPU, against float64; outputs are full of NaN before.

With tensor descriptors and with pointers (odd sizes, rows that are not aligned), and every tile.
"""

import pytest
import torch
from gpu_checks import (
    BF16,
    DEVICE,
    ON_GPU,
    TOLERANCE,
    check_error,
    check_written,
    double,
    keep_of,
    misaligned,
    normal,
    poisoned,
    sized,
    target,
    wide,
)

pytest.importorskip("triton", reason="Triton is not installed")

from bench.measure import contest as gpu_contest
from bench.tuning import product_tiles
from bench.tuning.products import Mlp
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.linear import linear_dx, linear_fwd
from fused_remat.steps.norm import NORMS, norm_fwd
from fused_remat.triton import products, tables

pytestmark = pytest.mark.gpu
ids = {"ids": lambda value: str(value).removeprefix("torch.").replace(" ", "")}
SHAPES = {  # rows, width, depth
    "even": (4096, 2048, 1024),  # multiples of every tile
    "uneven": (1030, 520, 328),  # not of tiles, but for tensor descriptors
    "odd": (515, 1001, 331),  # nothing for tensor descriptors
}


def shape_of(name):
    tiny = {"even": (64, 64, 32), "uneven": (40, 24, 48), "odd": (33, 65, 63)}[name]
    return sized(*SHAPES[name], tiny=tiny)


def layer(dtype, n, k):
    return normal(dtype, n, k, scale=k**-0.5), normal(dtype, n)


def uses_tma(name):
    return target().has_tma and name != "odd"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [("even", BF16), ("uneven", BF16), ("odd", BF16), ("even", torch.float16)],
    **ids,
)
@pytest.mark.parametrize("end", ["nothing", "act", "dropout pre", "residual", "all"])
def test_linear(shape, dtype, end):
    m, n, k = shape_of(shape)
    x, (weight, bias) = normal(dtype, m, k), layer(dtype, n, k)
    act = "gelu" if end in ("act", "dropout pre", "all") else None
    keep = keep_of(m, n, 0.3) if end in ("dropout pre", "all") else None
    residual = normal(dtype, m, n) if end in ("residual", "all") else None
    pre = poisoned(m, n, dtype, shape == "odd") if end in ("dropout pre", "all") else None
    y = poisoned(m, n, dtype, shape == "odd")
    bias = None if end == "nothing" else bias
    launch = products.linear_fwd(x, weight, bias, residual, keep, act, pre, y, target())
    assert launch.constants["TMA"] == uses_tma(shape)
    launch.run()
    check_written(y)
    exact = linear_fwd(*double(x, weight, bias))
    if pre is not None:
        check_written(pre)
        check_error(pre, exact)
    if act is not None:
        exact = activation_fwd(act, None, exact, wide(keep))
    if residual is not None:
        exact = exact + residual
    check_error(y, exact)


def test_linear_in_float32_is_not_tf32():
    m, n, k = shape_of("uneven")
    x, (weight, bias) = normal(torch.float32, m, k), layer(torch.float32, n, k)
    y = poisoned(m, n, torch.float32)
    tile = tables.TILES["linear"][tables.family(target())][-1]
    given = x, weight, bias, None, None, None, None, y, target()
    products.linear_fwd(*given, tile=tile).run()
    check_written(y)
    check_error(y, linear_fwd(*double(x, weight, bias)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", NORMS)
def test_linear_of_a_norm(shape, kind):
    m, n, k = shape_of(shape)
    x, (weight, bias) = normal(BF16, m, k, shift=1.0), layer(BF16, n, k)
    affine = normal(BF16, k, shift=1.0), normal(BF16, k) if kind == "layer_norm" else None
    normed, *stats = norm_fwd(NormSpec(kind=kind), *double(x, *affine))
    norm = (*[None, *(s.float() for s in stats)][-2:], *affine)
    y = poisoned(m, n, BF16, shape == "odd")
    products.linear_fwd(x, weight, bias, None, None, None, None, y, target(), norm).run()
    check_written(y)
    check_error(y, linear_fwd(normed, *double(weight, bias)))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [("even", BF16), ("uneven", BF16), ("odd", BF16), ("even", torch.float16)],
    **ids,
)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gated_mlp_forward(shape, dtype, p):
    m, f, k = shape_of(shape)
    x, gate, up = normal(dtype, m, k), layer(dtype, f, k), layer(dtype, f, k)
    keep = keep_of(m, f, p) if p else None
    y = poisoned(m, f, dtype, shape == "odd")
    products.gated_mlp_fwd(x, *gate, *up, keep, "silu", y, target()).run()
    check_written(y)
    pres = [linear_fwd(*double(x, *w)) for w in (gate, up)]
    check_error(y, activation_fwd("silu", *pres, wide(keep)))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [("even", BF16), ("uneven", BF16), ("odd", BF16), ("even", torch.float16)],
    **ids,
)
@pytest.mark.parametrize("route", ["one kernel", "after the product"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_mlp_backward(shape, dtype, route, gated):
    m, f, k = shape_of(shape)
    d = k + 8  # the block's output need not be as wide as its input
    x, gate, up = normal(dtype, m, k), layer(dtype, f, k), layer(dtype, f, k)
    dy, down = normal(dtype, m, d), layer(dtype, d, f)[0]
    keep, at = keep_of(m, f, 0.3), target()
    y, dup, dgate = (poisoned(m, f, dtype, shape == "odd") for _ in range(3))
    pres = [linear_fwd(*double(x, *w)) for w in (gate, up)]
    dact = linear_dx(*double(dy, down))
    if route == "one kernel" and gated:
        products.mlp_bwd(x, (gate, up), dy, down, keep, "silu", y, (dgate, dup), at).run()
    elif route == "one kernel":
        products.mlp_bwd(x, (up,), dy, down, keep, "gelu", y, (dup,), at).run()
    else:  # the activation takes the place of the pre-activation, as in a step
        y.copy_(pres[1])
        dgate.copy_(pres[0])
        pres = [dgate.double(), y.double()]
        given = (dgate, y, keep, "silu", y, dgate) if gated else (None, y, keep, "gelu", y, None)
        products.linear_act_bwd(dy, down, *given, dup, at).run()
    if gated:
        exact = [activation_fwd("silu", *pres, wide(keep))]
        exact += activation_bwd("silu", dact, *pres, wide(keep), False, (True, True))
        found = [y, dgate, dup]
    else:
        exact = [activation_fwd("gelu", None, pres[1], wide(keep))]
        exact.append(activation_bwd("gelu", dact, None, pres[1], wide(keep), False)[1])
        found = [y, dup]
    for value, true in zip(found, exact, strict=True):
        check_written(value)
        check_error(value, true)


@pytest.mark.parametrize("kernel", tables.TILES)
@pytest.mark.parametrize("layout", ["aligned", "misaligned"])
def test_every_tile_of_the_tables(kernel, layout):
    rig = gpu_contest.Rig(DEVICE, BF16, not ON_GPU, target(), ends=0.0)
    m = Mlp(rig, *sized(2048, 1024, 4096))
    if layout == "misaligned":
        m.xs, m.dys = ([misaligned(t) for t in ts] for ts in (m.xs, m.dys))
    rows = gpu_contest.admit(product_tiles.contest(m, kernel))
    assert len(rows) == 1 + len(tables.TILES[kernel][tables.family(target())])
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {}


def test_tolerances_are_those_of_the_benchmark():
    assert all(gpu_contest.TOLERANCE[dtype] == TOLERANCE[dtype] for dtype in TOLERANCE)
