"""Norms, MLPs and the residual sum as functions: small values, roundings, activations by name."""

import pytest
import torch
import torch.nn.functional as F
from block_inputs import check_beside, compare, in_pieces, normal
from op_cases import FF, D, one_branch
from reference import plain_block

from fused_remat import ops
from fused_remat.spec import MLPSpec
from fused_remat.steps import linear
from fused_remat.steps.activation import ACTIVATIONS

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
