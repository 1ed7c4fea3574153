"""Attention in blocks of query rows against the keys that they can see, in ATen ops.

Serves every call: the transient is a block of scores, never (S_q, S_k). N = B * Hkv products at a
time, the G query heads that share a key head as rows of one. A row whose keys are all excluded is
0, and so are its gradients.
Source: the backward of Dao et al. 2022, with dS = P * (dP - rowsum(dO * O)).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.spec import AttentionSpec

# Elements of a block of scores.
_BLOCK = 1 << 20
# Sequences at least this long are worked on one at a time.
_LONG = 128
Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False, slots=True)
class AttentionCall:
    """Sizes, masks and randomness of one attention over a group of whole sequences.

    With sizes alone, nothing is masked but by the spec's window.

    Attributes:
        spec: heads, scores, window, dropout's probability.
        batch, q_len, kv_len: B, S_q, S_k.
        mask: (S_q, S_k), or broadcasts to (B, H, S_q, S_k); bool, or float, added to the scores.
        padding: (B, S_k) over the keys; bool, True = excluded, or float, added.
        dmask, dpadding: float buffers of the same shapes to add the masks' gradients to, or None.
        mask_grad: whether any gradient of a mask is wanted; in forward too, for a choice depends
            on it.
        site_key, row0: dropout of the probabilities; `row0` is the row of the first (b, h, q)
            in the sense of `fused_remat.random`.
        lengths: (B,) of integers, or None: keys from lengths[b] on are excluded.
        cu_q, cu_k: (N + 1,) of integers, or None: one batch of N packed sequences. Queries
            cu_q[n] to cu_q[n + 1] see keys cu_k[n] to cu_k[n + 1] only, as if those were alone; a
            query of no sequence sees none. Rows and columns of dropout, and masks, are those of the
            whole: row (h, q), column k.
        head_rows, col0: for dropout where the call is a part of another: rows from one head to the
            next, 0 for S_q, and the column of the first key.
    """

    spec: AttentionSpec
    batch: int
    q_len: int
    kv_len: int
    mask: Tensor | None = None
    padding: Tensor | None = None
    dmask: Tensor | None = None
    dpadding: Tensor | None = None
    mask_grad: bool = False
    site_key: Tensor | None = None
    row0: int = 0
    lengths: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    head_rows: int = 0
    col0: int = 0

    @property
    def masked(self) -> bool:
        return self.mask is not None or self.padding is not None

    @property
    def limited(self) -> bool:
        """Whether there are masks or key lengths."""
        return self.lengths is not None or self.mask is not None or self.padding is not None

    @property
    def varlen(self) -> bool:
        return self.cu_q is not None

    @property
    def offset(self) -> int:
        """The key at the place of query i is i + offset: query i sees keys i + offset - left to
        i + offset + right, with the spec's window."""
        return 0 if self.spec.align == "start" else self.kv_len - self.q_len


class AttentionKey(NamedTuple):
    """What a choice between implementations of attention may depend on.

    Attributes:
        batch, q_len, kv_len: B, S_q, S_k; `widths`: of a head in q, k and in v.
        mask, padding: their dtypes, None where they are not there.
        lengths, varlen: whether there are key lengths, and packed sequences.
        mask_grad: as in `AttentionCall`.
        packed: of q, k and v: the format, the width of a head and the first column of those that
            are packed, None for the others; () where none is.
        switches: those of CUDA devices, `attention_library.switches`.
    """

    spec: AttentionSpec
    batch: int
    q_len: int
    kv_len: int
    widths: tuple[int, int]
    mask: torch.dtype | None
    padding: torch.dtype | None
    lengths: bool
    varlen: bool
    mask_grad: bool
    dtype: torch.dtype
    device: torch.device
    packed: tuple[tuple[str, int, int] | None, ...] = ()
    switches: tuple[bool, ...] = ()

    @property
    def limited(self) -> bool:
        return self.lengths or self.mask is not None or self.padding is not None


# --- packed sequences: where each lies, and the call that it is


