"""What the functional ops share: checks of what they are given, and tokens of any shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.blocks.program import Graph
from fused_remat.graph.build import captured_params
from fused_remat.ops.activation import ActivationLike, Recallable, activation_name, prepare
from fused_remat.policies import Policy
from fused_remat.spec import USER_FUNCTION, AttentionOptions, AttentionSpec, BlockSpec
from fused_remat.steps.activation import ACTIVATIONS
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
        from fused_remat import uncompiled

        return uncompiled.eagerly(prepare, activation, x)  # type: ignore[no-any-return]
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
