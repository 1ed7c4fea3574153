"""Norms, MLPs and the residual sum as functions: small values, roundings, activations.

Of activations of the caller: what they capture, and which are refused.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from block_inputs import calls, check_beside, compare, in_pieces, normal, results, same_bits
from op_cases import FF, D, one_branch
from reference import dropout, plain_block
from tiers import pairwise
from torch import nn

from fused_remat import ops, random
from fused_remat.autograd import run_block
from fused_remat.execution import program
from fused_remat.graph.graph import Graph
from fused_remat.spec import MLPSpec
from fused_remat.steps import linear
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.replay import Replay
from fused_remat.steps.residual import Add

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# --- norms


@pytest.mark.parametrize("weight", [None, "weight"])
@pytest.mark.parametrize("bias", [None, "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_with_and_without_weight_and_bias(weight, bias, dtype):
    tensors = {"input": normal(7, 33, dtype=dtype)}
    tensors |= {n: normal(33, dtype=dtype, seed=i) for i, n in enumerate((weight, bias), 1) if n}
    check_beside(
        lambda t: ops.layer_norm(t["input"], t.get("weight"), t.get("bias")),
        lambda t: F.layer_norm(normalized_shape=(33,), **t), tensors,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_pytorchs_also_of_small_values(dtype, eps, weighted):
    """Small enough that eps counts: its default is that of the dtype computed in."""
    weight = normal(8, dtype=dtype) if weighted else None
    for scale in (1.0, 2e-4):
        x = normal(7, 8, dtype=dtype, scale=scale)
        torch.testing.assert_close(ops.rms_norm(x, weight, eps), F.rms_norm(x, (8,), weight, eps))


@pytest.mark.parametrize("scale", [1e-14, 1e15])
def test_rms_norm_gradients_where_the_cube_of_rstd_is_no_float32(scale):
    x = normal(7, 8, dtype=torch.float32, scale=scale)
    wide, dy = x.detach().double().requires_grad_(), normal(7, 8, seed=3).detach()
    (dx,) = torch.autograd.grad(ops.rms_norm(x, None, 1e-30), x, dy.float())
    (truth,) = torch.autograd.grad(F.rms_norm(wide, (8,), None, 1e-30), wide, dy)
    # A few roundings of float32.
    assert (dx.double() - truth).norm() <= 1e-6 * truth.norm()


# --- the sum with a residual


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_dropout_add_returns_the_gradient_of_its_sum_without_a_copy(p):
    """To the residual; what is not dense, or has been compiled, is copied."""
    x, residual = (torch.randn(2, 5, 8, requires_grad=True) for _ in "xr")
    dy = torch.randn(2, 5, 8)
    y = ops.dropout_add(x, residual, p, seed=1)
    dx, same = torch.autograd.grad(y, (x, residual), dy)
    assert same.data_ptr() == dy.data_ptr() and torch.equal(same, dy)
    expected = ops.dropout_add(dy, torch.zeros_like(dy), p, seed=1)
    torch.testing.assert_close(dx, expected)
    y = ops.dropout_add(x, residual, p, seed=1)
    (copy,) = torch.autograd.grad(y, residual, dy[:1, :1].expand_as(dy))
    assert copy.is_contiguous() and torch.equal(copy, dy[:1, :1].expand_as(dy))
    ops.dropout_add(x, residual, p, seed=1).backward(dy)
    residual.grad.zero_()
    assert torch.equal(dy, same) and dy.abs().sum() > 0, "the caller's gradient is its own"


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8), (2, 3, 5, 8)])
@pytest.mark.parametrize("few", [0, 1 << 30])
def test_gradients_of_dropout_add_are_tensors_of_their_own(p, shape, few, monkeypatch):
    """Also where the op reshapes, with programs made of passes without views, and without."""
    monkeypatch.setattr(program, "FEW", few)
    x, residual, dy = torch.zeros(shape), torch.zeros(shape), torch.ones(shape)
    for t in (x.requires_grad_(), residual.requires_grad_()):
        ops.dropout_add(t.view(-1, 1, 8), residual.view(-1, 1, 8), p, seed=1).sum().backward()
    residual.grad = x.grad = None
    for n in (1, 2, 3):
        ops.dropout_add(x, residual, p, seed=1).backward(dy)
        assert torch.equal(residual.grad, n * torch.ones(shape))
    assert torch.equal(dy, torch.ones(shape))
    x.grad.zero_()
    assert residual.grad.min() == 3.0


def test_dropout_add_rounds_once():
    """The sum in float32, where adding a rounded product would be off by one rounding more."""
    x, residual = normal(64, D, dtype=torch.bfloat16), normal(64, D, dtype=torch.bfloat16, seed=1)
    wide = ops.dropout_add(x.float(), residual.float(), 0.3, seed=1)
    assert torch.equal(ops.dropout_add(x, residual, 0.3, seed=1), wide.bfloat16())


# --- MLPs


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_every_activation_by_name_plain_and_gated(name, p):
    x, w1, w2, gate = normal(7, D), normal(FF, D), normal(5, FF, seed=1), normal(FF, D, seed=2)
    given = {"input": x, "fc1.weight": w1, "fc2.weight": w2, "gate.weight": gate, "seed": 3}

    def plain(gated):
        op = MLPSpec(activation=name, gated=gated, dropout=p)
        return plain_block(one_branch(op), given)

    how = {"activation": name, "dropout_p": p, "seed": 3}
    compare(lambda: ops.mlp(x, w1, None, w2, None, **how), lambda: plain(False), [x, w1, w2])
    compare(lambda: ops.gated_mlp(x, gate, w1, w2, **how), lambda: plain(True), [x, gate, w1, w2])


def test_weight_gradients_of_pieces_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(linear, "widens", lambda x: False)  # as a CPU with products in bfloat16
    x, up = torch.ones(512, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    down = up.clone().requires_grad_()
    with in_pieces(1):
        ops.mlp(x, up, None, down, None, "relu").sum().backward()
    assert down.grad.item() == 512  # in bfloat16 256 + 1 is 256


# --- the caller's own activations

X, W1, B1, W2 = normal(3, 5, D), normal(FF, D, scale=0.3), normal(FF), normal(D, FF, seed=1)


def mlp(activation, p=0.0, **options):
    return ops.mlp(X, W1, B1, W2, None, activation, p, seed=5, **options)


def plain(activation, p=0.0):
    return F.linear(dropout(activation(F.linear(X, W1, B1)), random.MLP, p, 5), W2)


SLOPE = normal(FF, seed=3)
DOUBLED = SLOPE * 2


PRELU = nn.PReLU(dtype=torch.float64)
FROZEN = nn.PReLU(dtype=torch.float64).requires_grad_(False)
CUSTOM = {
    "a function": (torch.sin, []),
    "a parameter": (lambda t: t * torch.sigmoid(SLOPE * t), [SLOPE]),
    "twice": (lambda t: torch.sin(t * SLOPE) * SLOPE, [SLOPE]),
    "a product": (lambda t: torch.sin(t * DOUBLED), [SLOPE]),
    "a module": (PRELU, [PRELU.weight]),
    "a tied weight": (lambda t: torch.sin(t * W1.sum(-1)), []),
    "a frozen module": (FROZEN, []),
    "in place": (lambda t: t.mul_(2.0).sin_(), []),
    "no gradient": (lambda t: t.detach().sin(), []),
    "a constant": (lambda t: SLOPE.expand_as(t), [SLOPE]),
    "a partial": (functools.partial(F.leaky_relu, negative_slope=0.3), []),
}


@pytest.mark.parametrize(
    "kind, p, policy, tokens", pairwise(list(CUSTOM), [0.0, 0.3], ["full", "none"], [512, 4])
)
def test_any_activation_and_what_it_captures(kind, p, policy, tokens):
    activation, captured = CUSTOM[kind]

    def run(fn):
        y = fn()
        dy = normal(3, 5, D, seed=9).detach()
        inputs = [X, W1, B1, W2, *captured]
        how = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return y, *torch.autograd.grad(y, inputs, dy, **how)

    with in_pieces(tokens):
        got = run(lambda: mlp(activation, p, policy=policy))
    torch.testing.assert_close(got, run(lambda: plain(activation, p)))


def test_hooks_of_a_captured_parameter_see_its_gradient_once_and_whole():
    slope, seen = normal(FF, seed=3), []
    slope.register_hook(lambda grad: seen.append(grad) or 3 * grad)
    with in_pieces():
        (got,) = torch.autograd.grad(mlp(lambda t: torch.sin(t * slope)).sum(), slope)
    (expected,) = torch.autograd.grad(plain(lambda t: torch.sin(t * SLOPE)).sum(), SLOPE)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(got, 3 * expected)


def test_capturing_something_else_in_backward_raises():
    captured = [SLOPE]
    y = mlp(lambda t: t * captured[0])
    captured[0] = normal(FF)
    with pytest.raises(RuntimeError, match="did not read in forward"):
        y.sum().backward()


@pytest.mark.parametrize("fn", [lambda t: t, lambda t: t.sum(-1, keepdim=True).expand_as(t)])
def test_the_callers_gradient_is_never_written_to(fn):
    """Nor is an expanded one, to which a residual's is added."""
    nodes = (
        Replay(
            name="a", xs=("input",), function="activation", captures=True, what="the function",
            needed_for=(("input",),), tokenwise=True,
        ),
        Add(name="output", x="a", residual="input"),
    )  # fmt: skip
    y = run_block(Graph("custom", nodes, ()), "full", {"input": X}, functions={"activation": fn})
    dy = torch.ones_like(y)
    (dx,) = torch.autograd.grad(y, X, dy)
    assert torch.equal(dy, torch.ones_like(dy))
    torch.testing.assert_close(dx, torch.autograd.grad((fn(X) + X).sum(), X)[0])


