"""Small layers whose first call does not show what a later call computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from altered_layers import LONGEST, MLP, WIDTH, heads
from torch import Tensor, nn


class Layer(nn.Module):
    """x + an MLP of its norm; subclasses have another `branch`."""

    def __init__(self, index: int = 0):
        super().__init__()
        self.norm, self.mlp, self.act = nn.LayerNorm(WIDTH), MLP(), F.gelu
        self.set_up(index)

    def set_up(self, index: int) -> None:
        """For the attributes of subclasses."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp.down(self.act(self.mlp.up(x)))


# Masks that do nothing in the first batch.


class Multiplied(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) * mask[..., None].to(x.dtype)


class Scores(Layer):
    """Attention as Hugging Face's eager BERT computes it."""

    causal = False

    def set_up(self, index: int) -> None:
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("later", torch.full((LONGEST, LONGEST), -1e9).triu(1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (heads(t) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores, n = q @ k.transpose(-1, -2) * 0.5, x.shape[1]
        if self.causal:
            scores = scores + self.later[:n, :n]
        y = self.masked(scores, mask).softmax(-1) @ v
        return x + self.mlp(y.transpose(1, 2).reshape(x.shape))

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + mask


class FilledScores(Scores):
    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None, None, :] == 0, -1e9)


class KindScores(Scores):
    """Tokens of kind 2 are hidden; in the first batch all may be of kind 1."""

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None, None, :] == 2, -1e9)


class ScaledByPosition(Scores):
    """Rotated queries have a factor that is 1 at the first positions, as Ministral 3's."""

    def forward(self, x: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (heads(t) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (t * tables[0] + t.roll(2, -1) * self.signs * tables[1] for t in (q, k))
        scale = 1 + torch.log(1 + torch.floor(positions / 64))
        y = F.scaled_dot_product_attention(q * scale[:, None, :, None], k, v)
        return x + self.mlp(y.transpose(1, 2).reshape(x.shape))

    def set_up(self, index: int) -> None:
        super().set_up(index)
        self.register_buffer("signs", torch.tensor([-1.0, -1.0, 1.0, 1.0]))


class CausalScores(Scores):
    causal = True


# Clamps that are reached later.


class Clamped(Layer):
    def branch(self, x: Tensor) -> Tensor:
        return self.mlp.down(self.mlp.up(x).clamp(-8, 8))


# What two layers of a class may differ in.


class Scaled(Layer):
    """The MLP times what `read` finds in an attribute."""

    def __init__(self, value: Any, read: Callable[[Any], float]):
        super().__init__()
        self.value, self.read = value, read

    def branch(self, x: Tensor) -> Tensor:
        return self.read(self.value) * self.mlp(x)


class Options(NamedTuple):
    scale: float


class Half(Enum):
    NO = 0
    YES = 1


class Partial(Layer):
    def set_up(self, index: int) -> None:
        self.act = functools.partial(F.leaky_relu, negative_slope=0.1 + 0.8 * index)


class BoundMethod(Layer):
    def set_up(self, index: int) -> None:
        self.act = self.second if index else self.first

    def first(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def second(self, x: Tensor) -> Tensor:
        return F.silu(x)


class Closure(Layer):
    def set_up(self, index: int) -> None:
        scale = 1.0 + index
        self.act = lambda x: scale * F.relu(x)


class Function(Layer):
    def forward(self, x: Tensor, function) -> Tensor:
        return x + self.mlp.down(function(self.mlp.up(self.norm(x))))


class Factor(Layer):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x + self.mlp(self.norm(x)) * factor


class Cached(Layer):
    """A table of each length, of the parameters of its first call."""

    def set_up(self, index: int) -> None:
        self.cache, self.table = {}, nn.Linear(WIDTH, WIDTH)

    def branch(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in self.cache:
            with torch.no_grad():
                self.cache[n] = self.table(torch.linspace(-1, 1, n * WIDTH).view(n, -1).to(x))
        return self.mlp(x + self.cache[n])


class Written(Layer):
    """A tensor that is no buffer, written in place."""

    def set_up(self, index: int) -> None:
        self.seen = torch.zeros(LONGEST, WIDTH, dtype=torch.float64)

    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x + self.seen[: x.shape[1]].clone())
        self.seen[: x.shape[1]] = x.detach().mean(0)
        return y


class AuxiliaryInObject(Layer):
    def set_up(self, index: int) -> None:
        self.aux = SimpleNamespace()

    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        self.aux.loss = y.square().mean()
        return y


class AuxiliaryInArgument(Layer):
    """A list or a dict of the caller's, if any."""

    def forward(self, x: Tensor, aux: list | dict | None = None) -> Tensor:
        y = self.mlp(self.norm(x))
        if isinstance(aux, list):
            aux.append(y.square().mean())
        elif aux is not None:
            aux["loss"] = y.square().mean()
        return x + y


class DroppedPlanes(Layer):
    """Each token's row is a plane."""

    def set_up(self, index: int) -> None:
        self.drop = nn.Dropout2d(0.5)

    def branch(self, x: Tensor) -> Tensor:
        return self.drop(self.mlp(x).unflatten(-1, (4, -1))).flatten(-2)


class Meeting(nn.Module):
    """Runs a function when a layer comes here; does nothing to what it is given."""

    run = None

    def forward(self, x: Tensor) -> Tensor:
        if Meeting.run is not None:
            Meeting.run()
        return x


class Met(Layer):
    def set_up(self, index: int) -> None:
        self.meeting, self.drop = Meeting(), nn.Dropout(0.5)

    def branch(self, x: Tensor) -> Tensor:
        return self.drop(self.mlp(self.meeting(x)))


class FirstTokens(Layer):
    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y + 3 * y[:, : min(18, x.shape[1])].mean(1, keepdim=True)


class LongBranch(Layer):
    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y if x.shape[1] <= 300 else y - 3 * y.flip(1)


class BatchBranch(Layer):
    def branch(self, x: Tensor) -> Tensor:
        return -2 * self.mlp(x) if x.shape[0] > 4 else self.mlp(x)


class SignBranch(Layer):
    def set_up(self, index: int) -> None:
        self.alpha = nn.Parameter(torch.tensor([-1.0]))

    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x) * self.alpha
        return y if self.alpha > 0 else -20 * y


class MadeMask(Layer):
    """A mask that is a product."""

    def set_up(self, index: int) -> None:
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("places", 0.3 * torch.randn(LONGEST, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(t) for t in self.qkv(self.norm(x)).chunk(3, -1))
        places = self.places[: x.shape[1]]
        mask = (places @ places.t()).to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.mlp(y.transpose(1, 2).reshape(x.shape))


class Float32(Layer):
    """The MLP, and its norm, in float32 whatever autocast says."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x + self.mlp(self.norm(x.float()))


class GuardedFloat32(Layer):
    """As the `maybe_autocast` of transformers."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return x + self.mlp(self.norm(x.float()))
        return x + self.mlp(self.norm(x))


class Inside(Layer):
    """The layer is a submodule of another."""

    part = Float32

    def set_up(self, index: int) -> None:
        self.inner = self.part()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class GuardedInside(Inside):
    part = GuardedFloat32


# Submodules that are replayed as a whole.


class Router(nn.Module):
    """Two experts, each of the tokens that are sent to it."""

    def __init__(self):
        super().__init__()
        self.gate, self.temperature = nn.Linear(WIDTH, 2), 1.0
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        p = (self.gate(x) * self.temperature).softmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            sent = (p.argmax(-1) == i).nonzero(as_tuple=True)
            y[sent] = expert(x[sent]) * p[sent][:, i : i + 1]
        return y


class Routed(Layer):
    def set_up(self, index: int) -> None:
        self.router = Router()

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x) + self.router(x)


class Either(Router):
    """A flag chooses the expert of all tokens."""

    first = True

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        sent = (self.gate(x).argmax(-1) == 0).nonzero(as_tuple=True)
        y[sent] = self.experts[0 if self.first else 1](x[sent])
        return y


class RoutedEither(Routed):
    def set_up(self, index: int) -> None:
        self.router = Either()


class Cumulated(Layer):
    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x).cumsum(1)


class Division(Layer):
    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x) * (1 / (x.shape[1] // 16))


class TableOf16(Layer):
    def set_up(self, index: int) -> None:
        self.table = nn.Parameter(torch.randn(16, WIDTH))

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.table[: x.shape[1]])


class OfOneSize(Layer):
    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x.view(2, 16, WIDTH))