def bounds(cu: Tensor, tokens: int, name: str) -> list[int]:
    """The values of `cu` (N + 1,): sequence n is tokens bounds[n] to bounds[n + 1] of `tokens`.

    On a GPU this waits for the device.

    Raises: ValueError for values that decrease or are outside 0 to `tokens`.

    >>> import torch
    >>> bounds(torch.tensor([0, 3, 3, 7]), 8, "cu_seqlens")
    [0, 3, 3, 7]
    """
    values: list[int] = cu.tolist()
    last = 0
    for i, value in enumerate(values):
        if not 0 <= value <= tokens:
            raise ValueError(
                f"{name}[{i}] is {value}, expected 0 to {tokens}, the tokens there are"
            )
        if value < last:
            raise ValueError(f"{name}[{i}] is {value}, less than {last} before it")
        last = value
    return values


def bounds_of(call: AttentionCall) -> tuple[list[int], list[int]]:
    """The bounds of the queries and of the keys of a call's packed sequences."""
    assert call.cu_q is not None and call.cu_k is not None
    of_queries = bounds(call.cu_q, call.q_len, "cu_seqlens of the queries")
    return of_queries, bounds(call.cu_k, call.kv_len, "cu_seqlens of the keys")


def varlen_sequences(
    call: AttentionCall, of_queries: list[int], of_keys: list[int]
) -> Iterator[tuple[slice, slice, AttentionCall]]:
    """Each packed sequence: its queries, its keys, and its call, in which masks are views."""
    for n in range(len(of_queries) - 1):
        rows = slice(of_queries[n], of_queries[n + 1])
        keys = slice(of_keys[n], of_keys[n + 1])
        yield (
            rows,
            keys,
            dataclasses.replace(
                call,
                q_len=rows.stop - rows.start,
                kv_len=keys.stop - keys.start,
                mask=_part(call.mask, rows, keys),
                dmask=_part(call.dmask, rows, keys),
                padding=None if call.padding is None else call.padding[:, keys],
                dpadding=None if call.dpadding is None else call.dpadding[:, keys],
                row0=call.row0 + rows.start,
                head_rows=call.q_len,
                col0=keys.start,
                cu_q=None,
                cu_k=None,
            ),
        )


def _part(mask: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    """The rows and columns of a mask; one of all rows, or of all columns, stays one."""
    if mask is None:
        return None
    if mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., keys] if mask.shape[-1] > 1 else mask


# --- the general algorithm


def sequences(call: AttentionCall) -> Iterator[tuple[slice, AttentionCall]]:
    """Long sequences one at a time: read in place, and their scores stay in cache."""
    if call.batch == 1 or call.q_len < _LONG:
        yield slice(None), call
        return
    for b in range(call.batch):
        part = slice(b, b + 1)
        yield (
            part,
            dataclasses.replace(
                call,
                batch=1,
                mask=_of_sequence(call.mask, b),
                dmask=_of_sequence(call.dmask, b),
                padding=None if call.padding is None else call.padding[part],
                dpadding=None if call.dpadding is None else call.dpadding[part],
                row0=call.row0 + b * call.spec.num_heads * call.q_len,
            ),
        )


def _of_sequence(mask: Tensor | None, b: int) -> Tensor | None:
    if mask is None or mask.dim() == 2 or mask.shape[0] == 1:
        return mask
    return mask[b : b + 1]


