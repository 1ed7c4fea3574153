"""What the tests compare with: PyTorch's own layer, and an encoder block with explicit masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import FusedRematLayer, random

RUNGS = ("full", "lean", "balanced", "fast", "none")
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


def masked_encoder(layer: nn.TransformerEncoderLayer, x: Tensor, seed: Tensor) -> Tensor:
    """The layer on x (B, S, D) in plain autograd, dropout masks from the generator's definition."""
    batch, seq_len, width = x.shape
    nhead = layer.self_attn.num_heads
    keys = random.site_keys(seed)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32

    def drop(t: Tensor, site: int, p: float, rows: int) -> Tensor:
        if p == 0.0:
            return t
        keep = random.keep_scale(keys[site], 0, rows, t.shape[-1], p, dtype)
        return t * keep.view(t.shape).to(t.dtype)

    def attention(t: Tensor) -> Tensor:
        attn = layer.self_attn
        packed = F.linear(t, attn.in_proj_weight, attn.in_proj_bias)
        q, k, v = packed.view(batch, seq_len, 3, nhead, -1).permute(2, 0, 3, 1, 4)
        probs = ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1)
        probs = drop(probs, random.ATTENTION, attn.dropout, batch * nhead * seq_len)
        heads = (probs @ v).transpose(1, 2).reshape(batch, seq_len, width)
        out = F.linear(heads, attn.out_proj.weight, attn.out_proj.bias)
        return drop(out, random.RESIDUAL1, layer.dropout1.p, batch * seq_len)

    def mlp(t: Tensor) -> Tensor:
        act = drop(layer.activation(layer.linear1(t)), random.MLP, layer.dropout.p, batch * seq_len)
        return drop(layer.linear2(act), random.RESIDUAL2, layer.dropout2.p, batch * seq_len)

    if layer.norm_first:
        mid = x + attention(layer.norm1(x))
        return mid + mlp(layer.norm2(mid))
    mid = layer.norm1(x + attention(x))
    return layer.norm2(mid + mlp(mid))


#: (S, B, D) for the layers of `make`.
X = torch.randn(5, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make(policy="full", dropout=0.0, norm_first=True, **kwargs):
    """A small float64 `pair`."""
    return pair(
        8, 2, 12, dropout=dropout, norm_first=norm_first, policy=policy, dtype=torch.float64,
        **kwargs,
    )  # fmt: skip
