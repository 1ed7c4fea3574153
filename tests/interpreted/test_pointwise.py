import pytest
import torch
from poisoned import check_error, check_margin, keep_of, poisoned, wide

from fused_remat.steps.activation import ACTIVATIONS, activation_bwd, activation_fwd
from fused_remat.steps.residual import residual_add
from fused_remat.triton import pointwise

SHAPES = [(1, 1), (5, 63), (3, 1000), (70, 33)]
DTYPES = [torch.float32, torch.float16]


def inputs(shape, dtype, count):
    """Matrices of one dtype: rows apart, columns apart (a copy is made), expanded over rows."""
    torch.manual_seed(0)
    apart = torch.randn(shape[0], shape[1] + 3)[:, : shape[1]] * 2
    transposed = torch.randn(shape[1], shape[0]).t()
    expanded = torch.randn(shape[1]).expand(shape)
    return [t.to(dtype) if t is not expanded else t for t in (apart, transposed, expanded)][:count]


def drop(shape, p):
    return keep_of(*shape, p) if p else None


def test_every_activation_of_eager_has_a_pair():
    assert set(pointwise.PAIRS) == set(ACTIVATIONS)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout_and_residual(shape, dtype, p):
    x, residual = inputs(shape, dtype, 2)
    keep = drop(shape, p)
    y = poisoned(*shape, dtype)
    pointwise.dropout_add_fwd(x, residual, keep, y).run()
    check_margin(y)
    exact = residual_add(x.double(), residual.double(), wide(keep))
    check_error(y, exact, dtype)
    if keep is not None:
        dx = poisoned(*shape, dtype)
        pointwise.dropout_add_fwd(x, None, keep, dx).run()
        check_margin(dx)
        assert torch.equal(dx == 0, (keep.tensor() == 0) | (x == 0)), "the same bits as eager's"


@pytest.mark.parametrize("act", pointwise.PAIRS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_activation(act, p, dtype, shape):
    x, dy = inputs(shape, dtype, 2)
    keep = drop(shape, p)
    exact = activation_fwd(act, None, x.double(), wide(keep))
    y, again, dx = (poisoned(*shape, dtype) for _ in range(3))
    pointwise.act_fwd(x, act, keep, y).run()
    pointwise.act_bwd(dy, x, act, keep, dx, again).run()
    for found in (y, again, dx):
        check_margin(found)
    check_error(y, exact, dtype)
    check_error(again, exact, dtype)
    check_error(dx, activation_bwd(act, dy.double(), None, x.double(), wide(keep), False)[1], dtype)


@pytest.mark.parametrize("act", pointwise.PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("needs_grad", ["both", "gate", "up"])
def test_gated(act, dtype, needs_grad):
    shape = SHAPES[3]
    gate, up = inputs(shape, dtype, 2)
    dy, keep = torch.randn(shape[1]).to(dtype).expand(shape), drop(shape, 0.3)
    y = poisoned(*shape, dtype)
    pointwise.gated_fwd(gate, up, act, keep, y).run()
    check_margin(y)
    check_error(y, activation_fwd(act, gate.double(), up.double(), wide(keep)), dtype)
    dgate = poisoned(*shape, dtype) if needs_grad != "up" else None
    dup = poisoned(*shape, dtype) if needs_grad != "gate" else None
    given = None if needs_grad == "up" else up
    pointwise.gated_bwd(dy, gate, given, act, keep, dgate, dup).run()
    exact = activation_bwd(
        act, dy.double(), gate.double(), None if given is None else up.double(), wide(keep), False,
        (needs_grad != "up", needs_grad != "gate"),
    )  # fmt: skip
    for found, true in zip((dgate, dup), exact, strict=True):
        assert (found is None) == (true is None)
        if found is not None:
            check_margin(found)
            check_error(found, true, dtype)


def test_gelu_is_relatively_right_in_its_tail():
    """Where erf cancels. exp(-x²/2) of a rounded x²/2 = 32 is off by up to 32 * 2**-24 = 2e-6."""
    x = torch.linspace(-8, 8, 4001, dtype=torch.float32)[None]
    y = torch.empty_like(x)
    pointwise.act_fwd(x, "gelu", None, y).run()
    exact = 0.5 * x.double() * torch.erfc(-x.double() * 0.5**0.5)
    error = ((y.double() - exact) / exact.abs().clamp_min(1e-30)).abs()
    assert error.max() < 4e-6, error.max()


@pytest.mark.parametrize("act", pointwise.PAIRS)
def test_activations_at_the_ends_of_the_line(act):
    """Far out, about zero, at infinity and NaN, as ATen has it."""
    x = torch.tensor([[-100.0, -10.0, -0.2, -1e-4, -0.0, 0.0, 1e-4, 0.2, 10.0, 100.0, torch.nan]])
    y, dx = torch.empty_like(x), torch.empty_like(x)
    pointwise.act_fwd(x, act, None, y).run()
    pointwise.act_bwd(torch.ones_like(x), x, act, None, dx).run()
    exact = activation_fwd(act, None, x.double(), None)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-7, equal_nan=True)
    slope = activation_bwd(act, torch.ones_like(x).double(), None, x.double(), None, False)[1]
    torch.testing.assert_close(dx.double()[:, :-1], slope[:, :-1], rtol=1e-5, atol=1e-6)


def test_rows_more_than_2_31_elements_apart():
    apart = torch.empty(2**31 + 4096, dtype=torch.float16).as_strided((3, 64), (2**30, 1))
    apart.copy_(torch.randn(3, 64))
    y = poisoned(3, 64, torch.float16)
    pointwise.dropout_add_fwd(apart, None, None, y).run()
    check_margin(y)
    assert torch.equal(y, apart)
