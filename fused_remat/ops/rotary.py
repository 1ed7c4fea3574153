"""Rotary position embedding of a packed projection, and the RMSNorm of its heads before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.graph.build import rotary_graph
from fused_remat.ops.inputs import check_alike, check_heads, check_shape
from fused_remat.policies import Policy
from fused_remat.spec import AttentionSpec, NormSpec, RotarySpec


def rotary(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    nhead: int,
    kv_heads: int | None = None,
    interleaved: bool = False,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
) -> Tensor:
    """qkv, its queries and keys rotated in pairs: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.

    Shapes: qkv (B, S, (H + 2·Hkv)·E), the query heads first, then the key heads, then the value
        heads, which stay as they are; returns the same in qkv.dtype. cos and sin (S, R/2) or
        (B, S, R/2), of qkv's dtype or float32, constants; both None: nothing is rotated. The
        first R elements of a head are, R <= E. Hkv is `kv_heads`, or H.
    interleaved: (x1, x2) are neighbours, elements 2i and 2i + 1 (GPT-J); else i and i + R/2
        (GPT-NeoX, and LLaMA in Hugging Face's layout).
    q_norm_weight, k_norm_weight: (E,) of an RMSNorm of each query and key head, with `eps`, before
        it is rotated (Qwen3); both or neither.
    Arithmetic is float32 (float64 for float64), rounded once.
    Units: bytes kept = none, or qkv where heads are normed.
    Raises: ValueError for shapes that do not fit or nothing to do; RuntimeError for mixed dtypes or
        devices, and for tables that require a gradient, which they cannot be given.
    Source: Su et al. 2021; heads normed as in Dehghani et al. 2023.

    >>> angle = torch.tensor([[0.0], [torch.pi / 2]])
    >>> x = torch.tensor([3.0, 4.0]).repeat(1, 2, 3)  # a query, a key and a value head of two
    >>> rotary(x, angle.cos(), angle.sin(), nhead=1).round()
    tensor([[[ 3.,  4.,  3.,  4.,  3.,  4.],
             [-4.,  3., -4.,  3.,  3.,  4.]]])
    """
    check_alike(qkv, {})
    kv_heads = nhead if kv_heads is None else kv_heads
    check_heads(nhead, kv_heads, "nhead and kv_heads")
    heads = nhead + 2 * kv_heads
    if qkv.dim() != 3 or qkv.shape[-1] % heads:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}, expected (B, S, {heads}·E): {nhead} query, "
            f"{kv_heads} key and {kv_heads} value heads"
        )
    rope = None if cos is None and sin is None else (cos, sin)
    tensors = rotary_tensors(qkv, qkv.shape[-1] // heads, rope, q_norm_weight, k_norm_weight)
    if not tensors:
        raise ValueError("nothing to do: neither cos and sin nor q_norm_weight and k_norm_weight")
    spec = AttentionSpec(
        num_heads=nhead, num_kv_heads=kv_heads, head_dim=qkv.shape[-1] // heads, scale=1.0,
        **rotary_fields(tensors, interleaved, eps),
    )  # fmt: skip
    return run_block(rotary_graph(spec), policy, {"input": qkv, **tensors}, backend=backend)


def rotary_tensors(
    x: Tensor,
    head_dim: int,
    rope: tuple[Tensor | None, Tensor | None] | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> dict[str, Tensor]:
    """What a rotary step takes besides its input, by name, checked; x is (B, S, ...).

    Raises: TypeError, ValueError, RuntimeError for what does not fit x and heads of `head_dim`.
    """
    found: dict[str, Tensor] = {}
    if rope is not None:
        if (
            not isinstance(rope, tuple | list)
            or [isinstance(t, Tensor) for t in rope] != [True] * 2
        ):
            raise TypeError(f"rope takes two Tensors, (cos, sin), got {_types(rope)}")
        for name, table in zip(("cos", "sin"), rope, strict=True):
            assert table is not None
            found[name] = _checked_table(name, table, x, head_dim)
        check_shape("sin", found["sin"], tuple(found["cos"].shape), "cos", found["cos"])
        if found["sin"].dtype != found["cos"].dtype:
            raise RuntimeError(f"sin is {found['sin'].dtype}, cos {found['cos'].dtype}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight go together, got one of them")
    check_alike(x, {"q_norm_weight": q_weight, "k_norm_weight": k_weight})
    for name, weight in (("q_norm", q_weight), ("k_norm", k_weight)):
        if weight is not None:
            check_shape(f"{name}_weight", weight, (head_dim,), "x", x)
            found[f"{name}.weight"] = weight
    return found


def _types(rope: object) -> str:
    if isinstance(rope, tuple | list):
        return f"({', '.join(type(t).__name__ for t in rope)})"
    return type(rope).__name__


def _checked_table(name: str, table: Tensor, x: Tensor, head_dim: int) -> Tensor:
    """The table, without a batch dimension of one."""
    batch, seq_len = x.shape[:2]
    shape = tuple(table.shape)
    lead, width = shape[:-1], 2 * shape[-1] if shape else 0
    if lead not in ((seq_len,), (batch, seq_len), (1, seq_len)) or not 0 < width <= head_dim:
        raise ValueError(
            f"{name} has shape {shape}, expected ({seq_len}, R/2) or ({batch}, {seq_len}, R/2) "
            f"with R at most {head_dim}, the width of a head, to go with x of shape "
            f"{tuple(x.shape)}"
        )
    if table.dtype not in (x.dtype, torch.float32) or table.device != x.device:
        raise RuntimeError(
            f"{name} is {table.dtype} on {table.device}, expected {x.dtype} or float32 on "
            f"{x.device}, as the input"
        )
    if table.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} requires a gradient, and rotary tables are given none")
    return table[0] if table.dim() == 3 and table.shape[0] == 1 else table


def rotary_fields(tensors: Mapping[str, Tensor], interleaved: bool, eps: float) -> dict[str, Any]:
    """What an `AttentionSpec` says of the tensors that `rotary_tensors` found: nothing, or more."""
    fields: dict[str, Any] = {}
    if "cos" in tensors:
        fields["rotary"] = RotarySpec(interleaved=bool(interleaved))
    if "q_norm.weight" in tensors:
        fields["head_norm"] = NormSpec(kind="rms_norm", eps=float(eps))
    return fields
