"""Formats in which kept activations are stored: a row each, how to pack and how to unpack.

A kept activation is native, stored as it is, or in one of `FORMATS`: its codes, and where the
format has blocks, a scale for each block of a row. Packing never changes what forward computes;
what a lossy format loses is lost for backward alone.

8-bit codes have a sign and a level. With L the largest magnitude of a block, step = L / LEVELS,

    code = sign(x) * m, m in 1..127     x = 0: 0
    x ~ sign(code) * (m - 1 + OFFSET) * step

so a value that is not 0 keeps its sign (ReLU's derivative is exact) and 0 stays 0. m is
floor(|x| / step + 1.5 - OFFSET), the nearest level; rounded stochastically
1 + floor(max(|x| / step - OFFSET, 0) + u), u uniform in [0, 1), whose mean is x wherever
|x| >= OFFSET * step. What is unpacked is rounded to the activation's dtype, as anything is: the
mean is right to within that rounding, and in float16 the smallest level of a block of subnormal
numbers may become 0. A block that has a NaN or an infinity is NaN; one whose largest magnitude is
below TINY is 0. Source: absmax blocks as in Dettmers et al. 2022 (arXiv 2110.02861), with the
levels shifted by OFFSET.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.random import Uniform

#: What a name is stored in if nothing else is said: as it is.
NATIVE = "native"

#: Elements of a row that share a scale, which takes a sixteenth of their codes' bytes. In a
#: trial with 128 the gradient of a key's bias was off by over 2.5 times bf16's own error.
BLOCK = 64
#: The smallest level, in steps, and the largest.
OFFSET = 0.0625
LEVELS = 126.0 + OFFSET
#: A block whose largest magnitude is below this is 0.
TINY = 1e-30
#: The largest number of float8_e4m3fn, and its smallest above 0.
_FP8_MAX, _FP8_LEAST = 448.0, 2.0**-9

# Elements that are packed or unpacked at a time: temporaries stay in a CPU's cache.
_CACHED, _DEVICE = 1 << 18, 1 << 24

#: The codes, and the scales if the format has blocks.
Parts = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A storage format: a row of `FORMATS`.

    Attributes:
        pack: x (T, W) and, if `seeded`, uniform numbers (T, W), to its parts.
        unpack: parts and W to x, float32 (float64 from float64 scales).
        dtype: of the codes.
        per_code: how many elements a code holds.
        block: how many elements of a row share a scale; 0: there are no scales. A scale is float32,
            or float64 in a float64 block.
        lossy: whether what is unpacked may differ from what was packed.
        signs: whether only the sign is kept, 1 where not x <= 0, else 0: for ReLU's derivative.
        seeded: whether `pack` draws random numbers.
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
        """Elements of a row of codes, of `width` elements."""
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
    """(T, W) as (T, W / BLOCK, BLOCK), with zeros at the end of rows that are not whole blocks."""
    if x.shape[1] % BLOCK:
        x = F.pad(x, (0, -x.shape[1] % BLOCK))
    return x.reshape(x.shape[0], -1, BLOCK)


def _scales(blocks: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """The step of each block, NaN where one element is not finite, and 1 / step, then 0."""
    largest = blocks.abs().amax(-1, keepdim=True)
    finite = largest <= torch.finfo(largest.dtype).max
    largest = torch.where(largest < TINY, 0.0, largest)
    inverse = torch.where(finite & (largest > 0.0), top / largest, 0.0)
    return torch.where(finite, largest * (1.0 / top), torch.nan), inverse  # the same on any device


def _pack_int8(x: Tensor, uniform: Tensor | None) -> Parts:
    blocks = _blocks(x.to(torch.promote_types(x.dtype, torch.float32)))
    step, inverse = _scales(blocks, LEVELS)
    sign = blocks.sign()
    if uniform is None:
        level = (blocks * inverse).add_(sign, alpha=1.5 - OFFSET)  # to 127.5; cut off below
    else:
        level = (blocks * inverse).abs_().sub_(OFFSET).clamp_(min=0.0)
        level = level.add_(_blocks(uniform)).floor_().add_(1.0).clamp_(max=127.0).mul_(sign)
    codes = level.nan_to_num_(0.0).to(torch.int8)  # of what is not finite always the same
    return codes.flatten(1)[:, : x.shape[1]], step.squeeze(-1)


def _unpack_int8(parts: Parts, width: int) -> Tensor:
    codes, step = parts
    x = _blocks(codes.to(step.dtype))
    x = x.sub(x.sign(), alpha=1.0 - OFFSET).mul_(step.unsqueeze(-1))
    return x.flatten(1)[:, :width]


def _pack_fp8(x: Tensor, uniform: Tensor | None) -> Parts:
    blocks = _blocks(x.to(torch.promote_types(x.dtype, torch.float32)))
    scale, inverse = _scales(blocks, _FP8_MAX)
    level = (blocks * inverse).abs_().clamp_(_FP8_LEAST, _FP8_MAX).mul_(blocks.sign())
    codes = level.nan_to_num_(0.0).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[1]], scale.squeeze(-1)


def _unpack_fp8(parts: Parts, width: int) -> Tensor:
    codes, scale = parts
    return _blocks(codes.to(scale.dtype)).mul(scale.unsqueeze(-1)).flatten(1)[:, :width]


def _pack_sign(x: Tensor, uniform: Tensor | None) -> Parts:
    bits = (x <= 0).logical_not_()  # of a NaN too, which ReLU's derivative lets through
    if x.shape[1] % 8:
        bits = F.pad(bits, (0, -x.shape[1] % 8))
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    shifted = bits.to(torch.uint8).unflatten(1, (-1, 8)).bitwise_left_shift_(places)
    return (shifted.sum(-1, dtype=torch.uint8),)


def _unpack_sign(parts: Parts, width: int) -> Tensor:
    (codes,) = parts
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    bits = codes.unsqueeze(-1).bitwise_right_shift(places).bitwise_and_(1)
    return bits.flatten(1)[:, :width].float()


class _Rows(dict[str, Format]):
    """A table whose rows cannot be replaced: graphs that name them are cached, and compiled.

    Rows are set one by one.
    """

    def __init__(self, rows: dict[str, Format]) -> None:
        super().__init__(rows)
        self._known = dict(rows)

    def __setitem__(self, name: str, row: Format) -> None:
        if not name or ":" in name or name == NATIVE:
            raise ValueError(f"a format's name is not empty, {NATIVE!r} or with a colon: {name!r}")
        if self._known.setdefault(name, row) != row:
            raise ValueError(f"there is, or was, another format {name!r}: give this one a new name")
        super().__setitem__(name, row)

    def update(self, *others: Any, **rows: Format) -> None:
        for name, row in dict(*others, **rows).items():
            self[name] = row


#: name -> format. A new one is a row; the names are those of `Policy(save={name: format})`.
FORMATS: dict[str, Format] = _Rows({
    "int8": Format(pack=_pack_int8, unpack=_unpack_int8, dtype=torch.int8),
    "int8_stochastic": Format(
        pack=_pack_int8, unpack=_unpack_int8, dtype=torch.int8, seeded=True
    ),
    "fp8_e4m3": Format(pack=_pack_fp8, unpack=_unpack_fp8, dtype=torch.float8_e4m3fn),
    "sign": Format(
        pack=_pack_sign, unpack=_unpack_sign, dtype=torch.uint8, per_code=8, block=0, lossy=False,
        signs=True,
    ),
})  # fmt: skip


def split_name(name: str) -> tuple[str, str]:
    """A kept name, as "qkv:int8", and its format.

    >>> split_name("qkv:int8"), split_name("attn")
    (('qkv', 'int8'), ('attn', 'native'))
    """
    base, _, stored = name.partition(":")
    return base, stored or NATIVE


def _spans(rows: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    step = max(1, (_CACHED if device.type == "cpu" else _DEVICE) // max(width, 1))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def pack(x: Tensor, stored: str, uniform: Uniform | None = None) -> Parts:
    """`x` in the format `stored`, in ATen operations on a few rows at a time.

    Shapes: x (T, W); returns codes (T, code_width(W)) and, if it has blocks, scales
        (T, scale_width(W)).
    Raises: KeyError for a format that is none; ValueError without `uniform` where it is seeded.

    >>> codes, scales = pack(torch.tensor([[0.0, 0.5, -2.0]]), "int8")
    >>> codes, scales.shape
    (tensor([[   0,   32, -127]], dtype=torch.int8), torch.Size([1, 1]))
    """
    row = FORMATS[stored]
    if row.seeded and uniform is None:
        raise ValueError(f"the format {stored!r} is rounded stochastically: pass uniform=")
    rows, width = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    parts: Parts = (torch.empty((rows, row.code_width(width)), dtype=row.dtype, device=x.device),)
    if row.block:
        scale = torch.empty((rows, row.scale_width(width)), dtype=wide, device=x.device)
        parts += (scale,)
    for first, last in _spans(rows, width, x.device):
        drawn = None
        if row.seeded and uniform is not None:
            drawn = uniform.of_rows(first, last - first).tensor()
        made = row.pack(x[first:last], drawn)
        if not isinstance(made, tuple) or len(made) != len(parts):
            raise ValueError(
                f"the format {stored!r} has block={row.block}: its pack must return a tuple of "
                f"{'codes and scales' if row.block else 'codes alone'}"
            )
        for whole, part in zip(parts, made, strict=True):
            whole[first:last].copy_(part)
    return parts


@dataclass(eq=False, slots=True)
class Quantized:
    """An activation as it is stored; a routine unpacks what it reads, where it reads it.

    Attributes:
        stored: the name of the format.
        parts: codes, and scales if the format has blocks.
        width, dtype: of the activation.

    >>> x = torch.tensor([[0.0, 0.5, -2.0]])
    >>> Quantized("int8", pack(x, "int8"), 3, torch.float32).tensor()
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
        """Rows from first to last, unpacked: a new tensor in `dtype`."""
        parts = tuple([part[first:last] for part in self.parts])
        return FORMATS[self.stored].unpack(parts, self.width).to(self.dtype)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Runs of a few rows, first and last, to unpack one after the other."""
        rows, width = self.shape
        return _spans(rows, width, self.device)

    def tensor(self) -> Tensor:
        """The whole, unpacked: a new tensor (T, width) in `dtype`."""
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for first, last in self.spans():
            x[first:last].copy_(self.rows(first, last))
        return x


#: What a routine that loads elements itself is given: a matrix, or one as it is stored.
Loaded = Tensor | Quantized


@dataclass(eq=False, slots=True)
class QuantizedHeads:
    """Heads (B, H, S, E) of a packed matrix (B*S, W): columns from `first` on, side by side.

    Attributes:
        whole: the matrix.
        batch, first, nhead, width: B, the first column, H, E.
    """

    whole: Quantized
    batch: int
    first: int
    nhead: int
    width: int

    @property
    def shape(self) -> torch.Size:
        rows = self.whole.shape[0]
        return torch.Size((self.batch, self.nhead, rows // self.batch, self.width))

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def of(self, matrix: Tensor) -> Tensor:
        """These heads of a matrix (B*S, W), as a view."""
        columns = matrix.unflatten(0, (self.batch, -1))
        columns = columns[..., self.first : self.first + self.nhead * self.width]
        heads: Tensor = columns.unflatten(-1, (self.nhead, self.width)).transpose(1, 2)
        return heads


#: Heads as a routine is given them that unpacks what it reads.
LoadedHeads = Tensor | QuantizedHeads
