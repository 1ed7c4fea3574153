"""Calls of attention to be measured: their masks, sizes and operands, what is exact of them.

Operations are those of the scores that are seen; a causal mask hides half.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gpu.kernels import doubled
from bench.measure.contest import EXACT, SETS, P, Results, Rig
from fused_remat import random
from fused_remat.backends.base import AttentionCall

TOKENS, WIDTH = 16384, 2048  # at least the former; of all heads
WINDOW, BLOCK, GROUP = 1024, 128, 4
#: Results of a direction, forward or backward.
DIRECTIONS: dict[str, tuple[str, ...]] = {"fwd": ("out",), "bwd": ("dq", "dk", "dv")}
_PER_MILLE = (100, 20, 250, 130, 60, 300, 40, 100)  # of all tokens: lengths of packed sequences

Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """A call besides its sizes.

    Attributes:
        rivals: names of `gpu_attention.RIVALS` that can serve it.
        options: of an `AttentionCall`, for sequences of so many tokens.
        share: of the scores that is seen.
        mask_mod: the same for FlexAttention: whether query i sees key j.
        group: query heads to a key head. packed: one batch of sequences side by side.
    """

    rivals: tuple[str, ...]
    options: Callable[[Subject], Mapping[str, Any]] = lambda s: {}
    share: Callable[[Subject], float] = lambda s: 1.0
    mask_mod: Callable[[Subject], Any] = lambda s: None
    group: int = 1
    packed: bool = False


def _causal(s: Subject) -> Mapping[str, Any]:
    return {"right": 0}


def _half(s: Subject) -> float:
    return 0.5


def _sees_before(s: Subject) -> Any:
    return lambda b, h, i, j: i >= j


def _window(s: Subject) -> float:
    before = torch.arange(1, s.seq_len + 1, dtype=torch.float64).clamp(max=WINDOW)
    return before.sum().item() / s.seq_len**2


def _checkered(s: Subject) -> Mapping[str, Any]:
    """Every other block of keys is hidden, as on a chessboard."""
    place = torch.arange(s.seq_len, device=s.rig.device) // s.block
    return {"mask": (place[:, None] + place) % 2 == 0, "mask_keeps": True}


def _of_documents(s: Subject) -> Any:
    ends = s.cu[1:].long()
    place = torch.arange(s.seq_len, device=s.rig.device)
    document = torch.searchsorted(ends, place, right=True)
    return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)


def _documents_share(s: Subject) -> float:
    return 0.5 * s.cu.double().diff().square().sum().item() / s.seq_len**2


SDPA = ("flash", "cudnn", "efficient")
SETTINGS: dict[str, Setting] = {
    "causal": Setting(SDPA, _causal, _half, _sees_before),
    "full": Setting(SDPA),
    "causal dropout": Setting(
        ("flash dropout",), lambda s: {"right": 0, "p": P, "site_key": s.site_key}, _half
    ),
    "shared heads": Setting(("flash", "cudnn"), _causal, _half, _sees_before, group=GROUP),
    "half the blocks": Setting(
        ("efficient",), _checkered, _half,
        lambda s: lambda b, h, i, j: (i // s.block + j // s.block) % 2 == 0,
    ),
    "packed": Setting(
        ("varlen",), lambda s: {"right": 0, "cu_q": s.cu, "cu_k": s.cu}, _documents_share,
        _of_documents, packed=True,
    ),
    "window": Setting(
        (), lambda s: {"left": WINDOW - 1, "right": 0}, _window,
        lambda s: lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
    ),
}  # fmt: skip


class Subject:
    """Sets of q, k, v, views of packed projections, and gradients of the output; their call."""

    def __init__(self, rig: Rig, setting: Setting, seq_len: int, width: int) -> None:
        self.rig, self.setting, self.width = rig, setting, rig.size(width, 16)
        seq_len = rig.size(TOKENS if setting.packed else seq_len, 64)
        self.seq_len, self.batch = seq_len, rig.size(max(1, TOKENS // seq_len), 1)
        self.block = rig.size(BLOCK, 16)  # of the chessboard
        self.nhead = rig.size(WIDTH // width, GROUP)
        self.kv_heads = self.nhead // setting.group
        shape = (self.batch, seq_len, self.nhead + 2 * self.kv_heads, self.width)
        self.packed = [rig.normal(*shape) for _ in range(SETS)]
        rows = (self.batch * seq_len, self.nhead * self.width)
        self.douts = [rig.normal(*rows) for _ in range(SETS)]
        self.call = AttentionCall(
            batch=self.batch, nhead=self.nhead, kv_heads=self.kv_heads, q_len=seq_len,
            kv_len=seq_len, scale=self.width**-0.5, **setting.options(self),
        )  # fmt: skip
        products = 2.0 * self.batch * self.nhead * seq_len**2 * self.width * setting.share(self)
        self.flops = {"fwd": 2 * products, "bwd": 5 * products}

    @functools.cached_property
    def site_key(self) -> Tensor:
        return random.site_keys(torch.tensor(7, device=self.rig.device))[random.ATTENTION]

    @functools.cached_property
    def cu(self) -> Tensor:
        """Bounds of eight packed sequences."""
        lengths = torch.tensor((0, *_PER_MILLE), device=self.rig.device)
        return (lengths.cumsum(0) * self.seq_len // 1000).to(torch.int32)

    @functools.cached_property
    def block_mask(self) -> Any:
        """FlexAttention's, or None where everything is seen."""
        from torch.nn.attention.flex_attention import create_block_mask

        mod, n = self.setting.mask_mod(self), self.seq_len
        return None if mod is None else create_block_mask(mod, None, None, n, n, self.rig.device)

    @property
    def longest(self) -> int:
        """Of the packed sequences, at most."""
        return self.seq_len * max(_PER_MILLE) // 1000 + 1

    def heads(self, packed: Tensor) -> Heads:
        counts = (self.nhead, self.kv_heads, self.kv_heads)
        return packed.transpose(1, 2).split_with_sizes(counts, 1)

    def as_heads(self, rows: Tensor) -> Tensor:
        """(B·S, H·E) as (B, H, S, E), a view."""
        return rows.view(self.batch, self.seq_len, self.nhead, self.width).transpose(1, 2)

    def leaves(self, index: int) -> Heads:
        q, k, v = (t.detach().requires_grad_() for t in self.heads(self.packed[index]))
        return q, k, v

    def exact(self, direction: str, call: AttentionCall | None = None) -> Results:
        """The first set's results, in float64."""
        call = call or self.call
        q, k, v = self.heads(*doubled(self.packed[0]))
        out, lse = EXACT.attention_fwd(q, k, v, call)
        if direction == "fwd":
            return {"out": self.as_heads(out)}
        grads = self.heads(torch.empty_like(self.packed[0], dtype=torch.float64))
        EXACT.attention_bwd(self.douts[0].double(), q, k, v, out, lse, call, grads)
        return dict(zip(DIRECTIONS["bwd"], grads, strict=True))
