"""Dropout's multiplier, drawn where it is needed: as `fused_remat.random`.

The definition, its constants and its test vectors are there; these functions give the same bits.
They load nothing, so that any kernel can call them on the tile it holds.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15)
GOLDEN32 = tl.constexpr(0x9E3779B9)
MUL32 = tl.constexpr(0x7FEB352D)
MIX64_MUL1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX64_MUL2 = tl.constexpr(0x94D049BB133111EB)

#: `triton.jit` for kernels that draw: another key, first row or threshold is not another kernel.
#: Triton does not look for these names in groups of arguments, so a kernel takes them one by one.
seeded = triton.jit(
    do_not_specialize=["row0", "threshold"], do_not_specialize_on_alignment=["site_key_ptr"]
)


class Site(NamedTuple):
    """A dropout site: key or None, first row, `random.threshold(p)` and `random.scale(p)`."""

    key_ptr: Any
    row0: Any
    threshold: Any
    scale: Any


@triton.jit
def split_key(key, index):
    """mix64(key + GOLDEN64 · (index + 1)): a site's key from a seed, a row's from a site's.

    Shapes: key () int64 or uint64, index () or (M,) of integers; returns uint64 in index's shape.
    Source: `fused_remat.random`; mix64 is SplitMix64's finaliser (Steele, Lea, Flood 2014).
    """
    # Unsigned, so that products wrap and shifts are logical.
    z = key.to(tl.uint64) + (index.to(tl.uint64) + 1) * GOLDEN64
    z = (z ^ (z >> 30)) * MIX64_MUL1
    z = (z ^ (z >> 27)) * MIX64_MUL2
    return z ^ (z >> 31)


@triton.jit
def keep_at(row_key, cols, threshold, scale):
    """`scale` where the element survives, else 0; row_key uint64 and cols in any shapes.

    They broadcast against each other, so that a tile may be either way round.
    """
    k0 = row_key.to(tl.uint32)
    k1 = (row_key >> 32).to(tl.uint32)
    x = ((cols.to(tl.uint32) * GOLDEN32) ^ k0) * (k1 | 1)
    x = (x ^ (x >> 16)) * MUL32
    return tl.where((x & 0x7FFFFFFF).to(tl.int32) < threshold, scale, 0.0)


@triton.jit
def keep_tile(site, offs_m, offs_n):
    """Dropout's multiplier of a tile of a matrix, (M, N) float32; 1 where nothing is dropped.

    Shapes: offs_m (M,) int64, offs_n (N,) integers in [0, 2**31).
    Source: `fused_remat.random`.
    """
    keep = 1.0
    if site.key_ptr is not None:
        row_key = split_key(tl.load(site.key_ptr), site.row0 + offs_m)
        keep = keep_at(row_key[:, None], offs_n[None, :], site.threshold, site.scale)
    return keep


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["seed_ptr"])
def site_keys_fwd_kernel(seed_ptr, keys_ptr, first, COUNT: tl.constexpr):
    """Compute the keys of the sites `first`, `first` + 1 and so on.

    Shapes: seed () int64, keys (COUNT,) int64. Grid: (1,).
    Source: `fused_remat.random`.
    """
    sites = tl.arange(0, COUNT)
    keys = split_key(tl.load(seed_ptr), first.to(tl.int64) + sites)
    tl.store(keys_ptr + sites, keys.to(tl.int64, bitcast=True))
