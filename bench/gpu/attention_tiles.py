"""Which tile is ours: each attention kernel alone, as the tables cut it and as it might be cut."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from bench.kernels.attention import Kernels
from bench.kernels.attention_problem import Attention
from bench.measure.contest import Contest, Entry, Rig, Work, compile_together
from fused_remat.triton.tables import AttentionTile, attention_tile, family

BATCH, SEQ_LEN, D_MODEL, WIDTHS = 4, 4096, 2048, (128, 64)

_T = AttentionTile
#: Kernel -> its direction, and its products as a share of those that the direction counts: the
#: scores and their gradients are computed in both kernels of a backward.
KERNELS = {"fwd": ("fwd", 1.0), "dkdv": ("bwd", 4 / 5), "dq": ("bwd", 3 / 5)}
#: Family -> kernel -> tiles beside that of the tables.
CANDIDATES: dict[str, dict[str, tuple[AttentionTile, ...]]] = {
    "hopper": {
        "fwd": (
            _T(128, 128, 8, 3), _T(128, 128, 8, 2), _T(128, 64, 8, 3), _T(128, 64, 4, 3),
            _T(64, 64, 4, 3),
        ),
        "dkdv": (
            _T(64, 128, 8, 2), _T(64, 128, 8, 3), _T(64, 64, 4, 2), _T(64, 64, 8, 2),
            _T(128, 64, 8, 2),
        ),
        "dq": (
            _T(128, 128, 8, 2), _T(128, 128, 8, 3), _T(128, 64, 8, 2), _T(128, 64, 8, 3),
            _T(64, 64, 4, 3),
        ),
    },
    "interpreter": {"fwd": (_T(32, 16, 4, 1),), "dkdv": (_T(16, 16, 4, 1, split=True),)},
}  # fmt: skip


def tile_name(tile: AttentionTile) -> str:
    """Return a tile's name: queries by keys, warps, stages.

    >>> tile_name(AttentionTile(64, 128, 8, 2, split=True))
    '64x128 w8 s2 split'
    """
    split = " split" if tile.split else ""
    return f"{tile.block_m}x{tile.block_n} w{tile.warps} s{tile.stages}{split}"


def contest(p: Attention, kernel: str, tiles: tuple[AttentionTile, ...]) -> Contest:
    """Return a kernel with the tables' tile, the baseline, and with other tiles."""
    direction, share = KERNELS[kernel]
    assert p.rig.target is not None
    first = attention_tile(kernel, p.rig.target, p.head_dim, p.call)
    ways, launches = {}, []
    for tile in dict.fromkeys((first, *tiles)):
        own = Kernels(p, direction)
        ways[tile_name(tile)] = own.way(tile, kernel, optional=tile != first)
        launches += own.launches(0, tile)
    if not p.rig.dry:
        compile_together(launches)
    work = Work(flops=share * p.work(direction).flops)
    truth = functools.partial(p.truth, direction)
    return Contest(ways, truth, work, (tile_name(first),), p.factor)


def _entry(rig: Rig, kernel: str, form: str, width: int, tiles: Any) -> Entry:
    heads = rig.size(D_MODEL // width, 2)
    seq_len, width = rig.size(SEQ_LEN, 32), rig.size(width, 16)

    def build(rig: Rig) -> Contest:
        p = Attention(rig, form, rig.size(BATCH, 1), heads, heads, seq_len, width)
        return contest(p, kernel, tiles)

    sizes = {"seq_len": seq_len, "head_dim": width}
    return {"name": f"tiles of attention_{kernel} {form}", **sizes}, build


def tile_entries(rig: Rig) -> Iterator[Entry]:
    """Yield every kernel with a causal mask."""
    mine = family(rig.target)
    widths = WIDTHS[:1] if rig.dry else WIDTHS
    for width in widths:
        for kernel in KERNELS:
            tiles = CANDIDATES.get(mine, {}).get(kernel, ())
            yield _entry(rig, kernel, "causal", width, tiles)
