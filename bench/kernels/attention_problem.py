"""Attention at a size: its forms, operands, masks, and what is exact of it.

Operations are those of the scores that are seen; a causal mask hides half.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import Problem
from bench.measure.contest import Results, Work
from fused_remat.spec import AttentionSpec
from fused_remat.steps.attention import attention_bwd, attention_fwd
from fused_remat.steps.attention_call import AttentionArgs

WINDOW = 1024  # keys; at most half of a sequence
_PER_MILLE = (100, 20, 250, 130, 60, 300, 40, 100)  # of all tokens: lengths of packed sequences
Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Form:
    """The keys that a query sees."""

    causal: bool = False  # keys up to the query's own
    window: bool = False  # of these, the last ones only
    packed: bool = False  # sequences of different lengths, side by side in a batch of 1


FORMS: dict[str, Form] = {
    "causal": Form(causal=True),
    "full": Form(),
    "window": Form(causal=True, window=True),
    "packed": Form(causal=True, packed=True),
}


@dataclass(eq=False)
class Attention(Problem):
    """q, k and v (B, heads, S, E), views of a packed projection; out (B, H, S, E)."""

    #: Probabilities, their gradients and the output, which the backward reads, are rounded
    #: besides, some of them alike along a whole row.
    factor: ClassVar[float] = 2.5

    batch: int
    nhead: int
    kv_heads: int
    seq_len: int
    head_dim: int

    def __post_init__(self) -> None:
        self.form = FORMS[self.name]

    # --- operands

    @property
    def packed_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seq_len, self.nhead + 2 * self.kv_heads, self.head_dim

    def heads(self, packed: Tensor) -> Heads:
        counts = (self.nhead, self.kv_heads, self.kv_heads)
        return packed.transpose(1, 2).split_with_sizes(counts, 1)

    def as_heads(self, rows: Tensor) -> Tensor:
        """(B·S, H·E) as (B, H, S, E), a view."""
        return rows.view(self.batch, self.seq_len, self.nhead, self.head_dim).transpose(1, 2)

    @property
    def rows(self) -> tuple[int, int]:
        return self.batch * self.seq_len, self.nhead * self.head_dim

    def draw(self) -> dict[str, Tensor]:
        return dict(zip("qkv", self.heads(self.rig.normal(*self.packed_shape)), strict=True))

    @functools.cached_property
    def dys(self) -> list[Tensor]:
        """Laid out as a projection's input gradient is."""
        return [self.as_heads(self.rig.normal(*self.rows)) for _ in self.sets]

    # --- what is seen

    @property
    def window(self) -> int:
        """Keys that a query sees at most."""
        return min(WINDOW, max(1, self.seq_len // 2)) if self.form.window else self.seq_len

    @functools.cached_property
    def cu(self) -> Tensor:
        lengths = torch.tensor((0, *_PER_MILLE), device=self.rig.device)
        return (lengths.cumsum(0) * self.seq_len // 1000).to(torch.int32)

    @property
    def longest(self) -> int:
        return self.seq_len * max(_PER_MILLE) // 1000 + 1

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """True is seen, (S, S); None where SDPA needs none."""
        if not (self.form.packed or self.form.window):
            return None
        position = torch.arange(self.seq_len, device=self.rig.device)
        apart = position[:, None] - position
        if self.form.window:
            return (apart >= 0) & (apart < self.window)
        document = torch.searchsorted(self.cu[1:].long(), position, right=True)
        return (document[:, None] == document) & (apart >= 0)

    @property
    def share(self) -> float:
        """Of the scores, seen; of a plain causal mask half, its diagonal as well."""
        if self.mask is None:
            return 0.5 if self.form.causal else 1.0
        return self.mask.count_nonzero().item() / self.mask.numel()

    @functools.cached_property
    def call(self) -> AttentionArgs:
        """The same as our kernels are told."""
        form = self.form
        options = {"cu_q": self.cu, "cu_k": self.cu} if form.packed else {}
        window = self.window - 1 if form.window else -1, 0 if form.causal else -1
        spec = AttentionSpec(
            num_heads=self.nhead, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            scale=self.head_dim**-0.5, window=window,
        )  # fmt: skip
        return AttentionArgs(spec, self.batch, self.seq_len, self.seq_len, **options)

    # --- work and results

    def work(self, direction: str) -> Work:
        """Two products of what is seen, or five; q, k, v and out, and their gradients."""
        batch, seq_len, heads, width = self.packed_shape
        product = 2.0 * batch * self.nhead * seq_len**2 * width * self.share
        size = float(batch * seq_len * (heads + self.nhead) * width * self.rig.dtype.itemsize)
        products, sizes = {"fwd": (2, 1), "bwd": (5, 2)}[direction]
        return Work(flops=products * product, bytes=sizes * size)

    def reference(self, *inputs: Tensor) -> Tensor:
        """As PyTorch computes it where it is told all of it."""
        causal = self.form.causal and self.mask is None
        shared = self.nhead != self.kv_heads
        return F.scaled_dot_product_attention(*inputs, self.mask, 0.0, causal, enable_gqa=shared)

    def truth(self, direction: str) -> Results:
        """Compute in blocks: no sequence is too long for float64."""
        q, k, v = (t.double() for t in self.sets[0].values())
        call = self.call
        out, lse = attention_fwd(q, k, v, call)
        if direction == "fwd":
            return {"y": self.as_heads(out)}
        grads = self.heads(torch.empty(self.packed_shape, dtype=q.dtype, device=q.device))
        dy = self.dys[0].double().transpose(1, 2).reshape(out.shape)
        attention_bwd(dy, q, k, v, out, lse, call, grads)
        gradients = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        return gradients | {"y": self.as_heads(out)}
