"""Whether the tensors that were read from a layer make up a causal block."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fused_remat.layers import autocast
from fused_remat.layers.linears import is_readable
from fused_remat.spec import BlockSpec

_PLAIN = (Tensor, nn.Parameter)


def why_not_weights(
    x: Tensor,
    tensors: Mapping[str, Tensor | None],
    spec: BlockSpec,
    low: torch.dtype | None,
    called: str,
) -> str | None:
    """Why a block of `spec` cannot take `x`, (B, S, D), with these weights of a layer.

    `low` is autocast's dtype, None if it is off; `called`, what the layer calls `x`.

    >>> from fused_remat.spec import nn_layer_spec
    >>> spec = nn_layer_spec(True, 1, 8, "gelu")
    >>> widths = {"qkv": (24, 8), "proj": (8, 8), "fc1": (32, 8), "fc2": (8, 30)}
    >>> weights = {f"{name}.weight": torch.zeros(shape) for name, shape in widths.items()}
    >>> why_not_weights(torch.zeros(1, 3, 8), weights, spec, None, "x")
    'fc2.weight has shape (8, 30), expected (8, 32)'
    """
    compiling = torch.compiler.is_compiling()  # Dynamo would see through a cache, and say so
    names = spec.weights if compiling else _weights_of(spec)
    given = {name: tensors.get(name) for name in names}
    for name, p in given.items():
        if p is None:
            continue
        if type(p) not in _PLAIN and not is_readable(p):
            return f"{name} is a {type(p).__name__}"
        wide = low is not None or (name.startswith("lora") and p.dtype == torch.float32)
        if (p.dtype is not x.dtype and not wide) or p.device != x.device:
            return f"{called} is {x.dtype} on {x.device} but {name} is {p.dtype} on {p.device}"
    reason = None if low is None else autocast.why_not(x, given, low)
    if reason is not None:
        return reason.replace("src", called)
    shapes = tuple([None if p is None else p.shape for p in given.values()])
    why_not = _why_not_shapes.__wrapped__ if compiling else _why_not_shapes
    return why_not(x.shape[-1], names, shapes, spec)


@functools.lru_cache(maxsize=1024)
def _weights_of(spec: BlockSpec) -> tuple[str, ...]:
    return spec.weights


@functools.lru_cache(maxsize=1024)
def _why_not_shapes(
    width: int,
    names: tuple[str, ...],
    shapes: tuple[torch.Size | None, ...],
    spec: BlockSpec,
) -> str | None:
    given = dict(zip(names, shapes, strict=True))
    fc1 = given["fc1.weight"]
    assert fc1 is not None
    linears = spec.linear_shapes(width, fc1[0])
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in linears.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in spec.norms:
        expected |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    expected |= {f"{name}_norm.weight": (spec.attention.head_dim,) for name in "qk"}
    for name, wanted in expected.items():
        found = given.get(name)
        if found is not None and tuple(found) != wanted:
            return f"{name} has shape {tuple(found)}, expected {wanted}"
    for i, lora in enumerate(spec.loras):
        a, b = given[f"lora.{i}.A"], given[f"lora.{i}.B"]
        out, columns = linears[lora.layer]
        if a is None or b is None or (*a, *b) != (a[0], columns, out, a[0]):
            return f"an adapter of its {lora.layer} has matrices that do not fit"
    return None
