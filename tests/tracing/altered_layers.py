"""Small layers, each with one thing that a reader of layers may get wrong."""

from __future__ import annotations

import math
import random
import types
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LONGEST = 16, 4, 160


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


class Attention(nn.Module):
    """Causal attention; subclasses have another `attend`."""

    def __init__(self, index: int = 0):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v, *args).transpose(1, 2).reshape(x.shape))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    def __init__(self, index: int = 0):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Nothing is altered: x + attention, then + MLP."""

    attention: type[nn.Module] = Attention
    feed: type[nn.Module] = MLP

    def __init__(self, index: int = 0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = self.attention(index), self.feed(index)
        self.set_up(index)

    def set_up(self, index: int) -> None:
        """For the attributes of subclasses."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.branch(self.norm2(x))

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Noise(Block):
    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x + 0.1 * torch.randn_like(x))


class NoisyMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden * (1.0 + 0.1 * torch.randn_like(hidden)))


class NoisePiece(Block):
    feed = NoisyMLP


class DrawnDepth(Block):
    """LayerDrop inside of the layer: a number that is drawn decides whether the MLP runs."""

    def branch(self, x: Tensor) -> Tensor:
        return 0.0 * x if self.training and torch.rand(()).item() < 0.05 else self.mlp(x)


class DrawnDepthByPython(Block):
    def branch(self, x: Tensor) -> Tensor:
        return 0.0 * x if self.training and random.random() < 0.05 else self.mlp(x)


class DropPath(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty((x.shape[0], 1, 1)).bernoulli_(1.0 - self.p)
        return x * kept / (1.0 - self.p)


class Paths(Block):
    def set_up(self, index: int) -> None:
        self.drop_path = DropPath(0.4)

    def branch(self, x: Tensor) -> Tensor:
        return self.drop_path(self.mlp(x))


class DroppingAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = 0.2 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


class Dropping(Block):
    attention = DroppingAttention

    def set_up(self, index: int) -> None:
        self.drop = nn.Dropout(0.3)

    def branch(self, x: Tensor) -> Tensor:
        return self.drop(self.mlp.down(self.drop(F.gelu(self.mlp.up(x)))))


class RunningMean(Block):
    def set_up(self, index: int) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def branch(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.mlp(x - self.mean.clone())


class BranchOnSum(Block):
    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x) if x.sum() > 0 else -self.mlp(x)


class BranchingMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return 0.5 * y if x.sum().item() > 0 else y


class BranchPiece(Block):
    feed = BranchingMLP


class BranchOnMask(Block):
    """A mask that hides nothing is left out, with another way to compute."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = x + self.attn(self.norm1(x))
        if mask.all():
            return y + self.mlp(self.norm2(y))
        return y + self.mlp(self.norm2(y)) * mask[..., None].to(x.dtype)


class TrainFactor(Block):
    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x) * (1.5 if self.training else 1.0)


class IndexScale(Block):
    def set_up(self, index: int) -> None:
        self.layer_idx = index

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x) / (self.layer_idx + 1)


class FixedIndex(Block):
    def set_up(self, index: int) -> None:
        vars(self)["layer_idx"] = index

    @property
    def layer_idx(self) -> int:
        return vars(self)["layer_idx"]


class ShiftArgument(Block):
    """A whole number that is used as the recorder expects sizes to be."""

    def forward(self, x: Tensor, shift: int = 0) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(torch.roll(self.norm2(x), shift, 1))


# What two layers of one class may differ in.


class ListAttribute(Block):
    def set_up(self, index: int) -> None:
        self.scales = [1.0 + index]

    def branch(self, x: Tensor) -> Tensor:
        return self.scales[0] * self.mlp(x)


class Config(Block):
    """As Olmo's `config.clip_qkv`: read in forward."""

    def set_up(self, index: int) -> None:
        self.config = SimpleNamespace(clip=None if index else 0.3)

    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y if self.config.clip is None else y.clamp(-self.config.clip, self.config.clip)


class BufferMaskAttention(Attention):
    """The first layer is causal, the others have a window: their buffers differ."""

    def __init__(self, index: int = 0):
        super().__init__(index)
        ones = torch.ones(LONGEST, LONGEST)
        seen = ones.tril() if index == 0 else ones.tril() - ones.tril(-3)
        self.register_buffer("seen", seen.bool())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~self.seen[:n, :n], -torch.inf).softmax(-1) @ v


class BufferMask(Block):
    attention = BufferMaskAttention


class PlainTensor(Block):
    """A tensor that is neither a parameter nor a buffer."""

    def set_up(self, index: int) -> None:
        self.scale = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64) + index

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.scale


