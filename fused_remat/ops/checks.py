"""Checks and conversions of the arguments of ops: masks, lengths, seeds, tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.graph.graph import Graph
from fused_remat.policies import Policy
from fused_remat.spec import MASKS, BlockSpec, MLPSpec, check_one_of
from fused_remat.steps.attention_call import bounds
from fused_remat.steps.norm import NORMS
from fused_remat.steps.replay import Function

#: What autocast converts.
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)

Grid = tuple[int, int, int, int]  # (B, H, S_q, S_k)


def run_tokens(
    graph: Graph,
    tensors: Mapping[str, Tensor | None],
    functions: Mapping[str, Function],
    policy: str | Policy,
    backend: str,
) -> Tensor:
    """Run a block that works token by token on inputs (..., D), all of one shape but for widths.

    With `graph.side_outputs`, returns a tuple of the output and these.
    """
    inputs = {}
    for name in graph.inputs:
        x = tensors[name]
        assert x is not None
        inputs[name] = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    out: Any = run_block(graph, policy, {**tensors, **inputs}, backend=backend, functions=functions)
    shape = tensors["input"].shape  # type: ignore[union-attr]
    if len(shape) != 3:
        views = [t.view(*shape[:-1], t.shape[-1]) for t in (out if graph.side_outputs else (out,))]
        out = tuple(views) if graph.side_outputs else views[0]
    return out  # type: ignore[no-any-return]


def check_tensor(
    name: str, t: object, dtypes: Sequence[torch.dtype], x: Tensor, why: str = ""
) -> None:
    """Raise unless `t` is a Tensor with one of `dtypes` on the device of `x`.

    `why` ends the message.
    """
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}")
    if t.dtype not in dtypes or t.device != x.device:
        expected = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise RuntimeError(
            f"{name} is {t.dtype} on {t.device}, expected {expected} on {x.device}{why}"
        )


def check_alike(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise unless the first is a floating tensor with dimensions, and others match it."""
    (first, x), *others = tensors.items()
    if not isinstance(x, Tensor):
        raise TypeError(f"{first} must be a Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise RuntimeError(f"{first} is {x.dtype}, expected a floating dtype")
    if x.dim() < 1:
        raise ValueError(f"{first} must have at least one dimension, got shape ()")
    for name, t in others:
        if t is not None:
            check_tensor(name, t, (x.dtype,), x, f", as {first}")


def check_shape(
    name: str,
    t: Tensor | None,
    expected: Sequence[int | str],
    given: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Raise ValueError unless `t` is None or of the `expected` shape; a str fits any size.

    `given`: the tensors that the expected shape follows from.
    """
    if t is None:
        return
    sizes = zip(t.shape, expected, strict=False)
    if t.dim() != len(expected) or any(not isinstance(e, str) and e != size for size, e in sizes):
        of = " and ".join(f"{name} of shape {tuple(t.shape)}" for name, t in given.items())
        raise ValueError(
            f"{name} has shape {tuple(t.shape)}, expected {_shown(expected)}"
            f"{' to go with ' if given else ''}{of}"
        )


def _shown(shape: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def hidden_width(
    x: Tensor, weights: Mapping[str, Tensor | None], shown: Callable[[str], str] = str
) -> int:
    """Return F, from the matrix fc1.weight; `shown` maps names to the caller's."""
    name, fc1, expected = shown("fc1.weight"), weights.get("fc1.weight"), ("F", x.shape[-1])
    if fc1 is None:
        raise ValueError(f"{name} is missing, expected shape {_shown(expected)}")
    if fc1.dim() != 2:
        check_shape(name, fc1, expected, {"x": x})
    return fc1.shape[0]


def check_weights(
    x: Tensor,
    weights: Mapping[str, Tensor | None],
    spec: BlockSpec,
    shown: Callable[[str], str] = str,
) -> None:
    """Raise ValueError unless `weights` has those of the block `spec`, which fit `x` (..., D)."""
    width = x.shape[-1]
    for branch in spec.branches:
        hidden = hidden_width(x, weights, shown) if isinstance(branch.op, MLPSpec) else 0
        shapes: dict[str, tuple[int | str, int]] = {**branch.op.linear_shapes(width, hidden)}
        if not spec.residual:
            shapes["fc2"] = ("Dout", hidden)
        given = {"x": x}
        for name, shape in shapes.items():
            key, weight = shown(f"{name}.weight"), weights.get(f"{name}.weight")
            if weight is None:
                raise ValueError(f"{key} is missing, expected shape {_shown(shape)}")
            check_shape(key, weight, shape, given)
            given = given if len(given) > 1 else {**given, key: weight}
            bias = weights.get(f"{name}.bias")
            check_shape(shown(f"{name}.bias"), bias, weight.shape[:1], {key: weight})
    for name in spec.norms:
        for kind in ("weight", "bias"):
            key = f"{name}.{kind}"
            check_shape(shown(key), weights.get(key), (width,), {"x": x})


def argument_name(name: str) -> str:
    """Return the argument name of a weight: "fc1_weight" for "fc1.weight"."""
    return name.replace(".", "_")


def check_heads(nhead: int, kv_heads: int, name: str = "nhead", kv_name: str = "kv_heads") -> None:
    """Raise TypeError or ValueError unless `kv_heads` divides `nhead`."""
    if not isinstance(nhead, int) or not isinstance(kv_heads, int):
        raise TypeError(f"{name} and {kv_name} must be ints, got {nhead!r} and {kv_heads!r}")
    if kv_heads < 1 or nhead < 1 or nhead % kv_heads:
        raise ValueError(f"{name} must be a multiple of {kv_name}, got {nhead} and {kv_heads}")


def check_norm_kind(norm: str) -> str:
    """Return `norm`; raise ValueError unless it is in `steps.norm.NORMS`."""
    check_one_of("norm", norm, *NORMS)
    return norm


def check_p(name: str, p: float) -> float:
    """Return `p` as a float; raise ValueError unless it is a probability."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {p}")
    return float(p)


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor | None:
    """Return `seed`, an int of 64 bits or a tensor, as an int64 tensor () on `device`."""
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0 or seed.device != device:
            raise ValueError(
                f"seed must be an int64 tensor of shape () on {device}, got {seed.dtype} "
                f"{tuple(seed.shape)} on {seed.device}"
            )
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, a Tensor or None, got {seed!r}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit 64 bits, got {seed}")
    # Not torch.tensor, which copies to a GPU and waits: no CUDA graph could capture that.
    return torch.full((), seed, dtype=torch.int64, device=device)


def masks_given(tensors: Mapping[str, Tensor | None]) -> tuple[str, ...]:
    """Return the masks among a block's tensors, as `AttentionSpec.masks` lists them."""
    keys = [(name, "cu_q" if name == "cu_seqlens" else name) for name in MASKS]
    return tuple([name for name, key in keys if tensors.get(key) is not None])


def read_masks(
    x: Tensor,
    grid: Grid,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    name: str = "cu_seqlens",
) -> dict[str, Tensor | None]:
    """Return all masks and lengths, checked, by the blocks' names; `name` is that of `cu_q`."""
    dtypes = (torch.bool, x.dtype, torch.float32)
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask, dtypes, x)
        shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
        if len(shape) != 4 or any(m not in (1, g) for m, g in zip(shape, grid, strict=True)):
            raise ValueError(
                f"attn_mask has shape {tuple(attn_mask.shape)}, expected one that broadcasts to "
                f"{grid}"
            )
        attn_mask = attn_mask if attn_mask.dim() == 2 else attn_mask.view(shape)
    if key_padding_mask is not None:
        check_tensor("key_padding_mask", key_padding_mask, dtypes, x)
        check_shape("key_padding_mask", key_padding_mask, (grid[0], grid[3]))
    lengths = _lengths(key_lengths, cu_q, cu_k, grid, x, name)
    return {"mask": attn_mask, "padding": key_padding_mask, **lengths}


def _lengths(
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    grid: Grid,
    x: Tensor,
    name: str,
) -> dict[str, Tensor]:
    """Return key lengths (B,), or bounds of packed sequences (N + 1,); `cu_k` None means `cu_q`.

    Values are checked on a CPU only: a GPU would synchronize, and a compiler does not know them.
    """
    batch, _, q_len, kv_len = grid
    if key_lengths is not None:
        if cu_q is not None or cu_k is not None:
            raise ValueError(
                f"key_lengths is for padded sequences, {name} for packed ones: pass one, not both"
            )
        check_tensor("key_lengths", key_lengths, (torch.int32, torch.int64), x)
        check_shape("key_lengths", key_lengths, (batch,))
        for b, value in enumerate(key_lengths.tolist() if _is_known(key_lengths) else []):
            if not 0 <= value <= kv_len:
                raise ValueError(
                    f"key_lengths[{b}] is {value}, expected 0 to {kv_len}, the number of keys"
                )
        return {"lengths": key_lengths}
    if cu_q is None:
        if cu_k is not None:
            raise ValueError(f"cu_seqlens_k needs {name}")
        return {}
    if batch != 1:
        raise ValueError(f"{name} needs all sequences in a batch of 1, got a batch of {batch}")
    _check_bounds(name, cu_q, q_len, x)
    if cu_k is not None:
        _check_bounds("cu_seqlens_k", cu_k, kv_len, x)
        check_shape("cu_seqlens_k", cu_k, cu_q.shape, {name: cu_q})
    elif q_len != kv_len:
        raise ValueError(
            f"cu_seqlens_k is missing: with {q_len} queries and {kv_len} keys, {name} cannot be "
            "used for both; pass cu_seqlens_k"
        )
    return {"cu_q": cu_q, "cu_k": cu_q if cu_k is None else cu_k}


def _check_bounds(name: str, cu: Tensor, tokens: int, x: Tensor) -> None:
    check_tensor(name, cu, (torch.int32, torch.int64), x)
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(cu.shape)}, expected (N + 1,) for N sequences")
    if _is_known(cu):
        bounds(cu, tokens, name)


def _is_known(t: Tensor) -> bool:
    """Return whether reading `t` synchronizes no device and breaks no compiled graph."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling()
