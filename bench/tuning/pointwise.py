"""Contests of kernels of ours that are bound by memory and are no op by themselves.

Sums with their norm, activations and gates: parts of a layer, each against the ATen kernels that
it stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.measure.contest import Entry, Results, Rig
from bench.tuning.forms import Form
from fused_remat.spec import NormSpec
from fused_remat.triton import norm as norms
from fused_remat.triton import pointwise
from fused_remat.triton.launch import Launch

_aten = torch.ops.aten
ELEMENTS = 1 << 26  # 128 MiB in bfloat16, twice an H200's cache
WIDTHS = (1024, 2048, 4096, 8192, 16384)
NORM, AFFINE = NormSpec(eps=1e-5), {"weight": "D", "shift": "D"}


def _sum_norm(t: Any) -> Results:
    """Three ATen kernels, one of ours."""
    total = t.residual + t.drop(t.x)
    return {"total": total, "y": F.layer_norm(total, t.weight.shape, t.weight, t.shift, NORM.eps)}


def _norm_fwd(t: Any, out: Results) -> Launch:
    stats = tuple(t.x.new_empty(len(t.x), 1, dtype=torch.float32) for _ in range(2))
    affine = t.weight, t.shift
    return norms.norm_fwd(NORM, t.x, t.residual, t.keep, *affine, *out.values(), stats, False)


SUM_NORM = Form(
    {"x": "TD", "residual": "TD", **AFFINE}, _sum_norm, _norm_fwd,
    products=0, outputs=("total", "y"), shape="TD", dropped=True,
)  # fmt: skip
ACT_FWD = Form(
    {"x": "TF"},
    lambda t: {"y": t.drop(F.gelu(t.x))},
    lambda t, out: pointwise.act_fwd(t.x, "gelu", t.keep, out["y"]),
    products=0,
)
PASSES = {
    "act_fwd gelu": ACT_FWD,
    "act_fwd gelu dropout": dataclasses.replace(ACT_FWD, dropped=True),
    "act_bwd gelu, with act": Form(
        {"x": "TF", "dy": "TF"},
        lambda t: {"dx": _aten.gelu_backward(t.dy, t.x), "y": F.gelu(t.x)},
        lambda t, out: pointwise.act_bwd(t.dy, t.x, "gelu", None, *out.values()),
        products=0,
        outputs=("dx", "y"),
    ),
    "gated_fwd silu": Form(
        {"gate": "TF", "up": "TF"},
        lambda t: {"y": F.silu(t.gate) * t.up},
        lambda t, out: pointwise.gated_fwd(t.gate, t.up, "silu", None, out["y"]),
        products=0,
    ),
    "gated_bwd silu": Form(
        {"gate": "TF", "up": "TF", "dy": "TF"},
        lambda t: {"dgate": _aten.silu_backward(t.dy * t.up, t.gate), "dup": t.dy * F.silu(t.gate)},
        lambda t, out: pointwise.gated_bwd(t.dy, t.gate, t.up, "silu", None, *out.values()),
        products=0,
        outputs=("dgate", "dup"),
    ),
}


def pointwise_entries(rig: Rig) -> Iterator[Entry]:
    """Sums with their norm, by width; the passes over a matrix, at one."""
    for width in (64,) if rig.dry else WIDTHS:
        sizes = {"T": rig.size(ELEMENTS // width, 64), "D": width}
        yield SUM_NORM.entry("dropout + residual + layer_norm", sizes, "rows", "width")
    sizes = {"T": 64, "F": 96} if rig.dry else {"T": 8192, "F": ELEMENTS // 8192}
    for name, form in PASSES.items():
        yield form.entry(name, sizes, "rows", "width")
