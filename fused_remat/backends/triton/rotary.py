"""Launches of `kernels.rotary`: heads of a packed projection rotated, normed before or not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fused_remat.backends.base import RotaryCall
from fused_remat.backends.triton.launch import (
    Launch,
    Target,
    cdiv,
    in_place,
    power_of_2,
    rows_in_place,
    stride_of,
)
from fused_remat.backends.triton.norms import column_sum
from fused_remat.backends.triton.tables import family
from fused_remat.kernels.rotary import rotary_fwd_kernel, rotary_norm_bwd_kernel

#: The widest head, in elements: a program holds at least one.
MAX_HEAD = 1 << 11
#: Pairs that a program of a forward holds, at least those of one head, by family of GPUs; 2048
#: take more registers than they are given on Blackwell. A backward's also holds sums.
_FWD_PAIRS = {"blackwell": 1024}
_FWD_PAIRS_ELSEWHERE, _BWD_PAIRS = 2048, 1024


def width_of(x: Tensor, call: RotaryCall) -> int:
    """E, the width of a head."""
    return x.shape[1] // (call.nhead + 2 * call.kv_heads)


def serves(x: Tensor, call: RotaryCall) -> bool:
    """Whether a program holds a head of x, and 32 bits count its tokens."""
    return 0 < width_of(x, call) <= MAX_HEAD and x.shape[0] + call.seq_len < 2**31


def _place(call: RotaryCall) -> int:
    """Where in its sequence the first token is."""
    return call.token0 % max(call.seq_len, 1)


def _tables(call: RotaryCall) -> tuple[Any, ...]:
    """cos and sin from the sequence of the first token on; elements from one sequence and from one
    position to the next in both."""
    cos, sin = call.cos, call.sin
    if cos is None or sin is None:
        return None, None, 0, 0
    if cos.dim() == 3:
        first = call.token0 // max(call.seq_len, 1)
        cos, sin = cos[first:], sin[first:]
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2)


def _blocks(call: RotaryCall, lanes: int, pairs: int) -> dict[str, int]:
    """BLOCK_M tokens of BLOCK_H heads, which share a row of the tables, of BLOCK_P pairs."""
    block_p = power_of_2(lanes)
    fits = [n for n in (8, 4) if call.nhead % n == 0]
    block_h = min(fits[0] if fits else min(8, power_of_2(call.nhead)), max(1, pairs // block_p))
    block_m = max(1, pairs // (block_p * block_h))
    return {"BLOCK_M": block_m, "BLOCK_H": block_h, "BLOCK_P": block_p}


def _groups(call: RotaryCall, block_h: int, values: bool) -> tuple[int, int]:
    """Groups of query heads; and of all heads that a launch is over."""
    of_queries, of_keys = cdiv(call.nhead, block_h), cdiv(call.kv_heads, block_h)
    return of_queries, of_queries + (2 if values else 1) * of_keys


def rotary_fwd(
    x: Tensor, call: RotaryCall, y: Tensor, target: Target, back: bool = False
) -> Launch:
    """y, which may be x, = x with its query and key heads normed and rotated; `back`: rotated by
    the opposite angles."""
    values = y is not x
    width, rotated = width_of(x, call), call.rotated
    x, q_weight, k_weight = rows_in_place(x), in_place(call.q_weight), in_place(call.k_weight)
    lanes = cdiv(width, 2) if values or q_weight is not None else rotated // 2
    pairs = _FWD_PAIRS.get(family(target), _FWD_PAIRS_ELSEWHERE)
    blocks = _blocks(call, lanes, pairs)
    _, groups = _groups(call, blocks["BLOCK_H"], values)
    cos, sin, stride_cb, stride_cs = _tables(call)
    args = (
        x, cos, sin, q_weight, k_weight, y, stride_of(x), stride_cb, stride_cs, stride_of(y),
        _place(call), call.seq_len, x.shape[0], call.nhead, call.kv_heads, groups, call.eps,
    )  # fmt: skip
    constants = {"E": width, "R": rotated, "LANES": lanes, "INTERLEAVED": call.interleaved,
                 "BACK": back, **blocks}  # fmt: skip
    grid = (cdiv(x.shape[0], blocks["BLOCK_M"]) * groups,)
    return Launch(rotary_fwd_kernel, grid, args, constants, device=y.device)


def rotary_norm_bwd(
    dy: Tensor,
    x: Tensor,
    call: RotaryCall,
    dx: Tensor | None,
    dq_weight: Tensor | None,
    dk_weight: Tensor | None,
    target: Target,
) -> list[Launch]:
    """dx, which may be dy, and the norms' weight gradients (float32), those that are given."""
    values = dx is not None and dx is not dy
    tokens, width = x.shape[0], width_of(x, call)
    dy, x = rows_in_place(dy), rows_in_place(x)
    blocks = _blocks(call, cdiv(width, 2), _BWD_PAIRS)
    block_m = blocks["BLOCK_M"]
    of_queries, summed = _groups(call, blocks["BLOCK_H"], values=False)
    groups = _groups(call, blocks["BLOCK_H"], values)[1]
    # By the heads that are summed over: the same sums, in place or not.
    strip = block_m * max(1, cdiv(tokens, block_m * cdiv(4 * target.sms, summed)))
    programs = cdiv(tokens, strip)
    like = dq_weight if dq_weight is not None else dk_weight
    parts = None if like is None else like.new_empty((summed * programs, width))
    cos, sin, stride_cb, stride_cs = _tables(call)
    args = (
        dy, x, cos, sin, in_place(call.q_weight), in_place(call.k_weight), dx, parts,
        stride_of(dy), stride_of(x), stride_cb, stride_cs, stride_of(dx), _place(call),
        call.seq_len, strip, tokens, call.nhead, call.kv_heads, call.eps,
    )  # fmt: skip
    constants = {"E": width, "R": call.rotated, "INTERLEAVED": call.interleaved, **blocks}
    grid = (groups, programs)
    launches = [Launch(rotary_norm_bwd_kernel, grid, args, constants, device=x.device)]
    if parts is not None:
        ends = of_queries * programs
        sums = ((dq_weight, parts[:ends]), (dk_weight, parts[ends:]))
        launches += [column_sum(part, total) for total, part in sums if total is not None]
    return launches
