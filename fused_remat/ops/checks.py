"""What the functional ops share: checks of what they are given, and tokens of any shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.graph.build import captured_params
from fused_remat.graph.graph import Graph
from fused_remat.ops.activation import ActivationLike, Recallable, activation_name, prepare
from fused_remat.policies import Policy
from fused_remat.spec import USER_FUNCTION, AttentionOptions, AttentionSpec, BlockSpec
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.attention_call import bounds
from fused_remat.steps.norm import NORMS

Op = TypeVar("Op", bound=Callable[..., Any])


def lists_attention_options(op: Op) -> Op:
    """Show the keywords that `op` takes as `**options: Unpack[AttentionOptions]` in its signature.

    >>> from fused_remat.ops import attention
    >>> inspect.signature(attention).parameters["softcap"].default
    0.0
    """
    signature = inspect.signature(op)
    defaults = {name: field.default for name, field in AttentionSpec.__dataclass_fields__.items()}
    shown = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=annotation.__forward_arg__,
            default=None if name == "scale" else defaults[name],
        )
        for name, annotation in AttentionOptions.__annotations__.items()
    ]
    parameters = [p for p in signature.parameters.values() if p.name != "options"]
    op.__signature__ = signature.replace(parameters=parameters + shown)  # type: ignore[attr-defined]
    return op


def check_shape(
    name: str, tensor: Tensor | None, expected: tuple[int | str, ...], x_name: str, x: Tensor
) -> None:
    """Raise ValueError unless `tensor` is None or of the `expected` shape; a str fits any size.

    >>> check_shape("weight", torch.zeros(3), (4,), "x", torch.zeros(2, 4))
    Traceback (most recent call last):
    ValueError: weight has shape (3,), expected (4,) to go with x of shape (2, 4)
    """
    if tensor is None:
        return
    got = tuple(tensor.shape)
    fits = len(got) == len(expected) and all(
        isinstance(e, str) or g == e for g, e in zip(got, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, expected)) + ("," if len(expected) == 1 else "")
        raise ValueError(
            f"{name} has shape {got}, expected ({wanted}) to go with {x_name} of shape "
            f"{tuple(x.shape)}"
        )


def check_alike(x: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise unless every tensor has the floating dtype and the device of `x`.

    Raises: TypeError for what is not a Tensor, RuntimeError for another dtype or device.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise RuntimeError(f"expected a floating dtype, got {x.dtype}")
    for name, t in tensors.items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a Tensor or None, got {type(t).__name__}")
        if t.dtype != x.dtype or t.device != x.device:
            raise RuntimeError(
                f"{name} is {t.dtype} on {t.device}, the input {x.dtype} on {x.device}"
            )


def check_heads(nhead: int, kv_heads: int, of: str) -> None:
    """Raise TypeError or ValueError unless `kv_heads` divides `nhead`; `of` says whose they are.

    >>> check_heads(4, 3, "nhead and kv_heads")
    Traceback (most recent call last):
    ValueError: the number of key heads must divide that of query heads, got 4 and 3 of nhead and \
