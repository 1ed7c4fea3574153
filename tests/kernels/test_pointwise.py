"""Dropout and its generator, the residual sum, activations: one pass over a matrix."""

import pytest
import torch
from places import (
    BF16,
    COMPILED,
    DEVICE,
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
    misaligned,
    nan,
    normal,
    poisoned,
    run,
    served,
    sized,
    target,
    wide,
)  # fmt: skip

from fused_remat import random
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import ACTIVATIONS, activation_bwd, activation_fwd
from fused_remat.steps.linear import dropout_sum, linear_fwd
from fused_remat.steps.modulation_aten import Rows, gated_add, gated_add_bwd
from fused_remat.steps.norm import norm_fwd
from fused_remat.steps.residual import dropout, residual_add, site_keys
from fused_remat.triton import norm, pointwise, products
from fused_remat.triton.tables import Tile

DTYPES = [BF16, torch.float32]
SMALL = [(1, 1), (5, 63), (3, 1000), (70, 33)]


def test_every_activation_of_aten_has_a_pair():
    assert set(pointwise.PAIRS) == set(ACTIVATIONS)


@pytest.mark.parametrize("seed, first", [(0, 0), (-(2**63), 8), (2**62 + 3, 5 << 20)])
def test_keys_of_sites(seed, first):
    expected = random.site_keys(torch.tensor(seed), first)
    keys = run(site_keys, torch.tensor(seed, device=DEVICE), first)
    assert [key.item() for key in keys] == [key.item() for key in expected]


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("layout", ["aligned", "misaligned", "expanded", "transposed"])
@pytest.mark.parametrize("shape", at([(4099, 4104)], SMALL, [(67, 1032)]), **ids)
def test_dropout_and_residual(shape, layout, dtype, p):
    x, residual = normal(dtype, *shape, scale=2.0), normal(dtype, *shape)
    if layout == "misaligned":
        x, residual = misaligned(x), misaligned(residual)
    elif layout == "expanded":
        x = x[:1].expand(shape)
    elif layout == "transposed":  # a copy is made
        residual = residual.t().contiguous().t()
    mask, odd = mask_of(*shape, p), layout == "misaligned"
    y = run(residual_add, x, residual, mask, odd=odd)
    check_error(y, residual_add(*double(x, residual), wide(mask)))
    if mask is not None:
        dx, total = run(dropout_sum, x, mask, odd=odd)
        check_error(total, dropout(x.double(), wide(mask)).sum(0), dtype=dtype)
        check_error(dx, dropout(x.double(), wide(mask)))
        dx = run(dropout, x, mask, odd=odd)
        check_error(dx, dropout(x.double(), wide(mask)))
        assert torch.equal(dx == 0, (mask.tensor() == 0) | (x == 0)), "the bits of the definition"


# Rows before the first, rows of a sequence, and the matrix: parts of sequences, or a row each.
SEQUENCES = at(
    [(70, 1024, 4099, 4104), (0, 4099, 4099, 1000)],
    [(8, 20, 37, 63), (0, 1, 5, 63), (3, 7, 1, 64), (0, 33, 99, 130), (190, 200, 33, 1),
     (129, 130, 262, 63), (3, 1, 37, 63)],
)  # fmt: skip


@pytest.mark.parametrize("gate_dtype", DTYPES, **ids)
@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[::-1], DTYPES[:1] * 2], **ids)
@pytest.mark.parametrize("first, tokens, rows, width", SEQUENCES)
def test_a_gate_of_each_sequence(first, tokens, rows, width, dtypes, gate_dtype):
    x, residual = (misaligned(normal(dtype, rows, width)) for dtype in dtypes)
    count = (first + rows - 1) // tokens + 2
    gate, sequences = normal(gate_dtype, count, 2 * width)[:, width:], Rows(first, tokens)
    y = run(gated_add, x, residual, gate, sequences)
    exact_y = gated_add(*double(x, residual, gate), sequences)
    check_error(y, exact_y)
    assert y.dtype is residual.dtype
    in_place = x.clone()
    assert run(gated_add, in_place, residual, gate, sequences, out=in_place) is in_place
    check_error(in_place, exact_y)
    given, dtype = (residual, x, gate, sequences), x.dtype
    exact = gated_add_bwd(*double(residual, x, gate), sequences, torch.float64)
    dx, sums = run(gated_add_bwd, *given, dtype)
    check_error(dx, exact[0])
    check_error(sums, exact[1], dtype=dtype)
    assert dx.dtype is dtype and sums.dtype is torch.float32
    only_dx, none = run(gated_add_bwd, residual, None, gate, sequences, dtype)
    assert torch.equal(only_dx, dx) and none is None
    none, only_sums = run(gated_add_bwd, residual, x, None, sequences, dtype)
    check_error(only_sums, exact[1], dtype=dtype)
    assert none is None
    same, again = run(gated_add_bwd, *given, dtype, out=x)
    assert same is x and torch.equal(x, dx)
    check_error(again, exact[1], dtype=dtype)


