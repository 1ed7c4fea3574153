"""Pointwise operations in kernels (`kernels.pointwise`), on matrices (M, N) of any row stride."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fused_remat.kernels import activations
from fused_remat.kernels import pointwise as kernels
from fused_remat.kernels.dropout import site_keys_fwd_kernel
from fused_remat.kernels.pointwise import Sequences
from fused_remat.random import NUM_SITES, DropoutMask
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.linear import dropout_sum
from fused_remat.steps.modulation_aten import gated_add, gated_add_bwd
from fused_remat.steps.operations import faster
from fused_remat.steps.residual import dropout, residual_add
from fused_remat.steps.residual import site_keys as site_keys_of_seed
from fused_remat.triton.launch import Launch, run, scratch
from fused_remat.triton.norm import column_sum
from fused_remat.triton.operands import by_sequence, cdiv, dropout_of, matrix, operand

#: Activation -> its forward and backward for a tile. A new activation is a new row.
PAIRS: dict[str, tuple[Any, Any]] = {
    "relu": (activations.relu_fwd, activations.relu_bwd),
    "gelu": (activations.gelu_fwd, activations.gelu_bwd),
    "gelu_tanh": (activations.gelu_tanh_fwd, activations.gelu_tanh_bwd),
    "silu": (activations.silu_fwd, activations.silu_bwd),
    "relu2": (activations.relu2_fwd, activations.relu2_bwd),
    "tanh": (activations.tanh_fwd, activations.tanh_bwd),
}
_TILE = 4096  # elements of a program
# Where columns are summed, a program's tile, and its rows: then the sums are 2% of its bytes.
_SUM_TILE, _SUM_ROWS = {"BLOCK_M": 16, "BLOCK_N": 128}, 128


def unsupported_activation_reason(key: tuple[Any, ...]) -> str | None:
    act, *_ = key
    return None if act in PAIRS else f"{act} has no row in fused_remat.triton.pointwise.PAIRS"


@faster(activation_fwd, "triton", "pointwise kernel", unsupported_activation_reason)
def activation_fwd_triton(act, gate, up, mask):
    y = torch.empty_like(up, memory_format=torch.contiguous_format)
    if gate is None:
        run(act_fwd, up, act, mask, y)
    else:
        run(gated_fwd, gate, up, act, mask, y)
    return y


@faster(activation_bwd, "triton", "pointwise kernel", unsupported_activation_reason)
def activation_bwd_triton(act, dy, gate, up, mask, owned, needs_grad=(True, True), needs_sum=False):
    first = dy if owned and dy.is_contiguous() else None
    if gate is None:
        dx = torch.empty(up.shape, dtype=up.dtype, device=up.device) if first is None else first
        if not needs_sum:
            run(act_bwd, dy, up, act, mask, dx)
            return None, dx, None
        total = torch.empty(dx.shape[1], device=dx.device)
        run(act_sum_bwd, dy, up, act, mask, dx, total)
        return None, dx, total
    dup = gate.new_empty(gate.shape) if needs_grad[1] else None
    dgate = (gate.new_empty(gate.shape) if first is None else first) if needs_grad[0] else None
    if dgate is not None or dup is not None:
        run(gated_bwd, dy, gate, up, act, mask, dgate, dup)
    return dgate, dup, None


@faster(residual_add, "triton", "pointwise kernel")
def residual_add_triton(x, residual, mask, out=None):
    y = torch.empty(x.shape, dtype=residual.dtype, device=x.device) if out is None else out
    run(dropout_add_fwd, x, residual, mask, y)
    return y


@faster(dropout, "triton", "pointwise kernel")
def dropout_triton(x, mask, dtype=None):
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    run(dropout_add_fwd, x, None, mask, y)
    return y


@faster(dropout_sum, "triton", "pointwise kernel")
def dropout_sum_triton(x, mask, dtype=None):
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    total = torch.empty(y.shape[1], device=y.device)
    run(act_sum_bwd, x, None, None, mask, y, total)
    return y, total


@faster(gated_add, "triton", "pointwise kernel")
def gated_add_triton(x, residual, gate, rows, out=None):
    y = torch.empty(x.shape, dtype=residual.dtype, device=x.device) if out is None else out
    sequences, (gate,) = by_sequence(rows, len(x), gate)
    run(gate_add_fwd, x, residual, gate, sequences, y)
    return y


@faster(gated_add_bwd, "triton", "pointwise kernel")
def gated_add_bwd_triton(dy, x, gate, rows, dtype, out=None):
    sequences, (gate,) = by_sequence(rows, len(dy), gate)
    dx = None
    if gate is not None:
        dx = torch.empty(dy.shape, dtype=dtype, device=dy.device) if out is None else out
    if x is None:
        run(gate_add_fwd, dy, None, gate, sequences, dx)
        return dx, None
    total = torch.empty(sequences.count * dy.shape[1], dtype=torch.float32, device=dy.device)
    if rows.tokens == 1:  # nothing is summed
        run(gate_add_fwd, dy, None, x, sequences, total.view(dy.shape))
        if dx is not None:
            run(gate_add_fwd, dy, None, gate, sequences, dx)
        return dx, total.view(dy.shape)
    run(gate_add_bwd, dy, x, gate, sequences, dx, total)
    return dx, total.view(sequences.count, -1)


@faster(site_keys_of_seed, "triton", "pointwise kernel")
def site_keys_triton(seed, first):
    keys = torch.empty(NUM_SITES, dtype=torch.int64, device=seed.device)
    run(site_keys, seed, first, keys)
    return keys.unbind()


def site_keys(seed: Tensor, first: int, keys: Tensor) -> Launch:
    """Return the keys of as many sites as `keys` holds."""
    args, count = (seed, keys, first), {"COUNT": keys.numel()}
    return Launch(site_keys_fwd_kernel, (1,), args, count, num_warps=1, device=seed.device)


def dropout_add_fwd(
    x: Tensor, residual: Tensor | None, mask: DropoutMask | None, y: Tensor
) -> Launch:
    """Compute y = residual + mask * x."""
    args = operand(x), operand(residual), matrix(y), *dropout_of(mask)
    return _over(y, kernels.dropout_add_fwd_kernel, *args)


def gate_add_fwd(
    x: Tensor, residual: Tensor | None, gate: Tensor, sequences: Sequences, y: Tensor
) -> Launch:
    """Compute y = residual + gate * x, with the gate of each row's sequence."""
    args = operand(x), operand(residual), operand(gate), matrix(y), sequences
    return _over(y, kernels.gate_add_fwd_kernel, *args)


