"""Which route and which tile is ours: kernels with fused ends against the same in two steps.

An MLP's hidden half, its end, its backward. "split" is torch's product and our kernel for the rest:
where it wins, a table's route changes (`fused_remat.triton.tables`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.forms import Form
from bench.measure.contest import Entry, Results, Rig
from fused_remat.triton import cross_entropy, pointwise, products, tables
from fused_remat.triton.launch import Launch, cdiv
from fused_remat.triton.tables import Tile

_aten = torch.ops.aten
TOKENS = 8192
WIDTHS = (2048, 1024, 4096)
_UP, _GATE = {"up": "FD", "bias": "F"}, {"gate": "FD", "gate_bias": "F"}


def pre(t: Any) -> Tensor:
    return torch.addmm(t.bias, t.x, t.up.t())


def _gate(t: Any) -> Tensor:
    return torch.addmm(t.gate_bias, t.x, t.gate.t())


def _product(t: Any) -> Results:
    return {"product": t.x @ t.up.t()}


# --- forwards


LINEAR = Form(
    {"x": "TD", **_UP},
    lambda t: {"y": F.gelu(pre(t))},
    lambda t, out, *tile: products.linear_fwd(
        t.x, t.up, t.bias, None, None, "gelu", None, out["y"], t.target, None, *tile
    ),
    _product,
    {"split": lambda t, out: pointwise.act_fwd(pre(t), "gelu", None, out["y"]).run()},
)
GATED = Form(
    {"x": "TD", **_GATE, **_UP},
    lambda t: {"y": F.silu(_gate(t)) * pre(t)},
    lambda t, out, *tile: products.gated_mlp_fwd(
        t.x, t.gate, t.gate_bias, t.up, t.bias, None, "silu", out["y"], t.target, *tile
    ),
    lambda t: {"gate": t.x @ t.gate.t(), **_product(t)},
    {"split": lambda t, out: pointwise.gated_fwd(_gate(t), pre(t), "silu", None, out["y"]).run()},
    products=2,
)


# --- backwards


def _act_bwd(t: Any, up: Tensor, out: Results, *tile: Tile) -> Launch:
    given = t.dy, t.down, up, None, "gelu", out["act"], out["dup"]
    return products.linear_act_bwd(*given, t.target, *tile)


def _gelu_gradients(dact: Tensor, up: Tensor) -> Results:
    return {"act": F.gelu(up), "dup": _aten.gelu_backward(dact, up)}


def _backward(gated: bool) -> Form:
    """Of an MLP, which rebuilds what goes into the activation."""
    act, outputs = ("silu", ("act", "dgate", "dup")) if gated else ("gelu", ("act", "dup"))

    def gradients(dact: Tensor, *pres: Tensor) -> Results:
        if not gated:
            return _gelu_gradients(dact, *pres)
        gate, up = pres
        made = F.silu(gate)
        dgate = _aten.silu_backward(dact * up, gate)
        return {"act": made * up, "dgate": dgate, "dup": dact * made}

    def pres(t: Any) -> tuple[Tensor, ...]:
        return (_gate(t), pre(t)) if gated else (pre(t),)

    def kernel(t: Any, out: Results, *tile: Tile) -> Launch:
        ups = ((t.gate, t.gate_bias), (t.up, t.bias)) if gated else ((t.up, t.bias),)
        y, *dups = out.values()
        return products.mlp_bwd(t.x, ups, t.dy, t.down, None, act, y, tuple(dups), t.target, *tile)

    def split(t: Any, out: Results) -> None:
        given, dact = pres(t), t.dy @ t.down
        y, *dups = out.values()
        if gated:
            pointwise.gated_bwd(dact, *given, act, None, *dups, y).run()
        else:
            pointwise.act_bwd(dact, *given, act, None, *dups, y).run()

    def bare(t: Any) -> Results:
        gate = {"gate": t.x @ t.gate.t()} if gated else {}
        return {**gate, **_product(t), "dact": t.dy @ t.down}

    rest = {} if gated else {"linear_act_bwd": lambda t, out: _act_bwd(t, pre(t), out).run()}
    return Form(
        {"x": "TD", "dy": "TD", **(_GATE if gated else {}), **_UP, "down": "DF"},
        lambda t: gradients(t.dy @ t.down, *pres(t)),
        kernel,
        bare,
        {**rest, "split": split},
        products=2 + gated,
        outputs=outputs,
        name="gated_mlp_bwd" if gated else "mlp_bwd",
    )


MLP_BWD, GATED_MLP_BWD = _backward(False), _backward(True)
ACT_BWD = Form(
    {"dy": "TD", "down": "DF", "up": "TF"},
    lambda t: _gelu_gradients(t.dy @ t.down, t.up),
    lambda t, out, *tile: _act_bwd(t, t.up, out, *tile),
    lambda t: {"dact": t.dy @ t.down},
    outputs=("act", "dup"),
)


# --- the loss of a head of F logits


def _labels(t: Any) -> dict[str, Any]:
    return {"labels": torch.arange(len(t.x), device=t.x.device) % len(t.up)}


def _loss(t: Any, out: Results, tile: Tile) -> Launch:
    """What a softmax needs of each tile of logits; the labels' own logits are compared."""
    picked = out["picked"]
    highs, sums = (picked.new_empty((cdiv(len(t.up), tile.block_n), len(t.x))) for _ in range(2))
    given = t.x, t.up, t.bias, t.labels, 0.0, 0, highs, sums, None, picked
    return cross_entropy.cross_entropy_fwd(*given, t.target, tile)


