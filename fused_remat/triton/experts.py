"""Experts in kernels (`kernels.experts`): grouped products whose rows are read where they are.

Nothing is read on the host: a launch has as many programs as there may be tiles. First the
operations, then their launches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.kernels import experts as kernels
from fused_remat.kernels import experts_bwd as backward
from fused_remat.kernels.experts import Rows as KernelRows
from fused_remat.kernels.experts import Stack as KernelStack
from fused_remat.kernels.linear import Tile as KernelTile
from fused_remat.kernels.pointwise import Matrix
from fused_remat.moe_spec import CLAMPED, ExpertsSpec
from fused_remat.steps import experts
from fused_remat.steps.operations import faster
from fused_remat.steps.stacks import Into, Order, Stack
from fused_remat.triton import tables
from fused_remat.triton.launch import Launch, Target, run, scratch, target_of
from fused_remat.triton.operands import cdiv, contiguous_rows, operand, power_of_2
from fused_remat.triton.pointwise import PAIRS
from fused_remat.triton.products import unsupported_dtype_reason
from fused_remat.triton.tables import Tile

_TILES = 16  # that a program lists
_ACT_TILE = {"BLOCK_M": 4, "BLOCK_N": 512}
_BIAS_TILE = {"BLOCK_M": 32, "BLOCK_N": 64}


class Rows(NamedTuple):
    """Pairs by expert, and the list of their tiles of `block_m` rows."""

    pairs: Tensor
    ends: Tensor
    tiles: Tensor
    block_m: int
    top_k: int


def unsupported_reason(key: tuple[Any, ...]) -> str | None:
    spec, dtype, *_, form = key
    if form != "plain":
        return "adapters and quantized experts are ATen's"
    if spec.weighs_input:
        return "weights that multiply the input are ATen's"
    if spec.activation != CLAMPED and spec.activation not in PAIRS:
        return f"there is no kernel for activation {spec.activation!r}"
    wide = dtype == torch.float64
    return "there are no kernels in float64" if wide else unsupported_dtype_reason(dtype)


def rows_of(spec: ExpertsSpec, order: Order, target: Target) -> Rows:
    """Return rows by expert with an empty list of tiles."""
    count = len(order.pairs)
    block_m = tables.experts_rows(target, cdiv(count, spec.experts))
    most = cdiv(count, block_m) + spec.experts
    tiles = torch.empty((most, 2), dtype=torch.int32, device=order.ends.device)
    return Rows(order.pairs, order.ends, tiles, block_m, spec.top_k)


def _listed(spec: ExpertsSpec, order: Order, target: Target) -> Rows:
    rows = rows_of(spec, order, target)
    run(experts_tiles, rows.ends, rows.tiles, len(rows.pairs), rows.block_m)
    return rows


def _empty(like: Tensor, rows: int, columns: int) -> Tensor:
    return torch.empty((rows, columns), dtype=like.dtype, device=like.device)


def _columns(spec: ExpertsSpec, pre: Tensor) -> int:
    """Return the width of an expert's activation."""
    return pre.shape[1] // (2 if spec.gated else 1)


@faster(experts.experts_up_fwd, "triton", "kernel experts_product", unsupported_reason)
def experts_up_fwd_triton(spec, x, weights, order, up):
    target = target_of(x.device)
    return _pre(spec, x, _listed(spec, order, target), up, target)


def _pre(spec: ExpertsSpec, x: Tensor, rows: Rows, up: Stack, target: Target) -> Tensor:
    pre = _empty(x, len(rows.pairs), up.out_features)
    run(experts_product, x, up.weight, up.bias, None, rows, pre, up.transposed, "gather", target)
    return pre


