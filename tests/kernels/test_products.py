"""Products and what is fused with them: every end, tile, route and layout, against float64."""

import pytest
import torch
from places import (
    BF16,
    COMPILED,
    ON_GPU,
    PLACE,
    at,
    check_all,
    check_error,
    check_written,
    compiled,
    double,
    far_apart,
    ids,
    mask_of,
    normal,
    poisoned,
    served,
    sized,
    target,
    wide,
)  # fmt: skip
from tiers import pairwise

from fused_remat.steps import fused
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.linear import linear_dw, linear_dx, linear_fwd
from fused_remat.triton import products, tables

F16, F32 = torch.float16, torch.float32
# M, N, K. Interpreted: single, odd, even sizes (tensor descriptors), more tiles than programs. On a
# GPU: multiples of every tile; not of tiles, but for tensor descriptors; nothing for them.
SHAPES = at(
    [(4096, 2048, 1024), (1030, 520, 328), (515, 1001, 331)],
    [(1, 1, 1), (33, 65, 63), (48, 64, 96), (130, 72, 40)],
    [(256, 256, 128), (200, 136, 72), (67, 129, 63)],
)
ODD = compiled(SHAPES[-1], SHAPES[1])
#: Shapes and dtypes of what is compiled.
GPU = [(SHAPES[0], BF16), (SHAPES[1], BF16), (SHAPES[-1], BF16), (SHAPES[0], F16)]
# Interpreted, tiles of the table in turn; else the table's own choice.
TILES = tables.TILES["linear"]["interpreter"] if PLACE == "interpreter" else (None,)
#: Kernels of an MLP's backward that this target has tiles of.
BACKWARDS = [
    name
    for name in ("mlp_bwd", "gated_mlp_bwd")
    if PLACE == "aten" or tables.family(target()) in tables.TILES[name]
]
needs_tiles = pytest.mark.skipif(
    PLACE != "aten" and tables.family(target()) not in tables.TILES["linear"],
    reason="ATen computes these products on this target",
)
FAMILIES = ("interpreter", *tables.FAMILIES.values())
ENDS = ["no bias", "act", "pre", "dropout", "dropout pre"]


def cases(*axes):
    """(shape, dtype, tile, ...): all on a GPU, else enough for every pair of values."""
    if not COMPILED:
        return pairwise(SHAPES, [F32, BF16], TILES, *axes)
    return [
        pytest.param(*GPU[shape], None, *others, marks=() if ON_GPU else case.marks)
        for case in pairwise(range(len(GPU)), *axes)
        for shape, *others in [case.values]
    ]


def layer(dtype, n, k):
    return normal(dtype, n, k, scale=k**-0.5), normal(dtype, n)


def rounded(pre, dtype):
    """As a kernel reads it: an element's rounding is no error of the function after it."""
    return pre.to(dtype).double()


def output(m, n, dtype):
    return poisoned(m, n, dtype, odd=(m, n) == ODD[:2])


def has_descriptors(k, dtype):
    return target().has_tma and k * dtype.itemsize % 16 == 0


@pytest.mark.gpu
@needs_tiles
@pytest.mark.parametrize("shape, dtype, tile, end", cases(ENDS), **ids)
def test_linear(shape, dtype, tile, end):
    m, n, k = shape
    x, (weight, bias) = normal(dtype, m, k), layer(dtype, n, k)
    mask = mask_of(m, n, 0.3) if "dropout" in end else None
    pre = output(m, n, dtype) if "pre" in end else None
    y, bias = output(m, n, dtype), None if end == "no bias" else bias
    launch = products.linear_fwd(x, weight, bias, mask, "gelu", pre, y, target(), tile)
    assert launch.constants["TMA"] == has_descriptors(k, dtype)
    launch.run()
    check_written(y)
    exact = linear_fwd(*double(x, weight, bias))
    if pre is not None:
        check_written(pre)
        check_error(pre, exact, compiled(1, 2))
    exact = activation_fwd("gelu", None, rounded(exact, dtype), mask and wide(mask))
    check_error(y, exact, compiled(1, 4))


