"""The gradients of a scalar cross-entropy, computed in forward: three products instead of four.

All columns of the logits are computed for some tokens at a time, and their gradient follows before
the next tokens. So dweight is a sum over these blocks, in float32, which backward's order avoids.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fused_remat.steps import collective, linear
from fused_remat.steps.chunk import spans
from fused_remat.steps.cross_entropy import (
    Columns,
    Tokens,
    check_targets,
    describe_blocks,
    key_of,
    sum_in,
)
from fused_remat.steps.linear import add_product, product
from fused_remat.steps.logit_blocks import rows_of
from fused_remat.steps.operations import operation
from fused_remat.steps.token_losses import CrossEntropyTargets, losses, slopes

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
#: Of tokens `lo` to `hi`: their losses, they themselves, and the gradients of their logits.
OfRows = Callable[[int, int], tuple[Tensor, Tensor, Tensor]]


@operation(key=lambda x, weight, *_, **__: key_of(x, weight), description=describe_blocks)
def cross_entropy_grads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: CrossEntropyTargets,
    scale: Tensor | None,
    needs_grad: tuple[bool, ...],
) -> tuple[Tensor, Grads]:
    """Return the loss of each token (T, 1), and dx, dweight and dbias of their sum times `scale`.

    Losses are those of `cross_entropy_fwd`; `scale` is a tensor () or None for 1. Gradients that
    `needs_grad` does not mark are None. Others have the dtypes of x, weight and bias; for float16,
    which a later factor would come too late for, at least float32.

    Raises: as `cross_entropy_fwd`.
    """
    check_targets(call, len(weight))
    tokens, wide = Tokens.of(x, call), linear.widens(x)
    count, vocab = len(tokens.target), len(weight)
    columns = Columns.of(weight, bias, (0, vocab), x, wide)

    def of_rows(lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        x_part = tokens.taken(x, lo, hi).to(columns.weight.dtype)
        z = columns.logits(x_part, call)
        at, inside = columns.places(tokens.target[lo:hi])
        picked = torch.where(inside, z.gather(1, at), 0)
        total = z.sum(1, keepdim=True) if call.label_smoothing else picked
        cap = 1 - (z / call.softcap).square_() if call.softcap else None
        top = torch.amax(z, 1, keepdim=True).clamp_(min=torch.finfo(z.dtype).min)
        sums = z.sub_(top).exp().sum(1, keepdim=True)
        loss, high, log_sum = losses(top, sums, picked, total, vocab, call)
        dy = torch.ones_like(loss)
        if tokens.used is not None:  # exp(z) could be infinite, and inf * 0 is NaN
            dy.masked_fill_(~tokens.used[lo:hi], 0)
        mass, spread, at_target, _ = slopes(dy, (high, log_sum), vocab, call)
        if call.group:  # the maximum of all ranks
            z.add_(top - high)
        z.sub_(log_sum).exp_().mul_(mass)
        if call.label_smoothing:
            z.add_(spread)
        z.scatter_add_(1, at, torch.where(inside, at_target, 0))
        return loss, x_part, z if cap is None else z.mul_(cap)

    rows = rows_of(count, vocab, call.logits, x)
    loss, (dx, *others) = by_rows(of_rows, x, columns, weight, bias, count, rows, scale, needs_grad)
    if dx is not None and call.group:
        dx = collective.total(dx, call.group, owned=True)
    return tokens.whole(loss), (None if dx is None else tokens.whole(dx), *others)  # type: ignore[return-value]


def by_rows(
    of_rows: OfRows,
    x: Tensor,
    columns: Columns,
    weight: Tensor,
    bias: Tensor | None,
    count: int,
    rows: int,
    scale: Tensor | None,
    needs_grad: tuple[bool, ...],
) -> tuple[Tensor, Grads]:
    """Return the results of `cross_entropy_grads` for `count` tokens, `rows` at a time.

    `columns` are all of them, in the dtype of products.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    loss = x.new_empty((count, 1), dtype=wide)
    dx = x.new_empty((count, x.shape[1]), dtype=kept_dtype(x)) if needs_grad[0] else None
    dbias = x.new_zeros(len(weight), dtype=wide) if needs_grad[2] else None
    dweight = dw = None
    if needs_grad[1]:
        dweight = torch.empty_like(weight, dtype=kept_dtype(weight))
        dtype = columns.weight.dtype if scale is None else wide
        dw = sum_in(dweight, dtype, -(-count // rows))
    for lo, hi in spans(count, rows):
        loss[lo:hi], x_part, z = of_rows(lo, hi)
        if dbias is not None:
            dbias += z.sum(0, dtype=wide)
        z = z.to(columns.weight.dtype)
        if dw is not None:
            add_product(dw, z.t(), x_part, lo == 0)
        if dx is not None:
            part = product(z, columns.weight)
            dx[lo:hi] = part if scale is None else part.mul_(scale)
        del x_part, z
    if scale is not None:
        for grad in (dw, dbias):
            if grad is not None:
                grad.mul_(scale)
    if dweight is not None and dw is not None and dw is not dweight:
        dweight.copy_(dw)
    if dbias is not None and bias is not None:
        dbias = dbias.to(kept_dtype(bias))
    return loss, (dx, dweight, dbias)


def kept_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype in which the gradient of `t` waits for the factor of backward.

    float16 has too few exponents: a gradient of a mean vanishes before it is multiplied.
    """
    return torch.float32 if t.dtype == torch.float16 else t.dtype


def kept_bytes(
    x: Tensor, weight: Tensor, bias: Tensor | None, needs_grad: tuple[bool, ...]
) -> list[int]:
    """Return the bytes of the gradients that `cross_entropy_grads` returns; 0 for None."""
    pairs = zip((x, weight, bias), needs_grad, strict=True)
    return [t.numel() * kept_dtype(t).itemsize if n and t is not None else 0 for t, n in pairs]