def _sum(
    x: Tensor, stack: Stack, bias: Tensor | None, weights: Tensor | None, rows: Rows, width: int,
    is_kn: bool, target: Target,
) -> Tensor:  # fmt: skip
    """Return the sum over a token's pairs of products, which are written by pair."""
    y = _empty(x, len(rows.pairs), width)
    run(experts_product, x, stack.weight, bias, weights, rows, y, is_kn, "scatter", target)
    return y if rows.top_k == 1 else y.view(-1, rows.top_k, width).sum(1)


def _down(act: Tensor, weights: Tensor, rows: Rows, down: Stack, target: Target) -> Tensor:
    given = act, down, down.bias, weights, rows, down.out_features
    return _sum(*given, down.transposed, target)


@faster(
    experts.experts_down_fwd,
    "triton",
    "kernels experts_act_fwd, experts_product; ATen's sum",
    unsupported_reason,
)
def experts_down_fwd_triton(spec, pre, weights, order, down):
    target, weights = target_of(pre.device), weights.contiguous()
    rows, act = _listed(spec, order, target), _empty(pre, len(pre), _columns(spec, pre))
    run(experts_act_fwd, spec, pre, weights, rows, act)
    return _down(act, weights, rows, down, target)


@faster(
    experts.experts_fwd,
    "triton",
    "kernels experts_up_act, experts_product; ATen's sum",
    unsupported_reason,
)
def experts_fwd_triton(spec, x, weights, order, up, down):
    target, weights = target_of(x.device), weights.contiguous()
    rows = _listed(spec, order, target)
    act = _empty(x, len(rows.pairs), up.out_features // (2 if spec.gated else 1))
    run(experts_up_act, spec, x, up.weight, up.bias, weights, rows, act, up.transposed, target)
    return _down(act, weights, rows, down, target)


_BACKWARD = "kernels experts_product, experts_act_bwd, experts_dw; ATen's sum"


@faster(experts.experts_bwd, "triton", _BACKWARD, unsupported_reason)
def experts_bwd_triton(read, up_grads, down_grads):
    *_, grads = experts_bwd_stages_triton(read, lambda: up_grads, down_grads)
    return grads


@faster(experts.experts_bwd_stages, "triton", _BACKWARD, unsupported_reason)
def experts_bwd_stages_triton(read, up_grads, down_grads):
    spec, dy, x, given, weights, order, up, down, needs_x, needs_weights = read
    target, weights = target_of(dy.device), weights.contiguous()
    rows = _listed(spec, order, target)
    pre = _pre(spec, x, rows, up, target) if given is None else given
    act = None
    if down_grads.weight is not None:
        act = _empty(pre, len(pre), _columns(spec, pre))
    dpre, dweights = pre if given is None else torch.empty_like(given), None
    if needs_weights:
        kind = {"dtype": weights.dtype, "device": weights.device}
        dweights = torch.empty(weights.numel(), **kind).view_as(weights)
    run(
        experts_act_bwd, spec, dy, down.weight, down.bias, pre, weights, rows, dpre, act, dweights,
        not down.transposed, target,
    )  # fmt: skip
    pre = given = None
    _stack_grads(dy, act, weights, rows, down_grads, down.transposed, "dy", target)
    act = down_grads = None
    yield None, None
    _stack_grads(dpre, x, None, rows, up_grads(), up.transposed, "x", target)
    dx = None
    if needs_x:
        dx = _sum(dpre, up, None, None, rows, x.shape[1], not up.transposed, target)
    yield dx, dweights


def _stack_grads(dy, x, weights, rows, grads, transposed, of_tokens, target):
    """Add the gradients of a stack; `of_tokens` is the operand that is read by token."""
    by_token = of_tokens == "dy", of_tokens == "x"
    if grads.bias is not None:
        run(experts_bias_bwd, dy, weights, rows, grads.bias, by_token[0])
    if grads.weight is not None:
        pair = (x, dy) if transposed else (dy, x)
        order = by_token[::-1] if transposed else by_token
        run(experts_dw, *pair, rows, grads.weight, order, target)


# Launches.


def experts_tiles(ends: Tensor, tiles: Tensor, rows: int, block_m: int) -> Launch:
    """List the tiles of rows by expert: (n, 2), the expert and the first row of each."""
    experts, count = len(ends), len(tiles)
    constants = {"BLOCK_M": block_m, "GROUPS": power_of_2(experts + 1), "BLOCK": _TILES}
    args, grid = (ends, tiles, rows, experts, count), (cdiv(count, _TILES),)
    return Launch(kernels.experts_tiles_fwd_kernel, grid, args, constants, device=ends.device)


def _rows(rows: Rows) -> KernelRows:
    return KernelRows(rows.pairs, rows.ends, rows.tiles, len(rows.pairs), len(rows.ends))


def _stack(weight: Tensor) -> KernelStack:
    weight = contiguous_rows(weight)
    return KernelStack(weight, weight.stride(0), weight.stride(1))


def _over(
    kernel: Any, name: str, args: tuple[Any, ...], rows: Rows, columns: int, depth: int,
    like: Tensor, target: Target, tile: Tile | None, **constants: Any,
) -> Launch:  # fmt: skip
    """Return a launch over tiles of rows and columns."""
    tile = tile or tables.experts_tile(name, target, rows.block_m)
    tiles = len(rows.tiles) if len(rows.pairs) else 0
    constants["tile"] = _tile(tile, depth, like)
    how = tile.warps, tile.stages, like.device
    args, grid = (*args, len(rows.tiles)), (tiles * cdiv(columns, tile.block_n),)
    constants["TOP_K"] = rows.top_k
    return Launch(kernel, grid, args, constants, *how, fixed=like.dtype != torch.float32)


def _tile(tile: Tile, depth: int, like: Tensor) -> KernelTile:
    wide = like.dtype == torch.float32
    fast = wide and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return KernelTile(
        tile.block_m, tile.block_n, tile.block_k, depth % tile.block_k == 0, tile.parts, tile.group,
        False, "tf32" if fast else "ieee",
    )  # fmt: skip


def experts_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, rows: Rows, y: Tensor,
    is_kn: bool, how: str, target: Target, tile: Tile | None = None,
) -> Launch:  # fmt: skip
    """Compute y = x @ weight.T + weights * bias; `weight` is (E, K, N) if `is_kn`.

    `how`: "gather" reads rows of x by token, "scatter" writes rows of y by pair.
    """
    k = x.shape[1]
    args = operand(x), _stack(weight), operand(bias), weights, operand(y), _rows(rows), y.shape[1]
    return _over(
        kernels.experts_product_kernel, "experts_product", (*args, k), rows, y.shape[1], k, x,
        target, tile, W_IS_KN=is_kn, GATHER=how == "gather", SCATTER=how == "scatter",
    )  # fmt: skip


