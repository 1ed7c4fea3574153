"""Norms, MLPs and the residual sum as functions: token by token, whatever shape the tokens have."""

import functools

import pytest
import torch
import torch.nn.functional as F
from accuracy import check_error
from reference_ops import (
    CASES,
    FF,
    D,
    compare,
    dropout,
    in_pieces,
    normal,
    results,
)

from fused_remat import ops, random
from fused_remat.steps.activation import ACTIVATIONS

MIXED = ("attention", "causal", "encoder", "qk_norm_attention")  # tokens with tokens
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
    for tokens, leads in ((4, LEADS), (512, [(), (2, 3, 5), (0, 5)])):  # whole, any is a matrix
        for lead in leads:
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


@pytest.mark.parametrize("scale", [1e-14, 1e15])
def test_rms_norm_gradients_where_the_cube_of_rstd_is_no_float32(scale):
    x = normal(7, 8, dtype=torch.float32, scale=scale)
    wide, dy = x.detach().double().requires_grad_(), normal(7, 8, seed=3).detach()
    (dx,) = torch.autograd.grad(ops.rms_norm(x, None, 1e-30), x, dy.float())
    (truth,) = torch.autograd.grad(F.rms_norm(wide, (8,), None, 1e-30), wide, dy)
    # A few roundings of float32.
    assert (dx.double() - truth).norm() <= 1e-6 * truth.norm()


def test_eps_keeps_a_constant_row_finite():
    x = torch.full((2, 8), 3.0, requires_grad=True)
    for y in (ops.layer_norm(x), ops.rms_norm(x * 0), ops.rms_norm(x * 0, None, 1e-30)):
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
        (lambda: ops.mlp(T(2, 8), None, None, T(8, 4), None), "fc1_weight missing (F, 8)"),
        (lambda: ops.gated_mlp(T(2, 8), T(5, 8), T(4, 8), T(8, 4)), "gate_weight (5, 8) (4, 8)"),
        (lambda: ops.gated_mlp(T(2, 8), T(4, 8), T(4, 7), T(8, 4)), "up_weight (4, 7) (2, 8)"),
        (lambda: ops.gated_mlp(T(2, 8), T(4, 8), T(4, 8), T(8, 5)), "down_weight (8, 5) (4, 8)"),
        (lambda: ops.gated_mlp(T(2, 8), T(4, 8), T(4, 8), T(8, 4), T(8)), "gate_bias (8,) (4,)"),
        (lambda: ops.gated_mlp(T(2, 8), T(4, 8), T(4, 8), T(8, 4), None, T(8)),
         "up_bias (8,) (4,)"),
        (lambda: ops.gated_mlp(T(2, 8), T(4, 8), T(4, 8), T(8, 4), None, None, T(4)),
         "down_bias (4,) (8,)"),
        (lambda: ops.gated_mlp(T(2, 8), None, T(4, 8), T(8, 4)), "gate_weight missing (4, 8)"),
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
