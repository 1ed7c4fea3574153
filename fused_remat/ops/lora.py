"""What blocks with low-rank updates share: checks of what they are given, and its names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fused_remat.ops.inputs import check_shape
from fused_remat.spec import LoraSpec, lora_params

#: layer, A (rank, in), B (out, rank), scale.
Update = tuple[str, Tensor, Tensor, float]


def loras_of(given: Sequence[Update], p: float, x: Tensor) -> tuple[LoraSpec, ...]:
    """The plain numbers of updates in a block of `x`, with dropout `p` of what each reads.

    Raises: TypeError for what is no update; RuntimeError for a dtype that is neither that of `x`
        nor float32, or another device.

    >>> loras_of([("q", torch.zeros(1, 4), torch.zeros(4, 1), 2)], 0.0, torch.zeros(3, 4))
    (LoraSpec(layer='q', scale=2.0, dropout=0.0, dtype=None),)
    """
    loras = []
    for update in given:
        if not isinstance(update, tuple) or len(update) != 4:
            raise TypeError(f"lora takes (layer, A, B, scale), got {type(update).__name__}")
        layer, a, b, factor = update
        for name, matrix in (("A", a), ("B", b)):
            if not isinstance(matrix, Tensor):
                raise TypeError(f"{name} of {layer} must be a Tensor, got {type(matrix).__name__}")
            if matrix.dtype not in (x.dtype, torch.float32) or matrix.device != x.device:
                raise RuntimeError(
                    f"{name} of {layer} is {matrix.dtype} on {matrix.device}, expected {x.dtype} "
                    f"or float32 on {x.device}"
                )
        if a.dtype != b.dtype:
            raise RuntimeError(f"A of {layer} is {a.dtype}, B {b.dtype}")
        dtype = None if a.dtype == x.dtype else a.dtype
        loras.append(LoraSpec(layer=layer, scale=float(factor), dropout=p, dtype=dtype))
    return tuple(loras)


def lora_tensors(given: Sequence[Update]) -> dict[str, Tensor | None]:
    """The matrices by the block's names.

    >>> list(lora_tensors([("q", torch.zeros(1, 4), torch.zeros(4, 1), 2.0)]))
    ['lora.0.A', 'lora.0.B']
    """
    matrices = [matrix for _, a, b, _ in given for matrix in (a, b)]
    return dict(zip(lora_params(len(given)), matrices, strict=True))


def check_loras(
    given: Sequence[Update], layers: Sequence[str], tensors: Mapping[str, Tensor | None]
) -> None:
    """Raise ValueError unless every update is of one of `layers` and fits its weight.

    >>> check_loras([("q", torch.zeros(1, 4), torch.zeros(4, 1), 2.0)], ("qkv",), {})
    Traceback (most recent call last):
    ValueError: no layer 'q' to update; valid: qkv
    """
    for layer, a, b, _ in given:
        if layer not in layers:
            raise ValueError(f"no layer {layer!r} to update; valid: {', '.join(layers)}")
        weight = tensors[f"{layer}.weight"]
        assert weight is not None
        out, width = weight.shape
        check_shape(f"A of {layer}", a, ("rank", width), f"{layer}.weight", weight)
        check_shape(f"B of {layer}", b, (out, a.shape[0]), "A", a)