@dataclass(frozen=True)
class _Block:
    """Query rows `start` to `stop` and the keys `low` to `high` that any of them can see."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def keys(self) -> slice:
        return slice(self.low, self.high)


def _blocks(call: AttentionCall) -> list[_Block]:
    size = max(16, _BLOCK // max(1, call.batch * call.spec.num_heads * call.kv_len))
    (left, right), offset = call.spec.window, call.offset
    blocks = []
    for start in range(0, call.q_len, size):
        stop = min(start + size, call.q_len)
        low, high = 0, call.kv_len
        if left >= 0:
            low = max(0, start + offset - left)
        if right >= 0:
            high = min(high, stop + offset + right)
        blocks.append(_Block(start, stop, low, max(low, high)))
    return blocks


class _Scratch:
    """Matrices of scores for one block after another: memory that is touched already is fast."""

    def __init__(self, grouped: Tensor, blocks: list[_Block], count: int) -> None:
        self.groups, self.heads = grouped.shape[:2]
        most = max(((b.stop - b.start) * (b.high - b.low) for b in blocks), default=0)
        self.flat = grouped.new_empty((count, self.groups * self.heads * most))

    def of(self, i: int, block: _Block) -> Tensor:
        """Matrix `i`: (N, G*rows, keys)."""
        rows, keys = block.stop - block.start, block.high - block.low
        return self.flat[i, : self.groups * self.heads * rows * keys].view(
            self.groups, self.heads * rows, keys
        )


def _grouped(x: Tensor, call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """(B, H, S, E) as (N, G, S, E) in `dtype`: a view of one sequence in place, else a copy."""
    group = x.shape[1] // call.spec.num_kv_heads
    if x.shape[0] == 1 and x.dtype == dtype and x.stride(-1) == 1:
        heads: Tensor = x[0].unflatten(0, (call.spec.num_kv_heads, group))
        return heads
    x = x.to(dtype).contiguous()
    return x.view(x.shape[0] * call.spec.num_kv_heads, group, *x.shape[2:])


def _product(into: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, add: bool = False) -> None:
    """`into` becomes alpha * a @ b, added to it if `add`; fast where `into` is contiguous."""
    # Not baddbmm_, which FLOP counters miss.
    torch.baddbmm(into, a, b, beta=float(add), alpha=alpha, out=into)


def _put(into: Tensor, rows: slice, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """Rows of `into` (B, H, S, E), of any strides, become alpha * a @ b, (N, G*rows, E)."""
    made = a.new_empty((*a.shape[:2], b.shape[2]))
    _product(made, a, b, alpha)
    target = into[:, :, rows]
    target.copy_(made.view(target.shape))


def _add(into: Tensor, keys: slice, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """alpha * a @ b is added to rows `keys` of `into` (N, S_k, E)."""
    target = into[:, keys]
    if target.is_contiguous():
        _product(target, a, b, alpha, add=True)
    else:
        target.add_(torch.bmm(a, b), alpha=alpha)


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, out: Tensor) -> Tensor:
    """Fills `out` (B, H, S_q, E), of any strides; returns lse."""
    acc = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (_grouped(x, call, acc) for x in (q, k, v))
    lse = q.new_empty((*q.shape[:3], 1))
    blocks = _blocks(call)
    scratch = _Scratch(q, blocks, 2)
    for block in blocks:
        probs, _, top = _probabilities(q, k, call, block, scratch.of(0, block))
        # The largest probability is exp(top - lse); of a row without keys it is 0, and lse +inf.
        if block.low < block.high:
            top = top.masked_fill_(top == -torch.inf, 0.0) - probs.amax(-1, keepdim=True).log_()
        else:
            top.fill_(torch.inf)
        lse[:, :, block.rows] = top.view(*q.shape[:2], -1, 1)
        if call.spec.dropout > 0.0:
            probs.mul_(_keep(block, call, scratch.of(1, block)))
        _put(out, block.rows, probs, v[:, 0, block.keys])
    return lse


def _probabilities(
    q: Tensor,
    k: Tensor,
    call: AttentionCall,
    block: _Block,
    scores: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """softmax of the masked scores, in `scores`; tanh of the soft-cap if any; the largest scores.

    A row whose keys are all excluded has probabilities 0 and -inf as its largest score.
    """
    q_rows = q[:, :, block.rows].flatten(1, 2)
    _product(scores, q_rows, k[:, 0, block.keys].transpose(1, 2), call.spec.scale)
    capped = None
    if call.spec.softcap != 0.0:
        capped = torch.div(scores, call.spec.softcap).tanh_()
        torch.mul(capped, call.spec.softcap, out=scores)
    if scores.shape[-1] == 0:
        return scores, capped, scores.new_full((*scores.shape[:2], 1), -torch.inf)
    _exclude(scores.view(call.batch, call.spec.num_heads, -1, scores.shape[-1]), call, block)
    top = scores.amax(-1, keepdim=True)
    torch.softmax(scores, -1, out=scores)
    if call.masked or call.spec.window != (-1, -1):
        scores.masked_fill_(top == -torch.inf, 0.0)
    return scores, capped, top


def _exclude(grid: Tensor, call: AttentionCall, block: _Block) -> None:
    """Apply the window and both masks to scores (B, H, rows, keys), in place."""
    low, high = block.low, block.high
    (left, right), offset = call.spec.window, call.offset
    first = block.start + offset
    if right >= 0 and (edge := max(low, first + right + 1)) < high:
        _exclude_band(grid[..., edge - low :], first + right - edge, above=True)
    if left >= 0 and (edge := min(high, block.stop - 1 + offset - left)) > low:
        _exclude_band(grid[..., : edge - low], first - left - low, above=False)
    if call.mask is not None:
        mask = call.mask[..., low:high] if call.mask.shape[-1] > 1 else call.mask
        _mask(grid, _rows_of(mask, block), call.spec.true_means == "attend")
    if call.padding is not None:
        _mask(grid, call.padding[:, None, None, low:high], False)


def _exclude_band(grid: Tensor, diagonal: int, above: bool) -> None:
    """Exclude column j of row i where j > i + diagonal (`above`), or where j < i + diagonal."""
    ones = torch.ones(grid.shape[2:], dtype=torch.bool, device=grid.device)
    band = ones.triu_(diagonal + 1) if above else ones.tril_(diagonal - 1)
    grid.masked_fill_(band, -torch.inf)


def _rows_of(mask: Tensor, block: _Block) -> Tensor:
    return mask[..., block.start : block.stop, :] if mask.shape[-2] > 1 else mask


def _mask(grid: Tensor, mask: Tensor, keeps: bool) -> None:
    if mask.dtype == torch.bool:
        grid.masked_fill_(mask.logical_not() if keeps else mask, -torch.inf)
    else:
        grid.add_(mask)


def _keep(block: _Block, call: AttentionCall, out: Tensor) -> Tensor:
    """Dropout's multiplier, in `out`."""
    assert call.site_key is not None
    random.keep_scale(
        call.site_key, call.row0 + block.start, block.stop - block.start, block.high - block.low,
        call.spec.dropout, out.dtype, call.batch * call.spec.num_heads,
        call.head_rows or call.q_len, call.col0 + block.low, out=out,
    )  # fmt: skip
    return out


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    call: AttentionCall,
    grads: Heads | None,
) -> None:
    """Fills dq, dk, dv if given; adds the masks' gradients to the call's."""
    acc = torch.promote_types(q.dtype, torch.float32)
    q, k, v, do, o = (_grouped(x, call, acc) for x in (q, k, v, do, o))
    delta = (do * o).sum(-1, keepdim=True)
    dk, dv = (torch.zeros_like(x[:, 0], memory_format=torch.contiguous_format) for x in (k, v))
    blocks = _blocks(call)
    scratch = _Scratch(q, blocks, 3)
    for block in blocks:
        if block.low == block.high:
            if grads is not None:
                grads[0][:, :, block.rows] = 0.0
            continue
        rows, keys = block.rows, block.keys
        do_rows, q_rows = do[:, :, rows].flatten(1, 2), q[:, :, rows].flatten(1, 2)
        probs, capped, _ = _probabilities(q, k, call, block, scratch.of(0, block))
        dprobs = scratch.of(1, block)
        torch.bmm(do_rows, v[:, 0, keys].transpose(1, 2), out=dprobs)
        dropped = probs
        if call.spec.dropout > 0.0:
            keep = _keep(block, call, scratch.of(2, block))
            dprobs.mul_(keep)
            dropped = keep.mul_(probs)
        _add(dv, keys, dropped.transpose(1, 2), do_rows)
        dscores = dprobs.sub_(delta[:, :, rows].flatten(1, 2)).mul_(probs)
        _add_mask_grads(dscores, call, block)
        if capped is not None:
            dscores.addcmul_(dscores * capped, capped, value=-1.0)  # times 1 - tanh**2
        if grads is not None:
            _add(dk, keys, dscores.transpose(1, 2), q_rows, call.spec.scale)
            _put(grads[0], rows, dscores, k[:, 0, keys], call.spec.scale)
    if grads is not None:
        for grad, made in zip(grads[1:], (dk, dv), strict=True):
            grad.copy_(made.view(grad.shape))


def _add_mask_grads(dscores: Tensor, call: AttentionCall, block: _Block) -> None:
    keys = slice(block.low, block.high)
    grid = dscores.view(call.batch, call.spec.num_heads, -1, block.high - block.low)
    if call.dmask is not None:
        target = call.dmask[..., keys] if call.dmask.shape[-1] > 1 else call.dmask
        target = _rows_of(target, block)
        target.add_(grid.sum_to_size(target.shape))
    if call.dpadding is not None:
        call.dpadding[:, keys].add_(grid.sum((1, 2)))
