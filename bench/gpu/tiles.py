"""Contests of tiles: kernels with products, with all tiles that their tables have for a GPU.

Operands are the audit's. Results are compared with those of a table's first tile, which tests
compare with float64. And each kernel of attention, as the tables divide it and as it might be.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.audit.cases import Products, tile_name
from bench.kernels.attention import Attention, kernels
from bench.kernels.experts import EXPERTS
from bench.kernels.problem import DIRECTIONS, Problem, at_tokens, tiny, ways_of
from bench.measure.contest import Contest, Entry, Results, Rig, Way, Work
from fused_remat.triton import tables
from fused_remat.triton.tables import (
    EXPERTS_TILES,
    TILES,
    AttentionTile,
    Tile,
    attention_tile,
    family,
)

#: Tokens, width and hidden width of an MLP; and in a dry run.
SIZES, DRY = (8192, 2048, 8192), (32, 64, 96)
#: Kernel -> how many products it computes, where that is not one.
COUNTS = {"gated_mlp_fwd": 2, "mlp_bwd": 2, "gated_mlp_bwd": 3}

_T = AttentionTile
#: Kernel -> its direction, and its products as a share of those that the direction counts: the
#: scores and their gradients are computed in both kernels of a backward.
ATTENTION = {"fwd": ("fwd", 1.0), "dkdv": ("bwd", 4 / 5), "dq": ("bwd", 3 / 5)}
#: Family -> kernel -> tiles that are compared with that of the tables.
CANDIDATES: dict[str, dict[str, tuple[AttentionTile, ...]]] = {
    "hopper": {
        "fwd": (_T(128, 128, 8, 3), _T(128, 64, 8, 3), _T(128, 64, 4, 3), _T(64, 64, 4, 3)),
        "dkdv": (_T(64, 128, 8, 3), _T(64, 64, 4, 2), _T(64, 64, 8, 2), _T(128, 64, 8, 2)),
        "dq": (_T(128, 128, 8, 3), _T(128, 64, 8, 2), _T(128, 64, 8, 3), _T(64, 64, 4, 3)),
    },
    "interpreter": {"fwd": (_T(32, 16, 4, 1),), "dkdv": (_T(16, 16, 4, 1, split=True),)},
}
#: Form, head dim of the contests, the most telling first.
ATTENTION_CASES = (
    ("causal", 128), ("causal", 64), ("window", 64), ("bias", 128), ("padding", 128),
)  # fmt: skip


def contest(rig: Rig, kernel: str, tiles: Sequence[Tile]) -> Contest:
    """Return a kernel in each of `tiles`; the first one is the baseline and the truth."""
    rows, width, hidden = sizes = DRY if rig.dry else SIZES
    assert rig.target is not None

    def draw(dtype: torch.dtype, *shape: int) -> Tensor:
        if dtype == torch.int64:
            return torch.zeros(shape, dtype=dtype, device=rig.device)
        return rig.normal(*shape).to(dtype)

    operands = Products(rig.target, rig.dtype, sizes, draw)
    for weight in (operands.up, operands.down):
        weight.mul_(weight.shape[-1] ** -0.5)
    drawn = {name: t.clone() for name, t in operands.results.items()}

    def restore(index: int) -> Results:
        """Undo what a launch overwrote."""
        return {name: t.copy_(drawn[name]) for name, t in operands.results.items()}

    def tiled(tile: Tile) -> Way:
        launch = next(iter(operands.launches(kernel, tile).values()))

        def run(results: Results) -> Results:
            launch.run()
            return results

        return Way(run, prepare=restore)

    ways = {tile_name(tile): tiled(tile) for tile in tiles}
    first = next(iter(ways))

    def truth() -> Results:
        return {name: t.double() for name, t in ways[first].run(restore(0)).items()}

    work = Work(flops=2.0 * COUNTS.get(kernel, 1) * rows * width * hidden)
    return Contest(ways, truth, work, (first,))


def tile_entries(rig: Rig) -> Iterator[Entry]:
    """Yield every kernel of the tables with every tile that they have for this GPU."""
    tokens, width, _ = DRY if rig.dry else SIZES
    for kernel, by_family in TILES.items():
        if tiles := by_family.get(family(rig.target), ()):
            case = {"name": f"tiles of {kernel}", "tokens": tokens, "width": width}
            yield case, functools.partial(contest, kernel=kernel, tiles=tiles)
    yield from _experts_entries(rig)


def _experts_entries(rig: Rig) -> Iterator[Entry]:
    """Yield experts of every mixture with tiles of as many rows as the tables have."""
    for mixture in list(EXPERTS.models.values())[: 1 if rig.dry else None]:
        size = at_tokens(tiny(mixture) if rig.dry else mixture, rig.size(SIZES[0], 16))
        (made,) = EXPERTS.of_model(rig, size)
        for direction in DIRECTIONS:
            case = {"name": f"tiles of experts_{direction} {made.name}", **made.sizes}
            problem = functools.partial(EXPERTS.of_model, rig, size)
            yield case, lambda rig, p=problem, d=direction: experts_contest(rig, *p(), d)


def experts_contest(rig: Rig, problem: Problem, direction: str) -> Contest:
    """Return experts in tiles of each number of rows; the largest is the baseline."""
    way = ways_of(EXPERTS["fused_remat triton full"], problem)[direction]

    def run(given: Any, rows: int) -> Results:
        with mock.patch.object(tables, "experts_rows", lambda *_: rows):
            return way.run(given)

    tiles = EXPERTS_TILES["experts_product"][family(rig.target)]
    ways = {
        f"{rows} rows": dataclasses.replace(way, run=functools.partial(run, rows=rows))
        for rows in (tile.block_m for tile in tiles)
    }
    truth = functools.partial(problem.truth, direction)
    return Contest(ways, truth, problem.work(direction), (next(iter(ways)),), problem.factor)


def _attention_name(tile: AttentionTile) -> str:
    split = " split" if tile.split else ""
    return f"{tile.block_m}x{tile.block_n} w{tile.warps} s{tile.stages}{split}"


def attention_contest(rig: Rig, kernel: str, form: str, *sizes: int) -> Contest:
    """Return a kernel of attention with the tables' tile, the baseline, and with other tiles."""
    p, (direction, share) = Attention(rig, form, *sizes), ATTENTION[kernel]
    assert rig.target is not None
    first = attention_tile(kernel, rig.target, p.head_dim, p.call)
    tiles = dict.fromkeys((first, *CANDIDATES.get(family(rig.target), {}).get(kernel, ())))
    ways = {_attention_name(tile): kernels(p, direction, kernel, tile) for tile in tiles}
    work = Work(flops=share * p.work(direction).flops)
    truth = functools.partial(p.truth, direction)
    return Contest(ways, truth, work, (_attention_name(first),), p.factor)


def attention_entries(rig: Rig) -> Iterator[Entry]:
    """Yield every kernel of attention, by form and head dim."""
    for form, width in ATTENTION_CASES:
        seq_len, heads = rig.size(4096, 32), rig.size(2048 // width, 2)
        sizes = rig.size(4, 1), heads, heads, seq_len, rig.size(width, 16)
        for kernel in ATTENTION:
            case = {"name": f"tiles of attention_{kernel} {form}", "head_dim": width}
            given = kernel, form, *sizes
            yield case, lambda rig, given=given: attention_contest(rig, *given)
