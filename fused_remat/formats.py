"""Storage formats of kept activations: how each quantizes and dequantizes.

A kept activation is stored as it is ("native"), or in one of `FORMATS`: as codes and, if the format
has blocks, one scale per block of a row. Quantizing never changes what forward computes: what a
lossy format loses, only backward misses.

An 8-bit code has a sign and a level m. With L the largest magnitude of a block, step = L / LEVELS,

    code = sign(x) * m, m in 1..127, and 0 for x = 0
    x ~ sign(code) * (m - 1 + OFFSET) * step

so a value that is not 0 keeps its sign (ReLU's derivative is exact), and 0 stays 0. The nearest
level is m = floor(|x| / step + 1.5 - OFFSET). Rounded stochastically, m is
1 + floor(max(|x| / step - OFFSET, 0) + u) with u uniform in [0, 1): its mean is exact wherever
|x| >= OFFSET * step. Dequantized values are rounded to the activation's dtype: the mean is exact to
within that rounding, and in float16 the smallest level of a block of subnormal numbers may become
0. A block with a NaN or an infinity is NaN; a block whose largest magnitude is below TINY is 0.
Source: absmax blocks as in Dettmers et al. 2022 (arXiv 2110.02861), with the levels shifted by
OFFSET.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.random import Uniform

#: The format of a name without one: stored as it is.
NATIVE = "native"

#: Elements of a row that share a scale, which takes a sixteenth of the bytes of their codes. With
#: 128, the error of a key bias's gradient was over 2.5 times bf16's own.
BLOCK = 64
#: The smallest level, in steps, and the largest.
OFFSET = 0.0625
LEVELS = 126.0 + OFFSET
#: A block whose largest magnitude is below this becomes 0.
TINY = 1e-30
# The largest number of float8_e4m3fn, and its smallest above 0.
_FP8_MAX, _FP8_LEAST = 448.0, 2.0**-9

# Elements that are quantized or dequantized at a time: temporaries stay in a CPU's cache.
_CACHED, _DEVICE = 1 << 18, 1 << 24

#: The codes; and the scales, if the format has blocks.
Parts = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A storage format: a row of `FORMATS`.

    Attributes:
        pack: pack(x, uniform) quantizes x (T, W) to its parts. `uniform` holds random numbers
            (T, W) if the format is `seeded`, else it is None.
        unpack: unpack(parts, W) returns x in float32, or in float64 if the scales are float64.
        dtype: of the codes.
        per_code: elements per code.
        block: elements of a row that share a scale; 0 for no scales. Scales are float32, or float64
            in a float64 block.
        lossy: whether dequantized values may differ from the original ones.
        signs: whether only signs are kept, for ReLU's derivative: 0 where x <= 0, else 1.
        seeded: whether rounding draws random numbers.
    """

    pack: Callable[[Tensor, Tensor | None], Parts]
    unpack: Callable[[Parts, int], Tensor]
    dtype: torch.dtype
    per_code: int = 1
    block: int = BLOCK
    lossy: bool = True
    signs: bool = False
    seeded: bool = False

    def code_width(self, width: int) -> int:
        """Codes of a row of `width` elements."""
        return -(-width // self.per_code)

    def scale_width(self, width: int) -> int:
        """Scales of a row of `width` elements."""
        return -(-width // self.block) if self.block else 0

    def nbytes(self, rows: int, width: int, itemsize: int = 2) -> int:
        """Bytes of a matrix (rows, width) of elements of `itemsize` bytes, scales included.

        >>> FORMATS["int8"].nbytes(10, 256)
        2720
        """
        row = self.code_width(width) * self.dtype.itemsize
        return rows * (row + self.scale_width(width) * max(itemsize, 4))


def _blocks(x: Tensor) -> Tensor:
    """(T, W) as (T, W / BLOCK, BLOCK); rows are padded with zeros to whole blocks."""
    if x.shape[1] % BLOCK:
        x = F.pad(x, (0, -x.shape[1] % BLOCK))
    return x.reshape(x.shape[0], -1, BLOCK)


def _scales(blocks: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """step and 1 / step of each block; NaN and 0 if an element of the block is not finite."""
    largest = blocks.abs().amax(-1, keepdim=True)
    finite = largest <= torch.finfo(largest.dtype).max
    largest = torch.where(largest < TINY, 0.0, largest)
    inverse = torch.where(finite & (largest > 0.0), top / largest, 0.0)
    return torch.where(finite, largest * (1.0 / top), torch.nan), inverse  # the same on any device


def _quantize_int8(x: Tensor, uniform: Tensor | None) -> Parts:
    blocks = _blocks(x.to(torch.promote_types(x.dtype, torch.float32)))
    step, inverse = _scales(blocks, LEVELS)
    sign = blocks.sign()
    if uniform is None:
        level = (blocks * inverse).add_(sign, alpha=1.5 - OFFSET)  # to 127.5; cut off below
    else:
        level = (blocks * inverse).abs_().sub_(OFFSET).clamp_(min=0.0)
        level = level.add_(_blocks(uniform)).floor_().add_(1.0).clamp_(max=127.0).mul_(sign)
    codes = level.nan_to_num_(0.0).to(torch.int8)  # a NaN's code must not depend on the device
    return codes.flatten(1)[:, : x.shape[1]], step.squeeze(-1)


def _dequantize_int8(parts: Parts, width: int) -> Tensor:
    codes, step = parts
    x = _blocks(codes.to(step.dtype))
    x = x.sub(x.sign(), alpha=1.0 - OFFSET).mul_(step.unsqueeze(-1))
    return x.flatten(1)[:, :width]


def _quantize_fp8(x: Tensor, uniform: Tensor | None) -> Parts:
    blocks = _blocks(x.to(torch.promote_types(x.dtype, torch.float32)))
    scale, inverse = _scales(blocks, _FP8_MAX)
    level = (blocks * inverse).abs_().clamp_(_FP8_LEAST, _FP8_MAX).mul_(blocks.sign())
    codes = level.nan_to_num_(0.0).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[1]], scale.squeeze(-1)


def _dequantize_fp8(parts: Parts, width: int) -> Tensor:
    codes, scale = parts
    return _blocks(codes.to(scale.dtype)).mul(scale.unsqueeze(-1)).flatten(1)[:, :width]


def _quantize_sign(x: Tensor, uniform: Tensor | None) -> Parts:
    bits = (x <= 0).logical_not_()  # 1 for NaN too: ReLU's derivative lets it through
    if x.shape[1] % 8:
        bits = F.pad(bits, (0, -x.shape[1] % 8))
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    shifted = bits.to(torch.uint8).unflatten(1, (-1, 8)).bitwise_left_shift_(places)
    return (shifted.sum(-1, dtype=torch.uint8),)


def _dequantize_sign(parts: Parts, width: int) -> Tensor:
    (codes,) = parts
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    bits = codes.unsqueeze(-1).bitwise_right_shift(places).bitwise_and_(1)
    return bits.flatten(1)[:, :width].float()


class _Rows(dict[str, Format]):
    """A table whose rows cannot be replaced, since cached and compiled graphs refer to them."""

    def __init__(self, rows: dict[str, Format]) -> None:
        super().__init__(rows)
        self._known = dict(rows)

    def __setitem__(self, name: str, row: Format) -> None:
        if not name or ":" in name or name == NATIVE:
            raise ValueError(
                f"invalid name of a format: {name!r}; it must not be empty, be {NATIVE!r}, or "
                "contain a colon"
            )
        if self._known.setdefault(name, row) != row:
            raise ValueError(f"{name!r} is or was the name of another format: choose a new name")
        super().__setitem__(name, row)

    def update(self, *others: Any, **rows: Format) -> None:
        for name, row in dict(*others, **rows).items():
            self[name] = row


_INT8 = Format(pack=_quantize_int8, unpack=_dequantize_int8, dtype=torch.int8)
#: Formats by name, as in `Policy(save={activation: format})`. A new format is a new row.
FORMATS: dict[str, Format] = _Rows({
    "int8": _INT8,
    "int8_stochastic": replace(_INT8, seeded=True),
    "fp8_e4m3": Format(pack=_quantize_fp8, unpack=_dequantize_fp8, dtype=torch.float8_e4m3fn),
    "sign": Format(
        pack=_quantize_sign, unpack=_dequantize_sign, dtype=torch.uint8, per_code=8, block=0,
        lossy=False, signs=True,
    ),
})  # fmt: skip


def split_name(name: str) -> tuple[str, str]:
    """The activation and the format of a kept name.

    >>> split_name("qkv:int8"), split_name("attn")
    (('qkv', 'int8'), ('attn', 'native'))
    """
    base, _, stored = name.partition(":")
    return base, stored or NATIVE


def spans(rows: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Start and stop of runs of a few rows."""
    step = max(1, (_CACHED if device.type == "cpu" else _DEVICE) // max(width, 1))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def quantize(x: Tensor, stored: str, uniform: Uniform | None = None) -> Parts:
    """`x` in the format `stored`, computed by ATen operations on a few rows at a time.

    Shapes: x (T, W); returns codes (T, code_width(W)) and, if the format has blocks, scales
        (T, scale_width(W)).
    Raises: KeyError for an unknown format; ValueError without `uniform` for a seeded one.

    >>> codes, scales = quantize(torch.tensor([[0.0, 0.5, -2.0]]), "int8")
    >>> codes, scales.shape
    (tensor([[   0,   32, -127]], dtype=torch.int8), torch.Size([1, 1]))
    """
    row = FORMATS[stored]
    if row.seeded and uniform is None:
        raise ValueError(f"the format {stored!r} rounds stochastically: pass uniform=")
    rows, width = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    parts: Parts = (torch.empty((rows, row.code_width(width)), dtype=row.dtype, device=x.device),)
    if row.block:
        scale = torch.empty((rows, row.scale_width(width)), dtype=wide, device=x.device)
        parts += (scale,)
    for first, last in spans(rows, width, x.device):
        drawn = None
        if row.seeded and uniform is not None:
            drawn = uniform.of_rows(first, last - first).tensor()
        made = row.pack(x[first:last], drawn)
        if not isinstance(made, tuple) or len(made) != len(parts):
            raise ValueError(
                f"pack of the format {stored!r} must return a tuple of "
                f"{'codes and scales' if row.block else 'codes alone'}, since block={row.block}"
            )
        for whole, part in zip(parts, made, strict=True):
            whole[first:last].copy_(part)
    return parts


@dataclass(eq=False, slots=True)
class Quantized:
    """An activation in its storage format.

    Attributes:
        stored: the name of the format.
        parts: codes; and scales, if the format has blocks.
        width, dtype: of the activation.

    >>> x = torch.tensor([[0.0, 0.5, -2.0]])
    >>> Quantized("int8", quantize(x, "int8"), 3, torch.float32).tensor()
    tensor([[ 0.0000,  0.4928, -2.0000]])
    """

    stored: str
    parts: Parts
    width: int
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.parts[0].shape[0], self.width))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def rows(self, first: int, last: int) -> Tensor:
        """Rows from `first` to `last`, dequantized: a new tensor in `dtype`."""
        parts = tuple([part[first:last] for part in self.parts])
        return FORMATS[self.stored].unpack(parts, self.width).to(self.dtype)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Start and stop of runs of a few rows, to be dequantized one after the other."""
        rows, width = self.shape
        return spans(rows, width, self.device)

    def tensor(self) -> Tensor:
        """All rows, dequantized: a new tensor (T, width) in `dtype`."""
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for first, last in self.spans():
            x[first:last].copy_(self.rows(first, last))
        return x


#: A matrix, or one in its storage format, for an operation that dequantizes what it reads.
Loaded = Tensor | Quantized


@dataclass(eq=False, slots=True)
class QuantizedHeads:
    """Heads (B, H, S, E) that lie side by side in a quantized matrix (B*S, W).

    Attributes:
        whole: the matrix.
        batch, first, num_heads, width: B, the first column, H, E.
    """

    whole: Quantized
    batch: int
    first: int
    num_heads: int
    width: int

    @property
    def shape(self) -> torch.Size:
        rows = self.whole.shape[0]
        return torch.Size((self.batch, self.num_heads, rows // self.batch, self.width))

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def of(self, matrix: Tensor) -> Tensor:
        """These heads of a matrix (B*S, W), as a view."""
        columns = matrix.unflatten(0, (self.batch, -1))
        columns = columns[..., self.first : self.first + self.num_heads * self.width]
        heads: Tensor = columns.unflatten(-1, (self.num_heads, self.width)).transpose(1, 2)
        return heads


#: Heads (B, H, S, E), or ones in their storage format.
LoadedHeads = Tensor | QuantizedHeads