def with_its_own_generator(t, generator=torch.Generator()):  # noqa: B008
    return t + torch.rand(t.shape, generator=generator)  # torch's own stays as it is


def that_catches_all(t):
    try:
        return t * torch.bernoulli(torch.full_like(t, 0.5))
    except Exception:
        return F.gelu(t)


@torch.library.custom_op("fused_remat_tests::own_relu", mutates_args=())
def own_relu(t: torch.Tensor) -> torch.Tensor:
    return t.relu()


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        (F.dropout, r"draws random numbers: it calls aten\."),
        (lambda t: t + torch.randn(()), r"draws random numbers: it calls aten\.randn"),
        (with_its_own_generator, r"draws random numbers: it calls aten\.rand"),
        (that_catches_all, r"draws random numbers: it calls aten\.bernoulli"),
        (own_relu, r"may draw random numbers: it calls fused_remat_tests\.own_relu"),
        (lambda t: t[..., :4], "changes the shape"),
        (lambda t: t.sum(-1, keepdim=True), "changes the shape"),
        (lambda t: t.float(), "changes the shape or dtype"),
        (lambda t: [t], "changes the shape"),
        (lambda t: t @ torch.ones(3, 3).double(), r"fails on an input of shape \(2, 12\)"),
        ("sigmoid", "unknown activation 'sigmoid'; valid: relu, gelu"),
    ],
)
def test_activations_that_cannot_be_rebuilt_are_refused(activation, message):
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        mlp(activation)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("activation", "name"),
    [(F.relu, "relu"), (torch.relu, "relu"), (nn.ReLU(), "relu"), (F.gelu, "gelu"),
     (nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (F.silu, "silu"), (nn.SiLU(), "silu"),
     (torch.tanh, "tanh"), (F.tanh, "tanh"), (nn.Tanh(), "tanh"),
     (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh")],
)  # fmt: skip
def test_functions_with_a_name_are_that_name(activation, name):
    gate = normal(FF, D)
    for run in (mlp, lambda a: ops.gated_mlp(X, gate, W1, W2, activation=a)):
        assert torch.equal(run(activation), run(name))
        ((block, _),), ((named, _),) = (calls(lambda: run(a)) for a in (activation, name))  # noqa: B023
        assert block == named, "its derivative is autograd's"


def test_an_activation_with_a_product_in_it_runs_outside_autocast_too():
    inner = nn.Linear(FF, FF, dtype=torch.float32)
    x, w1, w2 = (t.detach().float().requires_grad_() for t in (X, W1, W2))
    outside = results(lambda: ops.mlp(x, w1, None, w2, None, inner), [x, inner.weight])
    with torch.autocast("cpu", torch.bfloat16):
        inside = results(lambda: ops.mlp(x, w1, None, w2, None, inner), [x, inner.weight])
    assert same_bits(outside, inside)
