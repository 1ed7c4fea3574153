"""Attention in blocks of query rows against the keys that they can see, in ATen ops.

It supports every call. The largest temporary is a block of scores, never (S_q, S_k). The G query
heads that share a key head are rows of one product, and N = B * Hkv products run at a time. A row
whose keys are all excluded is 0, and so are its gradients.
Scores are scaled so that probabilities are powers of 2: exp2 is faster than exp.
Source: the backward of Dao et al. 2022 (arXiv 2205.14135), with dS = P * (dP - rowsum(dO * O)).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.steps.attention_call import AttentionArgs, Heads

# Elements of a block of scores, at most.
_BLOCK = 1 << 20
# Rows of a block that sees other keys than the block before: fewer rows see fewer keys in vain, and
# more rows make better products.
_ROWS = 128
# Sequences of at least this many queries are processed one at a time.
_LONG = 128
_LOG2_E = math.log2(math.e)


def sequences(call: AttentionArgs) -> Iterator[tuple[slice, AttentionArgs]]:
    """Yield parts of the batch: long sequences one at a time, whose scores stay in cache."""
    call, everything = call.with_lengths_as_padding(), slice(None)
    if call.batch == 1 or call.q_len < _LONG:
        yield everything, call
        return
    for b in range(call.batch):
        one, row0 = slice(b, b + 1), call.row0 + b * call.spec.num_heads * call.q_len
        yield one, call.part(one, everything, everything, batch=1, row0=row0)


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, out: Tensor) -> Tensor:
    """Fill `out` (B, H, S_q, E), of any strides; return lse (N, G, S_q, 1)."""
    acc = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (_grouped(x, call, acc) for x in (q, k, v))
    lse = q.new_empty((*q.shape[:3], 1))
    blocks, unit = _blocks(call), _unit(call)
    scratch = _Scratch(q, blocks, 2)
    for block in blocks:
        q_rows = _rows(q, block) * (unit * call.spec.scale)
        probs, _ = _scores(q_rows, k, call, block, scratch.of(0, block))
        top, total = _exponentials(probs, call)
        lse[:, :, block.rows] = total.log().add_(top, alpha=1.0 / unit).view(*q.shape[:2], -1, 1)
        if call.spec.dropout > 0.0:
            probs.mul_(_dropout(block, call, scratch.of(1, block)))
        _put(out, block.rows, torch.bmm(probs, v[:, 0, block.keys]).div_(total))
    return lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: AttentionArgs,
    grads: Heads | None,
) -> None:  # fmt: skip
    """Fill `grads` (dq, dk, dv) unless None; add the masks' gradients to the call's buffers."""
    acc = torch.promote_types(q.dtype, torch.float32)
    q, k, v, do, o = (_grouped(x, call, acc) for x in (q, k, v, do, o))
    unit = _unit(call)
    lse = lse.reshape(*q.shape[:3], 1) * unit
    delta = (do * o).sum(-1, keepdim=True)
    dk, dv = (torch.zeros_like(x[:, 0], memory_format=torch.contiguous_format) for x in (k, v))
    blocks = _blocks(call)
    scratch = _Scratch(q, blocks, 3)
    for block in blocks:
        if block.keys.start == block.keys.stop:
            if grads is not None:
                grads[0][:, :, block.rows] = 0.0
            continue
        keys, do_rows = block.keys, _rows(do, block)
        q_rows = _rows(q, block) * (unit * call.spec.scale)
        probs, capped = _scores(q_rows, k, call, block, scratch.of(0, block))
        if unit == 1.0 and not call.spec.sinks:  # lse may have lost the scores to a far mask value
            probs.div_(_exponentials(probs, call)[1])
        else:
            probs.sub_(_rows(lse, block))
            (probs.mul_(_LOG2_E) if unit == 1.0 else probs).exp2_()
        dprobs = scratch.of(1, block)
        torch.bmm(do_rows, v[:, 0, keys].transpose(1, 2), out=dprobs)
        dropped = probs
        if call.spec.dropout > 0.0:
            mask = _dropout(block, call, scratch.of(2, block))
            dprobs.mul_(mask)
            dropped = mask.mul_(probs)
        _add(dv, keys, dropped.transpose(1, 2), do_rows)
        dscores = dprobs.sub_(_rows(delta, block)).mul_(probs)
        _add_mask_grads(dscores, call, block)
        if capped is not None:
            dscores.addcmul_(dscores * capped, capped, value=-1.0)  # times 1 - tanh**2
        if grads is not None:
            _add(dk, keys, dscores.transpose(1, 2), q_rows)
            _put(grads[0], block.rows, torch.bmm(dscores, k[:, 0, keys]).mul_(call.spec.scale))
    if grads is not None:
        grads[1].copy_(dk.mul_(1.0 / unit).view(grads[1].shape))
        grads[2].copy_(dv.view(grads[2].shape))


def _scores(
    q_rows: Tensor, k: Tensor, call: AttentionArgs, block: _Block, scores: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return masked scores times `_unit`, in `scores`, and the soft-cap's tanh, if any."""
    torch.bmm(q_rows, k[:, 0, block.keys].transpose(1, 2), out=scores)
    capped = None
    if call.spec.softcap != 0.0:
        limit = _unit(call) * call.spec.softcap
        capped = torch.div(scores, limit).tanh_()
        torch.mul(capped, limit, out=scores)
    if scores.shape[-1] > 0:
        _exclude(scores.view(call.batch, call.spec.num_heads, -1, scores.shape[-1]), call, block)
    return scores, capped


