import pytest
import torch
from poisoned import TARGET, check_error, check_margin, keep_of, poisoned, wide
from tiers import pairwise

from fused_remat.spec import NormSpec
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.linear import linear_dx, linear_fwd
from fused_remat.steps.norm import norm_fwd
from fused_remat.triton import products, tables

# M, N, K: single, odd, even sizes (tensor descriptors), more tiles than programs.
SHAPES = [(1, 1, 1), (33, 65, 63), (48, 64, 96), (130, 72, 40)]
DTYPES = [torch.float32, torch.float16]
TILES = tables.TILES["linear"]["interpreter"]
ids = {"ids": lambda value: str(value).removeprefix("torch.").replace(" ", "")}


def normal(dtype, *shape, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype)


def layer(dtype, n, k):
    return normal(dtype, n, k, scale=k**-0.5), normal(dtype, n)


def double(*tensors):
    return tuple(None if t is None else t.double() for t in tensors)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "tile, dtype, shape, end",
    pairwise(TILES, DTYPES, SHAPES, ["nothing", "act", "pre", "dropout", "residual", "all"]),
    **ids,
)
def test_linear(tile, dtype, shape, end):
    m, n, k = shape
    x, (weight, bias) = normal(dtype, m, k), layer(dtype, n, k)
    act = "gelu" if end in ("act", "pre", "all") else None
    keep = keep_of(m, n, 0.3) if end in ("dropout", "all") else None
    residual = normal(dtype, m, n) if end in ("residual", "all") else None
    pre = poisoned(m, n, dtype) if end in ("pre", "all") else None
    y = poisoned(m, n, dtype)
    bias = None if end == "nothing" else bias
    launch = products.linear_fwd(x, weight, bias, residual, keep, act, pre, y, TARGET, tile=tile)
    assert launch.constants["TMA"] == (k * x.element_size() % 16 == 0)
    launch.run()
    check_margin(y)
    exact = linear_fwd(*double(x, weight, bias))
    if pre is not None:
        check_margin(pre)
        check_error(pre, exact, dtype, 2)
    if act is not None:
        exact = activation_fwd(act, None, exact.to(dtype).double(), None)
    if keep is not None:
        exact *= wide(keep).tensor()
    if residual is not None:
        exact += residual
    check_error(y, exact, dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", SHAPES[1:], **ids)
def test_linear_of_a_norm(dtype, kind, shape):
    m, n, k = shape
    x, (weight, bias) = normal(dtype, m, k) + 1, layer(dtype, n, k)
    affine = normal(dtype, k), normal(dtype, k) if kind == "layer_norm" else None
    normed, *stats = norm_fwd(NormSpec(kind=kind), *double(x, *affine))
    stats = [None, *stats][-2:]
    stats = [s if s is None else s.float() for s in stats]
    y = poisoned(m, n, dtype)
    norm = (*stats, *affine)
    products.linear_fwd(x, weight, bias, None, None, None, None, y, TARGET, norm).run()
    check_margin(y)
    exact = linear_fwd(normed.to(dtype).double(), *double(weight, bias))
    check_error(y, exact, dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("shape", SHAPES, **ids)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gated_forward(dtype, shape, p):
    m, f, k = shape
    x, gate, up = normal(dtype, m, k), layer(dtype, f, k), layer(dtype, f, k)
    up = (up[0], None)
    keep = keep_of(m, f, p) if p else None
    y = poisoned(m, f, dtype)
    products.gated_mlp_fwd(x, *gate, *up, keep, "silu", y, TARGET).run()
    check_margin(y)
    pres = [linear_fwd(*double(x, *w)).to(dtype).double() for w in (gate, up)]
    check_error(y, activation_fwd("silu", *pres, wide(keep)), dtype, 4)


@pytest.mark.parametrize(
    "tile, dtype, shape, p, gated, in_one",
    pairwise(TILES, DTYPES, SHAPES, [0.0, 0.3], [False, True], [False, True]),
    **ids,
)
def test_mlp_backward(tile, dtype, shape, p, gated, in_one):
    m, f, k = shape
    d = k + 8  # the block's output need not be as wide as its input
    x, gate, up = normal(dtype, m, k), layer(dtype, f, k), layer(dtype, f, k)
    dy, down = normal(dtype, m, d), layer(dtype, d, f)[0]
    keep = keep_of(m, f, p) if p else None
    y, dup, dgate = (poisoned(m, f, dtype) for _ in range(3))
    pre = linear_fwd(*double(x, *up)).to(dtype)
    dact = linear_dx(*double(dy, down))
    if gated:
        gate_pre = linear_fwd(*double(x, *gate)).to(dtype)
        exact_y = activation_fwd("silu", *double(gate_pre, pre), wide(keep))
        exact_dgate, exact_dup = activation_bwd(
            "silu", dact, *double(gate_pre, pre), wide(keep), False, (True, True)
        )
        if in_one:
            launch = products.mlp_bwd(
                x, (gate, up), dy, down, keep, "silu", y, (dgate, dup), TARGET, tile
            )
        else:  # each result in the place of what it is made of
            y.copy_(pre)
            dgate.copy_(gate_pre)
            launch = products.linear_act_bwd(
                dy, down, dgate, y, keep, "silu", y, dgate, dup, TARGET, tile
            )
        launch.run()
        check_margin(dgate)
        check_error(dgate, exact_dgate, dtype, 4)
    else:
        exact_y = activation_fwd("gelu", None, pre.double(), wide(keep))
        exact_dup = activation_bwd("gelu", dact, None, pre.double(), wide(keep), False)[1]
        if in_one:
            products.mlp_bwd(x, (up,), dy, down, keep, "gelu", y, (dup,), TARGET, tile).run()
        else:
            y.copy_(pre)
            products.linear_act_bwd(
                dy, down, None, y, keep, "gelu", y, None, dup, TARGET, tile
            ).run()
    for found, exact in ((y, exact_y), (dup, exact_dup)):
        check_margin(found)
        check_error(found, exact, dtype, 4)


@pytest.mark.parametrize("how", ["expanded", "transposed", "misaligned"])
def test_operands_of_any_layout(how):
    m, f, k = SHAPES[2]
    x, up = normal(torch.float32, m, k), layer(torch.float32, f, k)
    dy, down = normal(torch.float32, m, k), layer(torch.float32, k, f)[0]
    if how == "expanded":
        dy = dy[:1].expand(m, k)
    elif how == "transposed":
        x, down = x.t().contiguous().t(), down.t().contiguous().t()
    else:
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(m, k)
    dup = poisoned(m, f, torch.float32)
    launch = products.mlp_bwd(x, (up,), dy, down, None, "relu", None, (dup,), TARGET)
    assert launch.constants["TMA"] == (how == "transposed")  # after the one copy
    launch.run()
    check_margin(dup)
    pre, dact = linear_fwd(*double(x, *up)), linear_dx(*double(dy, down))
    check_error(dup, activation_bwd("relu", dact, None, pre, None, False)[1], torch.float32, 4)


def test_rows_more_than_2_31_elements_apart():
    _, f, k = SHAPES[2]
    x = torch.empty(2**31 + 4096, dtype=torch.float16).as_strided((3, k), (2**30, 1))
    x.copy_(torch.randn(3, k))
    weight, bias = layer(torch.float16, f, k)
    for offset in (0, 1):  # by descriptors, and by pointers
        x = x.as_strided((3, k), (2**30, 1), offset)
        x.copy_(torch.randn(3, k))
        y = poisoned(3, f, torch.float16)
        launch = products.linear_fwd(x, weight, bias, None, None, None, None, y, TARGET)
        assert launch.constants["TMA"] == (offset == 0)
        launch.run()
        check_margin(y)
        check_error(y, linear_fwd(*double(x, weight, bias)), torch.float16, 4)
