"""What the tests compare with: PyTorch's own layer, and an encoder block with explicit masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import FusedRematLayer, random

EXACT_PRESETS = ("full", "lean", "balanced", "fast", "none")
PARAM_NAMES = (
    "self_attn.in_proj_weight", "self_attn.in_proj_bias",
    "self_attn.out_proj.weight", "self_attn.out_proj.bias",
    "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias",
    "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias",
)  # fmt: skip


def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random values in every parameter: the stock initialisation has zero biases, unit norms."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(p.double() + 0.1 * noise)
    return module


def pair(
    *args: object, policy: object = "full", seed: int = 0, **kwargs: object
) -> tuple[nn.TransformerEncoderLayer, FusedRematLayer]:
    """A stock layer with random parameters, and a fused one with the same values."""
    torch.manual_seed(seed)
    stock = nn.TransformerEncoderLayer(*args, **kwargs)
    randomize(stock, seed)
    fused = FusedRematLayer(*args, policy=policy, **kwargs)
    fused.load_state_dict(stock.state_dict())
    return stock, fused


def run(layer: nn.Module, x: Tensor, dy: Tensor | None = None, **kwargs: object) -> list[Tensor]:
    """Output, and gradients of x, of every parameter and of float masks that require grad."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x, **kwargs)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    leaves += [m for m in kwargs.values() if isinstance(m, Tensor) and m.requires_grad]
    dy = torch.ones_like(y) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


class _Dropout:
    """Dropout by explicit masks of the generator's definition, and what is built of it."""

    def __init__(self, seed: Tensor, dtype: torch.dtype) -> None:
        self.keys = random.site_keys(seed)
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def drop(self, t: Tensor, site: int, p: float) -> Tensor:
        """Over the rows of `t`, a matrix for each index before the last."""
        if p == 0.0:
            return t
        rows = t.numel() // t.shape[-1]
        keep = random.keep_scale(self.keys[site], 0, rows, t.shape[-1], p, self.dtype)
        return t * keep.view(t.shape).to(t.dtype)

    def attention(self, attn: nn.MultiheadAttention, t: Tensor, keys: Tensor, site: int) -> Tensor:
        """Of t (B, S, D) to `keys` (B, M, D)."""
        (wq, wk, wv), biases = attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
            for x, w, b in zip((t, keys, keys), (wq, wk, wv), biases, strict=True)
        )
        probs = ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1)
        heads = (self.drop(probs, site, attn.dropout) @ v).transpose(1, 2).flatten(2)
        return F.linear(heads, attn.out_proj.weight, attn.out_proj.bias)

    def mlp(self, layer: nn.Module, t: Tensor, last: nn.Dropout) -> Tensor:
        act = self.drop(layer.activation(layer.linear1(t)), random.MLP, layer.dropout.p)
        return self.drop(layer.linear2(act), random.RESIDUAL2, last.p)


def masked_encoder(layer: nn.TransformerEncoderLayer, x: Tensor, seed: Tensor) -> Tensor:
    """The layer on x (B, S, D) in plain autograd, dropout masks from the generator's definition."""
    d = _Dropout(seed, x.dtype)

    def attention(t: Tensor) -> Tensor:
        out = d.attention(layer.self_attn, t, t, random.ATTENTION)
        return d.drop(out, random.RESIDUAL1, layer.dropout1.p)

    if layer.norm_first:
        mid = x + attention(layer.norm1(x))
        return mid + d.mlp(layer, layer.norm2(mid), layer.dropout2)
    mid = layer.norm1(x + attention(x))
    return layer.norm2(mid + d.mlp(layer, mid, layer.dropout2))


def masked_decoder(
    layer: nn.TransformerDecoderLayer, x: Tensor, memory: Tensor, seed: Tensor
) -> Tensor:
    """As `masked_encoder`, on x (B, S, D) and memory (B, M, D)."""
    d = _Dropout(seed, x.dtype)

    def attention(t: Tensor) -> Tensor:
        out = d.attention(layer.self_attn, t, t, random.ATTENTION)
        return d.drop(out, random.RESIDUAL1, layer.dropout1.p)

    def cross(t: Tensor) -> Tensor:
        out = d.attention(layer.multihead_attn, t, memory, random.CROSS_ATTENTION)
        return d.drop(out, random.CROSS_RESIDUAL, layer.dropout2.p)

    if layer.norm_first:
        mid1 = x + attention(layer.norm1(x))
        mid2 = mid1 + cross(layer.norm2(mid1))
        return mid2 + d.mlp(layer, layer.norm3(mid2), layer.dropout3)
    mid1 = layer.norm1(x + attention(x))
    mid2 = layer.norm2(mid1 + cross(mid1))
    return layer.norm3(mid2 + d.mlp(layer, mid2, layer.dropout3))


#: (S, B, D) for the layers of `make`.
X = torch.randn(5, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make(policy="full", dropout=0.0, norm_first=True, **kwargs):
    """A small float64 `pair`."""
    return pair(
        8, 2, 12, dropout=dropout, norm_first=norm_first, policy=policy, dtype=torch.float64,
        **kwargs,
    )  # fmt: skip