def _exponentials(scores: Tensor, call: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Replace scores by exp(score - top); return each row's maximum `top`, and their sum.

    A row whose keys are all excluded becomes 0; its maximum is +inf, and its sum 1.
    """
    if scores.shape[-1] == 0:
        top = scores.new_full((*scores.shape[:2], 1), torch.inf)
        return top, torch.ones_like(top)
    top = scores.amax(-1, keepdim=True)
    nothing = top == -torch.inf if call.may_exclude_rows else None
    scores.sub_(top if nothing is None else top.masked_fill_(nothing, 0.0))
    if _unit(call) == 1.0:
        scores.mul_(_LOG2_E)
    total = scores.exp2_().sum(-1, keepdim=True)
    if nothing is None:
        return top, total
    return top.masked_fill_(nothing, torch.inf), total.masked_fill_(nothing, 1.0)


def _unit(call: AttentionArgs) -> float:
    """Return the factor of scores: log2(e), or 1 for float masks, which it could overflow."""
    masks = [mask for mask in (call.mask, call.padding) if mask is not None]
    return _LOG2_E if all(mask.dtype == torch.bool for mask in masks) else 1.0


def _exclude(grid: Tensor, call: AttentionArgs, block: _Block) -> None:
    """Apply the window and both masks to the scores `grid` (B, H, rows, keys), in place."""
    low, high = block.keys.start, block.keys.stop
    (left, right), offset = call.spec.window, call.offset
    first = block.rows.start + offset
    if right >= 0 and (edge := max(low, first + right + 1)) < high:
        _exclude_band(grid[..., edge - low :], first + right - edge, above=True)
    if left >= 0 and (edge := min(high, block.rows.stop - 1 + offset - left)) > low:
        _exclude_band(grid[..., : edge - low], first - left - low, above=False)
    if call.mask is not None:
        _mask(grid, _of_block(call.mask, block), call.spec.true_means == "attend")
    if call.padding is not None:
        _mask(grid, call.padding[:, None, None, low:high], False)


def _exclude_band(grid: Tensor, diagonal: int, above: bool) -> None:
    """Exclude column j of row i where j > i + diagonal (`above`), or where j < i + diagonal."""
    ones = torch.ones(grid.shape[2:], dtype=torch.bool, device=grid.device)
    band = ones.triu_(diagonal + 1) if above else ones.tril_(diagonal - 1)
    grid.masked_fill_(band, -torch.inf)


def _of_block(mask: Tensor, block: _Block) -> Tensor:
    mask = mask[..., block.keys] if mask.shape[-1] > 1 else mask
    return mask[..., block.rows, :] if mask.shape[-2] > 1 else mask


def _mask(grid: Tensor, mask: Tensor, true_attends: bool) -> None:
    if mask.dtype == torch.bool:
        grid.masked_fill_(mask.logical_not() if true_attends else mask, -torch.inf)
    else:
        grid.add_(mask)


def _dropout(block: _Block, call: AttentionArgs, out: Tensor) -> Tensor:
    assert call.site_key is not None
    random.keep_scale(
        call.site_key, call.row0 + block.rows.start, *block.shape, call.spec.dropout, out.dtype,
        call.batch * call.spec.num_heads, call.head_rows or call.q_len,
        call.col0 + block.keys.start, out=out,
    )  # fmt: skip
    return out


def _add_mask_grads(dscores: Tensor, call: AttentionArgs, block: _Block) -> None:
    grid = dscores.view(call.batch, call.spec.num_heads, *block.shape)
    if call.dmask is not None:
        target = _of_block(call.dmask, block)
        target.add_(grid.sum_to_size(target.shape))
    if call.dpadding is not None:
        call.dpadding[:, block.keys].add_(grid.sum((1, 2)))


class _Block(NamedTuple):
    """Query rows, and the keys that they can see."""

    rows: slice
    keys: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


def _blocks(call: AttentionArgs) -> list[_Block]:
    size = max(16, _BLOCK // max(1, call.batch * call.spec.num_heads * call.kv_len))
    (left, right), offset = call.spec.window, call.offset
    if left >= 0 or right >= 0:
        size = min(size, _ROWS)
    blocks = []
    for start in range(0, call.q_len, size):
        stop = min(start + size, call.q_len)
        low, high = 0, call.kv_len
        if left >= 0:
            low = max(0, start + offset - left)
        if right >= 0:
            high = min(high, stop + offset + right)
        blocks.append(_Block(slice(start, stop), slice(low, max(low, high))))
    return blocks


class _Scratch:
    """Matrices of scores that all blocks share: memory that is in cache already is fast."""

    def __init__(self, grouped: Tensor, blocks: list[_Block], count: int) -> None:
        self.groups, self.heads = grouped.shape[:2]
        most = max((math.prod(block.shape) for block in blocks), default=0)
        self.flat = grouped.new_empty((count, self.groups * self.heads * most))

    def of(self, i: int, block: _Block) -> Tensor:
        """Matrix `i` for a block: (N, G*rows, keys)."""
        rows, keys = block.shape
        return self.flat[i, : self.groups * self.heads * rows * keys].view(
            self.groups, self.heads * rows, keys
        )


def _grouped(x: Tensor, call: AttentionArgs, dtype: torch.dtype) -> Tensor:
    # (B, H, S, E) as (N, G, S, E) in `dtype`: a view if it is one sequence, else a copy.
    group = x.shape[1] // call.spec.num_kv_heads
    if x.shape[0] == 1 and x.dtype == dtype and x.stride(-1) == 1:
        heads: Tensor = x[0].unflatten(0, (call.spec.num_kv_heads, group))
        return heads
    x = x.to(dtype).contiguous()
    return x.view(x.shape[0] * call.spec.num_kv_heads, group, *x.shape[2:])


def _rows(x: Tensor, block: _Block) -> Tensor:
    return x[:, :, block.rows].flatten(1, 2)


def _put(into: Tensor, rows: slice, made: Tensor) -> None:
    """Write `made` (N, G*rows, E) to `rows` of `into` (B, H, S, E), of any strides."""
    target = into[:, :, rows]
    target.copy_(made.view(target.shape))


def _add(into: Tensor, keys: slice, a: Tensor, b: Tensor) -> None:
    """Add a @ b to rows `keys` of `into` (N, S_k, E)."""
    target = into[:, keys]
    if target.is_contiguous():
        torch.baddbmm(target, a, b, out=target)  # not baddbmm_: FLOP counters miss it
    else:
        target.add_(torch.bmm(a, b))
