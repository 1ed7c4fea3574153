"""Read what the modules of a layer compute, as tensors, numbers and functions of its block.

The fused path reads parameters instead of calling modules, so it has to know what a call would
compute. Where that is not known exactly, `Unsupported` gives the reason. Classes of PEFT and
transformers are recognized by name; neither package is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fused_remat.layers.eligibility import (
    PLAIN,
    Precision,
    Unsupported,
    check_foreign_module,
    check_module,
    qualified,
    wrong_class,
)
from fused_remat.layers.packed import Packed, packed_weight
from fused_remat.ops.activation import Activation, activation_name, on_matrices, prepare
from fused_remat.spec import LoraSpec, lora_params
from fused_remat.steps.collective import is_dtensor

_CONV1D = ("transformers.pytorch_utils", "Conv1D")
#: By class, the layers of PEFT that compute what `updates_of` reads, and their forward's module.
_LORA = {
    (f"peft.tuners.lora.{module}", name): f"peft.tuners.lora.{source}"
    for module, name, source in (
        ("layer", "Linear", "layer"), ("bnb", "Linear4bit", "bnb"), ("bnb", "Linear8bitLt", "bnb"),
        ("torchao", "TorchaoLoraLinear", "layer"), ("hqq", "HqqLoraLinear", "hqq"),
    )
}  # fmt: skip
_DORA = ("peft.tuners.lora.variants", "DoraLinearVariant")
_MAGNITUDES = ("peft.tuners.lora.dora", "DoraLinearLayer")
_SAVED = ("peft.utils.other", "ModulesToSaveWrapper")
#: Biases of packed projections, by the layers that have parts of them.
_PACKED_BIASES = {"qkv.bias": ("q", "k", "v"), "cross.bias": ("cross_q", "cross_k", "cross_v")}


#: An active adapter (a, b, scale, p, m): + scale * dropout_p(x) @ a.T @ b.T; a (rank, in); DoRA's
#: magnitudes m (out,), or None.
Update = tuple[Tensor, Tensor, float, float, Tensor | None]
#: A layer computes x @ weight.T + bias, and its updates; weight is (out, in).
Linear = tuple[Tensor | Packed, Tensor | None, tuple[Update, ...]]


def read_linear(module: Any, path: str, x: Tensor | None = None) -> Linear:
    """Return the weight, bias and updates of the linear layer `module`, `path` in messages.

    The updates are those of PEFT's active LoRA adapters, with their current mode and scaling. `x`
    has the dtype and device of the layer's input; without it, quantized weights are not read.
    """
    is_linear = type(module) is nn.Linear
    if not is_linear:  # rarely; this runs at every call
        module = active_module(module, path)
        source = _LORA.get(_name(module))
        if source is not None:
            check_foreign_module(module, path, *_name(module), source=source)
            base, base_bias, inner = read_linear(
                module._modules["base_layer"], f"{path}.base_layer", x
            )
            if inner:
                raise Unsupported(f"{path}.base_layer has adapters itself")
            like: Any = x if isinstance(base, Packed) else base
            return base, base_bias, updates_of(module, path, like.dtype)
        packed = None if x is None else packed_weight(module, path, x)
        if packed is not None:
            return packed, tensor_of(module, "bias"), ()
    is_conv1d = not is_linear and _name(module) == _CONV1D
    if is_conv1d:
        check_foreign_module(module, path, *_CONV1D)
    else:
        check_module(module, path, nn.Linear)
    weight, bias = affine_of(module)
    if weight is None:
        raise Unsupported(f"{path} has no weight")
    if is_linear and type(weight) not in PLAIN and x is not None:
        packed = packed_weight(module, path, x)
        if packed is not None:
            return packed, bias, ()
    return weight.t() if is_conv1d else weight, bias, ()


def affine_of(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and bias of a module: parameters, or the tensors that replaced them."""
    own = module._parameters
    return (
        own["weight"] if "weight" in own else tensor_of(module, "weight"),
        own["bias"] if "bias" in own else tensor_of(module, "bias"),
    )


def tensor_of(module: Any, name: str) -> Tensor | None:
    """Return the tensor `module.name`, a parameter or what replaced it; None if there is none."""
    # Not getattr: a parametrization would compute, and update its buffers.
    for where in (module._parameters, module._buffers, module.__dict__):
        own = where.get(name)
        if own is not None:
            return own if isinstance(own, Tensor) else None
    return None


