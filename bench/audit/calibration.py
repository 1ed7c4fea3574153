"""How far real kernels are from what `bench.audit.machine_code` says: `python -m bench calibrate`.

Triton's tutorial product (03 and 09) and attention (06) have published rates. Our own kernels are
compiled in their tiles and sizes, their time is estimated from their machine code, and the ratio of
the published time to the estimate is how far a real kernel stays behind its floor: the clock falls
under load, and caches, memory and latency take time that is not counted. Its mean over the kernels
is what estimates of `bench paper` multiply a floor by, and its spread is their error.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch

from bench.audit import cases as audit_cases
from bench.audit import command as audit
from bench.audit.attention import call_of, meta
from bench.pages.audit import CALIBRATION
from fused_remat.triton import attention, products
from fused_remat.triton.launch import Launch
from fused_remat.triton.tables import AttentionTile, Tile

#: Architecture -> clocks a second for which the maker states its rate of tensor cores.
CLOCKS = {80: 1.41e9, 90: 1.83e9}
GPUS = {80: "A100", 90: "H100"}


class Published(NamedTuple):
    """A kernel in a size, and what it was reported to reach."""

    kernel: str
    arch: int
    sizes: tuple[int, ...]  # m, n, k; or batch, heads, tokens, width
    tile: Tile | AttentionTile
    tflops: float
    source: str

    @property
    def flops(self) -> float:
        """Of products."""
        if self.kernel == "product":
            return 2.0 * prod(self.sizes)
        batch, heads, tokens, width = self.sizes
        return 4.0 * batch * heads * tokens**2 * width

    @property
    def launch(self) -> Launch:
        dtype, at = torch.bfloat16, audit_cases.target(self.arch)
        if isinstance(self.tile, Tile):
            m, n, k = self.sizes
            given = meta(dtype, m, k), meta(dtype, n, k), *(None,) * 5, meta(dtype, m, n)
            return products.linear_fwd(*given, at, tile=self.tile)
        batch, heads, tokens, width = self.sizes
        call = call_of(width, {"batch": batch, "q_len": tokens, "kv_len": tokens})
        packed = meta(dtype, batch, tokens, 3, heads, width).transpose(1, 3)
        out, lse = meta(dtype, batch * tokens, heads * width), meta(torch.float32, batch, heads, 1)
        heads_of = packed.unbind(2)
        (launch,) = attention.forward(*heads_of, call, out, lse, at, self.tile)
        return launch

    @property
    def iterations(self) -> int:
        """Of the loop of a tile."""
        if isinstance(self.tile, Tile):
            return ceil(self.sizes[2] / self.tile.block_k)
        return ceil(self.sizes[2] / self.tile.block_n)


_H100 = "pytorch/benchmark#2391, H100, tutorial 06"
#: bfloat16 and float16 take as long.
PUBLISHED = (
    Published("product", 80, (2944, 2944, 2944), Tile(128, 128, 32, 4, 4), 251.7,
              "triton-lang/triton#3551, A100, tutorial 03"),
    Published("product", 80, (3200, 3200, 3200), Tile(128, 128, 32, 4, 4), 244.3,
              "triton-lang/triton#3551, A100, tutorial 03"),
    Published("product", 90, (3072, 3072, 3072), Tile(128, 256, 64, 8, 3, parts=4), 524.7,
              "triton-lang/triton#3672, H100, tutorial 03"),
    Published("product", 90, (8192, 8192, 8192), Tile(128, 256, 64, 8, 3, parts=4), 741.0,
              "0.92 to 0.97 of cuBLAS's 770 to 798, H200, tutorial 09"),
    Published("attention", 80, (12, 16, 8192, 64), AttentionTile(128, 64, 4, 3), 145.8,
              "triton-lang/triton#1917 (4 × 48 heads), taken for an A100, tutorial 06"),
    Published("attention", 80, (12, 16, 1024, 64), AttentionTile(128, 64, 4, 3), 122.5,
              "triton-lang/triton#1917 (4 × 48 heads), taken for an A100, tutorial 06"),
    Published("attention", 90, (16, 16, 1024, 128), AttentionTile(128, 128, 8, 2), 389.7, _H100),
    Published("attention", 90, (4, 16, 4096, 128), AttentionTile(128, 128, 8, 2), 458.4, _H100),
    Published("attention", 90, (1, 16, 16384, 128), AttentionTile(128, 128, 8, 2), 476.8, _H100),
)  # fmt: skip


#: Warps of a multiprocessor, two of each scheduler, among which a softmax overlaps no product.
_FEW = 8


def loop_clocks(loop: Mapping[str, Any], warps: int) -> float:
    """Of an iteration of a block, where so many warps share a multiprocessor: the slowest unit's.

    Special functions among products, as in attention, need the first product and are needed by the
    second: few warps do one after the other.
    """
    products = max(loop["tensor"], loop["shared"])
    others = max(loop[unit] for unit in ("issue", "special", "integer", "multiply"))
    in_turn = loop["special"] and warps <= _FEW
    return float(products + others if in_turn else max(products, others))


def floor(row: Mapping[str, Any], arch: int, tiles: int, iterations: int) -> float:
    """Seconds of a kernel with so many tiles, whose loop of whole blocks runs so often in each.

    Blocks of a multiprocessor share its units; the one with most tiles ends last.
    """
    warps = row["warps"] * audit.blocks(row["registers"], row["shared"], row["warps"], arch)
    loop = max(row["loops"], key=lambda loop: loop["share"])
    clocks = iterations * loop_clocks(loop, warps) + row["tail"]
    return ceil(tiles / audit_cases.SMS[arch]) * clocks / CLOCKS[arch]


def measured(one: Published) -> dict[str, Any]:
    """A row: the estimated and the published rate."""
    launch = one.launch
    row = audit.examine(audit_cases.Case(one.kernel, launch, True, True), one.arch)
    tiles = prod(launch.grid)
    if one.kernel == "product":
        named = launch.constants
        tiles = ceil(one.sizes[0] / named["BLOCK_M"]) * ceil(one.sizes[1] / named["BLOCK_N"])
    estimate = one.flops / floor(row, one.arch, tiles, one.iterations) / 1e12
    return {
        "kernel": one.kernel, "gpu": GPUS[one.arch], "sizes": one.sizes, "estimate": estimate,
        "published": one.tflops, "over": estimate / one.tflops, "source": one.source,
    }  # fmt: skip


def spread(rows: Sequence[Mapping[str, Any]], gpu: str) -> tuple[float, float]:
    """How often a floor fits into the published time: the mean on a GPU, and its largest error."""
    found = [row["over"] for row in rows if row["gpu"] == gpu]
    mean = statistics.geometric_mean(found)
    return mean, max(max(one / mean, mean / one) for one in found) - 1


def main(arguments: Sequence[str]) -> int:
    """Compile, print and write bench/results/calibration.json."""
    argparse.ArgumentParser(prog="python -m bench calibrate", description=__doc__).parse_args(
        arguments
    )
    rows = [measured(one) for one in PUBLISHED]
    for row in rows:
        print(row)
    over = {gpu: spread(rows, gpu) for gpu in GPUS.values()}
    print(over)
    CALIBRATION.write_text(json.dumps({"over": over, "rows": rows}, indent=1) + "\n")
    return 0
