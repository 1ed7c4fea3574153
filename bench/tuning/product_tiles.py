"""Which tile is ours: contests of a kernel with every tile the tables have for this GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure.contest import Contest, Results, Rig, Way, Work
from bench.tuning.products import (
    ENDS,
    WIDTHS,
    Entry,
    Mlp,
    doubled,
    mlp_at,
    per_set,
    product_of,
    sizes_of,
)
from fused_remat.triton import cross_entropy, products, tables
from fused_remat.triton.launch import Launch, cdiv
from fused_remat.triton.tables import Tile

Outputs = dict[str, Tensor]


def tile_name(tile: Tile) -> str:
    """As in `python -m bench audit`.

    >>> tile_name(Tile(128, 256, 64, 8, 3, parts=4))
    '128x256/4x64 w8 s3'
    """
    parts = f"/{tile.parts}" if tile.parts > 1 else ""
    return f"{tile.block_m}x{tile.block_n}{parts}x{tile.block_k} w{tile.warps} s{tile.stages}"


@dataclass(frozen=True)
class Tiled:
    """A kernel of `tables.TILES` on an MLP's operands.

    Attributes:
        launch: (input set, what it writes, tile) -> the launch.
        truth: what it writes of the first set, in float64.
        out: makes one of its results, poisoned.
        outputs: their names, in the order of its launcher's arguments.
        products: how many products it computes.
    """

    launch: Callable[[int, Outputs, Tile], Launch]
    truth: Callable[[], Results]
    out: Callable[[], Tensor]
    outputs: tuple[str, ...] = ("y",)
    products: int = 1


def _linear(m: Mlp) -> Tiled:
    def launch(index: int, out: Outputs, tile: Tile) -> Launch:
        given = m.xs[index], *m.up, None, None, "gelu", None
        return products.linear_fwd(*given, out["y"], m.rig.target, None, tile)

    return Tiled(launch, lambda: {"y": F.gelu(m.exact_pre())}, m.hidden)


def _gated_mlp_fwd(m: Mlp) -> Tiled:
    def launch(index: int, out: Outputs, tile: Tile) -> Launch:
        given = m.xs[index], *m.gate, *m.up, None, "silu"
        return products.gated_mlp_fwd(*given, out["y"], m.rig.target, tile)

    def truth() -> Results:
        return {"y": F.silu(m.exact_pre(m.gate)) * m.exact_pre()}

    return Tiled(launch, truth, m.hidden, products=2)


def _mlp_bwd(m: Mlp, gated: bool) -> Tiled:
    act, outputs, gradients = ENDS[gated]
    layers = (m.gate, m.up) if gated else (m.up,)

    def launch(index: int, out: Outputs, tile: Tile) -> Launch:
        y, *dups = out.values()
        given = m.xs[index], layers, m.dys[index], m.down[0], None, act
        return products.mlp_bwd(*given, y, tuple(dups), m.rig.target, tile)

    def truth() -> Results:
        return gradients(m.exact_dact(), *map(m.exact_pre, layers))

    return Tiled(launch, truth, m.hidden, outputs, 1 + len(layers))


def _act_bwd(m: Mlp, gated: bool) -> Tiled:
    act, outputs, gradients = ENDS[gated]
    gate, up = m.pre(0, m.gate) if gated else None, m.pre(0)

    def launch(index: int, out: Outputs, tile: Tile) -> Launch:
        given = m.dys[index], m.down[0], gate, up, None, act
        results = out["act"], out.get("dgate"), out["dup"]
        return products.linear_act_bwd(*given, *results, m.rig.target, tile)

    def truth() -> Results:
        return gradients(m.exact_dact(), *doubled(*((up,) if gate is None else (gate, up))))

    return Tiled(launch, truth, m.hidden, outputs)


def _labels(m: Mlp) -> Tensor:
    return torch.arange(m.tokens, device=m.xs[0].device) % m.f


def _cross_entropy_fwd(m: Mlp) -> Tiled:
    """What a softmax needs of each tile of F logits; the labels' own logits are compared."""
    labels = _labels(m)

    def launch(index: int, out: Outputs, tile: Tile) -> Launch:
        picked = out["picked"]
        highs = picked.new_empty((cdiv(m.f, tile.block_n), m.tokens))
        sums = torch.empty_like(highs)
        given = m.xs[index], *m.up, labels, 0.0, 0, highs, sums, None, picked
        return cross_entropy.cross_entropy_fwd(*given, m.rig.target, tile)

    def truth() -> Results:
        return {"picked": m.exact_pre()[torch.arange(m.tokens), labels]}

    out = lambda: m.rig.poisoned(m.tokens, dtype=torch.float32)  # noqa: E731
    return Tiled(launch, truth, out, ("picked",))


def _cross_entropy_bwd(m: Mlp) -> Tiled:
    """The gradient of F logits a token, of the mean of their losses."""
    labels = _labels(m)
    mass = torch.full((m.tokens,), 1.0 / m.tokens, device=labels.device)
    stats = []
    for x in m.xs:
        logits = torch.addmm(m.up[1].float(), x.float(), m.up[0].float().t())
        high = logits.amax(1)
        stats.append((high, logits.logsumexp(1) - high))

    def launch(index: int, out: Outputs, tile: Tile) -> Launch:
        slopes = mass, None, -mass
        given = m.xs[index], *m.up, labels, 0.0, 0, stats[index], slopes, out["dlogits"]
        return cross_entropy.cross_entropy_bwd(*given, m.rig.target, tile)

    def truth() -> Results:
        exact = m.exact_pre().softmax(1)
        exact[torch.arange(m.tokens), labels] -= 1
        return {"dlogits": exact / m.tokens}

    return Tiled(launch, truth, m.hidden, ("dlogits",))


#: A row of `tables.TILES` -> its kernel.
KERNELS: dict[str, Callable[[Mlp], Tiled]] = {
    "linear": _linear,
    "gated_mlp_fwd": _gated_mlp_fwd,
    "linear_act_bwd": lambda m: _act_bwd(m, False),
    "gated_act_bwd": lambda m: _act_bwd(m, True),
    "mlp_bwd": lambda m: _mlp_bwd(m, False),
    "gated_mlp_bwd": lambda m: _mlp_bwd(m, True),
    "cross_entropy_fwd": _cross_entropy_fwd,
    "cross_entropy_bwd": _cross_entropy_bwd,
}


def contest(m: Mlp, kernel: str) -> Contest:
    """A kernel with every tile, beside as many bare products as it computes."""
    tiled = KERNELS[kernel](m)

    def bare(index: int) -> Results:
        for _ in range(tiled.products):
            product = torch.mm(m.xs[index], m.up[0].t())
        return {"product": product}

    ways = {"bare": Way(bare, lambda _: {"product": product_of(m.xs[0], m.up[0])})}
    for tile in tables.TILES[kernel][tables.family(m.rig.target)]:
        out = {name: tiled.out() for name in tiled.outputs}
        ways[tile_name(tile)] = per_set(lambda i, t=tile, o=out: tiled.launch(i, o, t), out)
    return Contest(ways, tiled.truth, Work(flops=tiled.products * m.flops), ("bare",))


def tile_entries(rig: Rig) -> Iterator[Entry]:
    """Every kernel of the tables, at one width."""
    for kernel in tables.TILES:
        case = {"name": f"tiles of {kernel}", **sizes_of(rig, WIDTHS[0])}
        yield case, lambda rig, k=kernel: contest(mlp_at(rig, WIDTHS[0]), k)
