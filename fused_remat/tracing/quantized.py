"""Quantized linear layers of a layer that is traced, where plain ones stand in for them."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fused_remat.layers.expert_stacks import class_of
from fused_remat.layers.modules import has_adapters
from fused_remat.layers.packed import Packed, packed_weight
from fused_remat.spec import PackedSpec
from fused_remat.steps.linear import Linear
from fused_remat.steps.mixture import ExpertsDown, ExpertsUp
from fused_remat.steps.node import Node
from fused_remat.tracing.builder import Builder
from fused_remat.tracing.isolation import replica
from fused_remat.tracing.values import Untraceable

#: Formats of a layer's quantized weights, by the names that the weights have in a trace.
Formats = Mapping[str, PackedSpec]
#: Steps that read quantized weights.
_PRODUCTS = (Linear, ExpertsUp, ExpertsDown)


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
            found[_name_of(module, path)] = packed
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
        owner, _, leaf = name.rpartition(".")
        if len(spec.shape) == 3:
            _put_stack(copy.get_submodule(owner), leaf, spec, like)
            continue
        parent, _, leaf = owner.rpartition(".")
        owner = copy.get_submodule(parent)
        bias = owner._modules[leaf].bias
        linear: Any = nn.Linear(spec.shape[1], spec.shape[0], bias is not None, device="meta")
        linear.weight = nn.Parameter(like.new_zeros(()).expand(spec.shape), requires_grad=False)
        if bias is not None:
            linear.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, False)
        linear.training = owner._modules[leaf].training
        owner._modules[leaf] = linear
    return copy  # type: ignore[no-any-return]


def packed_at(layer: nn.Module, name: str, x: Tensor) -> Packed | None:
    """Return the quantized weight of this name of a layer with input x, or None.

    Raises: as `packed_weight`.
    """
    path, _, leaf = name.rpartition(".")
    module = layer.get_submodule(path)
    if "parametrizations" in module._modules:
        module, path = module.parametrizations[leaf], name  # type: ignore[index,assignment]
    return packed_weight(module, path, x)


def _name_of(module: nn.Module, path: str) -> str:
    if type(module) is not ParametrizationList:
        return f"{path}.weight"
    *owner, _, leaf = path.split(".")
    return ".".join([*owner, leaf])


def _put_stack(owner: Any, leaf: str, spec: PackedSpec, like: Tensor) -> None:
    """Put a plain parameter without values in place of a quantized stack of a replica."""
    own = owner._modules["parametrizations"]._modules
    del own[leaf]
    if not own:
        owner.__class__ = class_of(owner)
        del owner._modules["parametrizations"]
        owner._forward_pre_hooks, owner._forward_hooks = OrderedDict(), OrderedDict()
    owner._parameters[leaf] = nn.Parameter(like.new_zeros(()).expand(spec.shape), False)


def check_reads(t: Builder, nodes: Sequence[Node]) -> None:
    """Raise Untraceable if a step other than a linear layer reads a quantized weight."""
    sources = t.recording.sources
    for node in nodes if t.formats else ():
        for name in [name for name in node.params if name in t.values]:
            read = {sources.get(n) for n in t.roots(t.values[name])} & t.formats.keys()
            if read and not (isinstance(node, _PRODUCTS) and name in t.formats):
                raise Untraceable(f"{node.name} reads a quantized weight, {read.pop()}")
