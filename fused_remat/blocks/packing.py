"""Steps that pack an activation into a storage format, and steps that read it there.

`blocks.in_formats` puts them into a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.blocks.attention import Attention, CrossAttention
from fused_remat.blocks.frame import Frame
from fused_remat.blocks.nodes import Node, Shapes
from fused_remat.blocks.pointwise import Gated, Pointwise
from fused_remat.formats import (
    FORMATS,
    Format,
    Loaded,
    LoadedHeads,
    Packed,
    PackedHeads,
    split_name,
)
from fused_remat.steps.activation import activation_bwd
from fused_remat.steps.attention import attention_bwd
from fused_remat.steps.attention_library import attention_key
from fused_remat.steps.storage import Packing, dequantize, quantize


@dataclass(frozen=True, kw_only=True)
class Pack(Node):
    """name = codes of the activation `x` in a format; the scales, if it has any, are a statistic.

    `name` is "x:format". `site` is that of stochastic rounding.
    """

    x: str
    site: int
    keepable: ClassVar[bool] = False
    stats_follow: ClassVar[bool] = True

    @property
    def stored(self) -> str:
        return split_name(self.name)[1]

    @property
    def format(self) -> Format:
        return FORMATS[self.stored]

    @property
    def packs(self) -> str:
        return self.x

    @property
    def params(self) -> tuple[str, ...]:
        return ("seed",) if self.format.seeded else ()

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return (f"{self.name}.scale",) if self.format.block else ()

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)  # not an input: no gradient goes this way

    @property
    def follows(self) -> str:
        return self.x

    @property
    def dtype(self) -> torch.dtype:
        return self.format.dtype

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return self.format.code_width(widths[self.x])

    def stat_width(self, width: int) -> int:
        return self.format.scale_width(width)

    def packing(self, f: Frame) -> Packing:
        """What a routine that packs is told."""
        if not self.format.seeded:
            return Packing(self.stored)
        rows, run = f.rows_of(self.x), f.run
        key, row0 = run.site_key(self.site), f.first_row(self.x)
        return Packing(self.stored, random.Uniform(key, row0, rows, run.widths[self.x]))

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        self.put(f, f.ops[quantize](f[self.x], self.packing(f)))

    def put(self, f: Frame, parts: Iterable[Tensor]) -> None:
        """Put what a routine has packed into the frame."""
        for name, part in zip(self.makes, parts, strict=True):
            f.put(name, part)

    def load(self, f: Frame) -> Packed:
        """The activation as it is stored."""
        parts = tuple([f[name] for name in self.makes])
        return Packed(self.stored, parts, f.run.widths[self.x], f.dtype_of(self.x))

    def sample(self, f: Frame) -> Packed:
        """As `load`, of no memory and no values: to choose a routine by where there are none."""
        run, rows = f.run, f.rows_of(self.x)
        parts = tuple([
            torch.empty((1, 1), dtype=f.dtype_of(name), device=run.device).expand(
                rows, run.widths[name]
            )
            for name in self.makes
        ])  # fmt: skip
        return Packed(self.stored, parts, run.widths[self.x], f.dtype_of(self.x))


@dataclass(frozen=True, kw_only=True)
class Unpack(Node):
    """The activation `name` from what `pack` made of it, whole."""

    pack: Pack

    @property
    def unpacks(self) -> tuple[str, ...]:
        return (self.pack.name,)

    @property
    def undoes(self) -> bool:
        return False

    @property
    def inexact(self) -> bool:
        return self.pack.format.lossy

    @property
    def reads(self) -> tuple[str, ...]:
        return self.pack.makes

    @property
    def label(self) -> str:
        return f"{self.name} from {self.pack.name}"

    def backward_choice(self, f: Frame) -> tuple[Callable[..., Any], Any]:
        return dequantize, self.pack.stored

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        f.put(self.name, f.ops[dequantize](self.pack.load(f)))


class _Loads(Node):
    """Of a step that loads inputs packed; mixed in before the step's own class."""

    pack: tuple[Pack, ...]

    @property
    def unpacks(self) -> tuple[str, ...]:
        return tuple([pack.name for pack in self.pack])

    @property
    def rebuilds(self) -> bool:
        return not any(pack.format.signs for pack in self.pack)

    @property
    def inexact(self) -> bool:
        return any(pack.format.lossy for pack in self.pack)

    @property
    def label(self) -> str:
        return f"{self.name} from {' and '.join(self.unpacks)}"

    @property
    def reads(self) -> tuple[str, ...]:
        return self._packed((*self.inputs, *self.masks))

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return self._packed(super().asks(wants))

    def _packed(self, names: Iterable[str]) -> tuple[str, ...]:
        packs = {pack.x: pack.makes for pack in self.pack}
        return tuple([part for name in names for part in packs.get(name, (name,))])

    def backward_choice(self, f: Frame) -> tuple[Callable[..., Any], Any]:
        formats = {pack.x: pack.stored for pack in self.pack}
        stored = tuple([formats.get(name, "") for name in self.inputs])
        first = self.pack[0].x
        return activation_bwd, (getattr(self, "act", ""), f.dtype_of(first), f.run.device, stored)

    def load(self, f: Frame, name: str) -> Loaded:
        for pack in self.pack:
            if pack.x == name:
                return pack.load(f)
        return f[name]


