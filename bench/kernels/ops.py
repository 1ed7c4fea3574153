"""The ops of `python -m bench kernels`: norms, MLPs, attention, the loss of a head, experts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.attention import ATTENTION
from bench.kernels.experts import EXPERTS, GROUPED
from bench.kernels.problem import Function, Op, Problem, Size, Ways, through_autograd
from bench.measure.contest import Results, Rig, Way, Work
from bench.measure.registry import Absent
from fused_remat import ops
from fused_remat.steps.activation import ACTIVATIONS

#: Of a vocabulary, on a CPU: what is exact, in float64, is to fit its memory.
_CPU_VOCAB = 1 << 15
EPS = 1e-5  # of norms


# --- norms


@dataclass(eq=False)
class Norm(Problem):
    """`layer_norm` or `rms_norm` of x (T, D)."""

    tokens: int
    width: int

    mean: ClassVar[float] = 0.5

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {"x": (self.tokens, self.width), "weight": (self.width,), "bias": (self.width,)}
        return shapes if self.name == "layer_norm" else {n: shapes[n] for n in ("x", "weight")}

    def reference(self, *inputs: Tensor) -> Tensor:
        x, *affine = inputs
        norm = F.layer_norm if self.name == "layer_norm" else F.rms_norm
        return norm(x, x.shape[-1:], *affine, eps=EPS)

    def work(self, direction: str) -> Work:
        """Count x and y; or x, dy and dx."""
        matrix = self.tokens * self.width * self.rig.dtype.itemsize
        return Work(bytes={"fwd": 2.0, "bwd": 3.0}[direction] * matrix)


NORM = Op("norm", lambda rig, size: [Norm(rig, size.model.norm, size.tokens, size.model.d_model)])


@NORM.provider("liger", module="liger_kernel", needs="cuda")
def liger_norm(p: Norm) -> Function:
    from liger_kernel.ops import LigerLayerNormFunction, LigerRMSNormFunction

    if p.name == "layer_norm":
        return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


@NORM.ours()
def our_norm(p: Norm, backend: str) -> Function:
    norm = ops.layer_norm if p.name == "layer_norm" else ops.rms_norm
    return lambda x, *affine: norm(x, *affine, eps=EPS, backend=backend)


# --- MLPs


class Mlp(Problem):
    """act(x @ fc1ᵀ + b1) @ fc2ᵀ + b2, or (act(x @ gateᵀ) * (x @ upᵀ)) @ downᵀ; x (B, S, D)."""

    def __init__(
        self, rig: Rig, gated: bool, act: str, batch: int, seq_len: int, width: int, hidden: int
    ) -> None:
        super().__init__(rig, f"gated {act}" if gated else act)
        self.gated, self.act = gated, act
        self.sizes = {"tokens": batch * seq_len, "width": width, "hidden": hidden}
        into, out_of = (hidden, width), (width, hidden)
        shapes: dict[str, tuple[int, ...]] = {
            "fc1_weight": into, "fc1_bias": (hidden,), "fc2_weight": out_of, "fc2_bias": (width,),
        }  # fmt: skip
        if gated:
            shapes = {"gate_weight": into, "up_weight": into, "down_weight": out_of}
        self.shapes = {"x": (batch, seq_len, width), **shapes}

    def reference(self, *inputs: Tensor) -> Tensor:
        act = ACTIVATIONS[self.act].fwd
        if self.gated:
            x, gate, up, down = inputs
            return F.linear(act(F.linear(x, gate)) * F.linear(x, up), down)
        x, weight1, bias1, weight2, bias2 = inputs
        return F.linear(act(F.linear(x, weight1, bias1)), weight2, bias2)

    def work(self, direction: str) -> Work:
        """Count a product per weight, two backward; no activation is kept or read again.

        Bytes forward: inputs and y. Backward: x, weights and dy, the gradients of all inputs.
        """
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        weights = sum(size for name, size in sizes.items() if "weight" in name)
        moved = sum(sizes.values()) + sizes["x"]  # y is as large as x
        if direction == "bwd":
            moved += sizes["x"] + weights
        flops = {"fwd": 2.0, "bwd": 4.0}[direction] * self.sizes["tokens"] * weights
        return Work(flops=flops, bytes=float(moved * self.rig.dtype.itemsize))


def _mlps(rig: Rig, size: Size) -> Iterator[Problem]:
    """Yield the model's MLP; plain ones have biases here, gated ones have none."""
    model = size.model
    sizes = size.batch, size.seq_len, model.d_model, model.d_ff
    yield Mlp(rig, model.gated, model.activation, *sizes)


MLP = Op("mlp", _mlps)


@MLP.provider("liger", module="liger_kernel", needs="cuda")
def liger_mlp(p: Mlp) -> Function:
    """Compute act(gate) * up by Liger-Kernel's kernel, between PyTorch's linears."""
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    known = {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}
    if not p.gated or p.act not in known:
        raise Absent(f"it has gated MLPs only, of {' and '.join(known)}")
    apply = known[p.act].apply
    return lambda x, gate, up, down: F.linear(apply(F.linear(x, gate), F.linear(x, up)), down)


