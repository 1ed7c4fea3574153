"""Products with fused ends at real sizes on a GPU, against float64; outputs are full of NaN before.

With tensor descriptors and with pointers (odd sizes, rows that are not aligned), and every tile.
"""

import pytest
import torch
from gpu_checks import (
    BF16,
    DEVICE,
    EAGER,
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
from fused_remat.backends.base import NORM_STATS
from fused_remat.backends.triton import gemm, tables

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
    launch = gemm.linear_fwd(x, weight, bias, residual, keep, act, pre, y, target())
    assert launch.constants["TMA"] == uses_tma(shape)
    launch.run()
    check_written(y)
    exact = EAGER.linear_fwd(*double(x, weight, bias))
    if pre is not None:
        check_written(pre)
        check_error(pre, exact)
    if act is not None:
        exact = EAGER.act_fwd(exact, act, wide(keep))
    if residual is not None:
        exact = exact + residual
    check_error(y, exact)


def test_linear_in_float32_is_not_tf32():
    m, n, k = shape_of("uneven")
    x, (weight, bias) = normal(torch.float32, m, k), layer(torch.float32, n, k)
    y = poisoned(m, n, torch.float32)
    tile = tables.TILES["linear"][tables.family(target())][-1]
    given = x, weight, bias, None, None, None, None, y, target()
    gemm.linear_fwd(*given, tile=tile).run()
    check_written(y)
    check_error(y, EAGER.linear_fwd(*double(x, weight, bias)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", NORM_STATS)
def test_linear_of_a_norm(shape, kind):
    m, n, k = shape_of(shape)
    x, (weight, bias) = normal(BF16, m, k, shift=1.0), layer(BF16, n, k)
    affine = normal(BF16, k, shift=1.0), normal(BF16, k) if kind == "layer_norm" else None
    normed, *stats = EAGER.norm_fwd(kind, *double(x, *affine), 1e-5)
    norm = (*[None, *(s.float() for s in stats)][-2:], *affine)
    y = poisoned(m, n, BF16, shape == "odd")
    gemm.linear_fwd(x, weight, bias, None, None, None, None, y, target(), norm).run()
    check_written(y)
    check_error(y, EAGER.linear_fwd(normed, *double(weight, bias)))


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
    gemm.gated_mlp_fwd(x, *gate, *up, keep, "silu", y, target()).run()
    check_written(y)
    pres = [EAGER.linear_fwd(*double(x, *w)) for w in (gate, up)]
    check_error(y, EAGER.gated_fwd(*pres, "silu", wide(keep)))


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
    pres = [EAGER.linear_fwd(*double(x, *w)) for w in (gate, up)]
    dact = EAGER.linear_dx(*double(dy, down))
    if route == "one kernel" and gated:
        gemm.gated_mlp_bwd(x, *gate, *up, dy, down, keep, "silu", y, dgate, dup, at).run()
    elif route == "one kernel":
        gemm.mlp_bwd(x, *up, dy, down, keep, "gelu", y, dup, at).run()
    else:  # the activation takes the place of the pre-activation, as in a step
        y.copy_(pres[1])
        dgate.copy_(pres[0])
        pres = [dgate.double(), y.double()]
        given = (dgate, y, keep, "silu", y, dgate) if gated else (None, y, keep, "gelu", y, None)
        gemm.linear_act_bwd(dy, down, *given, dup, at).run()
    if gated:
        exact = [EAGER.gated_fwd(*pres, "silu", wide(keep))]
        exact += EAGER.gated_bwd(dact, *pres, "silu", wide(keep), False, True)
        found = [y, dgate, dup]
    else:
        exact = [EAGER.act_fwd(pres[1], "gelu", wide(keep))]
        exact.append(EAGER.act_bwd(dact, pres[1], "gelu", wide(keep), False))
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
