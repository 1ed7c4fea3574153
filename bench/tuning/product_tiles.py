"""Which tile is ours: contests of a kernel with every tile the tables have for this GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure.contest import Contest, Results, Rig, Way, Work
from bench.tuning.products import (
    WIDTHS,
    Entry,
    Mlp,
    doubled,
    gated_gradients,
    gelu_gradients,
    mlp_at,
    per_set,
    product_of,
    sizes_of,
)
from fused_remat.triton import cross_entropy, products, tables
from fused_remat.triton.launch import Launch, cdiv
from fused_remat.triton.tables import Tile

Outputs = dict[str, Tensor]
_GATED = ("act", "dgate", "dup")


def tile_name(tile: Tile) -> str:
    """As in `python -m bench audit`.

    >>> tile_name(Tile(128, 256, 64, 8, 3, parts=4))
    '128x256/4x64 w8 s3'
    """
    parts = f"/{tile.parts}" if tile.parts > 1 else ""
    return f"{tile.block_m}x{tile.block_n}{parts}x{tile.block_k} w{tile.warps} s{tile.stages}"


class Tiled:
    """A kernel of `tables.TILES`: one subclass for each.

    Attributes:
        outputs: names of what it writes, in the order of its launcher's arguments.
        products: how many products it computes.
    """

    outputs: tuple[str, ...] = ("y",)
    products = 1

    def __init__(self, m: Mlp) -> None:
        self.m = m
        self.down, self.at = m.down[0], m.rig.target

    def launch(self, index: int, tile: Tile, out: Outputs) -> Launch:
        raise NotImplementedError

    def truth(self) -> Results:
        raise NotImplementedError

    def made(self) -> Outputs:
        """What it writes, poisoned."""
        return {name: self.m.hidden() for name in self.outputs}


class _Linear(Tiled):
    def launch(self, index: int, tile: Tile, out: Outputs) -> Launch:
        given = self.m.xs[index], *self.m.up, None, None, "gelu", None
        return products.linear_fwd(*given, out["y"], self.at, None, tile)

    def truth(self) -> Results:
        return {"y": F.gelu(self.m.exact_pre())}


class _GatedMlpFwd(Tiled):
    products = 2

    def launch(self, index: int, tile: Tile, out: Outputs) -> Launch:
        given = self.m.xs[index], *self.m.gate, *self.m.up, None, "silu"
        return products.gated_mlp_fwd(*given, out["y"], self.at, tile)

    def truth(self) -> Results:
        return {"y": F.silu(self.m.exact_pre(self.m.gate)) * self.m.exact_pre()}


class _MlpBwd(Tiled):
    outputs, products = ("act", "dup"), 2
    act, gated = "gelu", False

    def launch(self, index: int, tile: Tile, out: Outputs) -> Launch:
        layers = (self.m.gate, self.m.up) if self.gated else (self.m.up,)
        given = self.m.xs[index], layers, self.m.dys[index], self.down, None, self.act
        act, *dups = out.values()
        return products.mlp_bwd(*given, act, tuple(dups), self.at, tile)

    def truth(self) -> Results:
        return gelu_gradients(self.m.exact_dact(), self.m.exact_pre())


class _GatedMlpBwd(_MlpBwd):
    outputs, products = _GATED, 3
    act, gated = "silu", True

    def truth(self) -> Results:
        m = self.m
        return gated_gradients(m.exact_dact(), m.exact_pre(m.gate), m.exact_pre())


class _LinearActBwd(Tiled):
    outputs, act = ("act", "dup"), "gelu"
    gate: Tensor | None = None

    def __init__(self, m: Mlp) -> None:
        super().__init__(m)
        self.up = m.pre(0)

    def launch(self, index: int, tile: Tile, out: Outputs) -> Launch:
        given = self.m.dys[index], self.down, self.gate, self.up, None, self.act
        gradients = out["act"], out.get("dgate"), out["dup"]
        return products.linear_act_bwd(*given, *gradients, self.at, tile)

    def truth(self) -> Results:
        return gelu_gradients(self.m.exact_dact(), self.up.double())


class _GatedActBwd(_LinearActBwd):
    outputs, act = _GATED, "silu"

    def __init__(self, m: Mlp) -> None:
        super().__init__(m)
        self.gate = m.pre(0, m.gate)

    def truth(self) -> Results:
        assert self.gate is not None
        return gated_gradients(self.m.exact_dact(), *doubled(self.gate, self.up))


class _CrossEntropyBwd(Tiled):
    """The gradient of F logits a token, of the mean of their losses."""

    outputs = ("dlogits",)

    def __init__(self, m: Mlp) -> None:
        super().__init__(m)
        self.labels = torch.arange(m.tokens, device=self.down.device) % m.f
        mass = torch.full((m.tokens,), 1.0 / m.tokens, device=self.down.device)
        self.slopes = (mass, None, -mass)
        self.stats = []
        for x in m.xs:
            logits = torch.addmm(m.up[1].float(), x.float(), m.up[0].float().t())
            high = logits.amax(1)
            self.stats.append((high, logits.logsumexp(1) - high))

    def launch(self, index: int, tile: Tile, out: Outputs) -> Launch:
        return cross_entropy.cross_entropy_bwd(
            self.m.xs[index], *self.m.up, self.labels, 0.0, 0, self.stats[index], self.slopes,
            out["dlogits"], self.at, tile,
        )  # fmt: skip

    def truth(self) -> Results:
        truth = self.m.exact_pre().softmax(1)
        truth[torch.arange(self.m.tokens), self.labels] -= 1
        return {"dlogits": truth / self.m.tokens}


class _CrossEntropyFwd(_CrossEntropyBwd):
    """What a softmax needs of each tile of logits; the labels' own logits are compared."""

    outputs = ("picked",)

    def launch(self, index: int, tile: Tile, out: Outputs) -> Launch:
        picked = out["picked"]
        highs = picked.new_empty((cdiv(self.m.f, tile.block_n), self.m.tokens))
        return cross_entropy.cross_entropy_fwd(
            self.m.xs[index], *self.m.up, self.labels, 0.0, 0, highs, torch.empty_like(highs), None,
            picked, self.at, tile,
        )  # fmt: skip

    def made(self) -> Outputs:
        return {"picked": torch.full_like(self.stats[0][0], torch.nan)}

    def truth(self) -> Results:
        return {"picked": self.m.exact_pre()[torch.arange(self.m.tokens), self.labels]}


#: A row of `tables.TILES` -> its kernel.
KERNELS: dict[str, Callable[[Mlp], Tiled]] = {
    "linear": _Linear,
    "gated_mlp_fwd": _GatedMlpFwd,
    "linear_act_bwd": _LinearActBwd,
    "gated_act_bwd": _GatedActBwd,
    "mlp_bwd": _MlpBwd,
    "gated_mlp_bwd": _GatedMlpBwd,
    "cross_entropy_fwd": _CrossEntropyFwd,
    "cross_entropy_bwd": _CrossEntropyBwd,
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
        out = tiled.made()
        ways[tile_name(tile)] = per_set(lambda i, t=tile, o=out: tiled.launch(i, t, o), out)
    return Contest(ways, tiled.truth, Work(flops=tiled.products * m.flops), ("bare",))


def tile_entries(rig: Rig) -> Iterator[Entry]:
    """Every kernel of the tables, at one width."""
    for kernel in tables.TILES:
        case = {"name": f"tiles of {kernel}", **sizes_of(rig, WIDTHS[0])}
        yield case, lambda rig, k=kernel: contest(mlp_at(rig, WIDTHS[0]), k)
