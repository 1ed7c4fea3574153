"""Contests of kernels of ours that are bound by memory and are no op by themselves.

Sums with their norm, activations and gates: parts of a layer, each against the ATen kernels that
it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure.contest import (
    SETS,
    Contest,
    Entry,
    P,
    Results,
    Rig,
    Way,
    Work,
    from_mask,
    multiplier,
)
from bench.tuning.products import EPS, doubled, per_set
from fused_remat.spec import NormSpec
from fused_remat.triton import norm as norms
from fused_remat.triton import pointwise
from fused_remat.triton.launch import Launch

_aten = torch.ops.aten
ELEMENTS = 1 << 26  # 128 MiB in bfloat16, twice an H200's cache
WIDTHS = (1024, 2048, 4096, 8192, 16384)


def sum_norm_fwd(rig: Rig, rows: int, width: int) -> Contest:
    """total = residual + dropout(x) and its LayerNorm: three ATen kernels, one of ours."""
    weight, bias = rig.normal(width, shift=1.0), rig.normal(width)
    xs = [rig.normal(rows, width) for _ in range(SETS)]
    residual, keep = rig.normal(rows, width, shift=0.5), rig.keep(rows, width)
    total, y = rig.poisoned(rows, width), rig.poisoned(rows, width)
    stats = tuple(rig.poisoned(rows, 1, dtype=torch.float32) for _ in range(2))
    rest = residual, keep, weight, bias, total, y, stats, False

    def kernel(index: int) -> Launch:
        return norms.norm_fwd(NormSpec(eps=EPS), xs[index], *rest)

    def aten(index: int) -> Results:
        dropped, mask = torch.native_dropout(xs[index], P, True)
        added = residual + dropped
        y, *_ = torch.native_layer_norm(added, [width], weight, bias, EPS)
        return {"total": added, "y": y, "mask": mask}

    def exact(scale: Tensor) -> Results:
        added = residual.double() + xs[0].double() * scale
        affine = weight.double(), bias.double()
        return {"total": added, "y": F.layer_norm(added, [width], *affine, EPS)}

    ways = {
        "aten": Way(aten, lambda found: exact(from_mask(found["mask"]))),
        "kernel": per_set(kernel, {"total": total, "y": y}),
    }
    return Contest(ways, lambda: exact(multiplier(keep)), Work(bytes=4 * y.nbytes), ("aten",))


# --- one pass over a matrix


def act_dropout(rig: Rig, rows: int, width: int) -> Contest:
    """Dropout of GELU."""
    xs, y = [rig.normal(rows, width) for _ in range(SETS)], rig.poisoned(rows, width)
    keep = rig.keep(rows, width)

    def aten(index: int) -> Results:
        dropped, mask = torch.native_dropout(F.gelu(xs[index]), P, True)
        return {"y": dropped, "mask": mask}

    def exact(scale: Tensor) -> Results:
        return {"y": F.gelu(xs[0].double()) * scale}

    ways = {
        "aten": Way(aten, lambda found: exact(from_mask(found["mask"]))),
        "kernel": per_set(lambda i: pointwise.act_fwd(xs[i], "gelu", keep, y), {"y": y}),
    }
    return Contest(ways, lambda: exact(multiplier(keep)), Work(bytes=2 * y.nbytes), ("aten",))


@dataclass(frozen=True)
class Pass:
    """A pass without dropout, each matrix of which is read or written once.

    Attributes:
        inputs: how many matrices it reads.
        aten: results of the inputs in ATen's operators, in any dtype.
        launch: our kernel of the inputs and then the results.
    """

    inputs: int
    aten: Callable[..., Results]
    launch: Callable[..., Launch]

    def contest(self, rig: Rig, rows: int, width: int) -> Contest:
        sets = [[rig.normal(rows, width) for _ in range(self.inputs)] for _ in range(SETS)]
        truth = lambda: self.aten(*doubled(*sets[0]))  # noqa: E731
        results = {name: rig.poisoned(rows, width) for name in truth()}
        ways = {
            "aten": Way(lambda index: self.aten(*sets[index])),
            "kernel": per_set(lambda i: self.launch(*sets[i], *results.values()), results),
        }
        matrices = self.inputs + len(results)
        return Contest(ways, truth, Work(bytes=matrices * sets[0][0].nbytes), ("aten",))


def _act_bwd(x: Tensor, dy: Tensor) -> Results:
    return {"dx": _aten.gelu_backward(dy, x), "y": F.gelu(x)}


def _gated_bwd(gate: Tensor, up: Tensor, dy: Tensor) -> Results:
    return {"dgate": _aten.silu_backward(dy * up, gate), "dup": dy * F.silu(gate)}


PASSES: dict[str, Callable[[Rig, int, int], Contest]] = {
    "act_fwd gelu": Pass(
        1, lambda x: {"y": F.gelu(x)}, lambda x, y: pointwise.act_fwd(x, "gelu", None, y)
    ).contest,
    "act_fwd gelu dropout": act_dropout,
    "act_bwd gelu, with act": Pass(
        2, _act_bwd, lambda x, dy, dx, y: pointwise.act_bwd(dy, x, "gelu", None, dx, y)
    ).contest,
    "gated_fwd silu": Pass(
        2,
        lambda gate, up: {"y": F.silu(gate) * up},
        lambda gate, up, y: pointwise.gated_fwd(gate, up, "silu", None, y),
    ).contest,
    "gated_bwd silu": Pass(
        3,
        _gated_bwd,
        lambda gate, up, dy, dgate, dup: pointwise.gated_bwd(
            dy, gate, up, "silu", None, dgate, dup
        ),
    ).contest,
}


# --- what is measured, the most telling first


def pointwise_entries(rig: Rig) -> Iterator[Entry]:
    """Sums with their norm, by width; the passes over a matrix, at one."""
    for width in (64,) if rig.dry else WIDTHS:
        rows = rig.size(ELEMENTS // width, 64)
        case = {"name": "dropout + residual + layer_norm", "rows": rows, "width": width}
        yield case, lambda rig, r=rows, w=width: sum_norm_fwd(rig, r, w)
    rows, width = (64, 96) if rig.dry else (8192, ELEMENTS // 8192)
    for name, contest in PASSES.items():
        case = {"name": name, "rows": rows, "width": width}
        yield case, lambda rig, c=contest, r=rows, w=width: c(rig, r, w)
