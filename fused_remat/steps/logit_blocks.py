"""The blocks of tokens and columns in which the logits of a loss are computed, and products."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

Span = tuple[int, int]
# Larger blocks read the weights fewer times, and need more memory.
_CPU_LOGITS, _CPU_ROWS = 1 << 20, 256
DEVICE_BYTES = 1 << 29
# Rows of a tile of a product on a device, and the columns that its library chooses from.
_TILE, _TILES = 128, (256, 192, 128)


def block_of(tokens: int, vocab: int, logits: int, x: Tensor, itemsize: int = 4) -> Span:
    """Return tokens and columns of a block of logits of `itemsize` bytes, of tokens like `x`.

    `logits`: about how many to hold at a time; 0 for a number that suits the device.
    """
    limit = _CPU_LOGITS if x.device.type == "cpu" else DEVICE_BYTES // itemsize
    return block_shape(tokens, vocab, logits or limit, x.shape[1], multiprocessors(x.device))


def rows_of(tokens: int, vocab: int, logits: int, x: Tensor, itemsize: int = 4) -> int:
    """Return tokens of a block of all columns, with arguments as in `block_of`.

    At least `_CPU_ROWS` on a CPU, and on devices those of a tile: a sum over blocks of the weight's
    gradient is read and written for each of them.
    """
    on_cpu = x.device.type == "cpu"
    limit, least = (_CPU_LOGITS, _CPU_ROWS) if on_cpu else (DEVICE_BYTES // itemsize, _TILE)
    rows = logits // vocab if logits else max(least, limit // vocab)
    most = max(1, min(tokens, rows))
    return full_waves(tokens, most, x.shape[1], multiprocessors(x.device))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 0 for other devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def block_shape(tokens: int, vocab: int, limit: int, width: int, multiprocessors: int) -> Span:
    """Return tokens and columns of a block of at most `limit` logits, whose products fill a GPU.

    It is about square, which moves the fewest bytes. The gradients of `width` features are products
    with the block's tokens and with its columns as rows, so both are numbers that fill waves.
    """
    rows = max(1, min(tokens, max(math.isqrt(limit), limit // vocab)))
    rows = full_waves(tokens, rows, width, multiprocessors)
    columns = max(1, limit // rows)
    if columns >= 64:
        columns -= columns % 64
    return rows, full_waves(vocab, min(vocab, columns), width, multiprocessors)


@functools.lru_cache(maxsize=4096)
def full_waves(total: int, most: int, width: int, multiprocessors: int) -> int:
    """Return how many of `total` rows to multiply at a time: at most `most`, at least half of it.

    Products with `width` columns then take the fewest waves of tiles, one a multiprocessor; of
    equal numbers the largest. 0 multiprocessors, or one product: `most`.
    """
    if not multiprocessors or most >= total:
        return most
    across = -(-width // min(_TILES, key=lambda n: -(-width // n) * n))

    def waves(rows: int) -> int:
        tiles = (-(-part // _TILE) * across for part in (rows, total % rows))
        one, rest = (-(-n // multiprocessors) for n in tiles)
        return total // rows * one + rest

    return min(range(most - most % _TILE, most // 2, -_TILE), key=waves, default=most)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b in float32 (float64), in `out` unless None.

    It is rounded to 16 bits before only where ATen has no other product.
    """
    if a.dtype.itemsize == 2 and a.device.type == "cuda" and torch.version.hip is None:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    y = torch.mm(a, b)
    y = y.float() if y.dtype.itemsize == 2 else y
    return y if out is None else out.copy_(y)


def add_product(into: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a @ b to `into`, or write it there if it is the first."""
    if a.dtype != into.dtype:
        product(a, b, into) if first else into.add_(product(a, b))
    elif first:
        torch.mm(a, b, out=into)
    else:
        torch.addmm(into, a, b, out=into)  # not addmm_: FLOP counters miss it
