"""Attention over heads of any strides: two operations and the step.

The operations run one of PyTorch's kernels where one applies (`attention_aten`), else blocks of
query rows (`attention_blocked`). The call decides, never what is kept. A row whose keys are all
excluded gives 0, not NaN. Variable-length sequences are calls of their own, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fused_remat.spec import AttentionSpec
from fused_remat.steps import attention_aten, attention_blocked
from fused_remat.steps.attention_aten import unsupported_call_reason, unsupported_reason
from fused_remat.steps.attention_call import AttentionArgs, AttentionKey, Heads, attention_key
from fused_remat.steps.node import Input, Node, Param, Shapes
from fused_remat.steps.operations import operation
from fused_remat.steps.residual import site_key
from fused_remat.steps.rotary import RotaryTables, pack_heads

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


@operation(
    key=lambda q, k, v, call, out=None: attention_key(q, v, call),
    description=lambda key, q=None, k=None, v=None, call=None, out=None: describe(key, q, v, call),
)
def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention over q (B, H, S_q, E), k and v (B, Hkv, S_k, E), of any strides.

    The result is attn (B*S_q, H*E) in the dtype of q, and lse, B*H*S_q elements in this order, in
    float32 (float64 for float64).
    """
    shape = call.batch * call.q_len, call.spec.num_heads * v.shape[-1]
    if unsupported_call_reason(q, v, _of_forward(call, q)) is None:
        rows, lse = attention_aten.forward(q, k, v, call)
        if out is None:
            return rows.reshape(shape).to(q.dtype), lse
        out.view(rows.shape).copy_(rows)
        return out, lse
    if out is None:
        out = q.new_empty(shape)
    if call.cu_q is not None:
        return out, _varlen_forward(q, k, v, call, out)
    heads = as_heads(out, call)
    parts = [
        attention_blocked.forward(q[part], k[part], v[part], one, heads[part])
        for part, one in attention_blocked.sequences(call)
    ]
    return out, parts[0] if len(parts) == 1 else torch.cat(parts)


@operation(
    key=lambda dattn, q, k, v, attn, lse, call, grads, own=False: attention_key(q, v, call),
    description=lambda key, *_: describe(key),
)
def attention_bwd(
    dattn: Tensor, q: Tensor, k: Tensor, v: Tensor, attn: Tensor, lse: Tensor, call: AttentionArgs,
    grads: Heads | None, own: bool = False,
) -> Heads | None:  # fmt: skip
    """Fill and return `grads`, shaped like q, k and v, unless None; add to the masks' gradients.

    These are call.dmask and call.dpadding. `own`: gradients of the same shapes and dtypes may be
    returned instead, of any strides, and `grads` be left as they are.
    """
    do, o = as_heads(dattn, call), as_heads(attn, call)
    if unsupported_call_reason(q, v, call) is None:
        if grads is not None:
            return attention_aten.backward(do, q, k, v, o, lse, call, grads, own)
        return grads
    if call.cu_q is not None:
        _varlen_backward(dattn, q, k, v, attn, lse, call, grads)
        return grads
    lse = lse.view(call.batch, call.spec.num_heads, call.q_len)
    for part, one in attention_blocked.sequences(call):
        mine = None if grads is None else (grads[0][part], grads[1][part], grads[2][part])
        heads = do[part], q[part], k[part], v[part], o[part]
        attention_blocked.backward(*heads, lse[part], one, mine)
    return grads


def _of_forward(call: AttentionArgs, q: Tensor) -> AttentionArgs:
    """Return a call as forward chooses for it.

    On a CPU forward runs in ATen also where backward does not, since a mask requires a gradient:
    that computes the probabilities from the scores again.
    """
    return replace(call, mask_grad=False) if _has_two(call, q.dtype, q.device) else call