class LearnedGate(Block):
    def set_up(self, index: int) -> None:
        self.gate = nn.Linear(WIDTH, WIDTH)

    def branch(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * self.mlp(x)


class WithoutGradient(Block):
    def branch(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean(-1, keepdim=True)
        return self.mlp(x) * scale


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3.0 * dy * x  # not the derivative, so that a replay without it is found


class ClippedByHook(Block):
    def branch(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda dy: dy.clamp(-0.1, 0.1))
        return self.mlp(x)


class OwnFunction(Block):
    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(_Square.apply(x))


class OwnFunctionMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(_Square.apply(self.up(x)))


class OwnFunctionPiece(Block):
    feed = OwnFunctionMLP


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.attn(self.norm1(x))
        y += x
        z = self.mlp(self.norm2(y))
        z.mul_(0.5)
        return y + z


class InPlaceView(Block):
    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x) * 1.0
        first, second = y.narrow(-1, 0, 8), y.narrow(-1, 4, WIDTH - 4)
        second.mul_(2.0)  # which changes y, and half of `first`
        first.transpose(1, 2)[:, 1:].add_(1.0)
        return y + torch.cat([second, first[..., :4]], -1)


class InPlaceArgument(Block):
    """The caller's tensor is changed, and the caller reads it."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        return super().forward(x)


class WeightNormed(Block):
    def set_up(self, index: int) -> None:
        nn.utils.parametrizations.weight_norm(self.mlp.up)


class SoftmaxOverQueries(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) * 0.5).softmax(-2) @ v


class WrongSoftmax(Block):
    attention = SoftmaxOverQueries


class Multihead(nn.Module):
    def __init__(self, index: int = 0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = MLP()

    def forward(
        self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        y = self.norm1(x)
        y = self.attn(y, y, y, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0]
        x = x + y
        return x + self.mlp(self.norm2(x))


class MaskArgument(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        q, k, v = (heads(layer(y)) for layer in (self.attn.q, self.attn.k, self.attn.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.attn.o(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class CrossBias(nn.Module):
    """The bias has no name that tells queries from keys."""

    def __init__(self, index: int = 0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(12, WIDTH)
        self.v, self.o = nn.Linear(12, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        q, k, v = heads(self.q(self.norm1(x))), heads(self.k(memory)), heads(self.v(memory))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class HeadsInBatch(Block):
    """The mask is a view of one with a batch, and the bias has heads in its batch."""

    def forward(self, x: Tensor, mask: Tensor, alibi: Tensor) -> Tensor:
        y, (b, s, _) = self.norm1(x), x.shape
        q, k, v = (heads(layer(y)) for layer in (self.attn.q, self.attn.k, self.attn.v))
        mask = (mask + 0.0).view(b, 1, s, s) + alibi.view(b, HEADS, 1, s)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.attn.o(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class TwoResults(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.attn(self.norm1(x))
        return y + self.mlp(self.norm2(y)), y


class MergedHeads(Block):
    """A view in which one dimension has tokens and heads."""

    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return (y.view(y.shape[0], -1, 4) * torch.arange(1.0, 5.0).to(x)).view(x.shape)


class ComplexRotary(nn.Module):
    """Rotary embeddings as complex numbers, as in Meta's Llama: two query heads share keys."""

    def __init__(self, index: int = 0):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        y, shape = self.norm1(x), (*x.shape[:2], -1, WIDTH // HEADS)
        q, k = (rotated(layer(y).view(shape), angles) for layer in (self.q, self.k))
        v = self.v(y).view(shape)
        k, v = (t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(t: Tensor, angles: Tensor) -> Tensor:
    """The pairs of each head as complex numbers, turned by an angle for each position."""
    pairs = torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[:, None, :]).flatten(3).to(t)


def turns(length: int) -> Tensor:
    """The angles of positions 0 to `length` as complex numbers of magnitude one."""
    speeds = 10.0 ** -torch.arange(WIDTH // HEADS // 2)
    angles = torch.outer(torch.arange(length).float(), speeds)
    return torch.polar(torch.ones_like(angles), angles)


class Patched(Block):
    """As monkey patches are made: a bound method in an object."""

    def set_up(self, index: int) -> None:
        if index:
            self.mlp.forward = patched(self.mlp)


def patched_forward(self: MLP, x: Tensor) -> Tensor:
    return 2.0 * self.down(F.gelu(self.up(x)))


def patched(mlp: MLP) -> types.MethodType:
    return types.MethodType(patched_forward, mlp)


def with_relu(mlp: MLP) -> nn.Module:
    """Another module for the place of an MLP."""
    return nn.Sequential(mlp.up, nn.ReLU(), mlp.down)


class Activated(Block):
    """The activation of its MLP is a function."""

    function = staticmethod(F.gelu)

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp.down(self.function(self.mlp.up(x)))


class Experts(Block):
    """All experts compute all tokens, in products whose results are parted."""

    def set_up(self, index: int) -> None:
        self.gate_up = nn.Parameter(torch.randn(2, WIDTH, 48) / 4)
        self.out = nn.Parameter(torch.randn(2, 24, WIDTH) / 4)

    def branch(self, x: Tensor) -> Tensor:
        tokens = x.reshape(1, -1, WIDTH).expand(2, -1, -1)
        gate, up = torch.bmm(tokens, self.gate_up).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.out).sum(0).view(x.shape)


class OneLength(Block):
    """Positions have the length of the model's images."""

    def set_up(self, index: int) -> None:
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH))

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.positions)
