"""Tiles of the kernels with products: contests of all tiles that the tables have for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.audit.cases import tile_name
from bench.measure.contest import SETS, Contest, Entry, Results, Rig, Way, Work
from fused_remat.triton import cross_entropy, products, tables
from fused_remat.triton.launch import Launch, cdiv
from fused_remat.triton.tables import Tile

_aten = torch.ops.aten
#: T tokens, D width, F hidden width; and in a dry run.
SIZES, DRY = {"T": 8192, "D": 2048, "F": 8192}, {"T": 32, "D": 64, "F": 96}
_UP, _GATE = {"up": "FD", "bias": "F"}, {"gate": "FD", "gate_bias": "F"}


@dataclass(frozen=True)
class Form:
    """The computation of a kernel on operands `t`: an attribute for each, and `t.target`."""

    operands: Mapping[str, str]  # name -> sizes, as in `SIZES`; those of tokens are in sets
    aten: Callable[[Any], Results]  # in PyTorch's operators, in any dtype
    kernel: Callable[[Any, Results, Tile], Launch]  # writes the results, which it gets by name
    products: int = 1
    outputs: Sequence[str] = ("y",)
    shape: str = "TF"
    dtype: torch.dtype | None = None
    derive: Callable[[Any], dict[str, Any]] = lambda t: {}  # operands that follow from the others

    def draw(self, rig: Rig, sizes: Mapping[str, int]) -> list[Any]:
        """Return sets of random operands."""

        def drawn(of_tokens: bool) -> dict[str, Tensor]:
            operands = {}
            for name, letters in self.operands.items():
                if letters.startswith("T") is of_tokens:
                    shape = [sizes[letter] for letter in letters]
                    scale = shape[-1] ** -0.5 if len(shape) == 2 and not of_tokens else 1.0
                    operands[name] = rig.normal(*shape, scale=scale)
            return operands

        weights = drawn(False) | {"target": rig.target, "sizes": sizes}
        sets = [SimpleNamespace(**weights, **drawn(True)) for _ in range(SETS)]
        for t in sets:
            vars(t).update(self.derive(t))
        return sets


def contest(form: Form, sets: Sequence[Any], rig: Rig, tiles: Iterable[Tile]) -> Contest:
    """Return the kernel in each of `tiles`; the first one is the baseline."""
    sizes = sets[0].sizes
    shape = [sizes[letter] for letter in form.shape]

    def truth() -> Results:
        t = SimpleNamespace(**vars(sets[0]))
        vars(t).update({name: getattr(t, name).double() for name in form.operands})
        return form.aten(t)

    def tiled(tile: Tile) -> Way:
        results = {name: rig.poisoned(*shape, dtype=form.dtype) for name in form.outputs}
        launches = [form.kernel(t, results, tile) for t in sets]

        def run(index: int) -> Results:
            launches[index].run()
            return results

        return Way(run)

    ways = {tile_name(tile): tiled(tile) for tile in tiles}
    work = Work(flops=2.0 * form.products * sizes["T"] * sizes["D"] * sizes["F"])
    return Contest(ways, truth, work, tuple(ways)[:1])


def pre(t: Any) -> Tensor:
    return torch.addmm(t.bias, t.x, t.up.t())


def _gate(t: Any) -> Tensor:
    return torch.addmm(t.gate_bias, t.x, t.gate.t())


LINEAR = Form(
    {"x": "TD", **_UP},
    lambda t: {"y": F.gelu(pre(t))},
    lambda t, out, tile: products.linear_fwd(
        t.x, t.up, t.bias, None, "gelu", None, out["y"], t.target, tile
    ),
)
GATED = Form(
    {"x": "TD", **_GATE, **_UP},
    lambda t: {"y": F.silu(_gate(t)) * pre(t)},
    lambda t, out, tile: products.gated_mlp_fwd(
        t.x, t.gate, t.gate_bias, t.up, t.bias, None, "silu", out["y"], t.target, tile
    ),
    products=2,
)


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

    def kernel(t: Any, out: Results, tile: Tile) -> Launch:
        ups = ((t.gate, t.gate_bias), (t.up, t.bias)) if gated else ((t.up, t.bias),)
        y, *dups = out.values()
        return products.mlp_bwd(t.x, ups, t.dy, t.down, None, act, y, tuple(dups), t.target, tile)

    return Form(
        {"x": "TD", "dy": "TD", **(_GATE if gated else {}), **_UP, "down": "DF"},
        lambda t: gradients(t.dy @ t.down, *pres(t)),
        kernel,
        products=2 + gated,
        outputs=outputs,
    )


MLP_BWD, GATED_MLP_BWD = _backward(False), _backward(True)
ACT_BWD = Form(
    {"dy": "TD", "down": "DF", "up": "TF"},
    lambda t: _gelu_gradients(t.dy @ t.down, t.up),
    lambda t, out, tile: products.linear_act_bwd(
        t.dy, t.down, t.up, None, "gelu", out["act"], out["dup"], t.target, tile
    ),
    outputs=("act", "dup"),
)


def _labels(t: Any) -> dict[str, Any]:
    return {"labels": torch.arange(len(t.x), device=t.x.device) % len(t.up)}


def _loss(t: Any, out: Results, tile: Tile) -> Launch:
    """Launch a loss's forward, whose logits of the labels are compared."""
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
    outputs=("picked",),
    shape="T",
    dtype=torch.float32,
    derive=_labels,
)
LOSS_BWD = Form({"x": "TD", **_UP}, _dlogits, _loss_gradient, outputs=("dlogits",), derive=_saved)


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


def tile_entries(rig: Rig) -> Iterator[Entry]:
    """Yield every kernel of the tables with every tile that they have for this GPU."""
    sizes = DRY if rig.dry else SIZES
    for kernel, of_family in tables.TILES.items():
        form, tiles = TILED[kernel], of_family.get(tables.family(rig.target), ())
        if not tiles:
            continue
        case = {"name": f"tiles of {kernel}", "tokens": sizes["T"], "width": sizes["D"]}

        def build(rig: Rig, form: Form = form, tiles: Any = tiles) -> Contest:
            return contest(form, form.draw(rig, sizes), rig, tiles)

        yield case, build