@pytest.mark.parametrize("act", pointwise.PAIRS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("shape", at([(2051, 4104)], SMALL[1:], [(67, 1032)]), **ids)
def test_activation(act, p, dtype, shape):
    x, dy = misaligned(normal(dtype, *shape, scale=2.0)), normal(dtype, *shape)
    mask = mask_of(*shape, p)
    exact = activation_fwd(act, None, x.double(), wide(mask))
    check_error(run(activation_fwd, act, None, x, mask), exact)
    none, dx, total = run(activation_bwd, act, dy, None, x, mask, False)
    exact_dx = activation_bwd(act, dy.double(), None, x.double(), wide(mask), False)[1]
    check_error(dx, exact_dx)
    assert none is None and total is None
    _, dx, total = run(activation_bwd, act, dy, None, x, mask, False, needs_sum=True)
    check_error(dx, exact_dx)
    check_error(total, exact_dx.sum(0), dtype=dtype)
    owned, dx = dy.clone(), run(activation_bwd, act, dy, None, x, mask, False)[1]
    _, same, _ = run(activation_bwd, act, owned, None, x, mask, True)
    assert torch.equal(same, dx) and same.data_ptr() == owned.data_ptr()
    if PLACE != "aten":  # a kernel may compute the activation again on the way
        dx, again = poisoned(*shape, dtype), poisoned(*shape, dtype)
        pointwise.act_bwd(dy, x, act, mask, dx, again).run()
        check_written(again)
        check_written(dx)
        assert torch.equal(dx, same)
        check_error(again, exact)
        again.fill_(torch.nan)
        pointwise.act_sum_bwd(dy, x, act, mask, dx, total, again)[0].run()
        check_written(again)
        check_error(again, exact)


@pytest.mark.parametrize("act", pointwise.PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("needs_grad", ["both", "gate", "up"])
def test_gated(act, dtype, needs_grad):
    shape = sized(2051, 4104, tiny=SMALL[3], executed=(67, 1032))
    gate, up = misaligned(normal(dtype, *shape)), normal(dtype, *shape)
    dy = compiled(normal(dtype, *shape), normal(dtype, shape[1]).expand(shape))
    mask, marks = mask_of(*shape, 0.3), (needs_grad != "up", needs_grad != "gate")
    exact = activation_fwd(act, *double(gate, up), wide(mask))
    check_error(run(activation_fwd, act, gate, up, mask), exact)
    given = gate, up if marks[0] else None
    found = run(activation_bwd, act, dy, *given, mask, False, marks)
    check_all(found, activation_bwd(act, *double(dy, *given), wide(mask), False, marks))


def test_gelu_is_relatively_right_in_its_tail():
    """Where erf cancels. exp(-x²/2) of a rounded x²/2 = 32 is off by up to 32 * 2**-24 = 2e-6."""
    x = torch.linspace(-8, 8, 4001, device=DEVICE)[None]
    y = run(activation_fwd, "gelu", None, x, None)
    exact = 0.5 * x.double() * torch.erfc(-x.double() * 0.5**0.5)
    error = ((y.double() - exact) / exact.abs().clamp_min(1e-30)).abs()
    # ATen's own is exact beside the result's size alone.
    assert error.max() < (4e-6 if PLACE != "aten" else 1.01), error.max()


@pytest.mark.parametrize("act", pointwise.PAIRS)
def test_activations_at_the_ends_of_the_line(act):
    """Far out, about zero, at infinity and NaN, as ATen has it."""
    ends = [-100.0, -10.0, -0.2, -1e-4, -0.0, 0.0, 1e-4, 0.2, 10.0, 100.0]
    x = torch.tensor([ends], device=DEVICE)
    one = torch.ones_like(x)
    exact = activation_fwd(act, None, x.double(), None)
    y = run(activation_fwd, act, None, x, None)
    # Some float32 roundings, of slopes also of terms that cancel.
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-7)
    slope = activation_bwd(act, one.double(), None, x.double(), None, False)[1]
    dx = run(activation_bwd, act, one, None, x, None, False)[1]
    torch.testing.assert_close(dx.double(), slope, rtol=1e-5, atol=1e-6)
    spoiled = x.masked_fill(x == 0.2, torch.nan)
    assert torch.equal(served(activation_fwd, act, None, spoiled, None).isnan(), spoiled.isnan())
    slope = activation_bwd(act, one.double(), None, spoiled.double(), None, False)[1]
    dx = served(activation_bwd, act, one, None, spoiled, None, False)[1]
    torch.testing.assert_close(dx.double(), slope, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "function, args",
    [
        (residual_add, lambda x: (x, x.clone(), None)),
        (activation_fwd, lambda x: ("gelu", None, x, None)),
        (norm_fwd, lambda x: (NormSpec(), x, None, None)),
    ],
    ids=["residual", "activation", "norm"],
)
def test_rows_more_than_2_31_elements_apart(function, args):
    """The same bits as of a copy."""
    x = far_apart(3, 64)
    found, expected = (run(function, *args(t)) for t in (x, x.clone()))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["dropout_add", "act_fwd", "norm", "linear"])
