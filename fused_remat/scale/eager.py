"""What PyTorch keeps of a layer without us: the plain layer, run on fake tensors, with hooks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.cli.shapes import Model
from fused_remat.layers.plain_causal import CausalLayer
from fused_remat.scale.layout import Layout


class _Tokens(torch.autograd.Function):
    """x with other tokens: what gathering them, or summing and dividing them, makes. Saves none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int) -> Tensor:
        ctx.tokens = x.shape[1]
        return x.new_empty(x.shape[0], tokens, x.shape[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.new_empty(dy.shape[0], ctx.tokens, dy.shape[2]), None


class _With(nn.Module):
    """A module whose output has other tokens."""

    def __init__(self, module: nn.Module, tokens: int) -> None:
        super().__init__()
        self.module, self.tokens = module, tokens

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Tokens.apply(self.module(x), self.tokens)
        return y


@functools.lru_cache(maxsize=256)
def kept_by_eager(model: Model, layout: Layout, seq: int, dtype: torch.dtype) -> int:
    """Bytes that autograd saves of a rank's plain layer, its input included, of one sequence.

    Each storage counts once; more sequences keep as many times that. Divided as PyTorch's tensor
    parallel does it: what linear layers read is gathered, and saved so. An RMSNorm keeps its input
    and a statistic, as its kernel for GPUs does (on CPUs it is made of parts that keep more):
    `nn.LayerNorm`, of two statistics, stands for it.

    >>> from fused_remat.cli.shapes import LARGE
    >>> from fused_remat.scale.layout import Mesh
    >>> whole = kept_by_eager(LARGE["llama3-70b"], Layout(Mesh(1, 1)), 8192, torch.bfloat16)
    >>> whole / 8192 / 8192  # bytes a token and width
    40.53...
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    tensor = layout.mesh.tensor
    with FakeTensorMode():
        layer = CausalLayer(
            model.d_model, model.nhead // tensor, model.d_ff // tensor, 0.0, model.activation,
            kv_heads=model.kv_heads // tensor, head_dim=model.head_dim, norm=model.norm,
            gated=model.gated, bias=model.bias, qkv_bias=model.qkv_bias, qk_norm=model.qk_norm,
            dtype=dtype,
        )  # fmt: skip
        for name, norm in list(layer.named_children()):
            if isinstance(norm, nn.RMSNorm):
                wide = list(norm.normalized_shape)
                setattr(layer, name, nn.LayerNorm(wide, bias=False, dtype=dtype))
        mine = seq // layout.stream
        if tensor > 1:
            parts: Any = layer
            parts.norm1, parts.norm2 = _With(parts.norm1, seq), _With(parts.norm2, seq)
            parts.proj, parts.down = _With(parts.proj, mine), _With(parts.down, mine)
        x = torch.empty(1, mine, model.d_model, dtype=dtype, requires_grad=True)
        half = model.head_dim // 2
        tables = [torch.empty(seq, half) for _ in range(2)] if model.rope else []
        theirs = {t.untyped_storage()._cdata for t in (*layer.parameters(), *tables)}
        found: dict[int, Tensor] = {}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage()._cdata not in theirs:
                found[t.untyped_storage()._cdata] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = layer(x, *tables)
        del out
        return sum(t.untyped_storage().nbytes() for t in found.values())