def without_adapters(module: Any) -> Any:
    """Return the layer that PEFT's LoRA wraps; `module` if it is none."""
    while has_adapters(module):
        module = module._modules["base_layer"]
    return module


def active_module(module: Any, path: str) -> Any:
    """Return the active copy of `module` if PEFT trains one (modules_to_save), else `module`."""
    if not isinstance(module, nn.Module) or _name(module) != _SAVED:
        return module
    check_foreign_module(module, path, *_SAVED)
    wrapper: Any = module
    active = wrapper.active_adapters
    if not active or wrapper._disable_adapters or any(n not in wrapper._adapters for n in active):
        return wrapper._modules["original_module"]
    return wrapper._modules["modules_to_save"][active[0]]


def split_biases(
    tensors: Mapping[str, Tensor | None], size: int = 1, rank: int = 0
) -> dict[str, Tensor | None]:
    """Split the biases of packed projections into those of q, k and v, one rank's part of each."""
    split = dict(tensors)
    for packed, layers in _PACKED_BIASES.items():
        bias = split.pop(packed, None)
        if bias is not None:
            parts = bias.view(3, size, -1)[:, rank].unbind()
            split.update(zip([f"{layer}.bias" for layer in layers], parts, strict=True))
    return split


def update_tensors(
    updates: Mapping[str, tuple[Update, ...]], dtype: torch.dtype | None
) -> tuple[dict[str, Tensor | None], tuple[LoraSpec, ...]]:
    """Return the matrices of a block's low-rank updates (by layer) by name, and their specs.

    `dtype` is that of the layers' inputs; None under autocast, whose dtype products have.
    """
    loras: list[LoraSpec] = []
    matrices: list[Tensor] = []
    for layer, group in updates.items():
        for a, b, scale, p, m in group:
            own = None if dtype is None or a.dtype == dtype else a.dtype
            is_dora = m is not None
            loras.append(LoraSpec(layer=layer, scale=scale, dropout=p, dtype=own, dora=is_dora))
            matrices += [a, b] if m is None else [a, b, m]
    return dict(zip(lora_params(loras), matrices, strict=True)), tuple(loras)


def read_dropout(module: Any, path: str) -> float:
    """Return the probability that an `nn.Dropout` or `nn.Identity` currently applies."""
    check_module(module, path, nn.Dropout, nn.Identity)
    state = module.__dict__
    p = float(state.get("p", 0.0)) if state["training"] else 0.0
    if not 0.0 <= p <= 1.0:
        raise Unsupported(f"{path} has the probability {p}, outside [0, 1]")
    return p


def has_adapters(module: Any) -> bool:
    """Return whether a module is a linear layer with adapters of PEFT's LoRA."""
    return _name(module) in _LORA


def _name(module: Any) -> tuple[str, str]:
    kind = type(module)
    return kind.__module__, kind.__qualname__


def updates_of(module: Any, path: str, dtype: torch.dtype) -> tuple[Update, ...]:
    """Return the active adapters of a layer of PEFT's LoRA."""
    if module._disable_adapters:
        if module.merged_adapters:  # PEFT's forward takes them out of the weight
            raise Unsupported(f"{path} has merged adapters while they are disabled")
        return ()
    if module.merged_adapters:
        return ()
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) > 1 and any(module.use_dora.get(name) for name in active):
        raise Unsupported(f"{path} has several active adapters, one of which is DoRA")
    return tuple(
        [_update(module, name, f"the adapter {name!r} of {path}", dtype) for name in active]
    )


