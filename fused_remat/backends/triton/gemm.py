"""Launches of `kernels.linear` and `kernels.mlp`: products with fused ends.

x (M, K) and dy (M, D) are activations; weights are as `nn.Linear` holds them. Each function takes
its tile from the tables unless one is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat.backends.triton.launch import (
    Launch,
    Target,
    cdiv,
    dropout_of,
    rows_in_place,
    stride_of,
)
from fused_remat.backends.triton.pointwise import PAIRS
from fused_remat.backends.triton.tables import Tile, tile_for
from fused_remat.kernels.linear import linear_fwd_kernel
from fused_remat.kernels.mlp import gated_mlp_bwd_kernel, gated_mlp_fwd_kernel, mlp_bwd_kernel
from fused_remat.random import Keep


def can_describe(x: Tensor) -> bool:
    """Whether a tensor descriptor can hold x: aligned, rows apart by multiples of 16 bytes."""
    step = x.stride(0) * x.element_size()
    return x.data_ptr() % 16 == 0 and step % 16 == 0 and x.stride(0) >= x.shape[1] > 0


def _operands(
    target: Target, *operands: tuple[Tensor, int, int]
) -> tuple[tuple[Any, ...], tuple[int, ...], bool]:
    """Operands, each with the rows and columns of its tile, as a kernel takes them.

    Returns descriptors where the target has them and every operand allows it, else tensors; then
    the row strides, and which it was.
    """
    tensors = [rows_in_place(x) for x, _, _ in operands]
    strides = tuple(x.stride(0) for x in tensors)
    if not (target.has_tma and all(map(can_describe, tensors))):
        return tuple(tensors), strides, False
    described = tuple(
        TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
        for x, (_, rows, columns) in zip(tensors, operands, strict=True)
    )
    return described, strides, True


def _launch(
    kernel: Any,
    target: Target,
    tile: Tile,
    y: Tensor,
    args: tuple[Any, ...],
    tma: bool,
    depths: tuple[int, ...],
    **constants: Any,
) -> Launch:
    """A persistent launch over tiles of `y`; `depths` are the lengths that products sum over."""
    rows, columns = y.shape
    tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    fast = torch.get_float32_matmul_precision() != "highest"
    constants |= {
        "PRECISION": "tf32" if fast else "ieee",
        "TMA": tma,
        "EVEN": all(depth % tile.block_k == 0 for depth in depths),
        "GROUP_M": tile.group,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    grid = (min(tiles, target.sms * (8 // tile.warps)),)
    return Launch(kernel, grid, args, constants, tile.warps, tile.stages, y.device)


def linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    keep: Keep | None,
    act: str | None,
    pre: Tensor | None,
    y: Tensor,
    target: Target,
    norm: tuple[Tensor | None, Tensor, Tensor | None, Tensor | None] | None = None,
    tile: Tile | None = None,
) -> Launch:
    """y = residual + keep * act(x @ weightᵀ + bias); pre = what act is taken of, if given.

    `norm` is (mean or None, rstd, weight, bias): x is normalised with them as it is loaded.
    """
    tile = tile or tile_for("linear", target, *y.shape)
    n, k = weight.shape
    (x_in, w_in), strides, tma = _operands(
        target, (x, tile.block_m, tile.block_k), (weight, tile.block_n, tile.block_k)
    )
    residual = None if residual is None else rows_in_place(residual)
    site_key, row0, threshold, scale = dropout_of(keep)
    args = (
        x_in, w_in, bias, residual, site_key, *(norm or (None,) * 4), pre, y, *strides,
        *map(stride_of, (residual, pre, y)), row0, y.shape[0], n, k, threshold, scale,
    )  # fmt: skip
    fwd = None if act is None else PAIRS[act][0]
    return _launch(linear_fwd_kernel, target, tile, y, args, tma, (k,), ACT=fwd, SPLIT=tile.split)


def gated_mlp_fwd(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    keep: Keep | None,
    act: str,
    y: Tensor,
    target: Target,
    tile: Tile | None = None,
) -> Launch:
    """y = keep * act(x @ gate_weightᵀ + gate_bias) * (x @ weightᵀ + bias)."""
    tile = tile or tile_for("gated_mlp_fwd", target, *y.shape)
    f, k = weight.shape
    at_w = (tile.block_n, tile.block_k)
    given, strides, tma = _operands(
        target, (x, tile.block_m, tile.block_k), (gate_weight, *at_w), (weight, *at_w)
    )
    site_key, row0, threshold, scale = dropout_of(keep)
    args = (
        *given, gate_bias, bias, site_key, y, *strides, stride_of(y), row0, y.shape[0], f, k,
        threshold, scale,
    )  # fmt: skip
    act_fwd = PAIRS[act][0]
    return _launch(gated_mlp_fwd_kernel, target, tile, y, args, tma, (k,), ACT=act_fwd)


def mlp_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    out_weight: Tensor,
    keep: Keep | None,
    act: str,
    y: Tensor | None,
    dup: Tensor,
    target: Target,
    tile: Tile | None = None,
) -> Launch:
    """y = keep * act(up) and dup = keep * (dy @ out_weight) * act'(up), up = x @ weightᵀ + bias."""
    tile = tile or tile_for("mlp_bwd", target, *dup.shape)
    (f, k), d = weight.shape, dy.shape[1]
    at_x = (tile.block_m, tile.block_k)
    given, strides, tma = _operands(
        target,
        (x, *at_x),
        (weight, tile.block_n, tile.block_k),
        (dy, *at_x),
        (out_weight, tile.block_k, tile.block_n),
    )
    site_key, row0, threshold, scale = dropout_of(keep)
    args = (
        *given, bias, site_key, y, dup, *strides, *map(stride_of, (y, dup)), row0, dup.shape[0],
        f, k, d, threshold, scale,
    )  # fmt: skip
    constants = {"ACT": PAIRS[act][1], "SPLIT": tile.split}
    return _launch(mlp_bwd_kernel, target, tile, dup, args, tma, (k, d), **constants)


def gated_mlp_bwd(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    out_weight: Tensor,
    keep: Keep | None,
    act: str,
    y: Tensor | None,
    dgate: Tensor,
    dup: Tensor,
    target: Target,
    tile: Tile | None = None,
) -> Launch:
    """As `mlp_bwd` for keep * act(gate) * up, with gate = x @ gate_weightᵀ + gate_bias."""
    tile = tile or tile_for("gated_mlp_bwd", target, *dup.shape)
    (f, k), d = weight.shape, dy.shape[1]
    at_x, at_w = (tile.block_m, tile.block_k), (tile.block_n, tile.block_k)
    given, strides, tma = _operands(
        target,
        (x, *at_x),
        (gate_weight, *at_w),
        (weight, *at_w),
        (dy, *at_x),
        (out_weight, tile.block_k, tile.block_n),
    )
    site_key, row0, threshold, scale = dropout_of(keep)
    args = (
        *given, gate_bias, bias, site_key, y, dgate, dup, *strides,
        *map(stride_of, (y, dgate, dup)), row0, dup.shape[0], f, k, d, threshold, scale,
    )  # fmt: skip
    constants = {"ACT": PAIRS[act][1], "SPLIT": tile.split}
    return _launch(gated_mlp_bwd_kernel, target, tile, dup, args, tma, (k, d), **constants)
