"""Quantized linear layers of a layer that is traced, where plain ones stand in for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fused_remat.layers.modules import has_adapters
from fused_remat.layers.packed import Packed, packed_weight
from fused_remat.spec import PackedSpec
from fused_remat.steps.linear import Linear
from fused_remat.steps.node import Node
from fused_remat.tracing.builder import Builder
from fused_remat.tracing.isolation import replica
from fused_remat.tracing.values import Untraceable

#: Formats of a layer's quantized weights, by the names that the weights have in a trace.
Formats = Mapping[str, PackedSpec]


def packed_weights(layer: nn.Module, x: Tensor) -> dict[str, Packed]:
    """Return the quantized weights of a layer with input x, by name.

    Raises: as `packed_weight`.
    """
    found = dict[str, Packed]()
    for path, module in layer.named_modules():
        packed = packed_weight(module, path, x)
        packs = getattr(module, "support_avx512bf16_for_cpu", False) and x.is_cpu
        if packs and not module.training:
            raise Untraceable(
                f"{path} is in evaluation mode, in which a call for a comparison would let "
                "bitsandbytes pack its weight for inference on this CPU; call train()"
            )
        if packed is not None:
            found[f"{path}.weight"] = packed
    return found


def unquantized(layer: nn.Module, formats: Formats, like: Tensor) -> nn.Module:
    """Return a replica with plain linear layers without values; the layer itself if it has none.

    Adapters of PEFT compute the same in its class for plain layers, which tests no autocast.
    """
    if not formats:
        return layer
    copy: Any = replica(layer)
    adapted = [module for module in copy.modules() if has_adapters(module)]
    for module in adapted:
        module.__class__ = sys.modules["peft.tuners.lora.layer"].Linear
    for name, spec in formats.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        owner = copy.get_submodule(parent)
        bias = owner._modules[leaf].bias
        linear: Any = nn.Linear(spec.shape[1], spec.shape[0], bias is not None, device="meta")
        linear.weight = nn.Parameter(like.new_zeros(()).expand(spec.shape), requires_grad=False)
        if bias is not None:
            linear.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, False)
        linear.training = owner._modules[leaf].training
        owner._modules[leaf] = linear
    return copy  # type: ignore[no-any-return]


def check_reads(t: Builder, nodes: Sequence[Node]) -> None:
    """Raise Untraceable if a step other than a linear layer reads a quantized weight."""
    sources = t.recording.sources
    for node in nodes if t.formats else ():
        for name in [name for name in node.params if name in t.values]:
            read = {sources.get(n) for n in t.roots(t.values[name])} & t.formats.keys()
            if read and not (isinstance(node, Linear) and name in t.formats):
                raise Untraceable(f"{node.name} reads a quantized weight, {read.pop()}")