def _update(module: Any, name: str, called: str, dtype: torch.dtype) -> Update:
    variant = getattr(module, "lora_variant", {}).get(name)
    if _name(variant) != _DORA and (variant is not None or module.use_dora.get(name)):
        kind = "DoRA" if variant is None else qualified(type(variant))
        raise Unsupported(f"{called} is {kind}; the fused path supports LoRA and DoRA")
    matrices = []
    for letter, layers in (("A", module.lora_A), ("B", module.lora_B)):
        layer = layers._modules[name]
        check_module(layer, f"{letter} of {called}", nn.Linear)
        weight, bias = affine_of(layer)
        if bias is not None or weight is None:
            raise Unsupported(f"{called} has {'no weight' if weight is None else 'a bias'}")
        matrices.append(weight)
    a, b = matrices
    if a.dtype != b.dtype:
        raise Unsupported(f"{called} has A of {a.dtype} and B of {b.dtype}")
    if a.dtype != dtype and not getattr(module, "cast_input_dtype_enabled", True):
        raise Unsupported(f"{called} is {a.dtype}, its layer {dtype}, and casting is disabled")
    p = read_dropout(module.lora_dropout._modules[name], f"the dropout of {called}")
    scale = module.scaling[name]
    if type(scale) not in (int, float):
        raise Unsupported(f"the scaling of {called} is {qualified(type(scale))}; expected a number")
    return a, b, float(scale), p, None if variant is None else _magnitudes(module, name, called)


def _magnitudes(module: Any, name: str, called: str) -> Tensor:
    """Return DoRA's magnitudes."""
    scaling, dropout = module.lora_magnitude_vector._modules[name], module.lora_dropout[name]
    check_foreign_module(scaling, f"the magnitudes of {called}", *_MAGNITUDES)
    if module.training != dropout.training and not isinstance(dropout, nn.Identity):
        raise Unsupported(f"{called} and its dropout differ in training mode")
    magnitudes = tensor_of(scaling, "weight")
    assert magnitudes is not None
    return magnitudes


def read_projections(
    modules: Mapping[str, Any], path: str, names: tuple[str, ...], width: int
) -> dict[str, Tensor | None]:
    """Return the weights of the `nn.MultiheadAttention` at `path` by the block's names.

    `names` are those of the packed projection, of q, k and v, and of the output projection.
    """
    attn = modules[path]
    check_module(attn, path, nn.MultiheadAttention)
    packed, *split, output = names
    widths = attn.embed_dim, attn.kdim, attn.vdim
    if widths != (width, width, width):
        raise Unsupported(f"{path} has embed_dim, kdim and vdim {widths}, expected {width}")
    if attn.bias_k is not None or attn.add_zero_attn:
        raise Unsupported(f"{path} has add_bias_kv or add_zero_attn")
    found: dict[str, Tensor | None] = {}
    if attn._qkv_same_embed_dim:
        found[f"{packed}.weight"] = tensor_of(attn, "in_proj_weight")
    else:
        for letter, name in zip("qkv", split, strict=True):
            found[f"{name}.weight"] = tensor_of(attn, f"{letter}_proj_weight")
    # PyTorch reads the output's weight and does not call it: an adapter on it does not act.
    proj, kind = modules[f"{path}.out_proj"], NonDynamicallyQuantizableLinear
    if type(proj) is not kind:
        proj = without_adapters(proj)
    if type(proj) is not kind:
        raise wrong_class(proj, f"{path}.out_proj", qualified(kind))
    weight, bias = affine_of(proj)
    found[f"{output}.weight"] = weight
    for name, tensor in found.items():
        if tensor is None:
            raise Unsupported(f"{path} has no {name}")
    found[f"{output}.bias"] = bias
    bias = tensor_of(attn, "in_proj_bias")
    found[f"{packed}.bias"] = bias
    if attn._qkv_same_embed_dim or is_dtensor(bias):
        return found
    return split_biases(found)


def read_activation(
    activation: Any, x: Tensor, width: int, seq_first: bool, precision: Precision | None
) -> Activation:
    """Return the activation of a layer whose MLP is `width` wide, for a call on `x`.

    A function that is no entry of `ACTIVATIONS` is called once on one token, to see which tensors
    it captures. A block calls it on all tokens, in the layout of the stock layer: `seq_first` is
    for x of (S, B, D). Raises `Unsupported` if backward cannot call the function again.
    """
    name = activation_name(activation)
    if name is not None:
        return Activation(name, {}, {})
    if torch.compiler.is_compiling():
        raise Unsupported("a compiled backward cannot call the activation function again")
    dtype = x.dtype if precision is None else precision.compute or precision.stream
    token = x.new_zeros((*(1,) * (x.dim() - 1), width), dtype=dtype)
    prepared = prepare(activation, token, None if precision is None else precision.autocast)
    if isinstance(prepared, str):
        raise Unsupported(f"the activation function {prepared}")
    function = on_matrices(prepared.functions["activation"], x.shape[:-1], seq_first)
    return prepared._replace(functions={"activation": function})
