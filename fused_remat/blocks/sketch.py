"""What blocks are put together of: norms, projections, attention and MLP halves, with dropout."""

from __future__ import annotations

from fused_remat import random
from fused_remat.blocks.attention import Attention
from fused_remat.blocks.nodes import KeepScale, Linear, Node, Norm
from fused_remat.blocks.pointwise import Custom, Gated, Pointwise
from fused_remat.blocks.rotary import Rotary

#: The activation "name" of the caller's own function (`blocks.pointwise.Custom`).
CUSTOM = "custom"


def linear_params(*names: str) -> tuple[str, ...]:
    """The weight and bias of each layer.

    >>> linear_params("fc1")
    ('fc1.weight', 'fc1.bias')
    """
    return tuple(f"{name}.{kind}" for name in names for kind in ("weight", "bias"))


def captured_params(count: int) -> tuple[str, ...]:
    """Names of the tensors that a caller's own activation function captures."""
    return tuple(f"activation.{i}" for i in range(count))


class Sketch:
    """Collects the nodes of a block; every method adds one step or one half, by name."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def keep(self, name: str, site: int, p: float, like: str) -> str:
        """The multiplier of a dropout site, as wide as `like`; "" and no node at p = 0."""
        if p == 0.0:
            return ""
        self.nodes.append(KeepScale(name=name, site=site, p=p, like=like))
        return name

    def norm(self, name: str, x: str, weights: str, eps: float, kind: str = "layer_norm") -> None:
        weight, bias = linear_params(weights)
        self.nodes.append(Norm(name=name, x=x, weight=weight, bias=bias, eps=eps, kind=kind))

    def linear(self, name: str, x: str, weights: str, residual: str = "", keep: str = "") -> None:
        weight, bias = linear_params(weights)
        self.nodes.append(
            Linear(name=name, x=x, weight=weight, bias=bias, residual=residual, keep=keep)
        )

    def attention_half(
        self,
        x: str,
        residual: str,
        name: str,
        attention: Attention,
        p_residual: float,
        rotary: Rotary | None = None,
    ) -> None:
        """name = residual + dropout(proj(attention(qkv(x)))); `rotary`, if any, works on qkv(x)."""
        self.linear("qkv", x, "qkv")
        if rotary is not None:
            self.nodes.append(rotary)
        self.nodes.append(attention)
        keep = self.keep("keep1", random.RESIDUAL1, p_residual, "proj.weight")
        self.linear(name, "attn", "proj", residual, keep)

    def mlp_half(
        self,
        x: str,
        residual: str,
        name: str,
        activation: str,
        p_mlp: float,
        p_residual: float,
        captured: int = 0,
        per_batch: bool = False,
    ) -> None:
        """name = residual + dropout(fc2(dropout(activation(fc1(x)))))."""
        self.linear("up", x, "fc1")
        keep = self.keep("keep_mlp", random.MLP, p_mlp, "fc1.weight")
        act: Node = Pointwise(name="act", x="up", act=activation, keep=keep)
        if activation == CUSTOM:
            names = captured_params(captured)
            act = Custom(name="act", x="up", captured=names, keep=keep, per_batch=per_batch)
        self.nodes.append(act)
        self._down(name, residual, p_residual)

    def gated_half(
        self, x: str, residual: str, name: str, activation: str, p_mlp: float, p_residual: float
    ) -> None:
        """name = residual + dropout(fc2(dropout(activation(gate(x)) * fc1(x))))."""
        self.linear("gate", x, "gate")
        self.linear("up", x, "fc1")
        keep = self.keep("keep_mlp", random.MLP, p_mlp, "fc1.weight")
        self.nodes.append(Gated(name="act", gate="gate", up="up", act=activation, keep=keep))
        self._down(name, residual, p_residual)

    def _down(self, name: str, residual: str, p_residual: float) -> None:
        keep = self.keep("keep2", random.RESIDUAL2, p_residual, "fc2.weight")
        self.linear(name, "act", "fc2", residual, keep)