@pytest.mark.gpu
@needs_tiles
def test_float32_is_not_tf32():
    m, n, k = sized(1030, 520, 328)
    x, (weight, bias), y = normal(F32, m, k), layer(F32, n, k), poisoned(m, n, F32)
    tile = tables.TILES["linear"][tables.family(target())][-1]
    products.linear_fwd(x, weight, bias, None, "relu", None, y, target(), tile).run()
    check_written(y)
    check_error(y, linear_fwd(*double(x, weight, bias)).relu(), compiled(1, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("shape, dtype, tile, p", cases([0.0, 0.3]), **ids)
def test_gated_forward(shape, dtype, tile, p):
    m, f, k = shape
    x, gate, up = normal(dtype, m, k), layer(dtype, f, k), layer(dtype, f, k)
    up, mask, y = compiled(up, (up[0], None)), mask_of(m, f, p), output(m, f, dtype)
    products.gated_mlp_fwd(x, *gate, *up, mask, "silu", y, target(), tile=tile).run()
    check_written(y)
    pres = [rounded(linear_fwd(*double(x, *w)), dtype) for w in (gate, up)]
    check_error(y, activation_fwd("silu", *pres, wide(mask)), compiled(1, 4))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, dtype, tile, p, kernel", cases(at([0.3], [0.0, 0.3]), BACKWARDS), **ids
)
def test_mlp_backward(shape, dtype, tile, p, kernel):
    m, f, k = shape
    gated = kernel == "gated_mlp_bwd"
    d = k + 8  # the block's output need not be as wide as its input
    x, gate, up = normal(dtype, m, k), layer(dtype, f, k), layer(dtype, f, k)
    dy, (down, _) = normal(dtype, m, d), layer(dtype, d, f)
    act, mask = "silu" if gated else "gelu", mask_of(m, f, p)
    y, dgate, dup = (output(m, f, dtype) for _ in range(3))
    gate_pre, pre = (linear_fwd(*double(x, *w)).to(dtype) for w in (gate, up))
    if not gated:
        gate_pre = dgate = None
    ups, dups = ((gate, up), (dgate, dup)) if gated else ((up,), (dup,))
    products.mlp_bwd(x, ups, dy, down, mask, act, y, dups, target(), tile).run()
    for result in filter(lambda t: t is not None, (y, dgate, dup)):
        check_written(result)
    pres, dact = double(gate_pre, pre), linear_dx(*double(dy, down))
    check_error(y, activation_fwd(act, *pres, wide(mask)), compiled(1, 4))
    exact = activation_bwd(act, dact, *pres, wide(mask), False, (True, True))
    check_all((dgate, dup), exact[:2], compiled(1, 4))


# --- the operations, by whatever serves them


@pytest.mark.parametrize("dtype", [F32, BF16], **ids)
def test_a_products_end_and_gradients_by_operations(dtype, routes):
    m, n, k = sized(1030, 520, 328)
    x, (weight, bias), dy = normal(dtype, m, k), layer(dtype, n, k), normal(dtype, m, n)
    residual, mask, out = normal(dtype, m, n), mask_of(m, n, 0.3), poisoned(m, n, dtype)
    plain = linear_fwd(*double(x, weight, bias))
    check_error(served(linear_fwd, x, weight, bias), plain, 4)
    exact = residual + wide(mask).tensor() * plain
    for into in (None, out):
        y = served(linear_fwd, x, weight, bias, residual, mask, out=into)
        check_error(y, exact, 4)
    assert y is out
    check_written(out)
    total = normal(dtype, m, k)
    exact = dy.double() @ weight.double()
    check_error(served(linear_dx, dy, weight), exact, 4)
    check_error(served(linear_dx, dy, weight, total.clone()), exact + total, 4)
    dw = dy.double().t() @ x.double()
    check_error(served(linear_dw, dy, x, None, False), dw, 4)
    for exactly in (False, True):
        into = normal(F32, n, k)
        given = into.double()
        found = served(linear_dw, dy, x, into, True, exactly)
        assert found is into and found.dtype == F32
        check_error(found, given + dw, 4, dtype=F32 if exactly else dtype)


@pytest.mark.parametrize("needs_act", [True, False])
@pytest.mark.parametrize("kept", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("gated", [False, True])
def test_an_mlp_in_passes_by_operations(gated, kept, needs_act, monkeypatch):
    """Where ATen computes all products, and passes follow."""
    if COMPILED and not needs_act and gated:
        pytest.skip("as with the activation, and without its store")
    monkeypatch.setattr(tables, "MLP_IN_KERNELS", frozenset())
    monkeypatch.setattr(tables, "MLP_UP_IN_KERNEL", dict.fromkeys(FAMILIES, (0, 0)))
    dtype, (m, f, k) = compiled(BF16, F32), at((1030, 520, 328), (48, 64, 328), (136, 200, 328))
    x, gate, up = normal(dtype, m, k), layer(dtype, f, k), layer(dtype, f, k)
    dy, down, mask = normal(dtype, m, k), layer(dtype, k, f)[0], mask_of(m, f, 0.3)
    act, gate = ("silu", gate) if gated else ("gelu", None)
    kept = kept[1 - gated :]
    y, pres = served(fused.mlp_up_fwd, act, x, gate, up, mask, kept)
    exact = [rounded(linear_fwd(*double(x, *w)), dtype) for w in (gate, up) if w is not None]
    exact_y = activation_fwd(act, exact[0] if gated else None, exact[-1], wide(mask))
    check_error(y, exact_y, 4)
    assert [p is not None for p in pres] == [*kept]
    for pre, wanted in zip(pres, exact, strict=True):
        if pre is not None:
            check_error(pre, wanted, 2)
    given = act, dy, x, gate, up, down, mask, needs_act, not gated
    y, *grads = served(fused.mlp_bwd, *given)
    assert (y is not None) == needs_act
    if needs_act:
        check_error(y, exact_y, 4)
    pair = exact if gated else (None, *exact)
    dact = linear_dx(*double(dy, down))
    *exact, total = activation_bwd(act, dact, *pair, wide(mask), False, needs_sum=not gated)
    check_all(grads[:2], exact, 4)
    if not gated:
        check_error(grads[2], total, 4, dtype=dtype)


# --- layouts, tiles


@pytest.mark.gpu
@needs_tiles
@pytest.mark.parametrize("how", ["expanded", "transposed", "misaligned"])
def test_operands_of_any_layout(how):
    m, f, k = at((1030, 520, 328), (48, 64, 96), (136, 200, 72))
    dtype = compiled(BF16, F32)
    x, up = normal(dtype, m, k), layer(dtype, f, k)
    dy, down = normal(dtype, m, k), layer(dtype, k, f)[0]
    if how == "expanded":
        dy = dy[:1].expand(m, k)
    elif how == "transposed":
        x, down = x.t().contiguous().t(), down.t().contiguous().t()
    else:
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(m, k)
    dup = poisoned(m, f, dtype)
    launch = products.mlp_bwd(x, (up,), dy, down, None, "relu", None, (dup,), target())
    # After the one copy.
    assert launch.constants["TMA"] == (target().has_tma and how == "transposed")
    launch.run()
    check_written(dup)
    pre, dact = rounded(linear_fwd(*double(x, *up)), dtype), linear_dx(*double(dy, down))
    check_error(dup, activation_bwd("relu", dact, None, pre, None, False)[1], compiled(1, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1], ids=["descriptors", "pointers"])
def test_rows_more_than_2_31_elements_apart(offset):
    x, (weight, bias), y = far_apart(3, 96, offset), layer(F16, 64, 96), poisoned(3, 64, F16)
    launch = products.gated_mlp_fwd(x, weight, bias, weight, bias, None, "relu", y, target())
    assert launch.constants["TMA"] == (target().has_tma and offset == 0)
    launch.run()
    check_written(y)
    pre = rounded(linear_fwd(*double(x, weight, bias)), F16)
    check_error(y, pre.relu() * pre, compiled(1, 4))


@pytest.mark.gpu
@pytest.mark.executed
def test_rows_that_end_within_16_bytes():
    """Bulk stores would write on to the end of these (triton#11583)."""
    x, (weight, bias), y = normal(BF16, 40, 64), layer(BF16, 33, 64), poisoned(40, 33, BF16)
    assert y.data_ptr() % 16 == y.stride(0) * y.element_size() % 16 == 0
    launch = products.gated_mlp_fwd(x, weight, bias, weight, bias, None, "relu", y, target())
    assert not launch.constants["TMA"]
    launch.run()
    check_written(y)
    pre = rounded(linear_fwd(*double(x, weight, bias)), BF16)
    check_error(y, pre.relu() * pre, compiled(1, 4))