def _act(spec: ExpertsSpec, backward: bool) -> dict[str, Any]:
    act = None if spec.activation == CLAMPED else PAIRS[spec.activation][backward]
    return {"ACT": act, "GATED": spec.gated, "INTERLEAVED": spec.interleaved}


def experts_up_act(
    spec: ExpertsSpec, x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor, rows: Rows,
    y: Tensor, is_kn: bool, target: Target, tile: Tile | None = None,
) -> Launch:  # fmt: skip
    """Compute y = weights * act(x @ weight.T + bias)."""
    f, k = y.shape[1], x.shape[1]
    numbers = spec.limit, spec.alpha, f * (1 if is_kn else weight.stride(1))
    args = operand(x), _stack(weight), operand(bias), weights, operand(y), _rows(rows)
    return _over(
        kernels.experts_up_act_kernel, "experts_up_act", (*args, *numbers, f, k), rows, f, k, x,
        target, tile, W_IS_KN=is_kn, **_act(spec, False),
    )  # fmt: skip


def experts_act_fwd(
    spec: ExpertsSpec, pre: Tensor, weights: Tensor, rows: Rows, y: Tensor
) -> Launch:
    """Compute y = weights * act(pre)."""
    grid = (cdiv(len(y), _ACT_TILE["BLOCK_M"]) * cdiv(y.shape[1], _ACT_TILE["BLOCK_N"]),)
    args = operand(pre), weights, operand(y), _rows(rows), spec.limit, spec.alpha, y.shape[1]
    constants = _act(spec, False) | _ACT_TILE
    return Launch(kernels.experts_act_fwd_kernel, grid, args, constants, device=y.device)


