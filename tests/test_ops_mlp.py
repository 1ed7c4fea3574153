"""Norms, MLPs and the residual sum as functions: token by token, whatever shape the tokens have."""

import functools

import pytest
import torch
import torch.nn.functional as F
from reference_ops import (
    CASES,
    FF,
    D,
    check_error,
    compare,
    dropout,
    in_pieces,
    normal,
    results,
)
from torch import nn

from fused_remat import ops, random
from fused_remat.backends.activations import ACTIVATIONS

MIXED = ("attention", "encoder", "qk_norm_attention")  # tokens with tokens
TOKENWISE = [name for name in CASES if not name.startswith(MIXED)]
LEADS = [(), (1,), (7,), (3, 5), (2, 3, 5), (0,), (3, 0), (0, 5), (2, 0, 3)]


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def strided(x):
    return torch.stack((x, x + 1), -1)[..., 0]


def expanded(x):
    return x[:1].expand_as(x) if x.dim() > 1 and x.shape[0] else x


def weights(case):
    return {n: t for n, t in case.tensors().items() if n not in ("x", "residual")}


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, transposed, strided, expanded])
@pytest.mark.parametrize("name", TOKENWISE)
def test_inputs_of_any_shape_and_layout(name, layout):
    """The tokens are rows of the dropout mask in order, whatever dimensions they are in."""
    case, params = CASES[name], weights(CASES[name])
    for tokens in (512, 4):
        for lead in LEADS:
            x, residual = normal(*lead, D), normal(*lead, D, seed=1)

            def inputs(x=x, residual=residual):
                t = {"x": layout(x)} | params
                return t | ({"residual": layout(residual)} if "residual" in case.shapes else {})

            ours = {"seed": 7} if case.dropout else {}
            with in_pieces(tokens):
                compare(
                    lambda: case.op(inputs(), 0.3, **ours),  # noqa: B023
                    lambda: case.plain(inputs(), 0.3, 7),
                    [x, *params.values()] + ([residual] if "residual" in case.shapes else []),
                )


@pytest.mark.parametrize("lead", [lead for lead in LEADS if 0 in lead])
@pytest.mark.parametrize("name", TOKENWISE)
def test_no_tokens_give_no_gradient(name, lead):
    case, params = CASES[name], weights(CASES[name])
    x = normal(*lead, D)
    tensors = {"x": x} | params | ({"residual": x} if "residual" in case.shapes else {})
    y, dx, *grads = results(lambda: case.op(tensors, 0.3), [x, *params.values()])
    assert y.shape == dx.shape == (*lead, D) and not any(g.any() for g in grads)


@pytest.mark.parametrize("name", ["layer_norm", "dropout_add", "mlp"])
def test_the_output_of_three_dimensions_is_laid_out_as_the_input(name):
    x = normal(5, 2, D).detach().transpose(0, 1)
    case = CASES[name]
    tensors = case.tensors() | {"x": x}
    assert case.op(tensors, 0.0).stride() == x.stride()


# --- norms and the residual sum


