"""Specs of the blocks of known layers, from plain values: `torch.nn`'s, and those of models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from fused_remat.moe_spec import MoESpec
from fused_remat.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    LoraSpec,
    MLPSpec,
    NormSpec,
    PackedSpec,
    RotarySpec,
)

P = ParamSpec("P")
Spec = TypeVar("Spec")


def cached(build: Callable[P, Spec]) -> Callable[P, Spec]:
    """Return `build`, which makes a spec from plain values, with a cache that compilers skip.

    A layer describes its block at every call, and the description seldom changes.
    """
    known = functools.lru_cache(maxsize=1024)(build)

    @functools.wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> Spec:
        if torch.compiler.is_compiling():
            return build(*args, **kwargs)
        return known(*args, **kwargs)  # type: ignore[arg-type]

    return built


def attention_fields(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_causal: bool,
    window: tuple[int, int],
    scale: float | None,
    softcap: float,
) -> dict[str, Any]:
    """Return fields of an `AttentionSpec` from a function's arguments.

    Raises: TypeError for a `window` that is not two ints.
    """
    if not isinstance(window, tuple) or [type(w) for w in window] != [int, int]:
        raise TypeError(f"window must be two ints, (left, right), got {window!r}")
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "scale": float(max(head_dim, 1)) ** -0.5 if scale is None else float(scale),
        "softcap": float(softcap),
        "window": (window[0], 0 if is_causal else window[1]),
    }


@cached
def nn_layer_spec(
    norm_first: bool,
    num_heads: int,
    head_dim: int,
    activation: str,
    eps: tuple[float, ...] = (1e-5, 1e-5),
    dropout: float | tuple[float, ...] = 0.0,
    *,
    causal: bool = False,
    masks: tuple[str, ...] = (),
    memory_causal: bool = False,
    memory_masks: tuple[str, ...] = (),
    true_means: Literal["attend", "exclude"] = "exclude",
    projection: Literal["packed", "split"] = "packed",
    captured: int = 0,
    loras: tuple[LoraSpec, ...] = (),
    packed: tuple[tuple[str, PackedSpec], ...] = (),
) -> BlockSpec:
    """Return the block of an `nn.TransformerEncoderLayer`; of a decoder layer for three norms.

    Args:
        norm_first, num_heads, head_dim, activation: of the layer.
        eps: of its two or three norms.
        dropout: one probability, or those of attention, of what it adds, the same two of the
            attention to "memory" in a decoder, of the MLP, and of what it adds.
        causal, masks: of the attention to the input.
        memory_causal, memory_masks: of the attention to "memory".
        captured: as in `MLPSpec`.
        true_means, projection: as in `AttentionSpec`.
    """
    decodes = len(eps) == 3
    ps = dropout if isinstance(dropout, tuple) else (dropout,) * (2 * len(eps))
    attention = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, scale=head_dim**-0.5,
        window=(-1, 0 if causal else -1), dropout=ps[0], masks=masks, true_means=true_means,
        projection=projection,
    )  # fmt: skip
    ops: list[AttentionSpec | MLPSpec] = [attention]
    if decodes:
        cross = replace(
            attention, window=(-1, 0 if memory_causal else -1), align="start", dropout=ps[2],
            masks=memory_masks, keys="memory",
        )  # fmt: skip
        ops.append(cross)
    ops.append(MLPSpec(activation=activation, dropout=ps[-2], captured=captured, whole=True))
    placement = "pre" if norm_first else "post"
    branches = [
        BranchSpec(op=op, norm=NormSpec(eps=e), placement=placement, dropout=p)
        for op, e, p in zip(ops, eps, ps[1::2], strict=True)
    ]
    return BlockSpec(
        kind=f"{'decoder' if decodes else 'encoder'}_{placement}norm",
        branches=tuple(branches),
        inputs=("input", "memory") if decodes else ("input",),
        loras=loras,
        packed=packed,
    )


@cached
def transformer_spec(
    norm: str,
    eps: float,
    activation: str,
    *,
    offset: float = 0.0,
    placement: str = "pre",
    gated: bool = False,
    moe: MoESpec | None = None,
    dropout: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    rotary: bool = False,
    interleaved: bool = False,
    qk_norm_eps: float | None = None,
    loras: tuple[LoraSpec, ...] = (),
    packed: tuple[tuple[str, PackedSpec], ...] = (),
    **attention: Any,
) -> BlockSpec:
    """Return the block of a language or vision model: attention and an MLP, norms of one kind.

    Args:
        norm, eps, offset, placement: of the norms of both branches.
        activation, gated: of the MLP.
        moe: a mixture of experts instead of the MLP, or None.
        dropout: probabilities of attention, of what attention adds, of the MLP, of what it adds.
        rotary, interleaved: whether query and key heads are rotated, and `RotarySpec.interleaved`.
        qk_norm_eps: of an RMSNorm of query and key heads before the rotation; None for no norm.
        attention: other fields of `AttentionSpec`.
    """
    p_attention, p_first, p_mlp, p_second = dropout
    head_norm = None
    if qk_norm_eps is not None:
        head_norm = NormSpec(kind="rms_norm", eps=qk_norm_eps, offset=offset)
    op = AttentionSpec(
        dropout=p_attention,
        rotary=RotarySpec(interleaved=interleaved) if rotary else None,
        head_norm=head_norm,
        **attention,
    )
    mlp = moe or MLPSpec(activation=activation, gated=gated, dropout=p_mlp)
    spec = NormSpec(kind=norm, eps=eps, offset=offset)
    kind = f"{op.heads_kind}{'moe_' if moe else ''}transformer_{placement}"
    return BlockSpec(
        kind=f"{kind}{'' if placement == 'sandwich' else 'norm'}",
        branches=(
            BranchSpec(op=op, norm=spec, placement=placement, dropout=p_first),
            BranchSpec(op=mlp, norm=spec, placement=placement, dropout=p_second),
        ),
        loras=loras,
        packed=packed,
    )
