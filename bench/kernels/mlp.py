"""MLPs, plain and gated: y, and the gradients of x, the weights and the biases."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import Function, Op, Problem, Ways, accumulated, through_autograd
from bench.kernels.products import QUACK_GATED, QUACK_PLAIN, Products, gradients
from bench.kernels.shapes import Size
from bench.measure.contest import Results, Rig
from bench.measure.registry import Absent
from fused_remat import ops


class Mlp(Products):
    """act(x @ fc1ᵀ + b1) @ fc2ᵀ + b2, or (act(x @ gateᵀ) * (x @ upᵀ)) @ downᵀ; x (B, S, D)."""

    def __init__(
        self, rig: Rig, gated: bool, act: str, batch: int, seq_len: int, width: int, hidden: int
    ) -> None:
        into, out_of = (hidden, width), (width, hidden)
        shapes: dict[str, tuple[int, ...]] = {"x": (batch, seq_len, width)}
        if gated:
            shapes |= {"gate_weight": into, "up_weight": into, "down_weight": out_of}
        else:
            shapes |= {"fc1_weight": into, "fc1_bias": (hidden,)}
            shapes |= {"fc2_weight": out_of, "fc2_bias": (width,)}
        sizes = {"tokens": batch * seq_len, "width": width, "hidden": hidden}
        super().__init__(rig, f"gated {act}" if gated else act, sizes, act, shapes, width)
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


@OP.provider("bare")
def bare(p: Mlp) -> Ways:
    """The products alone: what an MLP would take that does the rest for nothing.

    The product into the hidden width stands for the activation, dy's with the last weight for the
    gradient of each that goes into it.
    """

    def forward(x: Tensor, *weights: Tensor) -> Results:
        *into, out_of = weights
        hidden = [torch.mm(x, weight.t()) for weight in into]
        return {"hidden": hidden[0], "y": torch.mm(hidden[-1], out_of.t())}

    def backward(x: Tensor, hidden: Tensor, dy: Tensor, *weights: Tensor) -> Results:
        *into, out_of = weights
        dhidden = torch.mm(dy, out_of)
        found = {"dlast": torch.mm(dy.t(), hidden)}
        for i, weight in enumerate(into):
            found |= {f"dx{i}": torch.mm(dhidden, weight), f"dweight{i}": torch.mm(dhidden.t(), x)}
        return found

    def operands(index: int) -> tuple[Tensor, ...]:
        x, *others = p.sets[index].values()
        return x.flatten(0, 1), *(t for t in others if t.dim() == 2)

    def and_gradients(index: int) -> tuple[Tensor, ...]:
        x, *weights = operands(index)
        return x, torch.mm(x, weights[0].t()), p.dys[index].flatten(0, 1), *weights

    return {
        "fwd": p.way(forward, operands, _bare_fwd),
        "bwd": p.way(backward, and_gradients, _bare_bwd),
    }


def _in_two(x: Tensor, into: Tensor, out_of: Tensor) -> Tensor:
    return F.linear(F.linear(x, into), out_of)


def _bare_fwd(x: Tensor, *weights: Tensor) -> Results:
    *into, out_of = weights
    return {"hidden": F.linear(x, into[0]), "y": _in_two(x, into[-1], out_of)}


def _bare_bwd(x: Tensor, hidden: Tensor, dy: Tensor, *weights: Tensor) -> Results:
    """Of the MLP without its activation, by autograd, for each weight into the hidden width."""
    *into, out_of = weights
    made = [gradients(_in_two, dy, x, weight, out_of) for weight in into]
    found = {"dlast": made[0][2]}
    for i, (dx, dweight, _) in enumerate(made):
        found |= {f"dx{i}": dx, f"dweight{i}": dweight}
    return found


def _liger_act(p: Mlp) -> Any:
    """Liger-Kernel's act(gate) * up."""
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    known = {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}
    if not p.gated or p.act not in known:
        raise Absent(f"it has gated MLPs only, of {' and '.join(known)}")
    return known[p.act]


@OP.provider("liger", module="liger_kernel", needs="cuda")
def liger(p: Mlp) -> Function:
    """Liger-Kernel's MLP: its gate between PyTorch's linears, its backward in what it saved."""
    gate_up = _liger_act(p)
    return lambda x, gate, up, down: F.linear(
        gate_up.apply(F.linear(x, gate), F.linear(x, up)), down
    )


@OP.provider("liger tiled", module="liger_kernel", needs="cuda")
def liger_tiled(p: Mlp) -> Ways:
    """The same over pieces of the sequence, as many as it takes itself, rebuilt in backward.

    It adds the weights' gradients to `.grad` itself, so they are taken from there.
    """
    from liger_kernel.ops import apply_tiled_mlp

    gate_up = _liger_act(p)

    def tiled(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        def piece(module: None, x: Tensor) -> Tensor:
            return F.linear(gate_up.apply(F.linear(x, gate), F.linear(x, up)), down)

        made: Tensor = apply_tiled_mlp(piece, None, x)
        return made

    return through_autograd(tiled, p, gradients_of=accumulated)


@OP.provider("liger fused", module="liger_kernel", needs="cuda", optional=True, autotunes=True)
def liger_fused(p: Mlp) -> Function:
    """Liger-Kernel's Triton products with the gate in them; they take tensor descriptors."""
    from liger_kernel.ops import LigerMLPFunction

    if not p.gated or p.act != "silu":
        raise Absent("it has gated MLPs only, of silu")
    if p.rig.target is None or not p.rig.target.has_tma:
        raise Absent("needs a GPU with tensor descriptors")
    return lambda *inputs: LigerMLPFunction.apply(*inputs)


def side_by_side(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """A gated MLP's inputs with the gate's weight above the other."""
    return x, torch.cat([gate, up]), down


def apart(dx: Tensor, dgate_up: Tensor, ddown: Tensor) -> tuple[Tensor, ...]:
    """Gradients of `side_by_side`'s results as those of what it was given."""
    return dx, *dgate_up.chunk(2), ddown


def _quack(p: Mlp, recompute: bool) -> Function | Ways:
    """QuACK's MLP: activation and gate in the products, both ways; keeps the hidden half or x."""
    from quack.mlp import mlp_func

    known = QUACK_GATED if p.gated else QUACK_PLAIN
    if p.act not in known:
        raise Absent(f"it has no {p.act}")
    if recompute and not p.gated:
        raise Absent("it takes no biases where it recomputes")
    if not p.gated:
        return lambda x, weight1, bias1, weight2, bias2: mlp_func(
            x, weight1, weight2, known[p.act], bias1, bias2
        )

    def gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        options = {"recompute": recompute, "concat_layout": True}
        made: Tensor = mlp_func(x, gate_up, down, known[p.act], **options)
        return made

    return through_autograd(gated, p, optional=True, pack=side_by_side, unpack=apart)


for _name, _recompute in (("quack", False), ("quack recompute", True)):
    _build = functools.partial(_quack, recompute=_recompute)
    OP.provider(_name, module="quack", needs="cuda", optional=True, autotunes=True)(_build)


def _ours(p: Mlp, backend: str, policy: str) -> Function:
    """Keeping the hidden half ("none") or its input ("full")."""
    mlp: Function = ops.gated_mlp if p.gated else ops.mlp
    return lambda *inputs: mlp(*inputs, activation=p.act, policy=policy, backend=backend)


OP.add_ours(_ours, ("none", "full"))
