"""Products with fused ends, in kernels (`kernels.linear`, `kernels.mlp`).

x (M, K) and dy (M, D) are activations; weights are as in `nn.Linear`. A launch takes its tile from
the tables unless one is given. First the operations, then their launches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat.kernels.linear import Tile as KernelTile
from fused_remat.kernels.linear import linear_fwd_kernel
from fused_remat.kernels.mlp import (
    gated_mlp_bwd_kernel,
    gated_mlp_fwd_kernel,
    linear_act_bwd_kernel,
    mlp_bwd_kernel,
)
from fused_remat.random import DropoutMask
from fused_remat.steps import fused, linear
from fused_remat.steps.linear import Affine
from fused_remat.steps.norm import shifted
from fused_remat.steps.operations import faster
from fused_remat.triton import norm as norms
from fused_remat.triton import tables
from fused_remat.triton.launch import (
    INTERPRETED,
    Launch,
    Target,
    cdiv,
    dropout_of,
    in_place,
    rows_in_place,
    target_of,
)
from fused_remat.triton.launch_cache import run
from fused_remat.triton.pointwise import (
    PAIRS,
    act_bwd,
    act_fwd,
    dropout_add_fwd,
    gated_bwd,
    gated_fwd,
)
from fused_remat.triton.tables import Tile, family, tile_for

#: A matrix or None, and the rows and columns of its tile.
_Tiled = tuple[Tensor | None, int, int]


def _describe_linear(key: tuple[Any, ...], *_: Any, **__: Any) -> str:
    if key[2]:
        return "ATen's addmm, then kernel dropout_add_fwd"
    return "ATen's addmm: nothing follows that could be fused"


@faster(linear.linear_fwd, "triton", description=_describe_linear)
def linear_fwd_triton(x, weight, bias, residual=None, mask=None, out=None):
    if residual is None and mask is None:
        if out is None:
            return F.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)
    z = F.linear(x, weight, bias)
    y = z if out is None else out
    run(dropout_add_fwd, z, residual, mask, y)
    return y


def _unsupported_dw_reason(key: tuple[Any, ...]) -> str | None:
    dtype, device, wide = key
    cuda = device.type == "cuda" and torch.version.hip is None
    return None if wide and dtype.itemsize == 2 and cuda else ""


@faster(
    linear.linear_dw,
    "triton",
    unsupported_reason=_unsupported_dw_reason,
    description="ATen's mm, not rounded to 16 bits",
)
def linear_dw_triton(dy, x, into, partial, exact=False):
    dw = torch.mm(dy.t(), x, out_dtype=torch.float32)
    return dw if into is None else into.add_(dw)


def _unsupported_mlp_reason(key: tuple[Any, ...]) -> str | None:
    act, dtype, *_ = key
    if dtype.itemsize > 2 and not INTERPRETED:
        return f"products in {str(dtype)[6:]} are ATen's"
    return None if act in PAIRS else f"{act} has no row in fused_remat.triton.pointwise.PAIRS"


def _describe_mlp_up(key: tuple[Any, ...], *_: Any) -> str:
    description = "one kernel: product and activation"
    if family(target_of(key[2])) not in tables.KEPT_MLP_UP_IN_KERNEL:
        description += "; where a product is kept, ATen's addmm and a pointwise kernel"
    return description


@faster(
    fused.mlp_up_fwd,
    "triton",
    unsupported_reason=_unsupported_mlp_reason,
    description=_describe_mlp_up,
)
def mlp_up_fwd_triton(act, x, gate, up, mask, kept):
    y, target = x.new_empty((x.shape[0], up[0].shape[0])), target_of(x.device)
    if any(kept) and family(target) not in tables.KEPT_MLP_UP_IN_KERNEL:
        pres = tuple([F.linear(x, *affine) for affine in (gate, up) if affine is not None])
        run(act_fwd if gate is None else gated_fwd, *pres, act, mask, y)
        return y, tuple([pre if keep else None for pre, keep in zip(pres, kept, strict=True)])
    products = tuple([torch.empty_like(y) if keep else None for keep in kept])
    if gate is None:
        run(linear_fwd, x, *up, mask, act, products[0], y, target)
    else:
        run(gated_mlp_fwd, x, *gate, *up, mask, act, y, target, None, products)
    return y, products


def _describe_mlp_bwd(key: tuple[Any, ...], *_: Any) -> str:
    of = family(target_of(key[2]))
    if of in tables.MLP_BWD_IN_ONE:
        return "one kernel: both products of a tile; what is rebuilt is not written"
    widest = tables.ACT_BWD_IN_END.get(of, 0)
    end = f"; up to {widest} columns and without a gate, one kernel for the last two"
    return "ATen's addmm rebuilds; then ATen's mm and a pointwise kernel" + end * (widest > 0)


@faster(
    fused.mlp_bwd,
    "triton",
    unsupported_reason=_unsupported_mlp_reason,
    description=_describe_mlp_bwd,
)
def mlp_bwd_triton(act, dy, x, gate, up, down, mask, needs_act):
    target = target_of(x.device)
    if family(target) in tables.MLP_BWD_IN_ONE:
        ups = (up,) if gate is None else (gate, up)
        dups = tuple([x.new_empty((x.shape[0], up[0].shape[0])) for _ in ups])
        y = torch.empty_like(dups[0]) if needs_act else None
        run(mlp_bwd, x, ups, dy, down, mask, act, y, dups, target)
        return y, None if gate is None else dups[0], dups[-1]
    # Results take the place of what they are computed from.
    pre, dgate = F.linear(x, *up), None if gate is None else F.linear(x, *gate)
    y = pre if needs_act else None
    if gate is None and dy.shape[1] <= tables.ACT_BWD_IN_END.get(family(target), 0):
        dup = torch.empty_like(pre) if needs_act else pre
        run(linear_act_bwd, dy, down, pre, mask, act, y, dup, target)
        return y, None, dup
    dup = torch.mm(dy, down)
    if gate is None:
        run(act_bwd, dup, pre, act, mask, dup, y)
    else:
        run(gated_bwd, dup, dgate, pre, act, mask, dgate, dup, y)
    return y, dgate, dup


def _unsupported_norm_reason(key: tuple[Any, ...]) -> str | None:
    width = key[3]
    if width > norms.FWD_WIDTH:
        return f"rows of {width} elements do not fit a tile of {norms.FWD_WIDTH}"
    return norms.unsupported_reason(key)


@faster(
    fused.linear_norm_fwd, "triton", unsupported_reason=_unsupported_norm_reason,
    description="ATen's addmm, then kernel norm_fwd: dropout, residual and norm",
)  # fmt: skip
def linear_norm_fwd_triton(x, weight, bias, residual, mask, spec, norm_weight, norm_bias, out=None):
    product = F.linear(x, weight, bias)
    # The sum replaces the product: each program reads a whole tile before it writes it.
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
    """Compute y = mask * act(x @ weightᵀ + bias); `pre`, if given, is filled with the product."""
    tile = tile or tile_for("linear", target, *y.shape)
    n, k = weight.shape
    (x_in, w_in, pre_in, out), strides, tma = described(
        target,
        (x, tile.block_m, tile.block_k),
        (weight, tile.block_n, tile.block_k),
        *end_of(tile, pre, y),
    )
    args = (
        x_in, w_in, in_place(bias), pre_in, out, strides, *dropout_of(mask), y.shape[0], n, k,
    )  # fmt: skip
    fwd = PAIRS[act][0]
    return launch_over(linear_fwd_kernel, target, tile, y, args, tma, (k,), ACT=fwd)


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
    tile = tile or tile_for("gated_mlp_fwd", target, *y.shape)
    f, k = weight.shape
    at_w = (tile.block_n, tile.block_k)
    (*given, gate_pre, up_pre, out), strides, tma = described(
        target,
        (x, tile.block_m, tile.block_k),
        (gate_weight, *at_w),
        (weight, *at_w),
        *end_of(tile, *pres, y),
    )
    apart = [None if x is None else x.stride(0) for x in pres]  # None is not an argument
    args = (
        *given, in_place(gate_bias), in_place(bias), gate_pre, up_pre, out,
        (*strides[:3], *apart, strides[-1]), *dropout_of(mask), y.shape[0], f, k,
    )  # fmt: skip
    fwd = PAIRS[act][0]
    return launch_over(gated_mlp_fwd_kernel, target, tile, y, args, tma, (k,), ACT=fwd)


def linear_act_bwd(
    dy: Tensor,
    out_weight: Tensor,
    up: Tensor,
    mask: DropoutMask | None,
    act: str,
    y: Tensor | None,
    dup: Tensor,
    target: Target,
    tile: Tile | None = None,
) -> Launch:
    """Return the results of `mlp_bwd`, given up; y or dup may be up."""
    tile = tile or tile_for("linear_act_bwd", target, *dup.shape)
    d, f = out_weight.shape
    given, strides, tma = described(
        target,
        (dy, tile.block_m, tile.block_k),
        (out_weight, tile.block_k, tile.block_n),
        *end_of(tile, up, y, dup),
    )
    args = (*given, strides, *dropout_of(mask), dup.shape[0], f, d)
    bwd = PAIRS[act][1]
    return launch_over(linear_act_bwd_kernel, target, tile, dup, args, tma, (d,), ACT=bwd)


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
    kernel = mlp_bwd_kernel if len(ups) == 1 else gated_mlp_bwd_kernel
    tile = tile or tile_for("mlp_bwd" if len(ups) == 1 else "gated_mlp_bwd", target, *dups[0].shape)
    weights, biases = zip(*ups, strict=True)
    (f, k), d = weights[0].shape, dy.shape[1]
    given, strides, tma = described(
        target,
        (x, tile.block_m, tile.block_k),
        *[(weight, tile.block_n, tile.block_k) for weight in weights],
        (dy, tile.block_m, tile.block_k),
        (out_weight, tile.block_k, tile.block_n),
        *end_of(tile, y, *dups),
    )
    ends = 3 + len(ups)  # x, the weights, dy, out_weight
    args = (
        *given[:ends], *map(in_place, biases), *given[ends:], strides, *dropout_of(mask),
        dups[0].shape[0], f, k, d,
    )  # fmt: skip
    bwd = PAIRS[act][1]
    return launch_over(kernel, target, tile, dups[0], args, tma, (k, d), persistent=False, ACT=bwd)


def launch_over(
    kernel: Any,
    target: Target,
    tile: Tile,
    y: Tensor,
    args: tuple[Any, ...],
    tma: bool,
    depths: tuple[int, ...],
    persistent: bool = True,
    shape: tuple[int, int] | None = None,
    **constants: Any,
) -> Launch:
    """Return a launch over tiles of `y`; or of `shape`, with operands like `y`.

    `depths`: the lengths that the products sum over.
    """
    rows, columns = shape or y.shape
    tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    fast = y.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    even = all(depth % tile.block_k == 0 for depth in depths)
    constants["tile"] = KernelTile(
        tile.block_m, tile.block_n, tile.block_k, even, tile.parts, tile.group, tma,
        "tf32" if fast else "ieee",
    )  # fmt: skip
    programs = min(tiles, target.sms * (8 // tile.warps)) if persistent else tiles
    how = tile.warps, tile.stages, y.device
    return Launch(kernel, (programs,), args, constants, *how, fixed=y.dtype != torch.float32)


def described(target: Target, *matrices: _Tiled) -> tuple[tuple[Any, ...], tuple[int, ...], bool]:
    """Matrices as a kernel takes them, their row strides, and whether they are tensor descriptors.

    They are descriptors if the target has them and every matrix allows one; else tensors.
    """
    tensors = [None if x is None else rows_in_place(x) for x, _, _ in matrices]
    strides = tuple([0 if x is None else x.stride(0) for x in tensors])
    if not (target.has_tma and all(x is None or can_describe(x) for x in tensors)):
        return tuple(tensors), strides, False
    described = tuple(
        None if x is None else TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
        for x, (_, rows, columns) in zip(tensors, matrices, strict=True)
    )
    return described, strides, True


def end_of(tile: Tile, *matrices: Tensor | None) -> list[_Tiled]:
    """Return the matrices that a tile's end reads and writes, in as many parts as the end has."""
    return [(x, tile.block_m, tile.block_n // tile.parts) for x in matrices]


def can_describe(x: Tensor) -> bool:
    """Whether x allows a tensor descriptor: address, row stride and rows are multiples of 16 bytes.

    Hardware stores whole granules of 16 bytes, past the end of a row too (triton#11583).
    """
    places = x.data_ptr(), x.stride(0) * x.element_size(), x.shape[1] * x.element_size()
    aligned = not any(place % 16 for place in places)
    return aligned and x.stride(1) == 1 and x.stride(0) >= x.shape[1] > 0
