"""MLPs, plain and gated: y, and the gradients of x, the weights and the biases."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels import linear
from bench.kernels.linear import Products
from bench.kernels.problem import Function, Op, Problem, Ways, accumulated, through_autograd
from bench.kernels.shapes import Size
from bench.measure.contest import Rig
from bench.measure.registry import Absent
from fused_remat import ops

#: Our name of an activation -> QuACK's of one whose result multiplies another matrix.
QUACK_GATED = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}


class Mlp(Products):
    """act(x @ fc1ᵀ + b1) @ fc2ᵀ + b2, or (act(x @ gateᵀ) * (x @ upᵀ)) @ downᵀ; x (B, S, D)."""

    def __init__(
        self, rig: Rig, gated: bool, act: str, batch: int, seq_len: int, width: int, hidden: int
    ) -> None:
        into, out_of = (hidden, width), (width, hidden)
        if gated:
            shapes = {"gate_weight": into, "up_weight": into, "down_weight": out_of}
        else:
            shapes = {"fc1_weight": into, "fc1_bias": (hidden,)}
            shapes |= {"fc2_weight": out_of, "fc2_bias": (width,)}
        name, x = f"gated {act}" if gated else act, (batch, seq_len, width)
        sizes = {"tokens": batch * seq_len, "width": width, "hidden": hidden}
        super().__init__(rig, name, sizes, act, x=x, **shapes)
        self.gated = gated

    def reference(self, *inputs: Tensor) -> Tensor:
        if self.gated:
            x, gate, up, down = inputs
            return F.linear(self.activate(F.linear(x, gate)) * F.linear(x, up), down)
        x, weight1, bias1, weight2, bias2 = inputs
        return F.linear(self.activate(F.linear(x, weight1, bias1)), weight2, bias2)


def of_model(rig: Rig, size: Size) -> Iterator[Problem]:
    """The model's own MLP."""
    model = size.model
    if model.bias == model.gated:
        raise ValueError(f"{model.name}: plain MLPs have biases here, gated ones have none")
    sizes = size.batch, size.seq_len, model.d_model, model.d_ff
    yield Mlp(rig, model.gated, model.activation, *sizes)


OP = Op("mlp", of_model)
OP.add_stock()
OP.provider("bare")(linear.bare)


def _liger_gated(p: Mlp) -> Function:
    """Liger-Kernel's act(gate) * up between PyTorch's linears."""
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    known = {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}
    if not p.gated or p.act not in known:
        raise Absent(f"it has gated MLPs only, of {' and '.join(known)}")
    apply = known[p.act].apply
    return lambda x, gate, up, down: F.linear(apply(F.linear(x, gate), F.linear(x, up)), down)


@OP.provider("liger", module="liger_kernel", needs="cuda")
def liger(p: Mlp) -> Function:
    """Liger-Kernel's MLP: its backward in what it saved."""
    return _liger_gated(p)


@OP.provider("liger tiled", module="liger_kernel", needs="cuda")
def liger_tiled(p: Mlp) -> Ways:
    """The same over pieces of the sequence, as many as it takes itself, rebuilt in backward.

    It adds the weights' gradients to `.grad` itself, so they are taken from there.
    """
    from liger_kernel.ops import apply_tiled_mlp

    mlp = _liger_gated(p)

    def tiled(x: Tensor, *weights: Tensor) -> Tensor:
        return apply_tiled_mlp(lambda module, piece: mlp(piece, *weights), None, x)

    return through_autograd(tiled, p, gradients_of=accumulated)


@OP.provider("liger fused", module="liger_kernel", needs="cuda", optional=True, autotunes=True)
def liger_fused(p: Mlp) -> Function:
    """Liger-Kernel's Triton products with the gate in them; they take tensor descriptors."""
    from liger_kernel.ops import LigerMLPFunction

    if not p.gated or p.act != "silu":
        raise Absent("it has gated MLPs only, of silu")
    if p.rig.target is None or not p.rig.target.has_tma:
        raise Absent("needs a GPU with tensor descriptors")
    return LigerMLPFunction.apply


def side_by_side(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """A gated MLP's inputs with the gate's weight above the other."""
    return x, torch.cat([gate, up]), down


def apart(dx: Tensor, dgate_up: Tensor, ddown: Tensor) -> tuple[Tensor, ...]:
    """Gradients of `side_by_side`'s results as those of what it was given."""
    return dx, *dgate_up.chunk(2), ddown


def _quack(p: Mlp, recompute: bool) -> Function | Ways:
    """QuACK's MLP: activation and gate in the products, both ways; keeps the hidden half or x."""
    from quack.mlp import mlp_func

    act = (QUACK_GATED if p.gated else linear.QUACK).get(p.act)
    if act is None:
        raise Absent(f"it has no {p.act}")
    if recompute and not p.gated:
        raise Absent("it takes no biases where it recomputes")
    if not p.gated:
        return lambda x, fc1, bias1, fc2, bias2: mlp_func(x, fc1, fc2, act, bias1, bias2)
    options: dict[str, Any] = {"recompute": recompute, "concat_layout": True}
    gated = lambda x, gate_up, down: mlp_func(x, gate_up, down, act, **options)  # noqa: E731
    return through_autograd(gated, p, optional=True, pack=side_by_side, unpack=apart)


for _name, _recompute in (("quack", False), ("quack recompute", True)):
    _build = functools.partial(_quack, recompute=_recompute)
    OP.provider(_name, module="quack", needs="cuda", optional=True, autotunes=True)(_build)


def _ours(p: Mlp, backend: str, policy: str) -> Function:
    """Keeping the hidden half ("none") or its input ("full")."""
    mlp = ops.gated_mlp if p.gated else ops.mlp
    return lambda *inputs: mlp(*inputs, activation=p.act, policy=policy, backend=backend)


OP.add_ours(_ours, ("none", "full"))
