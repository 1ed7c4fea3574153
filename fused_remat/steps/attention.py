"""Attention from views of heads of any strides: operations, who serves a call in ATen; the step.

A library kernel where one does (`attention_library.why_not`), else blocks of query rows
(`attention_rows`): chosen by the call and never by what is kept. Both give 0, and no NaN, for a row
whose keys are all excluded. Packed sequences are calls of their own, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fused_remat.formats import LoadedHeads, Quantized, QuantizedHeads
from fused_remat.spec import AttentionSpec
from fused_remat.steps import attention_library, attention_rows, linear
from fused_remat.steps.attention_library import attention_key, why_not, why_not_call
from fused_remat.steps.attention_rows import (
    AttentionCall,
    AttentionKey,
    bounds_of,
    varlen_sequences,
)
from fused_remat.steps.node import Input, Node, Param, Shapes
from fused_remat.steps.operations import operation
from fused_remat.steps.storage import heads_in_memory

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk

Heads = tuple[Tensor, Tensor, Tensor]


def says(
    key: AttentionKey, q: Tensor | None = None, v: Tensor | None = None, call: Any = None
) -> str:
    """Which kernels serve a call in ATen, and why faster ones do not; of a key, or of a call."""
    if q is not None and v is not None and call.cu_q is not None:
        found = [
            says(attention_key(a, b, one), a, b, one)
            for rows, keys, one in varlen_sequences(call, *bounds_of(call))
            for a, b in ((q[:, :, rows], v[:, :, keys]),)
        ]
        return "packed sequences, one at a time: " + ("; ".join(dict.fromkeys(found)) or "none")
    if key.varlen:
        return "packed sequences, one at a time"
    if q is None or v is None:
        why = why_not(key, key.widths, key.dtype, key.device)
    else:
        why = why_not_call(q, v, call)
    said = f"blocks of query rows: {why}" if why else attention_library.says(key)
    return f"{said}; heads unpacked first" if key.packed else said


def as_heads(x: Tensor, call: AttentionCall) -> Tensor:
    """(B*S_q, H*E) as (B, H, S_q, E), a view."""
    width = x.shape[1] // call.spec.num_heads  # not -1: there may be no rows
    return x.view(call.batch, call.q_len, call.spec.num_heads, width).transpose(1, 2)


@operation(
    key=lambda q, k, v, call, out=None: attention_key(q, v, call),
    says=lambda key, q=None, k=None, v=None, call=None, out=None: says(key, q, v, call),
)
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over q (B, H, S_q, E), k and v (B, Hkv, S_k, E) of any strides.

    Returns attn (B*S_q, H*E) in the dtype of q, and lse, B*H*S_q elements in that order, in float32
    (float64 for float64).
    """
    shape = call.batch * call.q_len, call.spec.num_heads * v.shape[-1]
    if call.cu_q is not None:
        out = q.new_empty(shape) if out is None else out
        return out, _varlen_forward(q, k, v, call, out)
    if why_not_call(q, v, call) is None:
        wide = linear.widens(q)
        rows, lse = attention_library.forward(q, k, v, call, wide)
        if out is None:
            attn = rows.reshape(shape)
            return attn.to(q.dtype) if wide else attn, lse
        out.view(rows.shape).copy_(rows)
        return out, lse
    call = attention_library.lengths_as_padding(call)
    if out is None:
        out = q.new_empty(shape)
    heads = as_heads(out, call)
    parts = [
        attention_rows.forward(q[part], k[part], v[part], one, heads[part])
        for part, one in attention_rows.sequences(call)
    ]
    return out, parts[0] if len(parts) == 1 else torch.cat(parts)


