"""Norms in kernels (`kernels.norms`): a program holds one or more rows; wide rows go in blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fused_remat.kernels import norms
from fused_remat.kernels.pointwise import Sequences
from fused_remat.random import DropoutMask
from fused_remat.spec import NormSpec
from fused_remat.steps import norm
from fused_remat.steps.modulation_aten import modulated_norm_bwd, modulated_norm_fwd
from fused_remat.steps.norm import NORMS, shifted
from fused_remat.steps.operations import faster
from fused_remat.triton import launch, tables
from fused_remat.triton.launch import Launch, Target, run
from fused_remat.triton.operands import (
    by_sequence,
    cdiv,
    dropout_of,
    matrix,
    operand,
    power_of_2,
    vector,
)

#: The widest row, in elements.
MAX_WIDTH = 1 << 16
#: The widest rows that forward and backward hold in registers; wider ones are read two times.
FWD_WIDTH, BWD_WIDTH = 1 << 14, 1 << 13
_WIDE_BLOCK = 1 << 12


def unsupported_reason(key: tuple[Any, ...]) -> str | None:
    kind, _, _, width = key
    if kind not in norms.KINDS:
        return f"there is no kernel for {kind}"
    if not 0 < width <= MAX_WIDTH:
        return f"rows of {width} elements are not between 1 and {MAX_WIDTH}"
    return None


def _describe(key: tuple[Any, ...], *_: Any, **__: Any) -> str:
    return "kernel norm_fwd" if key[3] <= FWD_WIDTH else "kernel norm_wide_fwd"


@faster(norm.norm_fwd, "triton", _describe, unsupported_reason)
def norm_fwd_triton(spec, x, weight, bias, out=None, stats=None):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    made = new_stats(spec.kind, x) if stats is None else stats
    weight = shifted(weight, spec.offset)
    run(norm_fwd, spec, x, None, None, weight, bias, None, y, made, stats is not None)
    return (y, *made)


@faster(norm.norm_bwd, "triton", "kernel norm_bwd", unsupported_reason)
def norm_bwd_triton(spec, dy, x, stats, weight, needs_grad, add=None):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_grad[0] else None
    dweight, dbias = (
        torch.empty(x.shape[1], dtype=torch.float32, device=x.device) if wanted else None
        for wanted in needs_grad[1:]
    )
    weight = shifted(weight, spec.offset)
    run(norm_bwd, spec, dy, x, stats, weight, add, dx, dweight, dbias, launch.TARGET)
    return dx, dweight, dbias


@faster(modulated_norm_fwd, "triton", _describe, unsupported_reason)
def modulated_norm_fwd_triton(spec, x, weight, bias, rows, out=None, stats=None):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    made = new_stats(spec.kind, x) if stats is None else stats
    sequences, (weight, bias) = by_sequence(rows, len(x), weight, bias)
    weight = shifted(weight, spec.offset)
    run(norm_fwd, spec, x, None, None, weight, bias, None, y, made, stats is not None, sequences)
    return (y, *made)


@faster(modulated_norm_bwd, "triton", "kernel norm_bwd", unsupported_reason)
def modulated_norm_bwd_triton(spec, dy, x, stats, weight, rows, needs_grad, add=None):
    sequences, (weight,) = by_sequence(rows, len(x), weight)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_grad[0] else None
    shape, weight = (sequences.count, x.shape[1]), shifted(weight, spec.offset)
    dweight, dbias = (
        torch.empty(math.prod(shape), dtype=torch.float32, device=x.device) if wanted else None
        for wanted in needs_grad[1:]
    )
    target = launch.TARGET
    run(norm_bwd, spec, dy, x, stats, weight, add, dx, dweight, dbias, target, sequences)
    return dx, *(t if t is None else t.view(shape) for t in (dweight, dbias))


def norm_fwd(
    spec: NormSpec,
    x: Tensor,
    residual: Tensor | None,
    mask: DropoutMask | None,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor | None,
    y: Tensor,
    stats: tuple[Tensor, ...],
    has_stats: bool,
    sequences: Sequences | None = None,
) -> Launch:
    """Compute y = norm(x); or total = residual + mask * x, y = norm(total), up to FWD_WIDTH wide.

    The weight has its offset; it and the bias have one row for each of `sequences`. `stats` is
    filled, or read if `has_stats`.
    """
    rows, width = y.shape
    mean, rstd = _mean_rstd(spec.kind, stats)
    affine = vector if sequences is None else operand
    vectors = (affine(weight), affine(bias), mean, rstd, sequences)
    constants: dict[str, Any] = {"KIND": spec.kind, "HAS_STATS": has_stats}
    if width > FWD_WIDTH:
        assert residual is None
        wide = (operand(x), matrix(y), *vectors, rows, width, spec.eps)
        constants["BLOCK_N"] = _WIDE_BLOCK
        return Launch(norms.norm_wide_fwd_kernel, (rows,), wide, constants, 8, device=y.device)
    matrices = (operand(x), operand(residual), matrix(total), matrix(y))
    args = (*matrices, *vectors, *dropout_of(mask), rows, width, spec.eps)
    count, tokens = _count_and_tokens(rows, sequences)
    blocks, warps = _tiles(width, 24, sequences)
    grid = (count * cdiv(tokens, blocks["BLOCK_M"]),)
    return Launch(norms.norm_fwd_kernel, grid, args, constants | blocks, warps, device=y.device)


def norm_bwd(
    spec: NormSpec,
    dy: Tensor,
    x: Tensor,
    stats: tuple[Tensor, ...],
    weight: Tensor | None,
    add: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    target: Target,
    sequences: Sequences | None = None,
) -> list[Launch]:
    """Return the launches that fill dx (with + add), dweight and dbias (float32), if not None.

    The weight has its offset. With `sequences`, it has one row for each; dweight and dbias have
    these rows one after the other.
    """
    rows, width = x.shape
    matrices = (operand(dy), operand(x), operand(add), matrix(dx))
    mean, rstd = _mean_rstd(spec.kind, stats)
    vectors = vector(weight) if sequences is None else operand(weight), mean, rstd
    sums = x, sequences, dweight, dbias
    kind: dict[str, Any] = {"KIND": spec.kind}
    if width > BWD_WIDTH:
        launches = []
        if dx is not None:
            args = (*matrices, *vectors, sequences, rows, width)
            wide = kind | {"BLOCK_N": _WIDE_BLOCK}
            launches = [Launch(norms.norm_wide_bwd_kernel, (rows,), args, wide, 8, device=x.device)]
        if dweight is not None or dbias is not None:
            columns, blocks = cdiv(width, 128), kind | {"BLOCK_M": 16, "BLOCK_N": 128}
            read, programs = (*matrices[:2], *vectors[1:]), cdiv(4 * target.sms, columns)
            launches += _with_sums(
                norms.norm_params_bwd_kernel, (columns,), programs, read, *sums, blocks
            )
        return launches
    threads = tables.NORM_BWD_THREADS.get(tables.family(target), 128)
    tiles, warps = _tiles(width, 16, sequences, threads)
    per_sm = 4 if math.prod(tiles.values()) <= 2048 else 2
    inputs, programs, blocks = (*matrices, *vectors), per_sm * target.sms, kind | tiles
    return _with_sums(norms.norm_bwd_kernel, (), programs, inputs, *sums, blocks, warps)


def _tiles(
    width: int, most: int, sequences: Sequences | None, threads: int = 128
) -> tuple[dict[str, int], int]:
    """Return the tiles of rows that are held in registers, and the warps of a program.

    Three or five tiles instead of four or eight where these are enough, so that few lanes are idle:
    640 are for 576 columns, 1536 for 1536. A thread, of at least so many, holds at most so many
    elements of a matrix, unless a row is too wide; backward also holds sums.
    """
    lanes, blocks, parts = power_of_2(width), 1, 1
    if lanes >= 512 and 4 * width <= 3 * lanes:
        blocks, parts = (5, 8) if 8 * width <= 5 * lanes else (3, 4)
    block_n = lanes // parts
    row = blocks * block_n
    is_by_token = sequences is not None and sequences.tokens == 1
    rows = 1 if is_by_token else max(1, most * threads // row)
    block_m = power_of_2(rows + 1) // 2
    warps = min(16, max(threads // 32, power_of_2(cdiv(row, most * 32))))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCKS": blocks}, warps


def _with_sums(
    kernel: Any,
    columns: tuple[int, ...],
    programs: int,
    inputs: tuple[Any, ...],
    x: Tensor,
    sequences: Sequences | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    blocks: dict[str, Any],
    warps: int = 4,
) -> list[Launch]:
    """Return the launch of about so many programs over rows, and those that sum their parts."""
    (rows, width), block_m = x.shape, blocks["BLOCK_M"]
    count, tokens = _count_and_tokens(rows, sequences)
    strip = block_m * max(1, cdiv(tokens, block_m * cdiv(programs, count)))
    shape = cdiv(tokens, strip), count * width
    totals = (dweight, dbias)
    is_total = shape[0] == 1  # one part, which the first kernel writes in place
    parts = [t if t is None or is_total else launch.scratch(t, shape) for t in totals]
    args = (*inputs, *parts, sequences, strip, rows, width)
    grid = (*columns, shape[0] * count)
    first = Launch(kernel, grid, args, blocks, warps, device=x.device)
    pairs = zip(parts, totals, strict=True)
    wanted = [(part, total) for part, total in pairs if part is not None and total is not None]
    return [first, *([column_sum(*wanted[0], *wanted[1:])] if wanted and not is_total else [])]


def _count_and_tokens(rows: int, sequences: Sequences | None) -> tuple[int, int]:
    return (1, rows) if sequences is None else (sequences.count, sequences.tokens)


def column_sum(parts: Tensor, total: Tensor, *others: tuple[Tensor, Tensor]) -> Launch:
    """Compute total (N,), the sum of parts (P, N) over rows, float32; also of another pair."""
    programs, width = parts.shape
    blocks = {"BLOCK_M": 32, "BLOCK_N": 64}  # more warps would exchange more in shared memory
    grid = (cdiv(width, 64), 1 + len(others))
    ((more, sums),) = others or ((None, None),)
    args = (parts, total, more, sums, programs, width)
    return Launch(norms.column_sum_kernel, grid, args, blocks, 2, device=total.device)


def new_stats(kind: str, x: Tensor) -> tuple[Tensor, ...]:
    """Return uninitialized statistics of x, for a kernel to fill."""
    shape, stats = (x.shape[0], 1), NORMS[kind].stats
    return tuple([torch.empty(shape, dtype=torch.float32, device=x.device) for _ in stats])


def _mean_rstd(kind: str, stats: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    given = dict(zip(NORMS[kind].stats, stats, strict=True))
    return given.get("mean"), given.get("rstd")
