"""Cross-entropy over a linear layer's logits, in kernels (`kernels.cross_entropy`).

Forward is one kernel, or one per block of columns if the weights are rounded first. Backward
computes the logits' gradient a block at a time, in the dtype of x and in the order of
`steps.cross_entropy`; ATen's products take it. Where gradients are computed in forward, a block of
all columns is written as exp(logits - its tile's maximum), in the dtype of x, and one pass replaces
it by the logits' gradient. First the operations, then their launches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_remat.kernels.cross_entropy import (
    cross_entropy_grad_kernel,
    linear_cross_entropy_bwd_kernel,
    linear_cross_entropy_fwd_kernel,
)
from fused_remat.steps import collective, cross_entropy, loss_grads, token_losses
from fused_remat.steps.chunk import spans
from fused_remat.steps.cross_entropy import Columns, gradients
from fused_remat.steps.logit_blocks import block_of, rows_of
from fused_remat.steps.operations import faster
from fused_remat.triton.launch import TARGET, Launch, Target, run, target_of
from fused_remat.triton.operands import cdiv, matrix, vector
from fused_remat.triton.products import launch_over, unsupported_dtype_reason
from fused_remat.triton.tables import TILES, Tile, family, tile_for

_TILE = 4096  # elements of a program of one pass


def _unsupported_reason(key: tuple[Any, ...]) -> str | None:
    dtype, _, x_shape, weight_shape, outputs = key
    if outputs:
        return f"no kernel returns {' or '.join(outputs)}"
    if 0 in x_shape or max(*x_shape, *weight_shape) >= 2**31:
        return "a size is 0, or does not fit 32 bits"
    return unsupported_dtype_reason(dtype)


@faster(
    cross_entropy.cross_entropy_fwd,
    "triton",
    "kernel linear_cross_entropy_fwd; backward: a kernel per block and ATen's products",
    _unsupported_reason,
)
def cross_entropy_fwd_triton(x, weight, bias, call, out=None):
    target = target_of(x.device)
    tokens, vocab = x.shape[0], weight.shape[0]
    cross_entropy.check_targets(call, vocab)
    rows, columns = block_of(tokens, vocab, call.logits, x, x.element_size())
    # All columns at once, of so many tokens that the tiles' statistics are no larger than a block.
    if weight.dtype == x.dtype:
        most = rows * columns * x.element_size() // (8 * cdiv(vocab, 64))
        rows, columns = min(tokens, max(rows, most)), vocab
    used = (call.target != call.ignore_index)[:, None]

    def of_rows(lo: int, hi: int) -> tuple[Tensor, ...]:
        picked = torch.zeros(hi - lo, dtype=torch.float32, device=x.device)
        found: list[list[Tensor]] = [[], [], []]
        for span in spans(vocab, columns):
            block = Columns.of(weight, bias, span, x)
            tile = tile_for("cross_entropy_fwd", target, hi - lo, len(block.weight))
            shape = (cdiv(len(block.weight), tile.block_n), hi - lo)
            parts = [picked.new_empty(shape) for _ in range(3 if call.label_smoothing else 2)]
            totals = parts[2] if call.label_smoothing else None
            operands = x[lo:hi], block.weight, block.bias, call.target[lo:hi]
            given = *operands, call.softcap, block.first, *parts[:2], totals, picked
            run(cross_entropy_fwd, *given, TARGET, tile, None, call.logit_scale)
            for have, part in zip(found, parts, strict=False):
                have.append(part)
        highs, sums = (torch.cat(parts).t() for parts in found[:2])
        total = torch.cat(found[2]).sum(0) if found[2] else picked
        return token_losses.losses(highs, sums, picked[:, None], total[:, None], vocab, call)

    made = [of_rows(lo, hi) for lo, hi in spans(tokens, rows)]
    loss, *stats = (t[0] if len(t) == 1 else torch.cat(t) for t in zip(*made, strict=True))
    loss, high, log_sum = (t.masked_fill_(~used, 0) for t in (loss, *stats))
    return loss if out is None else out.copy_(loss), high, log_sum


@faster(
    cross_entropy.cross_entropy_bwd,
    "triton",
    "a kernel per block of logits, and ATen's products",
    _unsupported_reason,
)
def cross_entropy_bwd_triton(dy, x, weight, bias, stats, call, needs_grad, exact=False):
    tokens, vocab = x.shape[0], weight.shape[0]
    # dy is infinite for a mean over no token.
    dy = torch.where((call.target != call.ignore_index)[:, None], dy.float(), 0)
    factors = token_losses.slopes(dy, stats, vocab, call)
    rows, columns = block_of(tokens, vocab, call.logits, x, x.element_size())
    # A tensor descriptor needs rows of multiples of 16 bytes, whatever the vocabulary.
    held = x.new_empty((min(rows, tokens), 8 * cdiv(columns, 8)))

    def dlogits(block: Columns, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        width = len(block.weight)
        padded = held[: hi - lo, : 8 * cdiv(width, 8)]
        mass, spread, at_target = (t[lo:hi, 0] for t in factors[:3])
        run(
            cross_entropy_bwd, x[lo:hi], block.weight, block.bias, call.target[lo:hi], call.softcap,
            block.first, (stats[0][lo:hi, 0], stats[1][lo:hi, 0]),
            (mass, spread if call.label_smoothing else None, at_target), padded, TARGET,
            None, call.logit_scale,
        )  # fmt: skip
        return x[lo:hi], padded[:, :width]

    dx, dweight, dbias = gradients(
        dlogits, x, weight, bias, tokens, (rows, columns), needs_grad, exact
    )
    return None if dx is None else dx.to(x.dtype), dweight, dbias


@faster(
    loss_grads.cross_entropy_grads,
    "triton",
    "kernels linear_cross_entropy_fwd and cross_entropy_grad, and ATen's products",
    _unsupported_reason,
)
def cross_entropy_grads_triton(x, weight, bias, call, scale, needs_grad):
    target, (tokens, vocab) = target_of(x.device), (len(x), len(weight))
    # exp(z - maximum) in float16 has no logarithm where it is 0, and smoothing needs z.
    lossy = call.softcap and call.label_smoothing and x.dtype == torch.float16
    if lossy or family(target) not in TILES["cross_entropy_exps"]:
        return loss_grads.cross_entropy_grads(x, weight, bias, call, scale, needs_grad)
    cross_entropy.check_targets(call, vocab)
    columns, used = Columns.of(weight, bias, (0, vocab), x), call.target != call.ignore_index
    rows = rows_of(tokens, vocab, call.logits, x, x.element_size())
    # A tensor descriptor needs rows of multiples of 16 bytes, whatever the vocabulary.
    held = x.new_empty((rows, 8 * cdiv(vocab, 8)))

    def of_rows(lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        x_part, labels, exps = x[lo:hi], call.target[lo:hi], held[: hi - lo]
        tile = tile_for("cross_entropy_exps", target, hi - lo, vocab)
        picked = torch.zeros(hi - lo, dtype=torch.float32, device=x.device)
        parts = [picked.new_empty((cdiv(vocab, tile.block_n), hi - lo)) for _ in range(3)]
        highs, sums, totals = *parts[:2], parts[2] if call.label_smoothing else None
        given = x_part, columns.weight, columns.bias, labels, call.softcap, 0
        made = highs, sums, totals, picked, TARGET, tile, exps, call.logit_scale
        run(cross_entropy_fwd, *given, *made)
        total = picked if totals is None else totals.sum(0)
        found = highs.t(), sums.t(), picked[:, None], total[:, None]
        loss, high, log_sum = token_losses.losses(*found, vocab, call)
        factors = token_losses.slopes(used[lo:hi, None].float(), (high, log_sum), vocab, call)
        mass, spread, at_target = (t[:, 0] for t in factors[:3])
        slopes, z = (mass, spread if call.label_smoothing else None, at_target), exps[:, :vocab]
        stats = high[:, 0], log_sum[:, 0]
        run(cross_entropy_grad, z, labels, call.softcap, highs, stats, slopes, tile.block_n)
        return loss, x_part, z

    given = x, columns, weight, bias, tokens, rows, scale, needs_grad
    loss, (dx, *others) = loss_grads.by_rows(of_rows, *given)
    if dx is not None and call.group:
        dx = collective.total(dx, call.group, owned=True)
    return loss.masked_fill_(~used[:, None], 0), (dx, *others)


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
    tile: Tile,
    exps: Tensor | None = None,
    scale: float = 1.0,
) -> Launch:
    """Return the launch that fills `picked` with the targets' logits and the others from each tile.

    `highs`, `sums` and `totals` (tiles, M) are the maximum, sum(exp(logits - maximum)) and the sum
    of a tile's logits scale * (x @ weightᵀ + bias); weight holds the vocabulary from row `first`
    on. `exps` (M, V) are exp(logits - the tile's maximum); it may be wider, as dz of
    `cross_entropy_bwd`.
    """
    (m, k), n = x.shape, weight.shape[0]
    vectors = [vector(bias), vector(target), highs, sums, totals, picked]
    return launch_over(
        linear_cross_entropy_fwd_kernel, at, tile, [(x, "mk"), (weight, "nk")], vectors, [exps],
        (first, m, n, k, None if scale == 1.0 else scale, softcap or None), (m, n), (k,),
    )  # fmt: skip


def cross_entropy_grad(
    held: Tensor,
    target: Tensor,
    softcap: float,
    tops: Tensor,
    stats: tuple[Tensor, Tensor],
    slopes: tuple[Tensor, Tensor | None, Tensor],
    block_n: int,
) -> Launch:
    """Replace `held`, exps of `cross_entropy_fwd` and its tiles of `block_n`, by logits' gradient.

    `tops` (tiles, M) are the forward's `highs`; others as in `cross_entropy_bwd`.
    """
    (m, n), block_m = held.shape, max(1, _TILE // block_n)
    vectors = vector(target), tops, *stats, *slopes
    blocks, grid = {"BLOCK_M": block_m, "BLOCK_N": block_n}, (cdiv(m, block_m) * cdiv(n, block_n),)
    args = (matrix(held), *vectors, m, n, softcap or None)
    return Launch(cross_entropy_grad_kernel, grid, args, blocks, num_warps=8, device=held.device)


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
    scale: float = 1.0,
) -> Launch:
    """Compute dz = softmax(z) * mass + spread, + at_target at targets.

    z = scale * (x @ weightᵀ + bias), which `slopes` are multiplied by as well.
    dz (M, V) may be wider than the vocabulary: what it has more may be written.
    `stats`: each row's maximum and log of the sum; `slopes`: (mass, spread, at_target).
    """
    shape, k = (len(x), len(weight)), weight.shape[1]
    return launch_over(
        linear_cross_entropy_bwd_kernel, at, tile or "cross_entropy_bwd",
        [(x, "mk"), (weight, "nk")], [vector(bias), vector(target), *stats, *slopes], [dz],
        (first, *shape, k, None if scale == 1.0 else scale, softcap or None), shape, (k,),
    )  # fmt: skip