@operation(
    key=lambda dattn, q, k, v, attn, lse, call, grads: attention_key(q, v, call, k),
    says=lambda key, *_: says(key),
)
def attention_bwd(
    dattn: Tensor,
    q: LoadedHeads,
    k: LoadedHeads,
    v: LoadedHeads,
    attn: Tensor,
    lse: Tensor,
    call: AttentionCall,
    grads: Heads | None,
) -> None:
    """Fills `grads`, shaped like q, k and v; adds to call.dmask and call.dpadding.

    What is packed is unpacked for the time of it.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        q, k, v = heads_in_memory(q, k, v)
    if call.cu_q is not None:
        _varlen_backward(dattn, q, k, v, attn, lse, call, grads)
        return
    do, o = as_heads(dattn, call), as_heads(attn, call)
    if why_not_call(q, v, call) is None:
        if grads is not None:
            attention_library.backward(do, q, k, v, o, lse, call, grads, linear.widens(q))
        return
    call = attention_library.lengths_as_padding(call)
    for part, one in attention_rows.sequences(call):
        mine = None if grads is None else (grads[0][part], grads[1][part], grads[2][part])
        attention_rows.backward(do[part], q[part], k[part], v[part], o[part], one, mine)


# --- packed sequences: their rows and keys are views of the whole


def _outside(bounds: list[int]) -> tuple[slice, slice]:
    """The tokens of no sequence: before the first and after the last."""
    return slice(0, bounds[0]), slice(bounds[-1], None)


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, out: Tensor) -> Tensor:
    """Fills `out` (S_q, H*E); returns lse (H, S_q), +inf where there is no sequence."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty((call.spec.num_heads, call.q_len), dtype=dtype)
    bounds = bounds_of(call)  # the one wait for the device, if that is a GPU
    for rows, keys, one in varlen_sequences(call, *bounds):
        _, made = attention_fwd(q[:, :, rows], k[:, :, keys], v[:, :, keys], one, out[rows])
        lse[:, rows] = made.view(call.spec.num_heads, one.q_len)
    for rows in _outside(bounds[0]):
        out[rows] = 0.0
        lse[:, rows] = torch.inf
    return lse


def _varlen_backward(
    dattn: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    lse: Tensor,
    call: AttentionCall,
    grads: Heads | None,
) -> None:
    lse = lse.view(call.spec.num_heads, call.q_len)
    bounds = bounds_of(call)  # waits for the device again
    for rows, keys, one in varlen_sequences(call, *bounds):
        parts = (rows, keys, keys)
        q_one, k_one, v_one = (x[:, :, part] for x, part in zip((q, k, v), parts, strict=True))
        mine = None
        if grads is not None:
            mine = (grads[0][:, :, rows], grads[1][:, :, keys], grads[2][:, :, keys])
        attention_bwd(
            dattn[rows], q_one, k_one, v_one, attn[rows], lse[:, rows].reshape(-1), one, mine
        )
    if grads is not None:
        for grad, own in zip(grads, (bounds[0], bounds[1], bounds[1]), strict=True):
            for part in _outside(own):
                grad[:, :, part] = 0.0