@dataclass(frozen=True, kw_only=True)
class PackedPointwise(_Loads, Pointwise):
    """`Pointwise` whose input is packed."""

    pack: tuple[Pack, ...]


@dataclass(frozen=True, kw_only=True)
class PackedGated(_Loads, Gated):
    """`Gated` of which one input is packed, or both."""

    pack: tuple[Pack, ...]


class _LoadsHeads(_Loads, Attention):
    """Of an attention whose backward loads packed heads; its forward is another's, who unpacks."""

    @property
    def rebuilds(self) -> bool:
        return False

    def backward_choice(self, f: Frame) -> tuple[Callable[..., Any], Any]:
        samples = Frame(f.run, f.seqs, (f.lo, f.lo + f.rows))
        for pack in self.pack:
            sample = pack.sample(f)
            samples.update(zip(pack.makes, sample.parts, strict=True))
        for name in self.inputs:
            samples.setdefault(name, f.empty(name))
        q, k, v = self._loaded_heads(samples)
        return attention_bwd, attention_key(q, v, self.call(samples, q, k, ()), k)

    def _of(self, f: Frame, name: str, *heads: int) -> list[LoadedHeads]:
        """Side by side in the activation `name`, these numbers of heads."""
        batch, first = f.seqs[1] - f.seqs[0], 0
        found: list[LoadedHeads] = []
        x = self.load(f, name)
        width = x.shape[1] // sum(heads)
        for count in heads:
            if isinstance(x, Packed):
                found.append(PackedHeads(x, batch, first, count, width))
            else:
                columns = x[:, first : first + count * width].view(batch, -1, count, width)
                found.append(columns.transpose(1, 2))
            first += count * width
        return found


@dataclass(frozen=True, kw_only=True)
class PackedAttention(_LoadsHeads):
    """`Attention` whose heads are packed."""

    pack: tuple[Pack, ...]

    def _loaded_heads(self, f: Frame) -> tuple[LoadedHeads, LoadedHeads, LoadedHeads]:
        spec = self.spec
        q, k, v = self._of(f, self.qkv, spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        return q, k, v


@dataclass(frozen=True, kw_only=True)
class PackedCrossAttention(_LoadsHeads, CrossAttention):
    """`CrossAttention` of which queries, keys and values, or either, are packed."""

    pack: tuple[Pack, ...]

    def _loaded_heads(self, f: Frame) -> tuple[LoadedHeads, LoadedHeads, LoadedHeads]:
        (q,) = self._of(f, self.q, self.spec.num_heads)
        k, v = self._of(f, self.kv, self.spec.num_heads, self.spec.num_heads)
        return q, k, v
