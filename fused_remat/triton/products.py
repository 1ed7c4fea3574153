"""Products with fused ends, in kernels (`kernels.linear`, `kernels.mlp`).

x (M, K) and dy (M, D) are activations; weights are as in `nn.Linear`. A launch takes its tile from
the tables unless there is a `tile`. First the operations, then their launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat.kernels.linear import Tile as KernelTile
from fused_remat.kernels.linear import linear_fwd_kernel
from fused_remat.kernels.mlp import gated_mlp_bwd_kernel, gated_mlp_fwd_kernel, mlp_bwd_kernel
from fused_remat.random import DropoutMask
from fused_remat.steps import fused, linear
from fused_remat.steps.linear import Affine
from fused_remat.steps.norm import shifted
from fused_remat.steps.operations import faster
from fused_remat.triton import norm as norms
from fused_remat.triton import pointwise, tables
from fused_remat.triton.launch import INTERPRETED, Launch, Target, run, target_of
from fused_remat.triton.operands import cdiv, contiguous_rows, dropout_of, vector
from fused_remat.triton.pointwise import PAIRS
from fused_remat.triton.tables import Tile, family, tile_for


def _describe_linear(key: tuple[Any, ...], *_: Any, **__: Any) -> str:
    if key[2]:
        return "ATen's addmm, then kernel dropout_add_fwd"
    return "ATen's addmm: nothing follows that could be fused"


@faster(linear.linear_fwd, "triton", _describe_linear)
def linear_fwd_triton(x, weight, bias, residual=None, mask=None, out=None):
    if residual is None and mask is None:
        if out is None:
            return F.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)
    z = F.linear(x, weight, bias)
    y = z if out is None else out
    run(pointwise.dropout_add_fwd, z, residual, mask, y)
    return y


def _unsupported_dw_reason(key: tuple[Any, ...]) -> str | None:
    dtype, device, wide = key
    cuda = device.type == "cuda" and torch.version.hip is None
    return None if wide and dtype.itemsize == 2 and cuda else ""


@faster(linear.linear_dw, "triton", "ATen's mm, not rounded to 16 bits", _unsupported_dw_reason)
def linear_dw_triton(dy, x, into, partial, exact=False):
    dw = torch.mm(dy.t(), x, out_dtype=torch.float32)
    return dw if into is None else into.add_(dw)


def unsupported_dtype_reason(dtype: torch.dtype) -> str | None:
    wide = dtype.itemsize > 2 and not INTERPRETED
    return f"products in {str(dtype)[6:]} are ATen's" if wide else None


def _unsupported_mlp_reason(key: tuple[Any, ...]) -> str | None:
    return unsupported_dtype_reason(key[1]) or pointwise.unsupported_activation_reason(key)


def _describe_mlp_up(key: tuple[Any, ...], *_: Any) -> str:
    description, of = "one kernel: product and activation", family(target_of(key[2]))
    if of in tables.MLP_IN_KERNELS:
        return description
    split = "ATen's addmm and a pointwise kernel"
    if of in tables.MLP_UP_IN_KERNEL:
        widest = tables.MLP_UP_IN_KERNEL[of][1]
        return f"{split}; with a gate and up to {widest} columns, {description} if none is kept"
    return f"{description}; where a product is kept, {split}"


@faster(fused.mlp_up_fwd, "triton", _describe_mlp_up, _unsupported_mlp_reason)
def mlp_up_fwd_triton(act, x, gate, up, mask, kept):
    target = target_of(x.device)
    if not tables.mlp_up_in_kernel(target, x.shape[1], gate is not None, any(kept)):
        pres = tuple([F.linear(x, *affine) for affine in (gate, up) if affine is not None])
        y = torch.empty_like(pres[-1]) if kept[-1] else pres[-1]
        run(pointwise.act_fwd if gate is None else pointwise.gated_fwd, *pres, act, mask, y)
        return y, tuple([pre if keep else None for pre, keep in zip(pres, kept, strict=True)])
    y = x.new_empty((x.shape[0], up[0].shape[0]))
    products = tuple([torch.empty_like(y) if keep else None for keep in kept])
    if gate is None:
        run(linear_fwd, x, *up, mask, act, products[0], y, target)
    else:
        run(gated_mlp_fwd, x, *gate, *up, mask, act, y, target, None, products)
    return y, products


def _describe_mlp_bwd(key: tuple[Any, ...], *_: Any) -> str:
    if family(target_of(key[2])) in tables.MLP_IN_KERNELS:
        return "one kernel: both products of a tile; what is rebuilt is not written"
    return "ATen's addmm rebuilds; then ATen's mm and a pointwise kernel"


@faster(fused.mlp_bwd, "triton", _describe_mlp_bwd, _unsupported_mlp_reason)
def mlp_bwd_triton(act, dy, x, gate, up, down, mask, needs_act, needs_sum=False):
    target = target_of(x.device)
    if family(target) in tables.MLP_IN_KERNELS:
        ups = (up,) if gate is None else (gate, up)
        dups = tuple([x.new_empty((x.shape[0], up[0].shape[0])) for _ in ups])
        y = torch.empty_like(dups[0]) if needs_act else None
        run(mlp_bwd, x, ups, dy, down, mask, act, y, dups, target)
        total = linear.bias_grad(dups[-1]) if needs_sum and gate is None else None
        return y, None if gate is None else dups[0], dups[-1], total
    # Results take the place of what they are computed from.
    pre, dgate = F.linear(x, *up), None if gate is None else F.linear(x, *gate)
    y = pre if needs_act else None
    dup = torch.mm(dy, down)
    if gate is None and needs_sum:
        total = torch.empty(dup.shape[1], device=dup.device)
        run(pointwise.act_sum_bwd, dup, pre, act, mask, dup, total, y)
        return y, None, dup, total
    if gate is None:
        run(pointwise.act_bwd, dup, pre, act, mask, dup, y)
        return y, None, dup, None
    run(pointwise.gated_bwd, dup, dgate, pre, act, mask, dgate, dup, y)
    return y, dgate, dup, None


def _unsupported_norm_reason(key: tuple[Any, ...]) -> str | None:
    width = key[3]
    if width > norms.FWD_WIDTH:
        return f"rows of {width} elements do not fit a tile of {norms.FWD_WIDTH}"
    return norms.unsupported_reason(key)


@faster(
    fused.linear_norm_fwd,
    "triton",
    "ATen's addmm, then kernel norm_fwd: dropout, residual and norm",
    _unsupported_norm_reason,
)
def linear_norm_fwd_triton(x, weight, bias, residual, mask, spec, norm_weight, norm_bias, out=None):
    product = F.linear(x, weight, bias)
    # The sum replaces the product: each program reads an entire tile before it writes it.
    total = product
    if residual.dtype is not product.dtype:
        total = torch.empty(product.shape, dtype=residual.dtype, device=product.device)
    y = torch.empty_like(total) if out is None else out
    stats = norms.new_stats(spec.kind, total)
    affine = shifted(norm_weight, spec.offset), norm_bias
    run(norms.norm_fwd, spec, product, residual, mask, *affine, total, y, stats, False)
    return (total, y, *stats)


def linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: DropoutMask | None,
    act: str,
    pre: Tensor | None,
    y: Tensor,
    target: Target,
    tile: Tile | None = None,
) -> Launch:
    """Compute y = mask * act(x @ weightᵀ + bias); `pre`, if any, is filled with the product."""
    n, k = weight.shape
    return launch_over(
        linear_fwd_kernel, target, tile or "linear", [(x, "mk"), (weight, "nk")],
        [vector(bias)], [pre, y], (*dropout_of(mask), y.shape[0], n, k), y.shape, (k,),
        ACT=PAIRS[act][0],
    )  # fmt: skip


def gated_mlp_fwd(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    mask: DropoutMask | None,
    act: str,
    y: Tensor,
    target: Target,
    tile: Tile | None = None,
    pres: tuple[Tensor | None, ...] = (None, None),
) -> Launch:
    """Compute y = mask * act(x @ gate_weightᵀ + gate_bias) * (x @ weightᵀ + bias).

    `pres`, where given, are filled with both products.
    """
    f, k = weight.shape
    return launch_over(
        gated_mlp_fwd_kernel, target, tile or "gated_mlp_fwd",
        [(x, "mk"), (gate_weight, "nk"), (weight, "nk")], [vector(gate_bias), vector(bias)],
        [*pres, y], (*dropout_of(mask), y.shape[0], f, k), y.shape, (k,), absent=None,
        ACT=PAIRS[act][0],
    )  # fmt: skip


def mlp_bwd(
    x: Tensor,
    ups: tuple[Affine, ...],
    dy: Tensor,
    out_weight: Tensor,
    mask: DropoutMask | None,
    act: str,
    y: Tensor | None,
    dups: tuple[Tensor, ...],
    target: Target,
    tile: Tile | None = None,
) -> Launch:
    """Compute y = mask * act(up), dup = mask * (dy @ out_weight) * act'(up), up = x weightᵀ + bias.

    `ups` and `dups` are of up; or of a gate and up: then y = mask * act(gate) * up.
    """
    gated = len(ups) == 2
    kernel, row = (gated_mlp_bwd_kernel, "gated_mlp_bwd") if gated else (mlp_bwd_kernel, "mlp_bwd")
    weights, biases = zip(*ups, strict=True)
    (f, k), d = weights[0].shape, dy.shape[1]
    operands = [(x, "mk"), *((w, "nk") for w in weights), (dy, "mk"), (out_weight, "kn")]
    shape, sizes = dups[0].shape, (dups[0].shape[0], f, k, d)
    return launch_over(
        kernel, target, tile or row, operands, list(map(vector, biases)), [y, *dups],
        (*dropout_of(mask), *sizes), shape, (k, d), persistent=False, ACT=PAIRS[act][1],
    )  # fmt: skip


def launch_over(
    kernel: Any,
    target: Target,
    tile: Tile | str,
    operands: Sequence[tuple[Tensor, str]],
    vectors: Sequence[Tensor | None],
    ends: Sequence[Tensor | None],
    rest: tuple[Any, ...],
    shape: Sequence[int],
    depths: tuple[int, ...],
    persistent: bool = True,
    absent: int | None = 0,
    **constants: Any,
) -> Launch:
    """Return a launch over tiles of a result of this shape; `tile`: one, or a row of the tables.

    `operands`: matrices, and the sides of the tile that divide them. `ends`: what the end of a tile
    reads and writes, in parts. `depths`: the lengths that products sum over. Matrices are tensor
    descriptors if the target has them and each allows one. `absent`: the row stride of None.
    """
    if isinstance(tile, str):
        tile = tile_for(tile, target, shape[0], shape[1])
    sides = {"m": tile.block_m, "n": tile.block_n, "k": tile.block_k}
    blocks = [[sides[side] for side in across] for _, across in operands]
    blocks += [[tile.block_m, tile.block_n // tile.parts] for _ in ends]
    given = [*(x for x, _ in operands), *ends]
    matrices: list[Any] = [None if x is None else contiguous_rows(x) for x in given]
    strides = tuple([absent if x is None else x.stride(0) for x in matrices])
    tma = target.has_tma and all(x is None or can_describe(x) for x in matrices)
    if tma:
        matrices = [
            None if x is None else TensorDescriptor(x, list(x.shape), list(x.stride()), block)
            for x, block in zip(matrices, blocks, strict=True)
        ]
    args = (*matrices[: len(operands)], *vectors, *matrices[len(operands) :], strides, *rest)
    like = operands[0][0]
    tiles = cdiv(shape[0], tile.block_m) * cdiv(shape[1], tile.block_n)
    wide = like.dtype == torch.float32
    fast = wide and torch.backends.cuda.matmul.fp32_precision == "tf32"
    constants["tile"] = KernelTile(
        tile.block_m, tile.block_n, tile.block_k, all(k % tile.block_k == 0 for k in depths),
        tile.parts, tile.group, tma, "tf32" if fast else "ieee",
    )  # fmt: skip
    programs = min(tiles, target.sms * (8 // tile.warps)) if persistent else tiles
    how = tile.warps, tile.stages, like.device
    return Launch(kernel, (programs,), args, constants, *how, fixed=not wide)


def can_describe(x: Tensor) -> bool:
    """Return whether x allows a descriptor: address, stride and rows are multiples of 16 bytes."""
    places = x.data_ptr(), x.stride(0) * x.element_size(), x.shape[1] * x.element_size()
    aligned = not any(place % 16 for place in places)
    return aligned and x.stride(1) == 1 and x.stride(0) >= x.shape[1] > 0