kv_heads
    """
    if not isinstance(nhead, int) or not isinstance(kv_heads, int):
        raise TypeError(f"numbers of heads are ints, got {nhead!r} and {kv_heads!r}")
    if kv_heads < 1 or nhead < 1 or nhead % kv_heads:
        raise ValueError(
            f"the number of key heads must divide that of query heads, got {nhead} and {kv_heads} "
            f"of {of}"
        )


def check_norm_kind(norm: str) -> str:
    """`norm`, if it is a row of `steps.norm.NORMS`; else ValueError."""
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")
    return norm


def check_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str) -> None:
    """Raise ValueError for an unknown norm or weights that do not fit `x` (..., D)."""
    check_norm_kind(norm)
    check_alike(x, {"norm_weight": weight, "norm_bias": bias})
    for name, t in (("norm_weight", weight), ("norm_bias", bias)):
        check_shape(name, t, tuple(x.shape[-1:]), "x", x)


def check_weights(x: Tensor, weights: Mapping[str, Tensor | None], spec: BlockSpec) -> None:
    """Raise ValueError unless `weights` are those of the block `spec` of `x` (B, S, D)."""
    valid = set(spec.weights)
    unknown = sorted(set(weights) - valid)
    if unknown:
        raise ValueError(f"unknown weights {unknown}; valid: {', '.join(sorted(valid))}")
    width, fc1 = x.shape[-1], weights.get("fc1.weight")
    if fc1 is None:  # which says how wide the others are
        raise ValueError(f"weights has no fc1.weight, expected one of shape (F, {width})")
    for name, shape in spec.linear_shapes(width, fc1.shape[0]).items():
        weight = weights.get(f"{name}.weight")
        if weight is None:
            raise ValueError(f"weights has no {name}.weight, expected one of shape {shape}")
        check_shape(f"{name}.weight", weight, shape, "x", x)
        check_shape(f"{name}.bias", weights.get(f"{name}.bias"), shape[:1], "x", x)
    for name in spec.norms:
        for kind in ("weight", "bias"):
            check_shape(f"{name}.{kind}", weights.get(f"{name}.{kind}"), (width,), "x", x)


def check_p(name: str, p: float) -> float:
    """`p` as a float, if it is a probability; else ValueError.

    >>> check_p("dropout_p", 0)
    0.0
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {p}")
    return float(p)


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor | None:
    """`seed` as an int64 tensor () on `device`.

    Raises: TypeError, ValueError for what is no such tensor and no int of 64 bits.

    >>> seed_tensor(3, torch.device("cpu"))
    tensor(3)
    """
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0 or seed.device != device:
            raise ValueError(
                f"seed must be an int64 tensor () on {device}, got {seed.dtype} "
                f"{tuple(seed.shape)} on {seed.device}"
            )
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, a Tensor or None, got {seed!r}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit 64 bits, got {seed}")
    # Not torch.tensor, which copies to a GPU and waits: no CUDA graph could capture that.
    return torch.full((), seed, dtype=torch.int64, device=device)