class PositionalOnly(Layer):
    def forward(self, x: Tensor, /, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class AnyArguments(Layer):
    def forward(self, *args: Tensor) -> Tensor:
        return super().forward(args[0])


class UnusedArguments(Layer):
    def forward(self, x: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return super().forward(x)


class InplaceReLU(Layer):
    def set_up(self, index: int) -> None:
        self.act = nn.ReLU(inplace=True)


# What may be read again at each call, or kept.


class Counting(Layer):
    def set_up(self, index: int) -> None:
        self.calls = 0

    def branch(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.mlp(x)


class ItemOfBuffer(Layer):
    def set_up(self, index: int) -> None:
        self.register_buffer("scale", torch.ones(()))

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.scale.item()


class Processor:
    """An object without attributes, of which each layer has its own, as in diffusers."""

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        return layer.mlp(x)


class Processed(Layer):
    def set_up(self, index: int) -> None:
        self.processor = Processor()

    def branch(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


class HeldByForward(Layer):
    """As accelerate replaces the forward of a submodule."""

    def set_up(self, index: int) -> None:
        forward = self.mlp.up.forward
        self.mlp.up.forward = lambda x: forward(x)


# Numbers that are all one in the first batch.


class Segments(Scores):
    """Tokens attend to those of their segment; the argument has no name of a mask's."""

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None, :, None] != mask[:, None, None, :], -1e9)


class Chosen(Layer):
    """Tokens of kind 1 have a gate, of which the first batch has none."""

    def set_up(self, index: int) -> None:
        self.gate = nn.Parameter(torch.linspace(0.5, 2.0, WIDTH))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        return x + torch.where((kinds == 1)[..., None], y * self.gate, y)


class Switched(Chosen):
    """The same by a buffer, which is off at first."""

    def set_up(self, index: int) -> None:
        super().set_up(index)
        self.register_buffer("on", torch.zeros(WIDTH, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        return x + torch.where(self.on, y * self.gate, y)


class Mixed(Layer):
    """A buffer that is zero at first mixes tokens later."""

    def set_up(self, index: int) -> None:
        self.register_buffer("on", torch.zeros(1))

    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y + self.on * torch.sin(y.flip(1))


class MixedByAttribute(Mixed):
    """The same by a tensor that is no buffer."""

    def set_up(self, index: int) -> None:
        self.on = torch.zeros(1)


class LimitedByOthers(Layer):
    """A limit that is not reached at first hides that it follows from all tokens."""

    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y / y.abs().max().clamp(min=8.0)


class NormBy(nn.Module):
    """Some norm of x, with a weight."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.run, self.weight = run, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight)


class ObjectGate(nn.Module):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        return torch.sin(x) * given.scale


class SwitchingGate(nn.Module):
    """A piece with a tensor that a model makes of its parameters and sets."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x * self.given


class GivenGate(Layer):
    def set_up(self, index: int) -> None:
        self.gate = SwitchingGate()

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(self.gate(x))


class MadeGates(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([GivenGate(), GivenGate()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.gate.given = self.make(x[:, :1])
            x = layer(x)
        return x


class SubmoduleWithObject(Layer):
    """It reads a tensor of an object."""

    def set_up(self, index: int) -> None:
        self.gate = ObjectGate()

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return x + self.mlp(self.gate(self.norm(x), given))


class HalfBranch(Layer):
    """Operations of their own for 16 bits."""

    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y.clamp(-2.0, 2.0) if y.dtype == torch.bfloat16 else y


# Numbers of the layer's module and class, of arrays, slots and other objects.

SCALE = 1.0


class GlobalScale(Layer):
    def branch(self, x: Tensor) -> Tensor:
        return SCALE * self.mlp(x)


class ClassScale(Layer):
    scale = 1.0

    def branch(self, x: Tensor) -> Tensor:
        return self.scale * self.mlp(x)


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale: float):
        self.scale = scale


class Detached(Layer):
    """Parameters without a gradient."""

    def set_up(self, index: int) -> None:
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x).detach() * self.gate


class NormedHeads(Scores):
    """Heads of length 1, by `Tensor.norm`."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(t) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, scale=4.0)
        return x + self.mlp(y.transpose(1, 2).reshape(x.shape))


class NamedDropout(Layer):
    """A piece that has the name of an operation."""

    def set_up(self, index: int) -> None:
        self.dropout, self.gate = SwitchingGate(), nn.Linear(WIDTH, WIDTH)
        self.dropout.given = torch.ones(WIDTH)

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(self.dropout(x)) * F.silu(self.dropout(self.gate(x)))


class Skipped(Layer):
    """A generator of the layer's own chooses whether it does something."""

    def __init__(self, generator: Any, draw: Callable[[Any], float]):
        super().__init__()
        self.generator, self.draw = generator, draw

    def branch(self, x: Tensor) -> Tensor:
        return self.mlp(x) * float(self.draw(self.generator) < 0.5)


class DroppedInPlace(Layer):
    """The result of dropout is not used: it is in place."""

    def branch(self, x: Tensor) -> Tensor:
        y = self.mlp(x) * 1.0
        F.dropout(y, 0.5, self.training, inplace=True)
        return y


class Result(dict):
    __getattr__ = dict.__getitem__


class Results(Layer):
    """The result is what `make` makes of it."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]):
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x, x + self.mlp(self.norm(x)))


@dataclass
class Notes:
    """What a layer returns next to its result."""

    scale: float
    hidden: Tensor | None = None
    pair: tuple[Tensor, ...] | None = None


class Noted(Layer):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Notes]:
        h = self.norm(x)
        notes = Notes(2.0, pair=(h, h.square()))
        notes.hidden = torch.sin(self.mlp.up(h))
        return x + self.mlp(h if gate is None else h * gate), notes


class NotedInItself(Layer):
    def set_up(self, index: int) -> None:
        self.notes = Notes(2.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Notes]:
        return x + self.mlp(self.norm(x)), self.notes


class Weights(Layer):
    """It returns the weights of attention."""

    def set_up(self, index: int) -> None:
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        y, weights = self.attention(h, h, h)
        return x + self.mlp(y), weights


class SameArgument(Layer):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) + (0.0 if other is x else other.mean(1, keepdim=True))


class Called(Layer):
    """It calls a function among its arguments, or takes the next number of an iterator."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        y = self.mlp(self.norm(x))
        if callable(given):
            given(y.square().mean())
            return x + y
        return x + next(given) * y


class UnreadMemory(Layer):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))
