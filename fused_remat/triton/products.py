"""Products with fused ends, by `kernels.linear`, `mlp` and `cross_entropy`.

x (M, K) and dy (M, D) are activations; weights are as `nn.Linear` holds them. Each function takes
its tile from the tables unless one is given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat.formats import BLOCK, Parts
from fused_remat.kernels.cross_entropy import (
    linear_cross_entropy_bwd_kernel,
    linear_cross_entropy_fwd_kernel,
)
from fused_remat.kernels.linear import linear_fwd_kernel
from fused_remat.kernels.mlp import (
    gated_mlp_bwd_kernel,
    gated_mlp_fwd_kernel,
    linear_act_bwd_kernel,
    mlp_bwd_kernel,
)
from fused_remat.random import DropoutMask
from fused_remat.steps import fused, linear
from fused_remat.steps.operations import faster
from fused_remat.steps.storage import QuantizeCall, quantize
from fused_remat.triton import norm as norms
from fused_remat.triton import storage
from fused_remat.triton.launch import (
    INTERPRETED,
    Launch,
    Target,
    cdiv,
    dropout_of,
    in_place,
    rows_in_place,
    stride_of,
    target_of,
)
from fused_remat.triton.pointwise import PAIRS, dropout_add_fwd
from fused_remat.triton.storage import Codes, codes_of, new_parts
from fused_remat.triton.tables import Tile, ends_in_kernel, mlp_bwd_in_one, tile_for


def can_describe(x: Tensor) -> bool:
    """Whether a tensor descriptor can hold x: aligned, rows apart by multiples of 16 bytes."""
    step = x.stride(0) * x.element_size()
    aligned = x.data_ptr() % 16 == 0 and step % 16 == 0
    return aligned and x.stride(1) == 1 and x.stride(0) >= x.shape[1] > 0


#: A matrix, or None where there is none, and the rows and columns of its tile.
_Tiled = tuple[Tensor | None, int, int]


def _described(target: Target, *matrices: _Tiled) -> tuple[tuple[Any, ...], tuple[int, ...], bool]:
    """Matrices as a kernel takes them, their row strides, and whether they are descriptors.

    They are where the target has descriptors and every matrix allows one; else tensors.
    """
    tensors = [None if x is None else rows_in_place(x) for x, _, _ in matrices]
    strides = tuple(map(stride_of, tensors))
    if not (target.has_tma and all(x is None or can_describe(x) for x in tensors)):
        return tuple(tensors), strides, False
    described = tuple(
        None if x is None else TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
        for x, (_, rows, columns) in zip(tensors, matrices, strict=True)
    )
    return described, strides, True


def _end(tile: Tile, *matrices: Tensor | None) -> list[_Tiled]:
    """What a tile's end reads and writes: in parts if the end is."""
    return [(x, tile.block_m, tile.block_n // tile.parts) for x in matrices]


def _launch(
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
    """A launch over tiles of `y`, or of `shape` with operands like `y`; `depths` are the lengths
    that products sum over."""
    rows, columns = shape or y.shape
    tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    fast = y.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    constants |= {
        "PRECISION": "tf32" if fast else "ieee",
        "TMA": tma,
        "EVEN": all(depth % tile.block_k == 0 for depth in depths),
        "GROUP_M": tile.group,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    programs = min(tiles, target.sms * (8 // tile.warps)) if persistent else tiles
    return Launch(kernel, (programs,), args, constants, tile.warps, tile.stages, y.device)


def packs(kernel: str, target: Target, rows: int, columns: int) -> bool:
    """Whether the tile that a product takes is of whole blocks, so that its end can pack them."""
    return tile_for(kernel, target, rows, columns).block_n % BLOCK == 0


def _parts(tile: Tile, *packed: Codes | None) -> tuple[Tile, dict[str, Any]]:
    """The same tile, in the parts that its end is computed in, as constants too.

    Where any is packed a block is a whole number of parts, and there are twice as many, because
    packing needs registers; neither changes an element's bits.
    """
    if all(codes is None for codes in packed):
        return tile, {"PARTS": tile.parts, "IN_BLOCK": 1}
    tile = replace(tile, parts=min(8, max(2 * tile.parts, tile.block_n // BLOCK)))
    return tile, {"PARTS": tile.parts, "IN_BLOCK": BLOCK * tile.parts // tile.block_n}


def linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: DropoutMask | None,
    act: str | None,
    pre: Tensor | None,
    y: Tensor,
    target: Target,
    norm: tuple[Tensor | None, Tensor, Tensor | None, Tensor | None] | None = None,
    tile: Tile | None = None,
    packed: Codes | None = None,
) -> Launch:
    """y = residual + keep * act(x @ weightᵀ + bias); pre = what act is taken of, if given.

    `norm` is (mean or None, rstd, weight, bias): x is normalised with them as it is loaded.
    `packed` is filled with what act is taken of, where `packs`.
    """
    tile, parts = _parts(tile or tile_for("linear", target, *y.shape), packed)
    n, k = weight.shape
    (x_in, w_in, *ends), strides, tma = _described(
        target,
        (x, tile.block_m, tile.block_k),
        (weight, tile.block_n, tile.block_k),
        *_end(tile, residual, pre, y),
    )
    site_key, row0, threshold, scale = dropout_of(mask)
    pack_key, codes, step, pack_row0 = codes_of(packed)
    args = (
        x_in, w_in, in_place(bias), ends[0], site_key, *map(in_place, norm or (None,) * 4),
        pack_key, ends[1], codes, step, ends[2], *strides, row0, pack_row0, y.shape[0], n, k,
        threshold, scale,
    )  # fmt: skip
    fwd = None if act is None else PAIRS[act][0]
    return _launch(linear_fwd_kernel, target, tile, y, args, tma, (k,), ACT=fwd, **parts)


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
    packed: tuple[Codes | None, ...] = (None, None),
) -> Launch:
    """y = keep * act(x @ gate_weightᵀ + gate_bias) * (x @ weightᵀ + bias).

    `pres` and `packed` are filled with both products, those given; `packed` where `packs`.
    """
    tile, parts = _parts(tile or tile_for("gated_mlp_fwd", target, *y.shape), *packed)
    f, k = weight.shape
    at_w = (tile.block_n, tile.block_k)
    (*given, gate_pre, up_pre, out), strides, tma = _described(
        target,
        (x, tile.block_m, tile.block_k),
        (gate_weight, *at_w),
        (weight, *at_w),
        *_end(tile, *pres, y),
    )
    site_key, row0, threshold, scale = dropout_of(mask)
    (gate_key, *gate_parts, gate_row0), (up_key, *up_parts, up_row0) = map(codes_of, packed)
    first = max((r for r in (gate_row0, up_row0) if r is not None), default=None)  # the same rows
    apart = [None if x is None else x.stride(0) for x in pres]  # no argument where there is none
    args = (
        *given, in_place(gate_bias), in_place(bias), site_key, gate_key, up_key, gate_pre,
        *gate_parts, up_pre, *up_parts, out, *strides[:3], *apart, strides[-1], row0,
        first, y.shape[0], f, k, threshold, scale,
    )  # fmt: skip
    act_fwd = PAIRS[act][0]
    return _launch(gated_mlp_fwd_kernel, target, tile, y, args, tma, (k,), ACT=act_fwd, **parts)


def linear_act_bwd(
    dy: Tensor,
    out_weight: Tensor,
    gate: Tensor | None,
    up: Tensor,
    mask: DropoutMask | None,
    act: str,
    y: Tensor | None,
    dgate: Tensor | None,
    dup: Tensor,
    target: Target,
    tile: Tile | None = None,
) -> Launch:
    """What `mlp_bwd` or, with a gate, `gated_mlp_bwd` gives, from gate and up as computed before.

    y may be up, and dgate gate.
    """
    name = "linear_act_bwd" if gate is None else "gated_act_bwd"
    tile = tile or tile_for(name, target, *dup.shape)
    d, f = out_weight.shape
    given, strides, tma = _described(
        target,
        (dy, tile.block_m, tile.block_k),
        (out_weight, tile.block_k, tile.block_n),
        *_end(tile, gate, up, y, dgate, dup),
    )
    site_key, row0, threshold, scale = dropout_of(mask)
    args = (*given[:4], site_key, *given[4:], *strides, row0, dup.shape[0], f, d, threshold, scale)
    constants = {"ACT": PAIRS[act][1], "PARTS": tile.parts}
    return _launch(linear_act_bwd_kernel, target, tile, dup, args, tma, (d,), **constants)


def mlp_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    out_weight: Tensor,
    mask: DropoutMask | None,
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
    given, strides, tma = _described(
        target,
        (x, *at_x),
        (weight, tile.block_n, tile.block_k),
        (dy, *at_x),
        (out_weight, tile.block_k, tile.block_n),
        *_end(tile, y, dup),
    )
    site_key, row0, threshold, scale = dropout_of(mask)
    args = (
        *given[:4], in_place(bias), site_key, *given[4:], *strides, row0, dup.shape[0], f, k, d,
        threshold, scale,
    )  # fmt: skip
    constants = {"ACT": PAIRS[act][1], "PARTS": tile.parts}
    return _launch(mlp_bwd_kernel, target, tile, dup, args, tma, (k, d), False, **constants)


def gated_mlp_bwd(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    out_weight: Tensor,
    mask: DropoutMask | None,
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
    given, strides, tma = _described(
        target,
        (x, *at_x),
        (gate_weight, *at_w),
        (weight, *at_w),
        (dy, *at_x),
        (out_weight, tile.block_k, tile.block_n),
        *_end(tile, y, dgate, dup),
    )
    site_key, row0, threshold, scale = dropout_of(mask)
    args = (
        *given[:5], in_place(gate_bias), in_place(bias), site_key, *given[5:], *strides, row0,
        dup.shape[0], f, k, d, threshold, scale,
    )  # fmt: skip
    constants = {"ACT": PAIRS[act][1], "PARTS": tile.parts}
    return _launch(gated_mlp_bwd_kernel, target, tile, dup, args, tma, (k, d), False, **constants)


def cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    softcap: float,
    first: int,
    highs: Tensor,
    sums: Tensor,
    totals: Tensor | None,
    picked: Tensor,
    at: Target,
    tile: Tile | None = None,
) -> Launch:
    """What a softmax needs of each tile's columns of x @ weightᵀ + bias, and the targets' logits.

    `highs`, `sums` and `totals` are (tiles, M); weight holds the vocabulary from row `first` on.
    """
    (m, k), n = x.shape, weight.shape[0]
    tile = tile or tile_for("cross_entropy_fwd", at, m, n)
    given, strides, tma = _described(
        at, (x, tile.block_m, tile.block_k), (weight, tile.block_n, tile.block_k)
    )
    args = (
        *given, in_place(bias), in_place(target), highs, sums, totals, picked, *strides, first, m,
        n, k, softcap,
    )  # fmt: skip
    return _launch(
        linear_cross_entropy_fwd_kernel, at, tile, x, args, tma, (k,), shape=(m, n),
        SOFTCAP=softcap != 0.0, PARTS=tile.parts,
    )  # fmt: skip


def cross_entropy_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    softcap: float,
    first: int,
    stats: tuple[Tensor, Tensor],
    slopes: tuple[Tensor, Tensor | None, Tensor],
    dz: Tensor,
    at: Target,
    tile: Tile | None = None,
) -> Launch:
    """dz = softmax(x @ weightᵀ + bias) * mass + spread, + at_target at the targets; soft-capped.

    `stats` are the maximum and the log of the sum of each row, `slopes` (mass, spread, at_target).
    """
    tile = tile or tile_for("cross_entropy_bwd", at, *dz.shape)
    k = weight.shape[1]
    (x_in, w_in, out), strides, tma = _described(
        at,
        (x, tile.block_m, tile.block_k),
        (weight, tile.block_n, tile.block_k),
        *_end(tile, dz),
    )
    args = (
        x_in, w_in, in_place(bias), in_place(target), *stats, *slopes, out, *strides, first,
        *dz.shape, k, softcap,
    )  # fmt: skip
    return _launch(
        linear_cross_entropy_bwd_kernel, at, tile, dz, args, tma, (k,), SOFTCAP=softcap != 0.0,
        PARTS=tile.parts,
    )  # fmt: skip


# --- linear layers


def _says_linear(key: tuple[Any, ...], *_: Any, **__: Any) -> str:
    _, device, ends = key
    if not ends:
        return "ATen's addmm: a product without an end to fuse"
    if ends_in_kernel(target_of(device)):
        return "kernel linear_fwd, dropout and residual in its end"
    return "ATen's addmm, then kernel dropout_add_fwd"


@faster(linear.linear_fwd, "triton", says=_says_linear)
def linear_fwd_triton(x, weight, bias, residual=None, mask=None, out=None):
    if residual is None and mask is None:
        if out is None:
            return F.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)
    target = target_of(x.device)
    if ends_in_kernel(target):
        y = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
        linear_fwd(x, weight, bias, residual, mask, None, None, y, target).run()
        return y
    z = F.linear(x, weight, bias)
    y = z if out is None else out
    dropout_add_fwd(z, residual, mask, y).run()
    return y


def _why_not_dw(key: tuple[Any, ...]) -> str | None:
    dtype, device, wide = key
    cuda = device.type == "cuda" and torch.version.hip is None
    return None if wide and dtype.itemsize == 2 and cuda else ""


@faster(linear.linear_dw, "triton", why_not=_why_not_dw, says="ATen's mm, not rounded to 16 bits")
def linear_dw_triton(dy, x, into, partial, exact=False):
    dw = torch.mm(dy.t(), x, out_dtype=torch.float32)  # not rounded before the sum is whole
    return dw if into is None else into.add_(dw)


# --- several steps at once


def _why_not_mlp(key: tuple[Any, ...]) -> str | None:
    act, dtype, *_ = key
    if dtype.itemsize > 2 and not INTERPRETED:
        return f"products in {str(dtype)[6:]} are ATen's"
    return None if act in PAIRS else f"{act} has no row in fused_remat.triton.pointwise.PAIRS"


def _says_mlp_up(key: tuple[Any, ...], *_: Any) -> str:
    late = storage.why_not(*key[3])
    return f"one kernel: product and activation{(late and f'; then packed by ATen: {late}') or ''}"


@faster(fused.mlp_up_fwd, "triton", why_not=_why_not_mlp, says=_says_mlp_up)
def mlp_up_fwd_triton(act, x, gate, up, mask, kept, storages):
    y, target = x.new_empty((x.shape[0], up[0].shape[0])), target_of(x.device)
    kernel = "linear" if gate is None else "gated_mlp_fwd"
    made = [_made(kernel, y, *asked) for asked in zip(kept, storages, strict=True)]
    pres, packed = zip(*made, strict=True)
    if gate is None:
        given = x, up[0], up[1], None, mask, act, pres[0], y, target
        launch = linear_fwd(*given, packed=packed[0])
    else:
        weights = gate[0], gate[1], up[0], up[1]
        launch = gated_mlp_fwd(x, *weights, mask, act, y, target, pres=pres, packed=packed)
    launch.run()
    parts = [_packed_parts(*pair) for pair in zip(made, storages, strict=True)]
    return y, tuple([p if k else None for p, k in zip(pres, kept, strict=True)]), tuple(parts)


def _made(
    kernel: str, y: Tensor, kept: bool, call: QuantizeCall | None
) -> tuple[Tensor | None, Codes | None]:
    """What a product that ends in y also fills: its result, or that packed.

    The result is filled, too, where it is to be packed and the product's end cannot.
    """
    packed = None
    known = call is not None and storage.why_not(call.stored) is None
    if call is not None and known and packs(kernel, target_of(y.device), *y.shape):
        packed = call, new_parts(y, call)
    whole = kept or (call is not None and packed is None)
    return torch.empty_like(y) if whole else None, packed


def _packed_parts(made: tuple[Tensor | None, Codes | None], call: QuantizeCall | None) -> Parts:
    """What was packed; a pass of its own where the product's end did not."""
    pre, packed = made
    if call is None:
        return ()
    if packed is not None:
        return packed[1]
    assert pre is not None
    run = quantize if storage.why_not(call.stored) else storage.quantize_triton
    return run(pre, call)


def _says_mlp_bwd(key: tuple[Any, ...], *_: Any) -> str:
    if mlp_bwd_in_one(target_of(key[2])):
        return "one kernel: both products of a tile, nothing rebuilt is written"
    return "ATen's addmm rebuilds, then one kernel: product and the activation's backward"


@faster(fused.mlp_bwd, "triton", why_not=_why_not_mlp, says=_says_mlp_bwd)
def mlp_bwd_triton(act, dy, x, gate, up, down, mask, needs_act):
    target = target_of(x.device)
    dup = x.new_empty((x.shape[0], up[0].shape[0]))
    if not mlp_bwd_in_one(target):
        dgate, pre = None if gate is None else F.linear(x, *gate), F.linear(x, *up)
        y = pre if needs_act else None  # in its place, and dgate in the gate's
        linear_act_bwd(dy, down, dgate, pre, mask, act, y, dgate, dup, target).run()
        return y, dgate, dup
    y = torch.empty_like(dup) if needs_act else None
    dgate = None
    if gate is None:
        mlp_bwd(x, up[0], up[1], dy, down, mask, act, y, dup, target).run()
    else:
        dgate = torch.empty_like(dup)
        weights = gate[0], gate[1], up[0], up[1]
        gated_mlp_bwd(x, *weights, dy, down, mask, act, y, dgate, dup, target).run()
    return y, dgate, dup


def _why_not_norm(key: tuple[Any, ...]) -> str | None:
    width = key[3]
    if width > norms.FWD_WIDTH:
        return f"rows of {width} do not fit a tile of {norms.FWD_WIDTH} elements"
    return norms.why_not(key)


@faster(
    fused.linear_norm_fwd, "triton", why_not=_why_not_norm,
    says="ATen's addmm, then kernel norm_fwd: dropout, residual and norm",
)  # fmt: skip
def linear_norm_fwd_triton(x, weight, bias, residual, mask, spec, norm_weight, norm_bias, out=None):
    product = F.linear(x, weight, bias)
    # In place of the product: each program reads a tile whole before it writes it.
    total = product
    if residual.dtype is not product.dtype:
        total = torch.empty(product.shape, dtype=residual.dtype, device=product.device)
    y = torch.empty_like(total) if out is None else out
    stats = norms.new_stats(spec.kind, total)
    norms.norm_fwd(
        spec, product, residual, mask, norm_weight, norm_bias, total, y, stats, False
    ).run()
    return (total, y, *stats)
