"""Contests of kernels of ours that are bound by memory and are no op by themselves.

Sums with their norm, activations and gates: parts of a layer, each against the ATen kernels that
it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from fused_remat.random import DropoutMask
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


def act_fwd(rig: Rig, rows: int, width: int, dropped: bool) -> Contest:
    """GELU, and dropout of it."""
    xs, y = [rig.normal(rows, width) for _ in range(SETS)], rig.poisoned(rows, width)
    keep = rig.keep(rows, width) if dropped else None

    def aten(index: int) -> Results:
        act = F.gelu(xs[index])
        if not dropped:
            return {"y": act}
        return dict(zip(("y", "mask"), torch.native_dropout(act, P, True), strict=True))

    def exact(scale: Tensor | None) -> Results:
        act = F.gelu(xs[0].double())
        return {"y": act if scale is None else act * scale}

    own = (lambda found: exact(from_mask(found["mask"]))) if dropped else None
    ways = {
        "aten": Way(aten, own),
        "kernel": per_set(lambda i: pointwise.act_fwd(xs[i], "gelu", keep, y), {"y": y}),
    }
    return Contest(ways, lambda: exact(_scale(keep)), Work(bytes=2 * y.nbytes), ("aten",))


def _scale(keep: DropoutMask | None) -> Tensor | None:
    return None if keep is None else multiplier(keep)


def act_bwd(rig: Rig, rows: int, width: int) -> Contest:
    """GELU's gradient, and GELU again: two ATen kernels, one of ours."""
    xs = [rig.normal(rows, width) for _ in range(SETS)]
    dy, dx, y = rig.normal(rows, width), rig.poisoned(rows, width), rig.poisoned(rows, width)

    def aten(index: int) -> Results:
        return {"dx": _aten.gelu_backward(dy, xs[index]), "y": F.gelu(xs[index])}

    def truth() -> Results:
        x = xs[0].double()
        return {"dx": _aten.gelu_backward(dy.double(), x), "y": F.gelu(x)}

    ways = {
        "aten": Way(aten),
        "kernel": per_set(
            lambda i: pointwise.act_bwd(dy, xs[i], "gelu", None, dx, y), {"dx": dx, "y": y}
        ),
    }
    return Contest(ways, truth, Work(bytes=4 * y.nbytes), ("aten",))


def gated_fwd(rig: Rig, rows: int, width: int) -> Contest:
    """silu(gate) * up."""
    gates = [rig.normal(rows, width) for _ in range(SETS)]
    up, y = rig.normal(rows, width), rig.poisoned(rows, width)
    ways = {
        "aten": Way(lambda index: {"y": F.silu(gates[index]) * up}),
        "kernel": per_set(lambda i: pointwise.gated_fwd(gates[i], up, "silu", None, y), {"y": y}),
    }
    truth = lambda: {"y": F.silu(gates[0].double()) * up.double()}  # noqa: E731
    return Contest(ways, truth, Work(bytes=3 * y.nbytes), ("aten",))


def gated_bwd(rig: Rig, rows: int, width: int) -> Contest:
    """The gradients of silu(gate) * up."""
    gates = [rig.normal(rows, width) for _ in range(SETS)]
    up, dy = rig.normal(rows, width), rig.normal(rows, width)
    dgate, dup = rig.poisoned(rows, width), rig.poisoned(rows, width)

    def gradients(dy: Tensor, gate: Tensor, up: Tensor) -> Results:
        return {"dgate": _aten.silu_backward(dy * up, gate), "dup": dy * F.silu(gate)}

    ways = {
        "aten": Way(lambda index: gradients(dy, gates[index], up)),
        "kernel": per_set(
            lambda i: pointwise.gated_bwd(dy, gates[i], up, "silu", None, dgate, dup),
            {"dgate": dgate, "dup": dup},
        ),
    }
    truth = lambda: gradients(*doubled(dy, gates[0], up))  # noqa: E731
    return Contest(ways, truth, Work(bytes=5 * dup.nbytes), ("aten",))


# --- what is measured, the most telling first


def pointwise_entries(rig: Rig) -> Iterator[Entry]:
    """Sums with their norm, by width; the passes over a matrix, at one."""
    for width in (64,) if rig.dry else WIDTHS:
        rows = rig.size(ELEMENTS // width, 64)
        case = {"name": "dropout + residual + layer_norm", "rows": rows, "width": width}
        yield case, lambda rig, r=rows, w=width: sum_norm_fwd(rig, r, w)
    rows, width = (64, 96) if rig.dry else (8192, ELEMENTS // 8192)
    passes: dict[str, Callable[[Rig, int, int], Contest]] = {
        "act_fwd gelu": lambda *given: act_fwd(*given, False),
        "act_fwd gelu dropout": lambda *given: act_fwd(*given, True),
        "act_bwd gelu, with act": act_bwd,
        "gated_fwd silu": gated_fwd,
        "gated_bwd silu": gated_bwd,
    }
    for name, contest in passes.items():
        case = {"name": name, "rows": rows, "width": width}
        yield case, lambda rig, c=contest, r=rows, w=width: c(rig, r, w)