def gate_add_bwd(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    sequences: Sequences,
    dx: Tensor | None,
    sums: Tensor,
) -> list[Launch]:
    """Compute dx = gate * dy, if not None, and the sums of dy * x over each sequence's rows.

    `sums` has one row for each sequence, one after the other, in float32.
    """
    rows, width = x.shape
    parts = cdiv(sequences.tokens, _SUM_ROWS)
    found = scratch(sums, (parts, sums.numel()))
    grid = (parts * sequences.count * cdiv(width, _SUM_TILE["BLOCK_N"]),)
    matrices = operand(dy), operand(x), operand(gate), matrix(dx)
    args = (*matrices, found, sequences, rows, width)
    constants = {"ROWS": _SUM_ROWS, **_SUM_TILE}
    first = Launch(kernels.gate_add_bwd_kernel, grid, args, constants, 4, device=x.device)
    return [first, column_sum(found, sums)]


def act_fwd(x: Tensor, act: str, mask: DropoutMask | None, y: Tensor) -> Launch:
    """Compute y = mask * act(x)."""
    args = operand(x), matrix(y), *dropout_of(mask)
    return _over(y, kernels.act_fwd_kernel, *args, ACT=PAIRS[act][0])


def act_bwd(
    dy: Tensor, x: Tensor, act: str, mask: DropoutMask | None, dx: Tensor, y: Tensor | None = None
) -> Launch:
    """Compute dx = mask * dy * act'(x); y = mask * act(x) if requested."""
    args = operand(dy), operand(x), matrix(dx), matrix(y), *dropout_of(mask)
    return _over(dx, kernels.act_bwd_kernel, *args, ACT=PAIRS[act][1])


def act_sum_bwd(
    dy: Tensor,
    x: Tensor | None,
    act: str | None,
    mask: DropoutMask | None,
    dx: Tensor,
    total: Tensor,
    y: Tensor | None = None,
) -> list[Launch]:
    """Compute what `act_bwd` does, or dx = mask * dy; and the sum of dx over rows, float32."""
    rows, width = dx.shape
    parts = scratch(total, (cdiv(rows, _SUM_ROWS), width))
    matrices = operand(dy), operand(x), matrix(dx), matrix(y)
    constants = {"ACT": None if act is None else PAIRS[act][1], "ROWS": _SUM_ROWS, **_SUM_TILE}
    grid = (len(parts) * cdiv(width, _SUM_TILE["BLOCK_N"]),)
    args = (*matrices, parts, *dropout_of(mask), rows, width)
    kernel = kernels.act_sum_bwd_kernel
    first = Launch(kernel, grid, args, constants, num_warps=4, device=dx.device)
    return [first, column_sum(parts, total)]


def gated_fwd(gate: Tensor, up: Tensor, act: str, mask: DropoutMask | None, y: Tensor) -> Launch:
    """Compute y = mask * act(gate) * up."""
    args = operand(gate), operand(up), matrix(y), *dropout_of(mask)
    return _over(y, kernels.gated_fwd_kernel, *args, ACT=PAIRS[act][0])


def gated_bwd(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    act: str,
    mask: DropoutMask | None,
    dgate: Tensor | None,
    dup: Tensor | None,
    y: Tensor | None = None,
) -> Launch:
    """Compute dgate, dup and y of `gated_fwd`, those not None; dgate and y need `up`."""
    matrices = operand(dy), operand(gate), operand(up), matrix(dgate), matrix(dup), matrix(y)
    args = *matrices, *dropout_of(mask)
    return _over(dy, kernels.gated_bwd_kernel, *args, ACT=PAIRS[act][1])


def _over(y: Tensor, kernel: Any, *args: Any, **constants: Any) -> Launch:
    rows, width = y.shape
    block_n = _columns(width)
    block_m = _TILE // block_n
    grid = (cdiv(rows, block_m) * cdiv(width, block_n),)
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n}
    return Launch(kernel, grid, (*args, rows, width), constants, num_warps=8, device=y.device)


@functools.cache
def _columns(width: int) -> int:
    """Return the columns of a tile: so few that little of a row's last tile is idle.

    At least a row's 64, or 128 bytes of 16-bit elements, which is what a warp reads at once.

    >>> [_columns(width) for width in (576, 1536, 4096, 11008)]
    [64, 512, 2048, 1024]
    """
    sizes = [1 << n for n in range(11, 5, -1)]
    return min(sizes, key=lambda n: cdiv(width, n) * (n + 8))
