"""Attention as a step: from the packed projection of a block, or from separate heads."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fused_remat.blocks.frame import Frame
from fused_remat.blocks.nodes import Node, Shapes
from fused_remat.formats import LoadedHeads
from fused_remat.spec import AttentionSpec
from fused_remat.steps.attention import attention_bwd, attention_fwd
from fused_remat.steps.attention_rows import AttentionCall

Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Attention(Node):
    """name = dropout(softmax(scores + masks)) v, heads side by side, from packed q, k, v.

    scores = scale * q k^T, or softcap * tanh(scale * q k^T / softcap) where `softcap` is not 0.

    Attributes:
        qkv: the packed projection: query heads, key heads, value heads.
        spec: the heads, the scores, which keys a query sees; dropout of the probabilities.
        site: of that dropout.
        mask, padding: names of the masks, "" for none.
        lengths, cu_q, cu_k: names of key lengths and of packed sequences' bounds, "" for none.
    """

    qkv: str
    spec: AttentionSpec
    site: int
    mask: str = ""
    padding: str = ""
    lengths: str = ""
    cu_q: str = ""
    cu_k: str = ""
    per_sequence: ClassVar[bool] = True
    stats_follow: ClassVar[bool] = True

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.qkv,)

    @property
    def params(self) -> tuple[str, ...]:
        seed = ("seed",) if self.spec.dropout > 0.0 else ()
        names = (self.mask, self.padding, self.lengths, self.cu_q, self.cu_k)
        return tuple(n for n in names if n) + seed

    @functools.cached_property
    def _bare(self) -> bool:
        """Whether it reads no tensors besides q, k and v: no masks, no lengths, no dropout."""
        return not self.params

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return (f"{self.name}.lse",)

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        spec = self.spec
        return widths[self.qkv] // (spec.num_heads + 2 * spec.num_kv_heads) * spec.num_heads

    def stat_width(self, width: int) -> int:
        return self.spec.num_heads

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        full = 4 * seq_len * self.width(widths, shapes)
        return full // 2 if self.spec.window[1] == 0 else full

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return (*self.inputs, self.name, *self.stats)

    def rereads(self, wants: Collection[str]) -> tuple[str, ...]:
        return self.params

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        q, k, v = self._heads(f)
        attn, lse = f.ops[attention_fwd](q, k, v, self.call(f, q, k, ()), out)
        f.put(self.name, attn)
        f.put(self.stats[0], lse)

    def _loaded_heads(self, f: Frame) -> tuple[LoadedHeads, LoadedHeads, LoadedHeads]:
        """q, k and v as the backward routine takes them."""
        return self._heads(f)

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        q, k, v = self._loaded_heads(f)
        call = self.call(f, q, k, wants)
        wanted = any(name in wants for name in self.inputs)
        grads, heads = self._buffers(f) if wanted else ({}, None)
        stats = f[self.name], f[self.stats[0]]
        f.ops[attention_bwd](dy, q, k, v, *stats, call, heads)
        for name, grad in grads.items():
            if name in wants:
                f.add_grad(name, grad, owned=True)

    def _heads(self, f: Frame) -> Heads:
        return self._views(f, f[self.qkv])

    def _views(self, f: Frame, packed: Tensor) -> Heads:
        """q (B, H, S, E), k and v (B, Hkv, S, E) as views of a packed matrix."""
        h, kv = self.spec.num_heads, self.spec.num_kv_heads
        batch, length = f.seqs[1] - f.seqs[0], f.run.prepared.lengths[self.qkv]
        if h == kv:
            q, k, v = packed.view(batch, length, 3, h, -1).permute(2, 0, 3, 1, 4).unbind()
        else:
            heads = packed.view(batch, length, h + 2 * kv, -1).transpose(1, 2)
            q, k, v = heads.split_with_sizes((h, kv, kv), 1)
        return q, k, v

    def _buffers(self, f: Frame) -> tuple[dict[str, Tensor], Heads]:
        """Empty gradients of the inputs by name, and as heads for the operation to fill."""
        packed = f.empty(self.qkv)
        return {self.qkv: packed}, self._views(f, packed)

    def call(
        self, f: Frame, q: LoadedHeads, k: LoadedHeads, wants: Collection[str]
    ) -> AttentionCall:
        """The sizes, masks and randomness for the frame's sequences.

        The gradient of a mask that is in `wants` is added, group by group, to a buffer as large as
        the whole mask.
        """
        run, (batch, _, q_len, _), kv_len = f.run, q.shape, k.shape[2]
        if self._bare:
            return AttentionCall(self.spec, batch, q_len, kv_len)
        mask = padding = dmask = dpadding = None
        if self.mask:
            mask = self._of_group(f, run.tensors[self.mask])
            dmask = self._of_group(f, _mask_grad(f, self.mask, wants))
        if self.padding:
            padding = _rows_of_group(f, run.tensors[self.padding])
            dpadding = _rows_of_group(f, _mask_grad(f, self.padding, wants))
        return AttentionCall(
            self.spec,
            batch,
            q_len,
            kv_len,
            mask=mask,
            padding=padding,
            dmask=dmask,
            dpadding=dpadding,
            mask_grad=self.mask in run.wants or self.padding in run.wants,
            site_key=run.site_key(self.site) if self.spec.dropout > 0.0 else None,
            row0=f.seqs[0] * self.spec.num_heads * q_len,
            lengths=_rows_of_group(f, f.param(self.lengths)),
            cu_q=f.param(self.cu_q),
            cu_k=f.param(self.cu_k),
        )

    def _of_group(self, f: Frame, mask: Tensor | None) -> Tensor | None:
        """The part of a mask that the frame's sequences use, in four dimensions or (S_q, S_k).

        A mask is (S_q, S_k), (B*H, S_q, S_k), or broadcasts to (B, H, S_q, S_k).
        """
        if mask is None or mask.dim() == 2:
            return mask
        if mask.dim() == 3:
            mask = mask.view(-1, self.spec.num_heads, *mask.shape[1:])
        return mask if mask.shape[0] == 1 else mask[f.seqs[0] : f.seqs[1]]


def _mask_grad(f: Frame, name: str, wants: Collection[str]) -> Tensor | None:
    """The buffer for a mask's gradient, made when it is first asked for; None if not wanted."""
    if name not in wants:
        return None
    grads = f.run.param_grads
    if name not in grads:
        mask = f.run.tensors[name]
        assert mask is not None
        dtype = torch.promote_types(mask.dtype, torch.float32)
        grads[name] = mask.new_zeros(mask.shape, dtype=dtype)
    return grads[name]