def _has_two(call: AttentionArgs | AttentionKey, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether forward may run in ATen and backward not; 16 bits would round otherwise."""
    is_wide = device.type == "cpu" and dtype.itemsize > 2
    return call.mask_grad and is_wide and not call.spec.sinks


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, out: Tensor) -> Tensor:
    """Run `attention_fwd` for each sequence; lse (H, S_q) is +inf for a token of none."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty((call.spec.num_heads, call.q_len), dtype=dtype)
    bounds = call.bounds()  # on a GPU, the only wait for the device
    for rows, keys, one in call.varlen_sequences(*bounds):
        _, made = attention_fwd(q[:, :, rows], k[:, :, keys], v[:, :, keys], one, out[rows])
        lse[:, rows] = made.view(call.spec.num_heads, one.q_len)
    for rows in _outside(bounds[0]):
        out[rows] = 0.0
        lse[:, rows] = torch.inf
    return lse


def _varlen_backward(
    dattn: Tensor, q: Tensor, k: Tensor, v: Tensor, attn: Tensor, lse: Tensor, call: AttentionArgs,
    grads: Heads | None,
) -> None:  # fmt: skip
    lse = lse.view(call.spec.num_heads, call.q_len)
    bounds = call.bounds()  # waits for the device again
    for rows, keys, one in call.varlen_sequences(*bounds):
        heads = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        mine = None
        if grads is not None:
            mine = grads[0][:, :, rows], grads[1][:, :, keys], grads[2][:, :, keys]
        attention_bwd(dattn[rows], *heads, attn[rows], lse[:, rows].reshape(-1), one, mine)
    if grads is not None:
        for grad, own in zip(grads, (bounds[0], bounds[1], bounds[1]), strict=True):
            for part in _outside(own):
                grad[:, :, part] = 0.0


def _outside(bounds: list[int]) -> tuple[slice, slice]:
    """Return the tokens of no sequence: those before the first and after the last."""
    return slice(0, bounds[0]), slice(bounds[-1], None)


def as_heads(x: Tensor, call: AttentionArgs) -> Tensor:
    """Return a view of (B*S_q, H*E) as (B, H, S_q, E)."""
    width = x.shape[1] // call.spec.num_heads  # not -1, since there may be no rows
    return x.view(call.batch, call.q_len, call.spec.num_heads, width).transpose(1, 2)


def add_sinks(attn: Tensor, lse: Tensor, sinks: Tensor | None, call: AttentionArgs) -> Tensor:
    """Scale `attn` to what it is with `sinks` (H,) in the softmax, in place; return their lse.

    The backward of attention without sinks is exact with both: its probabilities are exp(s - lse),
    and the sums of their products with gradients are dattn . attn.
    """
    assert sinks is not None
    at = lse.view(call.batch, call.spec.num_heads, call.q_len)
    own = sinks.to(lse.dtype).unsqueeze(1)
    as_heads(attn, call).mul_((at - own).sigmoid().unsqueeze(-1))  # of no key: lse is +inf
    return torch.logaddexp(at, own).view_as(lse)


def sinks_grad(
    dattn: Tensor, attn: Tensor, lse: Tensor, sinks: Tensor | None, call: AttentionArgs
) -> Tensor:
    """Return the gradient (H,) of sinks from the results of `add_sinks`."""
    assert sinks is not None
    at = lse.view(call.batch, call.spec.num_heads, call.q_len)
    probs = (sinks.to(lse.dtype).unsqueeze(1) - at).exp()
    delta = (as_heads(dattn, call).to(lse.dtype) * as_heads(attn, call)).sum(-1)
    return delta.mul_(probs).sum((0, 2)).neg_()


def describe(
    key: AttentionKey, q: Tensor | None = None, v: Tensor | None = None, call: Any = None
) -> str:
    """Describe what runs in ATen, and why nothing faster does, for a key or a call's arguments."""
    why = unsupported_reason(key) if q is None or v is None else unsupported_call_reason(q, v, call)
    if not (key.varlen and why):
        blocks = f"blocks of query rows: {why}"
        if _has_two(key, key.dtype, key.device):
            plain = key._replace(mask_grad=False)
            if unsupported_reason(plain) is None:
                return f"{attention_aten.describe(plain)}; backward in {blocks}"
        return blocks if why else attention_aten.describe(key)
    description = "variable-length sequences, one at a time"
    if q is None or v is None:
        return description
    each: dict[str, None] = {}
    for rows, keys, one in call.varlen_sequences(*call.bounds()):
        q_one, v_one = q[:, :, rows], v[:, :, keys]
        each[describe(attention_key(q_one, v_one, one), q_one, v_one, one)] = None
    return f"{description}: {'; '.join(each) or 'none'}"


@dataclass(frozen=True, kw_only=True)
class Attention(Node):
    """name = dropout(softmax(scores + masks)) @ v, with the heads side by side."""

    # q, k, v: activations with the heads: matrices, or inputs of the block that are heads. In
    # a matrix that is named more than once, the heads lie side by side in the order q, k, v.
    q: Input
    k: Input
    v: Input
    spec: AttentionSpec  # scores, window and dropout
    site: int  # the random site of the dropout of the probabilities
    # mask, padding, lengths, cu_q, cu_k: names of the masks, of the key lengths and of the
    # bounds of variable-length sequences (`AttentionArgs`); "" for none
    mask: Param = ""
    padding: Param = ""
    lengths: Param = ""
    cu_q: Param = ""
    cu_k: Param = ""
    sinks: Param = ""  # scores (H,) of no key, if the spec has them
    windows: int = 1  # parts of equal length of each sequence, which do not see each other
    per_sequence: ClassVar[bool] = True
    stats_follow: ClassVar[bool] = True

    @functools.cached_property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """Numbers of heads that lie side by side in each input, in the order q, k, v."""
        counts: dict[str, tuple[int, ...]] = {}
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        for name, count in ((self.q, heads), (self.k, kv_heads), (self.v, kv_heads)):
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
    def lone_mask(self) -> str:
        """The name of the mask, if there is one alone and there are no key lengths; else ""."""
        several = self.lengths or (self.mask and self.padding)
        return "" if several else self.mask or self.padding

    @functools.cached_property
    def cuts_keys(self) -> bool:
        """True if query i sees the keys 0 to i, so that no query sees those after S_q."""
        return self.spec.align == "start" and self.spec.window[1] == 0

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        if self.v in shapes:  # an input of the block, (B, H, S, E)
            return self.spec.num_heads * shapes[self.v][-1]
        return widths[self.v] // sum(self.counts[self.v]) * self.spec.num_heads

    def stat_width(self, width: int) -> int:
        return self.spec.num_heads

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        full = 4 * seq_len // self.windows * self.width(widths, shapes)
        return full // 2 if self.spec.window[1] == 0 else full

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (*self.inputs, self.name, *self.stats)

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return self.params

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        q, k, v = self._views(chunk, chunk)
        call = self.call(chunk, q, k, ())
        attn, lse = chunk.ops[attention_fwd](q, k, v, call, out)
        if self.sinks:
            lse = add_sinks(attn, lse, chunk.param(self.sinks), call)
        chunk.put(self.name, attn)
        chunk.put(self.stats[0], lse)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        q, k, v = self._views(chunk, chunk)
        call = self.call(chunk, q, k, needs_grad)
        grads = self._buffers(chunk) if not {*self.inputs}.isdisjoint(needs_grad) else None
        heads = None if grads is None else self._views(chunk, grads)
        attn, lse = chunk[self.name], chunk[self.stats[0]]
        if self.sinks in needs_grad:
            dsinks = sinks_grad(dy, attn, lse, chunk.param(self.sinks), call)
            chunk.add_param_grad(self.sinks, dsinks)
        own = len(self.counts) == 1 and chunk.ops.name != "eager" and chunk[self.q].dim() == 2
        made = chunk.ops[attention_bwd](dy, q, k, v, attn, lse, call, heads, own)
        total = None if made is heads else self._pack(chunk, made, grads)
        for name, grad in (grads or {}).items():
            if name in needs_grad:
                chunk.add_grad(name, grad, True, total)

    def _pack(self, chunk: Chunk, heads: Heads | None, grads: Any) -> Tensor | None:
        """Put heads side by side into the one gradient, or leave that to the step that is next."""
        assert heads is not None
        layout = chunk.owner.execution
        if self.q in layout.loose:
            chunk.heads[self.q] = heads
            return None
        call = RotaryTables(self.spec, None, None, None, None, 0, heads[0].shape[2])
        return chunk.ops[pack_heads](heads, call, grads[self.q], self.q in layout.summed)

    def _views(self, chunk: Chunk, tensors: Mapping[str, Tensor]) -> Heads:
        """Return q (B, H, S, E), k and v (B, Hkv, S, E) as views of `tensors`, by inputs' names."""
        heads: list[Tensor] = []
        batch, lengths = chunk.seqs[1] - chunk.seqs[0], chunk.owner.execution.lengths
        batch *= self.windows
        for name, counts in self.counts.items():
            x = tensors[name]
            if x.dim() == 4:
                heads.append(x)
            else:
                length = lengths[name] // self.windows
                packed = x.view(batch, length, sum(counts), -1).transpose(1, 2)
                heads += packed.split_with_sizes(counts, 1)
        if self.cuts_keys:
            q, *kv = heads
            heads = [q, *(x[:, :, : q.shape[2]] for x in kv)]
        q, k, v = heads
        return q, k, v

    def _buffers(self, chunk: Chunk) -> dict[str, Tensor]:
        """Return uninitialized gradients of the inputs; zeros if some keys are not seen."""
        lengths = chunk.owner.execution.lengths
        unseen = self.cuts_keys and lengths[self.k] > lengths[self.q]
        grads = {}
        for name in self.inputs:
            x = chunk[name]
            grads[name] = chunk.empty(name) if x.dim() == 2 else _empty_heads(x)
            if unseen and name in (self.k, self.v):
                grads[name].zero_()
        return grads

    def call(
        self, chunk: Chunk, q: Tensor, k: Tensor, needs_grad: Collection[str]
    ) -> AttentionArgs:
        """Return the call for the chunk's sequences."""
        owner, (batch, _, q_len, _), kv_len = chunk.owner, q.shape, k.shape[2]
        if not self.params:
            return AttentionArgs(self.spec, batch, q_len, kv_len)
        mask = padding = dmask = dpadding = None
        if self.mask:
            mask = self._part_of_mask(chunk, owner.tensors[self.mask])
            dmask = self._part_of_mask(chunk, _mask_grad(chunk, self.mask, needs_grad))
        if self.padding:
            padding = _sequences(chunk, owner.tensors[self.padding])
            dpadding = _sequences(chunk, _mask_grad(chunk, self.padding, needs_grad))
        return AttentionArgs(
            self.spec, batch, q_len, kv_len, mask, padding, dmask, dpadding,
            mask_grad=self.mask in owner.needs_grad or self.padding in owner.needs_grad,
            site_key=site_key(owner, self.site) if self.spec.dropout > 0.0 else None,
            row0=chunk.seqs[0] * self.windows * self.spec.num_heads * q_len,
            lengths=_sequences(chunk, chunk.param(self.lengths)),
            cu_q=chunk.param(self.cu_q),
            cu_k=chunk.param(self.cu_k),
            entire=owner.tensors[self.lone_mask] if self.lone_mask else None,
        )  # fmt: skip

    def _part_of_mask(self, chunk: Chunk, mask: Tensor | None) -> Tensor | None:
        # The mask is (S_q, S_k), (B*H, S_q, S_k), or broadcasts to (B, H, S_q, S_k); B counts
        # windows.
        if mask is None or mask.dim() == 2:
            return mask
        if mask.dim() == 3:
            mask = mask.view(-1, self.spec.num_heads, *mask.shape[1:])
        first, end = (n * self.windows for n in chunk.seqs)
        return mask if mask.shape[0] == 1 else mask[first:end]


def _mask_grad(chunk: Chunk, name: str, needs_grad: Collection[str]) -> Tensor | None:
    """Return a mask's gradient, to which all chunks add, or None if it is not needed."""
    if name not in needs_grad:
        return None
    grads = chunk.owner.param_grads
    if name not in grads:
        mask = chunk.owner.tensors[name]
        assert mask is not None
        dtype = torch.promote_types(mask.dtype, torch.float32)
        grads[name] = mask.new_zeros(mask.shape, dtype=dtype)
    return grads[name]


def _sequences(chunk: Chunk, x: Tensor | None) -> Tensor | None:
    return None if x is None else x[chunk.seqs[0] : chunk.seqs[1]]


def _empty_heads(x: Tensor) -> Tensor:
    """Return uninitialized heads in the layout of x, but with contiguous rows for kernels."""
    heads = torch.empty_like(x.transpose(1, 2))
    if heads.stride(-1) != 1:
        heads = torch.empty_like(heads, memory_format=torch.contiguous_format)
    return heads.transpose(1, 2)
