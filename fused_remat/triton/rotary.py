"""Rotary position embedding of a packed projection's heads, in kernels (`kernels.rotary`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_remat.kernels.rotary import (
    Angles,
    Heads,
    Pairs,
    rotary_fwd_kernel,
    rotary_norm_bwd_kernel,
    rotary_pack_bwd_kernel,
)
from fused_remat.steps import rotary
from fused_remat.steps.operations import faster
from fused_remat.steps.rotary import RotaryTables
from fused_remat.triton import launch
from fused_remat.triton.launch import Launch, Target, run
from fused_remat.triton.norm import column_sum
from fused_remat.triton.operands import cdiv, contiguous_rows, matrix, operand, power_of_2, vector
from fused_remat.triton.tables import family

#: The widest head, in elements: a program holds at least one head.
MAX_HEAD = 1 << 11
# Pairs that a program of forward holds, if these are at least one head's, by family of GPUs: on
# Blackwell, 2048 need too many registers. A program of backward also holds sums.
_FWD_PAIRS = {"blackwell": 1024}
_FWD_PAIRS_ELSEWHERE, _BWD_PAIRS = 2048, 1024
# Tokens whose sums a program of `rotary_pack_bwd_kernel` adds: then the sums are 3% of its bytes,
# and there are programs enough.
_SUMMED = 64


def _unsupported_reason(key: tuple[Any, ...]) -> str | None:
    *_, width, few = key
    if not 0 < width <= MAX_HEAD:
        return f"heads of {width} elements are not between 1 and {MAX_HEAD} wide"
    return None if few else "the number of tokens does not fit 32 bits"


@faster(rotary.rotary_fwd, "triton", "kernel rotary_fwd", _unsupported_reason)
def rotary_fwd_triton(x, call, out=None):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    run(rotary_fwd, x, call, y, launch.TARGET)
    return y


@faster(rotary.rotary_bwd, "triton", "kernel rotary_norm_bwd", _unsupported_reason)
def rotary_bwd_triton(dy, x, call, needs_grad, owned, heads=None):
    dx = None
    if needs_grad[0]:
        in_place = owned and dy.is_contiguous()
        dx = dy if in_place else torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    if x is None:
        assert dx is not None and heads is None
        run(rotary_fwd, dy, call, dx, launch.TARGET, True)
        return dx, None, None
    dq_weight, dk_weight = (
        torch.empty(weight.shape, dtype=torch.float32, device=dy.device) if wanted else None
        for weight, wanted in zip((call.q_weight, call.k_weight), needs_grad[1:], strict=True)
    )
    run(rotary_norm_bwd, dy, x, call, dx, dq_weight, dk_weight, launch.TARGET, heads)
    return dx, dq_weight, dk_weight


@faster(rotary.pack_heads, "triton", "kernel rotary_pack_bwd", _unsupported_reason)
def pack_heads_triton(heads, call, out, needs_sum):
    sums = torch.empty(out.shape[1], device=out.device) if needs_sum else None
    run(pack_heads, heads, call, out, sums)
    return sums


def rotary_fwd(
    x: Tensor, call: RotaryTables, y: Tensor, target: Target, back: bool = False
) -> Launch:
    """Compute y = x with query and key heads normed and rotated, by opposite angles if `back`.

    y may be x.
    """
    copies = y is not x
    values = copies and call.values
    width, (q_weight, k_weight) = call.width(x), map(vector, call.norm_weights())
    lanes = cdiv(width, 2) if copies or q_weight is not None else call.rotated // 2
    blocks = _blocks(call, width, lanes, _FWD_PAIRS.get(family(target), _FWD_PAIRS_ELSEWHERE))
    _, groups = _groups(call, blocks["BLOCK_H"], values)
    args = (
        operand(x), _angles(call), q_weight, k_weight, matrix(y),
        call.token0 % max(call.seq_len, 1), call.seq_len, x.shape[0], call.spec.num_heads,
        call.spec.num_kv_heads, groups, call.eps,
    )  # fmt: skip
    constants = {"BACK": back, **blocks}
    grid = (cdiv(x.shape[0], blocks["BLOCK_M"]) * groups,)
    return Launch(rotary_fwd_kernel, grid, args, constants, device=y.device)


def pack_heads(
    heads: tuple[Tensor, Tensor, Tensor], call: RotaryTables, dx: Tensor, sums: Tensor | None
) -> list[Launch]:
    """Return the launches of dx, and of its columns' sums (float32) unless None."""
    tokens, (*_, seq_len, width) = dx.shape[0], heads[0].shape
    blocks = _blocks(call, width, cdiv(width, 2), _BWD_PAIRS)
    _, groups = _groups(call, blocks["BLOCK_H"], values=True)
    rows = max(_SUMMED, blocks["BLOCK_M"]) if sums is not None else blocks["BLOCK_M"]
    programs = cdiv(tokens, rows)
    parts = None if sums is None else launch.scratch(sums, (programs, dx.shape[1]))
    args = (
        _heads(heads), _angles(call), matrix(dx), parts,
        call.token0 % max(call.seq_len, 1), seq_len, tokens, call.spec.num_heads,
        call.spec.num_kv_heads, groups,
    )  # fmt: skip
    grid, constants = (programs * groups,), {"ROWS": rows, **blocks}
    launches = [Launch(rotary_pack_bwd_kernel, grid, args, constants, device=dx.device)]
    if sums is not None and parts is not None:
        launches.append(column_sum(parts, sums))
    return launches


