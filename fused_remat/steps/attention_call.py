"""One attention over a group of whole sequences: sizes, masks and randomness, and its parts.

Implementations receive an `AttentionArgs`; the choice among them depends on an `AttentionKey`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.spec import AttentionSpec

#: A row of a float mask whose largest value is finite and below this may be wrong in ATen's kernel
#: for CPUs: its logsumexp is the rounded value, and backward is off by up to the number of keys.
FAR_ROW = -1e3
#: Float masks that were read, by identity: their address and version then, and `is_near`.
_READ: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], bool]] = {}
_MOST_READ = 64

#: q, k and v, or their gradients: (B, H, S_q, E), (B, Hkv, S_k, E), (B, Hkv, S_k, E).
Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False, slots=True)
class AttentionArgs:
    """Sizes, masks and randomness. With sizes only, the one mask is the spec's window."""

    spec: AttentionSpec  # heads, scores, window, dropout probability
    batch: int  # batch, q_len, kv_len: B, S_q, S_k
    q_len: int
    kv_len: int
    # (S_q, S_k), or broadcasts to (B, H, S_q, S_k); bool, or float, added to the scores
    mask: Tensor | None = None
    # (B, S_k), over the keys; bool, True for an excluded key, or float, added
    padding: Tensor | None = None
    # dmask, dpadding: float buffers of the same shapes, to which the masks' gradients are
    # added; None if not needed
    dmask: Tensor | None = None
    dpadding: Tensor | None = None
    # whether backward computes a gradient of a mask. Forward knows it too, since the choice
    # of an implementation depends on it.
    mask_grad: bool = False
    # site_key, row0: dropout of the probabilities: the site's key, and the row (in the sense
    # of `fused_remat.random`) of the first (b, h, q)
    site_key: Tensor | None = None
    row0: int = 0
    # (B,) integers or None: in sequence b, keys from lengths[b] on are excluded
    lengths: Tensor | None = None
    # cu_q, cu_k: (N + 1,) integers or None: variable-length sequences. The batch is 1 and
    # holds N sequences. Queries cu_q[n] to cu_q[n + 1] see keys cu_k[n] to cu_k[n + 1] only,
    # as if those were alone. A query of no sequence sees no key. Masks, and the rows and
    # columns of dropout, are those of the entire batch: row (h, q), column k.
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    # head_rows, col0: for dropout in a part of another call: rows from one head to the next
    # (0 for S_q), and the column of the first key
    head_rows: int = 0
    col0: int = 0
    # the mask of all sequences, if there is one alone: its values are read once, not in each group
    entire: Tensor | None = None

    @property
    def masked(self) -> bool:
        return self.mask is not None or self.padding is not None

    @property
    def limited(self) -> bool:
        """True if there are masks or key lengths."""
        return self.lengths is not None or self.mask is not None or self.padding is not None

    @property
    def may_exclude_rows(self) -> bool:
        """True if there may be queries that see no key; in a call of one sequence each."""
        (left, right), offset = self.spec.window, self.offset
        before, after = offset + right < 0, self.q_len - 1 + offset - left >= self.kv_len
        return self.limited or (right >= 0 and before) or (left >= 0 and after)

    @property
    def varlen(self) -> bool:
        return self.cu_q is not None

    @property
    def offset(self) -> int:
        """Position of query 0 among the keys: query i sees keys i + offset - left to + right."""
        return 0 if self.spec.align == "start" else self.kv_len - self.q_len

    def part(self, seqs: slice, rows: slice, keys: slice, **changes: Any) -> AttentionArgs:
        """Return the call of some sequences, queries and keys, and `changes`; masks are views."""
        changes["entire"] = None
        for name in ("mask", "dmask"):
            mask = getattr(self, name)
            if mask is not None:
                cuts = zip(mask.shape, (seqs, slice(None), rows, keys)[-mask.dim() :], strict=True)
                changes[name] = mask[tuple([cut if n > 1 else slice(None) for n, cut in cuts])]
        for name in ("padding", "dpadding"):
            padding = getattr(self, name)
            if padding is not None:
                changes[name] = padding[seqs, keys]
        return replace(self, **changes)

    def varlen_sequences(
        self, q_bounds: list[int], k_bounds: list[int]
    ) -> Iterator[tuple[slice, slice, AttentionArgs]]:
        """Yield the queries, the keys and the call of each variable-length sequence."""
        for n in range(len(q_bounds) - 1):
            rows, keys = slice(*q_bounds[n : n + 2]), slice(*k_bounds[n : n + 2])
            one = self.part(
                slice(None), rows, keys, q_len=rows.stop - rows.start,
                kv_len=keys.stop - keys.start, row0=self.row0 + rows.start, head_rows=self.q_len,
                col0=keys.start, cu_q=None, cu_k=None,
            )  # fmt: skip
            yield rows, keys, one

    def bounds(self) -> tuple[list[int], list[int]]:
        """Return the values of `cu_q` and `cu_k`; on a GPU this waits for the device."""
        assert self.cu_q is not None and self.cu_k is not None
        q_bounds = bounds(self.cu_q, self.q_len, "cu_seqlens of the queries")
        return q_bounds, bounds(self.cu_k, self.kv_len, "cu_seqlens of the keys")

    def with_lengths_as_padding(self) -> AttentionArgs:
        """Return the call with its key lengths as a part of its padding mask."""
        if self.lengths is None:
            return self
        beyond = torch.arange(self.kv_len, device=self.lengths.device) >= self.lengths[:, None]
        if self.padding is None:
            padding = beyond
        elif self.padding.dtype == torch.bool:
            padding = self.padding | beyond
        else:
            padding = self.padding.masked_fill(beyond, -torch.inf)
        return replace(self, padding=padding, lengths=None)

    def merged_mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return masks and key lengths as one additive tensor that broadcasts to (B, H, S_q, S_k).

        It has at least float32, which PyTorch's kernels accept for 16-bit dtypes too.
        """
        if not self.limited:
            return None
        call, dtype = self.with_lengths_as_padding(), torch.promote_types(dtype, torch.float32)

        def additive(mask: Tensor, true_attends: bool) -> Tensor:
            if mask.dtype != torch.bool:
                return mask.to(dtype)
            excluded = mask.logical_not() if true_attends else mask
            return torch.zeros_like(mask, dtype=dtype).masked_fill_(excluded, -torch.inf)

        mask = None if call.mask is None else additive(call.mask, call.spec.true_means == "attend")
        if call.padding is None:
            return mask
        padding = additive(call.padding, False)[:, None, None, :]
        return padding if mask is None else mask + padding


def bounds(cu: Tensor, tokens: int, name: str) -> list[int]:
    """Return the values of `cu` (N + 1,): sequence n is tokens bounds[n] to bounds[n + 1].

    On a GPU this waits for the device.

    Raises: ValueError for values that decrease or are outside 0 to `tokens`.
    """
    values: list[int] = cu.tolist()
    for i, (last, value) in enumerate(itertools.pairwise((0, *values))):
        if not 0 <= value <= tokens:
            raise ValueError(
                f"{name}[{i}] is {value}, expected 0 to {tokens}, the number of tokens"
            )
        if value < last:
            raise ValueError(f"{name}[{i}] is {value}, less than {last} before it")
    return values


class AttentionKey(NamedTuple):
    """All that the choice of an implementation may depend on."""

    spec: AttentionSpec
    batch: int  # batch, q_len, kv_len: B, S_q, S_k
    q_len: int
    kv_len: int
    widths: tuple[int, int]  # of a head in q and k, and in v
    masks: tuple[torch.dtype | None, ...]  # dtypes of the mask and of the padding
    # lengths, varlen: whether there are key lengths; whether sequences have variable length
    lengths: bool
    varlen: bool
    mask_grad: bool  # as in `AttentionArgs`
    dtype: torch.dtype
    device: torch.device
    switches: tuple[int, ...] = ()  # PyTorch's switches for attention on CUDA devices; () on others

    @property
    def limited(self) -> bool:
        return self.lengths or self.masks != (None, None)


def attention_key(q: Tensor, v: Tensor, call: AttentionArgs) -> AttentionKey:
    """Return the key of forward and of backward, which choose equally."""
    mask, padding, device = call.mask, call.padding, q.device
    masks = None if mask is None else mask.dtype, None if padding is None else padding.dtype
    return AttentionKey(
        call.spec, call.batch, call.q_len, call.kv_len, (q.shape[3], v.shape[3]), masks,
        call.lengths is not None, call.cu_q is not None, call.mask_grad, q.dtype, device,
        switches() if device.type == "cuda" else (),
    )  # fmt: skip


def flash_is_replaced() -> bool:
    """Return whether another implementation replaces PyTorch's own flash kernel."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is not None and current() is not None


def switches() -> tuple[int, ...]:
    """Return PyTorch's switches by which attention on CUDA devices is chosen."""
    cuda = torch.backends.cuda
    return (
        torch.get_deterministic_debug_mode(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        *torch._C._get_sdp_priority_order(),
        flash_is_replaced(),
    )


def is_near(mask: Tensor) -> bool:
    """Return whether a mask has no far row; values of floats are read once, until it changes."""
    if not mask.is_floating_point():
        return True
    if mask.is_inference():  # which have no version
        return not has_far_row(mask)
    known, version = _READ.get(id(mask)), (mask.data_ptr(), mask._version)
    if known is None or known[0]() is not mask or known[1] != version:
        if len(_READ) >= _MOST_READ:
            _READ.clear()
        known = _READ[id(mask)] = weakref.ref(mask), version, not has_far_row(mask)
    return known[2]


def has_far_row(mask: Tensor) -> bool:
    """Return whether a row of a float mask is finite and below `FAR_ROW` everywhere."""
    if not mask.numel():
        return False
    top = mask.detach().amax(-1)
    return bool(((top < FAR_ROW) & (top > -torch.inf)).any())