def _rows_of_group(f: Frame, rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows[f.seqs[0] : f.seqs[1]]


@dataclass(frozen=True, kw_only=True)
class CrossAttention(Attention):
    """`Attention` of one sequence's queries to the keys of another, packed side by side.

    Attributes:
        q: query heads, of the tokens that the result has.
        kv: key heads, then value heads, of the other sequence's tokens.

    With `spec.align` "start", query i sees keys 0 to i, as `scaled_dot_product_attention` has it
    where the two sequences are not of one length.
    """

    qkv: str = ""
    q: str
    kv: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.q, self.kv)

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return widths[self.q]

    @property
    def causal(self) -> bool:
        """Whether query i sees keys 0 to i."""
        return self.spec.align == "start" and self.spec.window[1] == 0

    def _heads(self, f: Frame) -> Heads:
        return self._heads_of(f, f[self.q], f[self.kv])

    def _heads_of(self, f: Frame, q: Tensor, kv: Tensor) -> Heads:
        batch, lengths = f.seqs[1] - f.seqs[0], f.run.prepared.lengths
        q = q.view(batch, lengths[self.q], self.spec.num_heads, -1).transpose(1, 2)
        kv = kv.view(batch, lengths[self.kv], 2, self.spec.num_heads, -1)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind()
        if self.causal:  # no query sees a key behind the last query's place
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        return q, k, v

    def _buffers(self, f: Frame) -> tuple[dict[str, Tensor], Heads]:
        lengths = f.run.prepared.lengths
        unseen = self.causal and lengths[self.kv] > lengths[self.q]
        q, kv = f.empty(self.q), f.empty(self.kv)
        return {self.q: q, self.kv: kv.zero_() if unseen else kv}, self._heads_of(f, q, kv)


@dataclass(frozen=True, kw_only=True)
class HeadsAttention(Attention):
    """`Attention` from three inputs: query (B, H, S_q, E), key, value (B, Hkv, S_k, E)."""

    qkv: str = ""
    query: str = "input"
    key: str = "key"
    value: str = "value"

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.query, self.key, self.value)

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return self.spec.num_heads * shapes[self.value][-1]

    def _heads(self, f: Frame) -> Heads:
        return f[self.query], f[self.key], f[self.value]

    def _buffers(self, f: Frame) -> tuple[dict[str, Tensor], Heads]:
        q, k, v = map(_empty_heads, self._heads(f))
        return dict(zip(self.inputs, (q, k, v), strict=True)), (q, k, v)


def _empty_heads(x: Tensor) -> Tensor:
    """Empty heads laid out as x, but with the elements of a row side by side, as kernels write."""
    made = torch.empty_like(x.transpose(1, 2))
    if made.stride(-1) != 1:
        made = torch.empty_like(made, memory_format=torch.contiguous_format)
    return made.transpose(1, 2)