@MLP.provider("quack", module="quack", needs="cuda", optional=True)
def quack_mlp(p: Mlp) -> Ways:
    """Call QuACK's MLP, which keeps its input alone, as "full" does.

    Its gate and up are one weight, [gate; up]: joined, and its gradient divided, off the clock.
    """
    known = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}
    if not p.gated or p.act not in known:
        raise Absent(f"recomputed, it has no biases, and gates are of {', '.join(known)}")
    from quack.mlp import mlp_func

    def mlp(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
        return mlp_func(x, both, down, known[p.act], recompute=True, concat_layout=True)

    return {name: divided(way) for name, way in through_autograd(mlp, Joined(p), True).items()}


class Joined(Problem):
    """A gated MLP's inputs with the weights of gate and up in one."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__(mlp.rig, mlp.name)
        self.dys = mlp.dys
        self.sets = [
            {"x": x, "both": torch.cat((gate, up)), "down_weight": down}
            for x, gate, up, down in (inputs.values() for inputs in mlp.sets)
        ]


def divided(way: Way) -> Way:
    """Return a way that divides the gradient of `both` into those of gate and up."""

    def run(given: Any) -> Results:
        found = dict(way.run(given))
        if "dboth" in found:
            found["dgate_weight"], found["dup_weight"] = found.pop("dboth").chunk(2)
        return found

    return dataclasses.replace(way, run=run)


@MLP.ours("none", "full")
def our_mlp(p: Mlp, backend: str, policy: str) -> Function:
    """Keep the hidden half ("none") or its input ("full")."""
    mlp = ops.gated_mlp if p.gated else ops.mlp
    return lambda *inputs: mlp(*inputs, activation=p.act, policy=policy, backend=backend)


# --- the loss


@dataclass(eq=False)
class Loss(Problem):
    """Of x (T, D), weight (V, D) and fixed targets; the result is rounded to x's dtype, as all."""

    name: str = field(default="loss", init=False)
    tokens: int
    width: int
    vocab: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.tokens, self.width), "weight": (self.vocab, self.width)}

    @functools.cached_property
    def target(self) -> Tensor:
        """Every token counts."""
        return torch.randint(self.vocab, (self.tokens,), device=self.rig.device)

    def reference(self, *inputs: Tensor) -> Tensor:
        x, weight = inputs
        logits = F.linear(x, weight)
        wide = logits.to(torch.promote_types(x.dtype, torch.float32))
        return F.cross_entropy(wide, self.target).to(x.dtype)

    def work(self, direction: str) -> Work:
        """Count one product, two backward, no kept logits; x and weight, their gradients."""
        product = 2.0 * self.tokens * self.width * self.vocab
        given = (self.tokens + self.vocab) * self.width * self.rig.dtype.itemsize
        backward = direction == "bwd"
        return Work(flops=product * (1 + backward), bytes=float(given * (1 + backward)))


def _losses(rig: Rig, size: Size) -> Iterator[Problem]:
    model = size.model
    if model.vocab:
        vocab = min(model.vocab, _CPU_VOCAB) if rig.device.type == "cpu" else model.vocab
        yield Loss(rig, size.tokens, model.d_model, vocab)


LOSS = Op("loss", _losses)


@LOSS.provider("liger", module="liger_kernel", needs="cuda")
def liger_loss(p: Loss) -> Function:
    """Call Liger-Kernel's loss: forward computes the gradients, backward scales them."""
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    apply = LigerFusedLinearCrossEntropyFunction.apply
    return lambda x, weight: apply(x, weight, p.target)[0].to(x.dtype)


@LOSS.provider("liger_scaled", module="liger_kernel", needs="cuda", optional=True)
def liger_scaled_loss(p: Loss) -> Function:
    """Call Liger-Kernel's newest loss, a token's at a time: in CuTe DSL on Hopper, else in ATen."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    apply = LigerFusedLinearScaledCrossEntropyFunction.apply
    return lambda x, weight: apply(x, weight, p.target).mean().to(x.dtype)


@LOSS.provider("trl", module="trl")
def trl_loss(p: Loss) -> Function:
    """Call TRL's log-probabilities, in blocks of as many columns as its trainers take."""
    from trl.kernels import ChunkedLogProbFunction

    columns, logit_scale = 32768, 1.0
    rest = p.target, 1.0, columns, None, logit_scale, ("log_probs",)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        log_probs, *_ = ChunkedLogProbFunction.apply(x, weight, None, *rest)
        return -log_probs.mean().to(x.dtype)

    return loss


@LOSS.ours()
def our_loss(p: Loss, backend: str) -> Function:
    loss = ops.linear_cross_entropy
    return lambda x, weight: loss(x, weight, p.target, backend=backend).to(x.dtype)


#: Name on the command line -> op, in the order in which they are measured.
OPS: dict[str, Op] = {
    "norm": NORM, "mlp": MLP, "attention": ATTENTION, "loss": LOSS, "grouped": GROUPED,
    "experts": EXPERTS,
}  # fmt: skip
