"""Contests of tiles: kernels with products, with all tiles that their tables have for a GPU.

Operands are the audit's. Results are compared with those of a table's first tile, which tests
compare with float64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.audit.cases import Products, tile_name
from bench.measure.contest import Contest, Entry, Results, Rig, Way, Work
from fused_remat.triton.tables import TILES, Tile, family

#: Tokens, width and hidden width of an MLP; and in a dry run.
SIZES, DRY = (8192, 2048, 8192), (32, 64, 96)
#: Kernel -> how many products it computes, where that is not one.
COUNTS = {"gated_mlp_fwd": 2, "mlp_bwd": 2, "gated_mlp_bwd": 3}


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