@dataclass(frozen=True, kw_only=True)
class Attention(Node):
    """name = dropout(softmax(scores + masks)) v, heads side by side; see `AttentionSpec`.

    Attributes:
        q, k, v: what has the heads: matrices, in which those of one name lie side by side in this
            order, or inputs of the block that are heads.
        site: of the dropout of the probabilities.
        mask, padding, lengths, cu_q, cu_k: names of the masks, of key lengths and of packed
            sequences' bounds, "" for none.
    """

    q: Input
    k: Input
    v: Input
    spec: AttentionSpec
    site: int
    mask: Param = ""
    padding: Param = ""
    lengths: Param = ""
    cu_q: Param = ""
    cu_k: Param = ""
    per_sequence: ClassVar[bool] = True
    stats_follow: ClassVar[bool] = True

    @functools.cached_property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """The numbers of heads that lie side by side in each input."""
        counts: dict[str, tuple[int, ...]] = {}
        kv_heads = self.spec.num_kv_heads
        given = (self.q, self.spec.num_heads), (self.k, kv_heads), (self.v, kv_heads)
        for name, count in given:
            counts[name] = (*counts.get(name, ()), count)
        return counts

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.counts)

    @functools.cached_property
    def params(self) -> tuple[str, ...]:
        return self._named("param") + (("seed",) if self.spec.dropout > 0.0 else ())

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return (f"{self.name}.lse",)

    @functools.cached_property
    def cuts_keys(self) -> bool:
        """Whether query i sees keys 0 to i, however many there are."""
        return self.spec.align == "start" and self.spec.window[1] == 0

    @property
    def rebuilds(self) -> bool:
        return not self.quantized  # forward reads heads in memory

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        if self.v in shapes:  # an input: heads
            return self.spec.num_heads * shapes[self.v][-1]
        return widths[self.v] // sum(self.counts[self.v]) * self.spec.num_heads

    def stat_width(self, width: int) -> int:
        return self.spec.num_heads

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        full = 4 * seq_len * self.width(widths, shapes)
        return full // 2 if self.spec.window[1] == 0 else full

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (*self.inputs, self.name, *self.stats)

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return self.params

    def backward_choice(self, chunk: Chunk) -> tuple[Callable[..., Any], Any] | None:
        if not self.quantized:
            return None
        samples = type(chunk)(chunk.owner, chunk.seqs, (chunk.lo, chunk.lo + chunk.rows))
        for pack in self.quantized:
            samples.update(zip(pack.makes, pack.sample(chunk).parts, strict=True))
        for name in self.inputs:
            samples.setdefault(name, chunk.empty(name))
        q, k, v = self._heads(samples)
        return attention_bwd, attention_key(q, v, self.call(samples, q, k, ()), k)

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        q, k, v = self._heads(chunk)
        call = self.call(chunk, q, k, ())
        attn, lse = chunk.ops[attention_fwd](q, k, v, call, out)  # type: ignore[arg-type]
        chunk.put(self.name, attn)
        chunk.put(self.stats[0], lse)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        q, k, v = self._heads(chunk)
        call = self.call(chunk, q, k, needs_grad)
        grads = self._buffers(chunk) if not {*self.inputs}.isdisjoint(needs_grad) else None
        heads = None if grads is None else self._views(chunk, grads)
        attn, lse = chunk[self.name], chunk[self.stats[0]]
        chunk.ops[attention_bwd](dy, q, k, v, attn, lse, call, heads)  # type: ignore[arg-type]
        for name, grad in (grads or {}).items():
            if name in needs_grad:
                chunk.add_grad(name, grad, owned=True)

    def _heads(self, chunk: Chunk) -> tuple[LoadedHeads, ...]:
        """q (B, H, S, E), k and v (B, Hkv, S, E), as views, or as they are stored."""
        return self._views(chunk, chunk)

    def _views(self, chunk: Chunk, tensors: Mapping[str, Tensor]) -> tuple[LoadedHeads, ...]:
        """The heads in the tensors of the inputs' names, or in what is stored of them."""
        heads: list[LoadedHeads] = []
        batch, lengths = chunk.seqs[1] - chunk.seqs[0], chunk.owner.execution.lengths
        for name, counts in self.counts.items():
            x = self.load(chunk, name) if self.quantized and tensors is chunk else tensors[name]
            if isinstance(x, Quantized):
                width = x.shape[1] // sum(counts)
                ends = [sum(counts[:i]) * width for i in range(len(counts))]
                heads += [
                    QuantizedHeads(x, batch, first, count, width)
                    for first, count in zip(ends, counts, strict=True)
                ]
            elif x.dim() == 4:
                heads.append(x)
            else:
                whole = x.view(batch, lengths[name], sum(counts), -1).transpose(1, 2)
                heads += whole.split_with_sizes(counts, 1)
        if self.cuts_keys:  # no query sees a key behind the last query's position
            q, *kv = heads
            heads = [q, *(x[:, :, : q.shape[2]] for x in kv if isinstance(x, Tensor))]
        return tuple(heads)

    def _buffers(self, chunk: Chunk) -> dict[str, Tensor]:
        """Empty gradients of the inputs by name, for the operation to fill."""
        lengths = chunk.owner.execution.lengths
        unseen = self.cuts_keys and lengths[self.k] > lengths[self.q]
        grads = {}
        for name in self.inputs:
            x = chunk.get(name)
            heads = x is not None and x.dim() == 4
            grads[name] = _empty_heads(x) if x is not None and heads else chunk.empty(name)
            if unseen and name in (self.k, self.v):
                grads[name].zero_()
        return grads

    def call(
        self, chunk: Chunk, q: LoadedHeads, k: LoadedHeads, needs_grad: Collection[str]
    ) -> AttentionCall:
        """The sizes, masks and randomness for the frame's sequences.

        The gradient of a mask that is in `needs_grad` is added, group by group, to a buffer as
        large as the whole mask.
        """
        owner, (batch, _, q_len, _), kv_len = chunk.owner, q.shape, k.shape[2]
        if not self.params:
            return AttentionCall(self.spec, batch, q_len, kv_len)
        mask = padding = dmask = dpadding = None
        if self.mask:
            mask = self._of_group(chunk, owner.tensors[self.mask])
            dmask = self._of_group(chunk, _mask_grad(chunk, self.mask, needs_grad))
        if self.padding:
            padding = _rows_of_group(chunk, owner.tensors[self.padding])
            dpadding = _rows_of_group(chunk, _mask_grad(chunk, self.padding, needs_grad))
        return AttentionCall(
            self.spec,
            batch,
            q_len,
            kv_len,
            mask=mask,
            padding=padding,
            dmask=dmask,
            dpadding=dpadding,
            mask_grad=self.mask in owner.needs_grad or self.padding in owner.needs_grad,
            site_key=owner.site_key(self.site) if self.spec.dropout > 0.0 else None,
            row0=chunk.seqs[0] * self.spec.num_heads * q_len,
            lengths=_rows_of_group(chunk, chunk.param(self.lengths)),
            cu_q=chunk.param(self.cu_q),
            cu_k=chunk.param(self.cu_k),
        )

    def _of_group(self, chunk: Chunk, mask: Tensor | None) -> Tensor | None:
        """The part of a mask that the frame's sequences use, in four dimensions or (S_q, S_k).

        A mask is (S_q, S_k), (B*H, S_q, S_k), or broadcasts to (B, H, S_q, S_k).
        """
        if mask is None or mask.dim() == 2:
            return mask
        if mask.dim() == 3:
            mask = mask.view(-1, self.spec.num_heads, *mask.shape[1:])
        return mask if mask.shape[0] == 1 else mask[chunk.seqs[0] : chunk.seqs[1]]


def _mask_grad(chunk: Chunk, name: str, needs_grad: Collection[str]) -> Tensor | None:
    """The buffer for a mask's gradient, made when it is first asked for; None if not wanted."""
    if name not in needs_grad:
        return None
    grads = chunk.owner.param_grads
    if name not in grads:
        mask = chunk.owner.tensors[name]
        assert mask is not None
        dtype = torch.promote_types(mask.dtype, torch.float32)
        grads[name] = mask.new_zeros(mask.shape, dtype=dtype)
    return grads[name]


def _rows_of_group(chunk: Chunk, rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows[chunk.seqs[0] : chunk.seqs[1]]


def _empty_heads(x: Tensor) -> Tensor:
    """Empty heads laid out as x, but with the elements of a row side by side, as kernels write."""
    made = torch.empty_like(x.transpose(1, 2))
    if made.stride(-1) != 1:
        made = torch.empty_like(made, memory_format=torch.contiguous_format)
    return made.transpose(1, 2)