def experts_act_bwd(
    spec: ExpertsSpec, dy: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor,
    weights: Tensor, rows: Rows, dpre: Tensor | None, act: Tensor | None, dweights: Tensor | None,
    is_kn: bool, target: Target, tile: Tile | None = None,
) -> list[Launch]:  # fmt: skip
    """Compute what is not None: the gradients of pre and of weights, and weights * act(pre)."""
    tile = tile or tables.experts_tile("experts_act_bwd", target, rows.block_m)
    f, k = _columns(spec, pre), dy.shape[1]
    blocks, sums = cdiv(f, tile.block_n), None
    if dweights is not None:
        sums = scratch(weights, (blocks, len(rows.pairs)))
    given = (
        operand(dy), _stack(weight), operand(pre), weights, operand(dpre), operand(act), sums,
        _rows(rows), spec.limit, spec.alpha, f, k,
    )  # fmt: skip
    launch = _over(
        backward.experts_act_bwd_kernel, "experts_act_bwd", given, rows, f, k, dy, target, tile,
        W_IS_KN=is_kn, **_act(spec, True),
    )  # fmt: skip
    if dweights is None:
        return [launch]
    args = sums, operand(dy), operand(bias), dweights, _rows(rows), k, blocks
    constants = {"TOP_K": rows.top_k, "BLOCK_M": rows.block_m, "BLOCK_N": 64}
    grid = (len(rows.tiles) if len(rows.pairs) else 0,)
    kernel = backward.experts_weights_bwd_kernel
    return [launch, Launch(kernel, grid, args, constants, device=dy.device)]


def experts_dw(
    x: Tensor, y: Tensor, rows: Rows, dw: Into, by_token: tuple[bool, bool], target: Target,
    tile: Tile | None = None,
) -> Launch:  # fmt: skip
    """Compute dw = x.T @ y over the rows of each expert; `by_token`: how x and y are read."""
    tile = tile or tables.EXPERTS_TILES["experts_dw"][tables.family(target)][0]
    grad, (_, m, n) = dw.grad, dw.grad.shape
    stack = KernelStack(grad, grad.stride(0), grad.stride(1))
    args = operand(x), operand(y), stack, _rows(rows), m, n, grad.stride(2)
    constants = {
        "TOP_K": rows.top_k, "GATHER_X": by_token[0], "GATHER_Y": by_token[1],
        "ADD": not dw.fresh, "tile": _tile(tile, 0, x),
    }  # fmt: skip
    grid = (len(grad) * cdiv(m, tile.block_m) * cdiv(n, tile.block_n),)
    how = tile.warps, tile.stages, x.device, x.dtype != torch.float32
    return Launch(backward.experts_dw_kernel, grid, args, constants, *how)


def experts_bias_bwd(
    dy: Tensor, weights: Tensor | None, rows: Rows, dbias: Into, by_token: bool
) -> Launch:
    """Compute dbias = the sum of weights * dy over the rows of each expert."""
    grad = dbias.grad
    args = operand(dy), weights, Matrix(grad, grad.stride(0)), _rows(rows), grad.shape[1]
    constants = {"TOP_K": rows.top_k, "GATHER": by_token, "ADD": not dbias.fresh, **_BIAS_TILE}
    grid = (len(grad) * cdiv(grad.shape[1], _BIAS_TILE["BLOCK_N"]),)
    return Launch(backward.experts_bias_bwd_kernel, grid, args, constants, device=dy.device)