def resolve_activation(
    activation: ActivationLike, x: Tensor, shape: tuple[int, ...]
) -> tuple[str, dict[str, Tensor], dict[str, Callable[[Tensor], Tensor]]]:
    """The name of an activation, what it captures by name, and the function if it has no name.

    `shape`: of a tensor to try a function on, like those that the block will give it.

    Raises: ValueError for an unknown name, and for a function that cannot be rebuilt; TypeError
        for what is neither a string nor callable.
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"unknown activation {activation!r}; valid: {', '.join(ACTIVATIONS)}, or a function"
            )
        return activation, {}, {}
    if not callable(activation):
        raise TypeError(f"activation must be a name or a function, got {activation!r}")
    name = activation_name(activation)
    if name is not None:
        return name, {}, {}
    found = _prepared(activation, x.new_zeros(shape))
    if isinstance(found, str):
        raise ValueError(f"cannot rebuild with this activation: it {found}")
    names = captured_params(len(found.captured))
    return USER_FUNCTION, dict(zip(names, found.captured, strict=True)), {"activation": found.fn}


def _prepared(activation: Callable[[Tensor], Tensor], x: Tensor) -> Recallable | str:
    if torch.compiler.is_compiling():
        from fused_remat.autograd import graph_break

        return graph_break.eagerly(prepare, activation, x)  # type: ignore[no-any-return]
    return prepare(activation, x)


def run_tokens(
    graph: Graph,
    policy: str | Policy,
    backend: str,
    tensors: Mapping[str, Tensor | None],
    functions: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> Tensor:
    """Run a block that works token by token on inputs (..., D), all of one shape but for widths."""
    inputs = {}
    for name in graph.inputs:
        x = tensors[name]
        assert x is not None
        if x.dim() < 1:
            raise ValueError("expected an input of at least one dimension, got shape ()")
        inputs[name] = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    out = run_block(
        graph,
        policy,
        {**tensors, **inputs},
        backend=backend,
        functions=functions,
    )
    shape = tensors["input"].shape  # type: ignore[union-attr]
    return out if len(shape) == 3 else out.view(*shape[:-1], out.shape[-1])


#: The tensor that says of each of `spec.MASKS` that a call passes it.
_GIVEN = {"mask": "mask", "padding": "padding", "lengths": "lengths", "cu_seqlens": "cu_q"}


def masks_given(tensors: Mapping[str, Tensor | None]) -> tuple[str, ...]:
    """The masks among a block's tensors, as `AttentionSpec.masks` has them.

    >>> masks_given({"mask": None, "padding": torch.zeros(2, 3), "cu_q": torch.zeros(2)})
    ('padding', 'cu_seqlens')
    """
    return tuple([name for name, key in _GIVEN.items() if tensors.get(key) is not None])


def mask_of(mask: Tensor | None, grid: tuple[int, int, int, int], x: Tensor) -> Tensor | None:
    """`mask` with four dimensions, or (S_q, S_k), if it broadcasts to `grid` (B, H, S_q, S_k).

    Raises: ValueError for another shape; TypeError, RuntimeError for another kind.
    """
    if mask is None:
        return None
    _check_kind("attn_mask", mask, x)
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(shape) != 4 or any(m not in (1, g) for m, g in zip(shape, grid, strict=True)):
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}, expected one that broadcasts to {grid}"
        )
    return mask if mask.dim() == 2 else mask.view(shape)


def padding_of(mask: Tensor | None, grid: tuple[int, int, int, int], x: Tensor) -> Tensor | None:
    """`mask` if it is (B, S_k).

    Raises: ValueError for another shape; TypeError, RuntimeError for another kind.
    """
    if mask is None:
        return None
    _check_kind("key_padding_mask", mask, x)
    if tuple(mask.shape) != (grid[0], grid[3]):
        raise ValueError(
            f"key_padding_mask has shape {tuple(mask.shape)}, expected {(grid[0], grid[3])}"
        )
    return mask


def _check_kind(name: str, mask: Tensor, x: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a Tensor or None, got {type(mask).__name__}")
    if mask.dtype not in (torch.bool, x.dtype, torch.float32) or mask.device != x.device:
        raise RuntimeError(
            f"{name} is {mask.dtype} on {mask.device}, expected bool, {x.dtype} or torch.float32 "
            f"on {x.device}"
        )


def lengths_of(
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    grid: tuple[int, int, int, int],
    x: Tensor,
    name: str = "cu_seqlens_q",
) -> dict[str, Tensor]:
    """Key lengths (B,), or the bounds of packed sequences (N + 1,), by the blocks' names.

    `cu_k` None is as `cu_q`, which the caller knows as `name`. Values are checked on CPU only: on a
    GPU that would wait for the device; while compiling they are not known.

    Raises: ValueError for shapes or values that do not fit `grid` (B, H, S_q, S_k), or for lengths
        of both kinds; TypeError, RuntimeError for another kind.
    """
    if key_lengths is not None and (cu_q is not None or cu_k is not None):
        raise ValueError(f"key_lengths is for padded sequences, {name} for packed ones: not both")
    if key_lengths is not None:
        return {"lengths": _key_lengths(key_lengths, grid, x)}
    if cu_q is None and cu_k is None:
        return {}
    if cu_q is None:
        raise ValueError(f"cu_seqlens_k needs {name} beside it")
    if grid[0] != 1:
        raise ValueError(f"{name} needs all sequences in a batch of 1, got a batch of {grid[0]}")
    if cu_k is None and grid[2] != grid[3]:
        raise ValueError(
            f"cu_seqlens_k is needed where keys are not as many as queries: {grid[3]}, {grid[2]}"
        )
    _check_bounds(name, cu_q, grid[2], x)
    if cu_k is None:
        return {"cu_q": cu_q, "cu_k": cu_q}
    _check_bounds("cu_seqlens_k", cu_k, grid[3], x)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"{name} has shape {tuple(cu_q.shape)}, cu_seqlens_k {tuple(cu_k.shape)}, expected "
            f"bounds of as many sequences"
        )
    return {"cu_q": cu_q, "cu_k": cu_k}


def _key_lengths(lengths: Tensor, grid: tuple[int, int, int, int], x: Tensor) -> Tensor:
    _check_integers("key_lengths", lengths, x)
    if tuple(lengths.shape) != (grid[0],):
        raise ValueError(f"key_lengths has shape {tuple(lengths.shape)}, expected ({grid[0]},)")
    values = lengths.tolist() if _known(lengths) else []
    for b, value in enumerate(values):
        if not 0 <= value <= grid[3]:
            raise ValueError(
                f"key_lengths[{b}] is {value}, expected 0 to {grid[3]}, the keys there are"
            )
    return lengths


def _check_bounds(name: str, cu: Tensor, tokens: int, x: Tensor) -> None:
    _check_integers(name, cu, x)
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(cu.shape)}, expected (N + 1,) for N sequences")
    if _known(cu):
        bounds(cu, tokens, name)


def _known(t: Tensor) -> bool:
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_integers(name: str, t: Tensor, x: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor or None, got {type(t).__name__}")
    if t.dtype not in (torch.int32, torch.int64) or t.device != x.device:
        raise RuntimeError(
            f"{name} is {t.dtype} on {t.device}, expected torch.int32 or torch.int64 on {x.device}"
        )