def rotary_norm_bwd(
    dy: Tensor,
    x: Tensor,
    call: RotaryTables,
    dx: Tensor | None,
    dq_weight: Tensor | None,
    dk_weight: Tensor | None,
    target: Target,
    heads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> list[Launch]:
    """Return the launches of dx, which may be dy, and the norm weights' gradients (float32).

    `heads`: what dy should hold, of any strides.
    """
    values = call.values and dx is not None and (dx is not dy or heads is not None)
    tokens, width = x.shape[0], call.width(x)
    blocks = _blocks(call, width, cdiv(width, 2), _BWD_PAIRS)
    block_m = blocks["BLOCK_M"]
    of_queries, summed = _groups(call, blocks["BLOCK_H"], values=False)
    groups = _groups(call, blocks["BLOCK_H"], values)[1]
    # From the heads that are summed over, so that sums are the same in place or not.
    strip = block_m * max(1, cdiv(tokens, block_m * cdiv(4 * target.sms, summed)))
    programs = cdiv(tokens, strip)
    like = dq_weight if dq_weight is not None else dk_weight
    parts = None if like is None else launch.scratch(like, (summed * programs, width))
    args = (
        None if heads else operand(dy), None if heads is None else _heads(heads), operand(x),
        _angles(call), *map(vector, call.norm_weights()), matrix(dx),
        parts, call.token0 % max(call.seq_len, 1), call.seq_len, strip, tokens, call.spec.num_heads,
        call.spec.num_kv_heads, call.eps,
    )  # fmt: skip
    grid = (groups, programs)
    launches = [Launch(rotary_norm_bwd_kernel, grid, args, blocks, device=x.device)]
    if parts is not None:
        ends = of_queries * programs
        sums = ((dq_weight, parts[:ends]), (dk_weight, parts[ends:]))
        launches += [column_sum(part, total) for total, part in sums if total is not None]
    return launches


def _heads(heads: tuple[Tensor, Tensor, Tensor]) -> Heads:
    found = tuple(map(contiguous_rows, heads))
    return Heads(*found, *(x.stride()[:3] for x in found))


def _angles(call: RotaryTables) -> Angles:
    # From the first token's sequence on.
    cos, sin = call.cos, call.sin
    if cos is None or sin is None:
        return Angles(None, None, 0, 0)
    if cos.dim() == 3:
        first = call.token0 // max(call.seq_len, 1)
        cos, sin = cos[first:], sin[first:]
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return Angles(cos, sin, cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2))


def _blocks(call: RotaryTables, width: int, lanes: int, most: int) -> dict[str, Any]:
    """Return a program's tokens, its heads, which share rows of tables, and its pairs of a head."""
    block_p, heads = power_of_2(lanes), call.spec.num_heads
    fits = [n for n in (8, 4) if heads % n == 0]
    block_h = min(fits[0] if fits else min(8, power_of_2(heads)), max(1, most // block_p))
    interleaved = call.spec.rotary is not None and call.spec.rotary.interleaved
    pairs = Pairs(width, call.rotated, lanes, interleaved, block_p)
    return {"BLOCK_M": max(1, most // (block_p * block_h)), "BLOCK_H": block_h, "pairs": pairs}


def _groups(call: RotaryTables, block_h: int, values: bool) -> tuple[int, int]:
    """Return the number of groups of query heads, and of all heads that a launch covers."""
    of_queries, of_keys = cdiv(call.spec.num_heads, block_h), cdiv(call.spec.num_kv_heads, block_h)
    return of_queries, of_queries + (2 if values else 1) * of_keys
