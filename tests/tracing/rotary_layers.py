"""Small decoder layers with rotary embeddings in the forms in which people write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KV_HEADS, HEAD, LONGEST = 32, 4, 2, 8, 200


def angles(length: int, rotated: int = HEAD) -> Tensor:
    """Return the angle of each position and pair, (S, R/2)."""
    speeds = 30.0 ** -(torch.arange(0, rotated, 2) / rotated)
    return torch.outer(torch.arange(length).float(), speeds)


def turns(length: int, rotated: int = HEAD) -> Tensor:
    """Return them as complex numbers of magnitude one."""
    turn = angles(length, rotated)
    return torch.polar(torch.ones_like(turn), turn)


def pixels(length: int, rotated: int, columns: int = 3) -> tuple[Tensor, Tensor]:
    """Return those of the rows and of the columns of an image."""
    row, column = torch.arange(length) // columns, torch.arange(length) % columns
    return turns(length, rotated)[row], turns(length, rotated)[column]


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate as Meta's Llama does, in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(3).type_as(x)


def turned_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(3).type_as(x)


def turned_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in the opposite direction, as nanochat does."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos + b * sin, a * -sin + b * cos], -1).type_as(x)


def parts(x: Tensor, *turn: Tensor) -> Tensor:
    """Rotate as much of each head as the tables have, one after the other, from its end."""
    sizes = [2 * t.shape[-1] for t in turn]
    rest, *rotated = x.split([x.shape[-1] - sum(sizes), *sizes], -1)
    pairs = zip(rotated, turn, strict=True)
    return torch.cat([rest, *[turned(part, t[None, :, None]) for part, t in pairs]], -1)


def batched(batch: int, length: int) -> Tensor:
    return torch.stack([turns(length + i)[i:] for i in range(batch)])


def packed_halves(x: Tensor, table: Tensor) -> Tensor:
    """Rotate as torchtitan's `CosSinRoPE` does."""
    cos, sin = table.view(1, x.shape[1], 1, -1).split(HEAD, -1)
    a, b = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-b, a], -1) * sin).type_as(x)


def _side_by_side(length: int) -> Tensor:
    turn = torch.cat([angles(length)] * 2, -1)
    return torch.cat([turn.cos(), turn.sin()], -1)


