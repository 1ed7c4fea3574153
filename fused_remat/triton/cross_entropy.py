"""Cross-entropy over a linear layer's logits: kernels around the products, which are ATen's.

Forward is one kernel, or one for each block of columns where the weights are rounded first.
Backward makes the logits' gradient a block at a time, in the dtype of x, in the order of
`steps.cross_entropy`: two products of ATen's take it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_remat.steps import cross_entropy
from fused_remat.steps.cross_entropy import (
    CrossEntropyCall,
    Slopes,
    add_product,
    block_of,
    check_targets,
    losses,
    new_dweight,
    spans,
    sum_in,
)
from fused_remat.steps.operations import faster
from fused_remat.triton import products
from fused_remat.triton.launch import INTERPRETED, Target, cdiv, target_of
from fused_remat.triton.tables import tile_for


def _why_not(key: tuple[Any, ...]) -> str | None:
    dtype, _, x_shape, weight_shape = key
    if dtype.itemsize > 2 and not INTERPRETED:
        return f"products in {str(dtype)[6:]} are ATen's"
    if 0 in x_shape or max(*x_shape, *weight_shape) >= 2**31:
        return "a size is 0, or more than 32 bits count"
    return None


def _part(
    weight: Tensor, bias: Tensor | None, span: tuple[int, int], x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Columns of the vocabulary, in the dtype of x."""
    return weight[slice(*span)].to(x.dtype), None if bias is None else bias[slice(*span)].to(
        x.dtype
    )


@faster(
    cross_entropy.cross_entropy_fwd,
    "triton",
    why_not=_why_not,
    says="kernel linear_cross_entropy_fwd; backward a kernel for each block, and ATen's products",
)
def cross_entropy_fwd_triton(x, weight, bias, call, out=None):
    target = target_of(x.device)
    tokens, vocab = x.shape[0], weight.shape[0]
    check_targets(call, vocab)
    rows, columns = block_of(tokens, vocab, call, x.device)
    if weight.dtype == x.dtype:  # in one, of so many tokens that what tiles write is no larger
        rows, columns = min(tokens, max(rows, rows * columns // cdiv(vocab, 64))), vocab
    used = (call.target != call.ignore_index)[:, None]
    made = [
        _of_rows(x[lo:hi], weight, bias, call, call.target[lo:hi], columns, target)
        for lo, hi in spans(tokens, rows)
    ]
    loss, *stats = (t[0] if len(t) == 1 else torch.cat(t) for t in zip(*made, strict=True))
    loss, high, log_sum = (t.masked_fill_(~used, 0) for t in (loss, *stats))
    return loss if out is None else out.copy_(loss), high, log_sum


def _of_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: CrossEntropyCall,
    labels: Tensor,
    columns: int,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and statistics of some tokens."""
    tokens, vocab = x.shape[0], weight.shape[0]
    picked = torch.zeros(tokens, dtype=torch.float32, device=x.device)
    found: list[list[Tensor]] = [[], [], []]
    for span in spans(vocab, columns):
        w, b = _part(weight, bias, span, x)
        tile = tile_for("cross_entropy_fwd", target, tokens, w.shape[0])
        shape = (cdiv(w.shape[0], tile.block_n), tokens)
        parts = [picked.new_empty(shape) for _ in range(3 if call.label_smoothing else 2)]
        totals = parts[2] if call.label_smoothing else None
        products.cross_entropy_fwd(
            x, w, b, labels, call.softcap, span[0], parts[0], parts[1], totals, picked, target, tile
        ).run()
        for have, part in zip(found, parts, strict=False):
            have.append(part)
    highs, sums = (torch.cat(parts).t() for parts in found[:2])
    total = torch.cat(found[2]).sum(0) if found[2] else picked
    return losses(highs, sums, picked[:, None], total[:, None], vocab, call)


@faster(
    cross_entropy.cross_entropy_bwd,
    "triton",
    why_not=_why_not,
    says="a kernel for each block of logits, and ATen's products",
)
def cross_entropy_bwd_triton(dy, x, weight, bias, stats, call, needs_grad, exact=False):
    target = target_of(x.device)
    (tokens, depth), vocab = x.shape, weight.shape[0]
    # A mean over no token at all hands out infinities.
    dy = torch.where((call.target != call.ignore_index)[:, None], dy.float(), 0)
    slopes = Slopes.of(dy, stats, vocab, call)
    rows, columns = block_of(tokens, vocab, call, x.device)
    dx = dy.new_empty((tokens, depth)) if needs_grad[0] else None
    dweight = new_dweight(weight, exact) if needs_grad[1] else None
    dbias = dy.new_zeros(vocab) if needs_grad[2] else None
    # Rows apart by multiples of 16 bytes, whatever the vocabulary: a tensor descriptor's.
    held = x.new_empty((min(rows, tokens), 8 * cdiv(columns, 8)))
    for span in spans(vocab, columns):
        w, b = _part(weight, bias, span, x)
        mine = None if dweight is None else dweight[slice(*span)]
        dw = None if mine is None else sum_in(mine, x.dtype, cdiv(tokens, rows))
        for lo, hi in spans(tokens, rows):
            dz = held[: hi - lo, : w.shape[0]]
            mass, spread, at_target = (
                t[lo:hi, 0] for t in (slopes.mass, slopes.spread, slopes.target)
            )
            products.cross_entropy_bwd(
                x[lo:hi], w, b, call.target[lo:hi], call.softcap, span[0],
                (stats[0][lo:hi, 0], stats[1][lo:hi, 0]),
                (mass, spread if call.label_smoothing else None, at_target), dz, target,
            ).run()  # fmt: skip
            if dbias is not None:
                dbias[slice(*span)] += dz.sum(0, dtype=torch.float32)
            if dw is not None:
                add_product(dw, dz.t(), x[lo:hi], lo == 0)
            if dx is not None:
                add_product(dx[lo:hi], dz, w, span[0] == 0)
        if mine is not None and dw is not None and dw is not mine:
            mine.copy_(dw)
    return None if dx is None else dx.to(x.dtype), dweight, dbias