def _saved(t: Any) -> dict[str, Any]:
    logits = torch.addmm(t.bias.float(), t.x.float(), t.up.float().t())
    high, mass = logits.amax(1), torch.full((len(t.x),), 1.0 / len(t.x), device=t.x.device)
    return {**_labels(t), "stats": (high, logits.logsumexp(1) - high), "mass": mass}


def _loss_gradient(t: Any, out: Results, tile: Tile) -> Launch:
    given = t.x, t.up, t.bias, t.labels, 0.0, 0, t.stats, (t.mass, None, -t.mass)
    return cross_entropy.cross_entropy_bwd(*given, out["dlogits"], t.target, tile)


def _dlogits(t: Any) -> Results:
    """Of the mean of the tokens' losses."""
    softmax = pre(t).softmax(1)
    ones = torch.ones_like(softmax[:, :1])
    return {"dlogits": softmax.scatter_add(1, t.labels[:, None], -ones) / len(t.x)}


LOSS = Form(
    {"x": "TD", **_UP},
    lambda t: {"picked": pre(t).gather(1, t.labels[:, None])[:, 0]},
    _loss,
    _product,
    outputs=("picked",),
    shape="T",
    dtype=torch.float32,
    derive=_labels,
)
LOSS_BWD = Form(
    {"x": "TD", **_UP}, _dlogits, _loss_gradient, _product, outputs=("dlogits",), derive=_saved
)


# --- what is measured


#: Routes, in the order in which they are measured: the most telling first.
ROUTES = {
    "mlp_bwd gelu": MLP_BWD,
    "gated_mlp_bwd silu": GATED_MLP_BWD,
    "linear + gelu": LINEAR,
    "gated_mlp_fwd silu": GATED,
}
#: Kernels of `tables.TILES`.
TILED = {
    "linear": LINEAR,
    "gated_mlp_fwd": GATED,
    "linear_act_bwd": ACT_BWD,
    "mlp_bwd": MLP_BWD,
    "gated_mlp_bwd": GATED_MLP_BWD,
    "cross_entropy_fwd": LOSS,
    "cross_entropy_bwd": LOSS_BWD,
}


def _sizes(rig: Rig, width: int) -> dict[str, int]:
    if rig.dry:
        return {"T": 32, "D": 64, "F": 96}
    return {"T": TOKENS, "D": width, "F": 4 * width}


def route_entries(rig: Rig) -> Iterator[Entry]:
    for width in WIDTHS[:1] if rig.dry else WIDTHS:
        for name, form in ROUTES.items():
            yield form.entry(name, _sizes(rig, width))


def tile_entries(rig: Rig) -> Iterator[Entry]:
    """Every kernel of the tables with every tile that they have for this GPU, at one width."""
    for kernel, of_family in tables.TILES.items():
        tiles = of_family[tables.family(rig.target)]
        sizes = _sizes(rig, WIDTHS[0])
        yield TILED[kernel].entry(f"tiles of {kernel}", sizes, tiles)