@pytest.mark.parametrize("weight", [None, "weight"])
@pytest.mark.parametrize("bias", [None, "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_layer_norm_with_and_without_weight_and_bias(weight, bias, dtype):
    x = normal(7, 33, dtype=dtype)
    w = weight and normal(33, dtype=dtype, seed=1)
    b = bias and normal(33, dtype=dtype, seed=2)

    def run(norm, to):
        given = [None if t is None else t.detach().to(to).requires_grad_() for t in (x, w, b)]
        dy = normal(7, 33, seed=3).detach().to(dtype).to(to)
        return results(lambda: norm(*given), [t for t in given if t is not None], dy)

    def peer(x, w, b):
        return F.layer_norm(x, (33,), w, b)

    names = ["output", "x", *(n for n in (weight, bias) if n)]
    check_error(run(ops.layer_norm, dtype), run(peer, dtype), run(peer, torch.float64), names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_pytorchs_also_of_small_values(dtype, eps, weighted):
    """Small enough that eps counts: its default is that of the dtype computed in."""
    weight = normal(8, dtype=dtype) if weighted else None
    for scale in (1.0, 2e-4):
        x = normal(7, 8, dtype=dtype, scale=scale)
        torch.testing.assert_close(ops.rms_norm(x, weight, eps), F.rms_norm(x, (8,), weight, eps))


def test_eps_keeps_a_constant_row_finite():
    x = torch.full((2, 8), 3.0, requires_grad=True)
    for y in (ops.layer_norm(x), ops.rms_norm(x * 0)):
        assert not y.any()
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_dropout_add_drops_the_generators_elements():
    x, residual = normal(3, 5, D), normal(3, 5, D, seed=1)
    y = ops.dropout_add(x, residual, 0.25, seed=11)
    keep = random.keep_scale(
        random.site_keys(torch.tensor(11))[random.RESIDUAL1], 0, 15, D, 0.25, torch.float64
    )
    assert torch.equal(y, torch.addcmul(residual, x, keep.view_as(x)))
    assert torch.equal(ops.dropout_add(x, residual, 0.0), x + residual)
    assert torch.equal(ops.dropout_add(x, residual, 1.0), residual)


def test_dropout_add_of_one_tensor_twice():
    x = normal(3, D)
    compare(
        lambda: ops.dropout_add(x, x, 0.3, seed=1),
        lambda: x + dropout(x, random.RESIDUAL1, 0.3, 1),
        [x],
    )


def test_dropout_add_rounds_once():
    """The sum in float32, where adding a rounded product would be off by one rounding more."""
    x, residual = normal(64, D, dtype=torch.bfloat16), normal(64, D, dtype=torch.bfloat16, seed=1)
    wide = ops.dropout_add(x.float(), residual.float(), 0.3, seed=1)
    assert torch.equal(ops.dropout_add(x, residual, 0.3, seed=1), wide.bfloat16())


# --- MLPs

STOCK = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_every_activation_by_name_plain_and_gated(name, p):
    x, w1, w2, gate = normal(7, D), normal(FF, D), normal(5, FF, seed=1), normal(FF, D, seed=2)

    def down(act):
        return F.linear(dropout(act, random.MLP, p, 3), w2)

    compare(
        lambda: ops.mlp(x, w1, None, w2, None, name, p, seed=3),
        lambda: down(STOCK[name](F.linear(x, w1))),
        [x, w1, w2],
    )
    compare(
        lambda: ops.gated_mlp(x, gate, w1, w2, activation=name, dropout_p=p, seed=3),
        lambda: down(STOCK[name](F.linear(x, gate)) * F.linear(x, w1)),
        [x, gate, w1, w2],
    )


@pytest.mark.parametrize("biases", [(), ("fc1_bias",), ("fc2_bias",), ("gate_bias", "fc1_bias")])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_blocks_without_some_biases(biases, norm):
    case = CASES["gated_mlp_block"]
    t = case.tensors()
    t = {n: v for n, v in t.items() if not n.endswith("bias") or n in biases}

    def plain():
        normed = (
            F.layer_norm(t["x"], (D,), t["norm_weight"])
            if norm == "layer_norm"
            else F.rms_norm(t["x"], (D,), t["norm_weight"], 1e-5)
        )
        gate = F.silu(F.linear(normed, t["gate_weight"], t.get("gate_bias")))
        up = gate * F.linear(normed, t["fc1_weight"], t.get("fc1_bias"))
        return t["x"] + F.linear(up, t["fc2_weight"], t.get("fc2_bias"))

    compare(
        lambda: ops.mlp_block(
            t["x"], t["norm_weight"], None, t["fc1_weight"], t.get("fc1_bias"), t["fc2_weight"],
            t.get("fc2_bias"), "silu", gate_weight=t["gate_weight"], gate_bias=t.get("gate_bias"),
            norm=norm,
        ),
        plain,
        list(t.values()),
    )  # fmt: skip


# --- the caller's own activations

X, W1, B1, W2 = normal(3, 5, D), normal(FF, D, scale=0.3), normal(FF), normal(D, FF, seed=1)


def mlp(activation, p=0.0, **options):
    return ops.mlp(X, W1, B1, W2, None, activation, p, seed=5, **options)


def plain(activation, p=0.0):
    return F.linear(dropout(activation(F.linear(X, W1, B1)), random.MLP, p, 5), W2)


SLOPE = normal(FF, seed=3)
DOUBLED = SLOPE * 2


class Prelu(nn.Module):
    """A leaky activation with a trained parameter, as nn.PReLU."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(SLOPE.detach().clone())

    def forward(self, t):
        return t.clamp(min=0.0) + self.weight * t.clamp(max=0.0)


STOCK_PRELU = nn.PReLU(dtype=torch.float64)
PRELU, FROZEN = Prelu(), Prelu().requires_grad_(False)
CUSTOM = {
    "a function": (torch.sin, []),
    "a parameter": (lambda t: t * torch.sigmoid(SLOPE * t), [SLOPE]),
    "twice": (lambda t: torch.sin(t * SLOPE) * SLOPE, [SLOPE]),
    "a product": (lambda t: torch.sin(t * DOUBLED), [SLOPE]),
    "a product of its own": (lambda t: torch.sin(t * (SLOPE.exp() + 1)), [SLOPE]),
    "a module": (PRELU, [PRELU.weight]),
    "stock prelu": (STOCK_PRELU, [STOCK_PRELU.weight]),
    "a tied weight": (lambda t: torch.sin(t * W1.sum(-1)), []),
    "a frozen module": (FROZEN, []),
    "in place": (lambda t: t.mul_(2.0).sin_(), []),
    "an identity": (lambda t: t, []),
    "no gradient": (lambda t: t.detach().sin(), []),
    "a constant": (lambda t: SLOPE.expand_as(t), [SLOPE]),
    "a partial": (functools.partial(F.leaky_relu, negative_slope=0.3), []),
}


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("tokens", [512, 4])
@pytest.mark.parametrize("kind", CUSTOM)
def test_any_activation_and_what_it_captures(kind, p, policy, tokens):
    activation, captured = CUSTOM[kind]

    def run(fn):
        y = fn()
        dy = normal(3, 5, D, seed=9).detach()
        inputs = [X, W1, B1, W2, *captured]
        return y, torch.autograd.grad(
            y, inputs, dy, retain_graph=True, allow_unused=True, materialize_grads=True
        )

    with in_pieces(tokens):
        got, grads = run(lambda: mlp(activation, p, policy=policy))
    expected, expected_grads = run(lambda: plain(activation, p))
    torch.testing.assert_close(got, expected)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_product_that_the_rest_of_the_model_uses_too():
    doubled = SLOPE.exp()
    (got,) = torch.autograd.grad(mlp(lambda t: t * doubled).sum() * doubled.sum(), SLOPE)
    doubled = SLOPE.exp()
    (expected,) = torch.autograd.grad(plain(lambda t: t * doubled).sum() * doubled.sum(), SLOPE)
    torch.testing.assert_close(got, expected)


def test_a_frozen_parameter_gets_no_gradient():
    mlp(FROZEN).sum().backward(inputs=[W1])
    assert FROZEN.weight.grad is None


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradcheck_of_a_captured_parameter(p):
    def fn(x, w1, slope):
        return ops.mlp(x, w1, None, W2, None, lambda t: torch.sin(t * slope), p, seed=5)

    x, slope = normal(3, D), normal(FF)
    assert torch.autograd.gradcheck(fn, (x, W1, slope), fast_mode=True)


def test_hooks_of_a_captured_parameter_see_its_gradient_once_and_whole():
    slope, seen = normal(FF, seed=3), []
    slope.register_hook(lambda grad: seen.append(grad) or 3 * grad)
    with in_pieces():
        (got,) = torch.autograd.grad(mlp(lambda t: torch.sin(t * slope)).sum(), slope)
    (expected,) = torch.autograd.grad(plain(lambda t: torch.sin(t * SLOPE)).sum(), SLOPE)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(got, 3 * expected)


def test_a_captured_parameters_gradient_is_summed_over_pieces_in_float32():
    """600 terms of one sign: added up in bfloat16, most would change nothing."""
    wide = [normal(600, D), normal(FF, D), normal(D, FF).abs(), normal(FF), normal(600, D).abs()]
    low = [t.detach().bfloat16() for t in wide]

    def run(fn, dtype):
        x, w1, w2, slope, dy = (t.to(dtype).requires_grad_() for t in low)
        return results(lambda: fn(x, w1, None, w2, None, lambda t: t.sin() + slope), [slope], dy)

    def plain(x, w1, b1, w2, b2, act):
        return F.linear(act(F.linear(x, w1)), w2)

    with in_pieces(2):
        ours = run(ops.mlp, torch.bfloat16)
    peer, exact = run(plain, torch.bfloat16), run(plain, torch.float64)
    check_error(ours, peer, exact, ["output", "slope"])


def test_changing_a_captured_parameter_raises():
    slope = normal(FF)
    y = mlp(lambda t: t * slope)
    with torch.no_grad():
        slope.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_capturing_something_else_in_backward_raises():
    captured = [SLOPE]
    y = mlp(lambda t: t * captured[0])
    captured[0] = normal(FF)
    with pytest.raises(RuntimeError, match="did not read in forward"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        (F.dropout, "draws random numbers"),
        (lambda t: t + torch.randn(()), "draws random numbers"),
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


def test_an_activation_whose_shape_changes_later_raises():
    with pytest.raises(ValueError, match="must keep shape and dtype"):
        mlp(lambda t: t if t.shape[0] == 2 else t[:1])


def test_what_is_neither_a_name_nor_a_function_raises():
    with pytest.raises(TypeError, match="activation"):
        mlp(3)


@pytest.mark.parametrize(
    ("activation", "name"),
    [(F.relu, "relu"), (nn.GELU("tanh"), "gelu_tanh"), (nn.SiLU(), "silu"), (F.gelu, "gelu"),
     (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh")],
)  # fmt: skip
def test_functions_with_a_name_are_that_name(activation, name):
    assert torch.equal(mlp(activation), mlp(name))
    gate = normal(FF, D)
    gated = [ops.gated_mlp(X, gate, W1, W2, activation=a) for a in (activation, name)]
    assert torch.equal(*gated)


def test_a_gated_mlp_takes_no_function():
    x, w, down = normal(3, D), normal(FF, D), normal(D, FF)
    with pytest.raises(ValueError, match="takes the name of an activation"):
        ops.gated_mlp(x, w, w, down, activation=torch.sin)
    with pytest.raises(ValueError, match="takes the name of an activation"):
        ops.mlp_block(x, None, None, w, None, down, None, torch.sin, gate_weight=w)


def test_an_activation_with_a_product_in_it_runs_outside_autocast_too():
    inner = nn.Linear(FF, FF, dtype=torch.float32)
    x, w1, w2 = (t.detach().float().requires_grad_() for t in (X, W1, W2))
    outside = results(lambda: ops.mlp(x, w1, None, w2, None, inner), [x, inner.weight])
    with torch.autocast("cpu", torch.bfloat16):
        inside = results(lambda: ops.mlp(x, w1, None, w2, None, inner), [x, inner.weight])
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


# --- errors

T = functools.cache(normal)


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (lambda: ops.layer_norm(T(2, 8), T(7)), "weight (7,) (8,) (2, 8)"),
        (lambda: ops.layer_norm(T(2, 8), None, T(8, 1)), "bias (8, 1) (8,) (2, 8)"),
        (lambda: ops.layer_norm(T()), "()"),
        (lambda: ops.rms_norm(T(2, 8), T(1)), "weight (1,) (8,) (2, 8)"),
        (lambda: ops.dropout_add(T(2, 8), T(8), 0.1), "residual (8,) (2, 8)"),
        (lambda: ops.mlp(T(2, 8), T(4, 7), None, T(8, 4), None), "fc1_weight (4, 7) (2, 8)"),
        (lambda: ops.mlp(T(2, 8), T(8), None, T(8, 4), None), "fc1_weight (8,) (2, 8)"),
        (lambda: ops.mlp(T(2, 8), T(4, 8), T(8), T(8, 4), None), "fc1_bias (8,) (4,) (4, 8)"),
        (lambda: ops.mlp(T(2, 8), T(4, 8), None, T(8, 5), None), "fc2_weight (8, 5) (4, 8)"),
        (lambda: ops.mlp(T(2, 8), T(4, 8), None, T(8, 4), T(4)), "fc2_bias (4,) (8,) (8, 4)"),
        (lambda: ops.mlp(T(), T(4, 8), None, T(8, 4), None), "at least one dimension"),
        (lambda: ops.mlp(T(2, 8), None, None, T(8, 4), None), "weights must be given"),
        (lambda: ops.gated_mlp(T(2, 8), T(5, 8), T(4, 8), T(8, 4)), "gate_weight (5, 8) (4, 8)"),
        (lambda: ops.gated_mlp(T(2, 8), T(4, 8), T(4, 7), T(8, 4)), "up_weight (4, 7) (2, 8)"),
        (lambda: ops.gated_mlp(T(2, 8), T(4, 8), T(4, 8), T(8, 5)), "down_weight (8, 5) (4, 8)"),
        (lambda: ops.gated_mlp(T(2, 8), T(4, 8), T(4, 8), T(8, 4), T(8)), "gate_bias (8,) (4,)"),
        (lambda: ops.gated_mlp(T(2, 8), T(4, 8), T(4, 8), T(8, 4), None, T(8)),
         "up_bias (8,) (4,)"),
        (lambda: ops.gated_mlp(T(2, 8), T(4, 8), T(4, 8), T(8, 4), None, None, T(4)),
         "down_bias (4,) (8,)"),
        (lambda: ops.gated_mlp(T(2, 8), None, T(4, 8), T(8, 4)), "weights must be given"),
        (lambda: ops.mlp_block(T(2, 8), T(7), None, T(4, 8), None, T(8, 4), None),
         "norm_weight (7,) (8,) (2, 8)"),
        (lambda: ops.mlp_block(T(2, 8), None, T(7), T(4, 8), None, T(8, 4), None),
         "norm_bias (7,) (8,) (2, 8)"),
        (lambda: ops.mlp_block(T(2, 8), None, None, T(4, 8), None, T(7, 4), None),
         "fc2_weight (7, 4) (8, 4) (2, 8)"),
        (lambda: ops.mlp_block(T(2, 8), None, None, T(4, 8), None, T(8, 4), None, gate_bias=T(4)),
         "gate_bias without gate_weight"),
        (lambda: ops.mlp_block(T(2, 8), None, None, T(4, 8), None, T(8, 4), None, norm="batch"),
         "'layer_norm' 'rms_norm' 'batch'"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_raise_and_are_named(call, shapes):
    with pytest.raises(ValueError) as error:
        call()
    parts = shapes.replace(", ", ",\0").split(" ")
    assert all(part.replace(",\0", ", ") in str(error.value) for part in parts)