def _heads_first(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.transpose(1, 2).float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(3).type_as(x).transpose(1, 2)


def _wide(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn[None, :, None]).flatten(3).to(x.dtype)


#: By name, a rotation of heads (B, S, H, E), and its tables for a batch of sequences.
ROTATIONS: dict[str, tuple[Callable[..., Tensor], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "(S, R/2)": (lambda x, t: turned(x, t[None, :, None]), lambda b, s: (turns(s),)),
    "(S, 1, R/2)": (turned, lambda b, s: (turns(s)[:, None],)),
    "(1, S, 1, R/2)": (turned, lambda b, s: (turns(s)[None, :, None],)),
    "(B, S, R/2)": (lambda x, t: turned(x, t[:, :, None]), lambda b, s: (batched(b, s),)),
    "(B, S, 1, R/2)": (turned, lambda b, s: (batched(b, s)[:, :, None],)),
    "heads before tokens": (_heads_first, lambda b, s: (turns(s),)),
    "a longer buffer": (
        lambda x, t: turned(x, t[: x.shape[1], None]), lambda b, s: (turns(LONGEST),),
    ),
    "complex128": (_wide, lambda b, s: (turns(s).to(torch.complex128),)),
    "polar": (
        lambda x, a: turned(x, torch.polar(torch.ones_like(a), a)[:, None]),
        lambda b, s: (angles(s),),
    ),
    "in the layer": (lambda x: turned(x, turns(x.shape[1])[:, None]), lambda b, s: ()),
    "the opposite turn": (
        lambda x, t: turned(x, t[:, None].conj()), lambda b, s: (turns(s),),
    ),
    "real pairs": (
        lambda x, t: turned(x, torch.view_as_complex(t)[:, None]),
        lambda b, s: (torch.view_as_real(turns(s)),),
    ),
    "real and imaginary parts": (
        lambda x, t: turned_pairs(x, t.real[:, None], t.imag[:, None]), lambda b, s: (turns(s),),
    ),
    "elements of pairs": (
        lambda x, t: turned_pairs(x, t[:, None, :, 0], t[:, None, :, 1]),
        lambda b, s: (torch.view_as_real(turns(s)),),
    ),
    "cosines and sines side by side": (packed_halves, lambda b, s: (_side_by_side(s),)),
    "halves, the opposite turn": (
        turned_halves, lambda b, s: (angles(s).cos()[:, None], angles(s).sin()[:, None]),
    ),
    "half of a head": (
        lambda x, t: torch.cat([turned(x[..., :4], t[:, None]), x[..., 4:]], -1),
        lambda b, s: (turns(s, 4),),
    ),
    "the last half of a head": (parts, lambda b, s: (turns(s, 4),)),
    "rows and columns": (
        lambda x, *t: turned(x, torch.cat(t, -1)[:, None]), lambda b, s: pixels(s, 4),
    ),
    "rows and columns one by one": (parts, lambda b, s: pixels(s, 4)),
    "three axes": (parts, lambda b, s: (*pixels(s, 2), turns(s, 4))),
}  # fmt: skip


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


class Rotating(nn.Module):
    """A decoder layer; two query heads share keys and values."""

    dropout = 0.0

    def __init__(self, rotate: Callable[..., Tensor]):
        super().__init__()
        self.rotate = rotate
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * HEAD) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 48, bias=False) for _ in range(2))
        self.down, self.drop = nn.Linear(48, WIDTH, bias=False), nn.Dropout(self.dropout)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x).unflatten(-1, (-1, HEAD)) for layer in (self.q, self.k, self.v))

    def rotated(self, q: Tensor, k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotate(q, *tables), self.rotate(k, *tables)

    def forward(
        self, x: Tensor, a: Tensor | None = None, b: Tensor | None = None, c: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.heads(self.norm1(x))
        q, k = self.rotated(q, k, *[t for t in (a, b, c) if t is not None])
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
        x = x + self.drop(self.o(y.transpose(1, 2).reshape(x.shape)))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Dropping(Rotating):
    dropout = 0.2


class Positions(Rotating):
    """A buffer of each layer, read at positions, as torchtitan's `ComplexRoPE`."""

    def __init__(self, rotate: Callable[..., Tensor]):
        super().__init__(rotate)
        self.register_buffer("cache", turns(LONGEST), persistent=False)

    def rotated(self, q: Tensor, k: Tensor, *positions: Tensor) -> tuple[Tensor, Tensor]:
        batch, length = q.shape[:2]
        if not positions:
            turn = self.cache[:length].view(1, length, 1, -1)
        else:
            (at,), table = positions, self.cache[None, :, None].expand(batch, -1, -1, -1)
            turn = table.gather(1, at.view(*at.shape, 1, 1).expand(-1, -1, 1, table.shape[-1]))
        return turned(q, turn), turned(k, turn)


class Groups(Rotating):
    """Heads that share keys lie side by side with these, as in torchtitan's `FusedQKVLinear`."""

    def __init__(self, rotate: Callable[..., Tensor]):
        super().__init__(rotate)
        del self.q, self.k, self.v
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        shared = HEADS // KV_HEADS
        groups = self.qkv(x).view(*x.shape[:2], -1, shared + 2, HEAD)
        split = torch.split(groups, [shared, 1, 1], -2)
        return tuple(t.reshape(*x.shape[:2], -1, HEAD).contiguous() for t in split)


class TwoTables(Rotating):
    """One for queries and one for keys, which may be equal."""

    def rotated(self, q: Tensor, k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotate(q, tables[0]), self.rotate(k, tables[1])


class Learned(Rotating):
    def __init__(self, rotate: Callable[..., Tensor]):
        super().__init__(rotate)
        self.speeds = nn.Parameter(30.0 ** -(torch.arange(HEAD // 2) / 4))

    def rotated(self, q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        turn = torch.outer(torch.arange(q.shape[1]).to(self.speeds), self.speeds)[:, None]
        return tuple(turned_pairs(t, turn.cos(), turn.sin()) for t in (q, k))


class NormedHeads(Rotating):
    def __init__(self, rotate: Callable[..., Tensor]):
        super().__init__(rotate)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD, 1e-6), nn.RMSNorm(HEAD, 1e-6)

    def rotated(self, q: Tensor, k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotated(self.q_norm(q), self.k_norm(k), *tables)


class Latent(Rotating):
    """DeepSeek's: keys and values from few latents, and a part of the keys that heads share."""

    def __init__(self, rotate: Callable[..., Tensor]):
        super().__init__(rotate)
        self.k, self.latent_norm = nn.Linear(WIDTH, 12 + 4, bias=False), nn.RMSNorm(12, 1e-6)
        self.v = nn.Linear(12, HEADS * (4 + 6), bias=False)
        self.o = nn.Linear(HEADS * 6, WIDTH, bias=False)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        y, turn = self.norm1(x), a[:, None]
        q, q_turned = self.q(y).unflatten(-1, (-1, HEAD)).split(4, -1)
        latent, k_turned = self.k(y).split([12, 4], -1)
        kv = self.v(self.latent_norm(latent)).unflatten(-1, (-1, 10))
        k, v = kv.split([4, 6], -1)
        q_turned, k_turned = turned(q_turned, turn), turned(k_turned[:, :, None], turn)
        q = torch.cat([q, q_turned], -1)
        k = torch.cat([k, k_turned.expand(-1, -1, HEADS, -1)], -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Nano(nn.Module):
    """A block of nanoGPT's fast variants: weightless norms, also of heads, and squared ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)
        self.mix = nn.Parameter(torch.tensor([0.7, 0.6]))
        turn = angles(LONGEST)
        for name, table in (("cos", turn.cos()), ("sin", turn.sin())):
            self.register_buffer(name, table, persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin = (t[None, : x.shape[1], None] for t in (self.cos, self.sin))
        return turned_halves(norm(x).float(), cos, sin).type_as(x)

    heads = Rotating.heads

    def value(self, v: Tensor, *_: Tensor) -> Tensor:
        return v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = norm(x)
        q, k, v = self.heads(y)
        q, k, v = self.rotated(q), self.rotated(k), self.value(v, y, other)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.relu(self.up(norm(x))).square())


class ValueEmbedding(Nano):
    def value(self, v: Tensor, x: Tensor, embedding: Tensor) -> Tensor:
        part = self.mix[0]
        return (1 - part) * v + part * embedding.view_as(v)


class PackedValueEmbedding(ValueEmbedding):
    def __init__(self) -> None:
        super().__init__()
        del self.q, self.k, self.v
        self.qkv = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 6)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        heads = F.linear(x, self.qkv.flatten(end_dim=1).type_as(x)).view(*x.shape[:2], -1, HEAD)
        return heads.chunk(3, -2)


class Unrotated(PackedValueEmbedding):
    def rotated(self, x: Tensor) -> Tensor:
        return x


class GatedValueEmbedding(Nano):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, HEADS, bias=False)

    def value(self, v: Tensor, x: Tensor, embedding: Tensor) -> Tensor:
        gate = 2 * torch.sigmoid(self.gate(x[..., :12]))
        return v + gate[..., None] * embedding.view_as(v)


class Skip(Nano):
    """U-Net: an earlier layer's result is added."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x + self.mix[0] * other)


class Mixed(Nano):
    """The embeddings are mixed into each layer's input."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(self.mix[0] * x + self.mix[1] * other)


class SoftCapped(Nano):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = 15 * torch.tanh(q @ k.transpose(-1, -2) * HEAD**-0.5 / 15)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


NANO = (
    Nano, ValueEmbedding, PackedValueEmbedding, Unrotated, GatedValueEmbedding, Skip, Mixed,
    SoftCapped,
)  # fmt: skip
