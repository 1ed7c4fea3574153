"""A block in two dtypes, as under autocast: the residual stream as it is, all else in a lower one.

In the stream are the block's inputs and output, sums of a residual and what is used as one
(`Graph.stream`). Products take operands and weights rounded to the lower dtype and round their
result to it; norms and sums of a residual compute in float32. Backward mirrors that: a gradient is
rounded before a product takes it, and added up in the stream's dtype where it is the stream's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fused_remat.blocks.frame import Frame
from fused_remat.blocks.lora import Adapted, LowRank
from fused_remat.blocks.nodes import KeepScale, Linear, Node, Norm
from fused_remat.blocks.parallel import Joins
from fused_remat.blocks.pointwise import Add
from fused_remat.blocks.program import Graph
from fused_remat.blocks.projections import Projections
from fused_remat.blocks.recipe import builder
from fused_remat.steps.linear import bias_grad, linear_dx, linear_fwd
from fused_remat.steps.residual import dropout, residual_add


@dataclass(frozen=True, kw_only=True)
class MixedNorm(Norm):
    """A norm in float32, rounded to `to` where that is not None, else to the dtype of x."""

    to: torch.dtype | None

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return dict.fromkeys(self.params, torch.float32)

    def target(self, like: Tensor, out: Tensor | None) -> Tensor | None:
        if out is not None or self.to is None or self.to == like.dtype:
            return out
        return torch.empty(like.shape, dtype=self.to, device=like.device)

    @property
    def says(self) -> tuple[str, str]:  # type: ignore[override]
        return "" if self.to is None else f"rounded to {str(self.to)[6:]}", ""

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        super().forward(f, self.target(f[self.x], out))


@dataclass(frozen=True, kw_only=True)
class MixedLinear(Linear):
    """A linear layer whose product is in `compute`, added to a residual in the residual's dtype.

    `x_in_stream`: x, and so its gradient, is in the stream's dtype.
    """

    compute: torch.dtype
    x_in_stream: bool

    @property
    def says(self) -> tuple[str, str]:  # type: ignore[override]
        return "added to the residual in the stream's dtype" if self.residual else "", ""

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return dict.fromkeys(self.params, self.compute)

    def operand(self, f: Frame) -> Tensor:
        return f[self.x].to(self.compute)

    def product_grad(self, f: Frame, dy: Tensor) -> Tensor:
        keep = f.keep(self.keep)
        if keep is None:
            return dy.to(self.compute)
        return f.ops[dropout](dy, keep, self.compute)

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        x, keep = self.operand(f), f.keep(self.keep)
        if not self.residual:
            y = f.ops[linear_fwd](x, *self.affine(f), None, keep, out)
        else:
            product = f.ops[linear_fwd](x, *self.affine(f))
            del x
            y = f.ops[residual_add](product, f[self.residual], keep, out)
        f.put(self.name, y)

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        if self.x in wants or self.weight in wants or self.bias in wants:
            dz = self.product_grad(f, dy)
            if self.weight in wants:
                f.add_weight_grad(self.weight, dz, f.last(self.x).to(self.compute), self.part)
            if self.bias in wants:
                f.add_param_grad(self.bias, f.ops[bias_grad](dz), self.part)
            if self.x in wants:
                dx = f.ops[linear_dx](dz, self.affine(f)[0])
                f.add_grad(self.x, dx.to(f.run.dtype) if self.x_in_stream else dx, owned=True)
            del dz
        if self.residual in wants:
            f.add_grad(self.residual, dy, owned)


@dataclass(frozen=True, kw_only=True)
class MixedAdd(Add):
    """A sum of a residual and x, which is in `compute`."""

    compute: torch.dtype

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        if self.x in wants:
            keep = f.keep(self.keep)
            dx = dy.to(self.compute) if keep is None else f.ops[dropout](dy, keep, self.compute)
            f.add_grad(self.x, dx, owned=dx is not dy)
        if self.residual in wants:
            f.add_grad(self.residual, dy, owned and self.x not in wants)


@builder
def mixed(graph: Graph, compute: torch.dtype) -> Graph:
    """`graph` with everything outside the residual stream in `compute`; one object for each pair.

    Raises: NotImplementedError if anything but norms, linear layers and sums touches the stream.

    >>> from fused_remat.graph.build import block_graph
    >>> from fused_remat.spec import nn_layer_spec
    >>> graph = mixed(block_graph(nn_layer_spec(True, 4, 16, "gelu")), torch.bfloat16)
    >>> sorted(graph.stream), graph.dtypes(torch.float32)["qkv"]
    (['input', 'mid', 'output'], torch.bfloat16)
    """
    nodes = tuple([_mixed_node(graph, node, compute) for node in graph.nodes])
    return replace(graph, nodes=nodes, compute=compute)


def _mixed_node(graph: Graph, node: Node, compute: torch.dtype) -> Node:
    inside = node.name in graph.stream
    given: dict[str, Any] = {field.name: getattr(node, field.name) for field in fields(node)}
    if isinstance(node, Norm):
        return MixedNorm(**given, to=None if inside else compute)
    if isinstance(node, Linear) and inside == bool(node.residual):
        return MixedLinear(**given, compute=compute, x_in_stream=node.x in graph.stream)
    if isinstance(node, Add) and node.x not in graph.stream:
        return MixedAdd(**given, compute=compute)
    if isinstance(node, LowRank):
        return replace(node, compute=compute, to=None)
    if isinstance(node, Projections | Adapted | Joins) and not inside:
        return replace(node, compute=compute)
    if isinstance(node, KeepScale) or not graph.stream.intersection((node.name, *node.inputs)):
        return node
    raise NotImplementedError(f"{graph.kind} cannot run in two dtypes: {node.name} is one step")