def test_outputs_whose_rows_are_more_than_2_31_elements_apart(kernel):
    x, y = normal(torch.float16, 3, 64), far_apart(3, 64).fill_(torch.nan)
    if kernel == "linear":
        weight = normal(torch.float16, 64, 64)
        tile = Tile(64, 64, 32, 4, 2) if COMPILED else None  # Hopper has none of its own
        launch = products.linear_fwd(x, weight, None, None, "relu", None, y, target(), tile)
        exact = linear_fwd(*double(x, weight), None).relu()
    elif kernel == "norm":
        stats, spec = (nan(3, 1),), NormSpec(kind="rms_norm")
        launch = norm.norm_fwd(spec, x, None, None, None, None, None, y, stats, False)
        exact = norm_fwd(spec, x.double(), None, None)[0]
    elif kernel == "act_fwd":
        launch = pointwise.act_fwd(x, "gelu", None, y)
        exact = activation_fwd("gelu", None, x.double(), None)
    else:
        mask = mask_of(3, 64, 0.3)
        launch = pointwise.dropout_add_fwd(x, None, mask, y)
        exact = dropout(x.double(), wide(mask))
    launch.run()
    check_error(y, exact)


# --- the generator of dropout: the bits of its definition, `random.keep_scale`

# row0, M, N, p: every p; widths 1, 63, 1000; rows about and beyond 2**32; below and above the 2**14
# elements at which `random.keep_scale` goes from numpy to torch.
BITS = [
    (0, 1, 1, 0.5),
    (5, 3, 63, 0.1),
    pytest.param(2**32 - 2, 5, 1000, 0.1, marks=pytest.mark.executed),
    (2**32 - 2, 17, 1000, 0.1),
    (2**40 + 1, 70, 63, 0.5),
    (2**40 + 1, 300, 63, 0.5),
    (2**62, 20000, 1, 0.1),
    (7, 16, 128, 1.0),
    (7, 129, 129, 1.0),
    (7, 40, 65, 0.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
@pytest.mark.parametrize("row0, m, n, p", BITS)
def test_the_bits_of_the_definition(row0, m, n, p, seed):
    key = random.site_keys(torch.tensor(seed))[random.MLP]
    mask = random.DropoutMask(key.to(DEVICE), row0, m, n, p, torch.float32)
    y = nan(m, n)
    pointwise.dropout_add_fwd(torch.ones(m, n, device=DEVICE), None, mask, y).run()
    assert torch.equal(y.cpu(), random.keep_scale(key, row0, m, n, p, torch.float32))
