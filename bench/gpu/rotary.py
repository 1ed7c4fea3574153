"""Contests of rotary position embedding: forward, back, and with the RMSNorm of heads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.gpu.kernels import Entry, launched
from bench.measure.contest import SETS, Contest, Results, Rig, Way, Work
from fused_remat.backends import rotary as eager
from fused_remat.backends.base import RotaryCall
from fused_remat.backends.triton import rotary

_NAMES = ("dx", "dq_weight", "dk_weight")


def _call(rig: Rig, seq_len: int, heads: int, width: int, normed: bool) -> RotaryCall:
    """Query heads and a quarter as many key heads, all of whose elements are rotated."""
    angle = rig.normal(seq_len, width // 2).float()
    weights = [rig.normal(width, shift=1.0) if normed else None for _ in range(2)]
    return RotaryCall(
        nhead=heads, kv_heads=heads // 4, cos=angle.cos(), sin=angle.sin(), interleaved=False,
        q_weight=weights[0], k_weight=weights[1], eps=1e-6, token0=0, seq_len=seq_len,
    )  # fmt: skip


def _exact(call: RotaryCall) -> RotaryCall:
    wide = {
        name: None if (t := getattr(call, name)) is None else t.double()
        for name in ("cos", "sin", "q_weight", "k_weight")
    }
    return dataclasses.replace(call, **wide)


def _plain(x: Tensor, call: RotaryCall) -> Tensor:
    """As models write it: heads split off, halves turned, heads put together again."""
    q, k, v = x.unflatten(-1, (call.nhead + 2 * call.kv_heads, -1)).split_with_sizes(
        (call.nhead, call.kv_heads, call.kv_heads), 1
    )
    assert call.cos is not None and call.sin is not None
    repeats = x.shape[0] // call.seq_len
    cos, sin = (torch.cat([t, t], -1).to(x.dtype).repeat(repeats, 1)[:, None]
                for t in (call.cos, call.sin))  # fmt: skip

    def turned(t: Tensor) -> Tensor:
        first, second = t.chunk(2, -1)
        return t * cos + torch.cat([-second, first], -1) * sin

    return torch.cat([turned(q), turned(k), v], 1).flatten(1)


def rotary_fwd(rig: Rig, tokens: int, seq_len: int, heads: int, width: int) -> Contest:
    """qkv rotated: plain PyTorch, our kernel."""
    call = _call(rig, seq_len, heads, width, False)
    columns = (heads + 2 * call.kv_heads) * width
    xs, y = [rig.normal(tokens, columns) for _ in range(SETS)], rig.poisoned(tokens, columns)
    launches = [[rotary.rotary_fwd(x, call, y, rig.target)] for x in xs]
    ways = {
        "aten": Way(lambda index: {"y": _plain(xs[index], call)}),
        "kernel": launched(launches, {"y": y}),
    }
    truth = lambda: {"y": eager.forward(xs[0].double(), _exact(call))}  # noqa: E731
    # Plain PyTorch rounds cos, sin and both products on the way.
    return Contest(ways, truth, Work(bytes=2 * y.nbytes), ("aten",), factor=2.0)


def rotary_norm_bwd(rig: Rig, tokens: int, seq_len: int, heads: int, width: int) -> Contest:
    """Gradients of RMSNorm and rotation of each head: our ATen twin, our kernels."""
    call = _call(rig, seq_len, heads, width, True)
    columns = (heads + 2 * call.kv_heads) * width
    xs = [rig.normal(tokens, columns) for _ in range(SETS)]
    dy, dx = rig.normal(tokens, columns), rig.poisoned(tokens, columns)
    sums = [rig.poisoned(width, dtype=torch.float32) for _ in range(2)]
    launches = [rotary.rotary_norm_bwd(dy, x, call, dx, *sums, rig.target) for x in xs]

    def gradients(dy: Tensor, x: Tensor, call: RotaryCall) -> Results:
        made = eager.backward(dy, x, call, (True, True, True), owned=False)
        return {name: t for name, t in zip(_NAMES, made, strict=True) if t is not None}

    ways = {
        "aten": Way(lambda index: gradients(dy, xs[index], call)),
        "kernel": launched(launches, dict(zip(_NAMES, (dx, *sums), strict=True))),
    }
    truth = lambda: gradients(dy.double(), xs[0].double(), _exact(call))  # noqa: E731
    return Contest(ways, truth, Work(bytes=3 * dx.nbytes), ("aten",))


def rotary_entries(rig: Rig) -> Iterator[Entry]:
    """Heads of 128 and 64, 32 of them."""
    heads, seq_len, tokens = (4, 8, 16) if rig.dry else (32, 2048, 16384)
    for width in (16,) if rig.dry else (128, 64):
        for name, build in (("rotary_fwd", rotary_fwd), ("rotary_norm_bwd", rotary_norm_bwd)):
            case = {"name": name, "tokens": tokens, "heads": heads, "width": width}
            given = {"tokens": tokens, "seq_len": seq_len, "heads": heads, "width": width}
            yield case, functools.partial(build, **given)
