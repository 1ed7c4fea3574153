"""Calls of the attention operations, as the tests write them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fused_remat.spec import AttentionSpec
from fused_remat.steps.attention_call import AttentionArgs

OF_SPEC = ("softcap", "true_means", "align")


def attention_call(
    sizes: tuple[int, int, int, int, int, int],
    scale: float | None = None,
    left: int = -1,
    right: int = -1,
    p: float = 0.0,
    **options: Any,
) -> AttentionArgs:
    """Return a call over (B, H, Hkv, S_q, S_k, E), without anything but for the options."""
    batch, heads, kv_heads, q_len, kv_len, width = sizes
    given = {name: options.pop(name) for name in OF_SPEC if name in options}
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width, window=(left, right), dropout=p,
        scale=width**-0.5 if scale is None else scale, **given,
    )  # fmt: skip
    return AttentionArgs(spec, batch, q_len, kv_len, **options)


def call_of(heads: Sequence[Tensor], **options: Any) -> AttentionArgs:
    """Return a call over q and k, in which True excludes in a bool mask."""
    (b, h, m, e), (_, kv, n, _) = heads[0].shape, heads[1].shape
    return attention_call((b, h, kv, m, n, e), **{"true_means": "exclude", **options})
