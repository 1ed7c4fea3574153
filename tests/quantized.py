"""Quantized linear layers of bitsandbytes, torchao and HQQ in the place of plain ones."""

from __future__ import annotations

from collections.abc import Callable

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup


def _4bit(linear: nn.Linear, compute: torch.dtype | None, **options) -> nn.Module:
    bias = linear.bias is not None
    new = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias, compute_dtype=compute, **options
    )
    given = {"requires_grad": False, "module": new, **options}
    new.weight = bnb.nn.Params4bit(linear.weight.data.clone(), **given)
    new.bias = linear.bias
    return new.to("cpu")  # which quantizes


def _int8(linear: nn.Linear, _: torch.dtype | None) -> nn.Module:
    bias = linear.bias is not None
    new = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias, has_fp16_weights=False, threshold=6.0
    )
    new.weight = bnb.nn.Int8Params(
        linear.weight.data.clone(), requires_grad=False, has_fp16_weights=False
    )
    new.bias = linear.bias
    return new.to("cpu")


def _hqq(linear: nn.Linear, _: torch.dtype | None) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=4, group_size=16)
    return HQQLinear(linear, config, compute_dtype=linear.weight.dtype, device="cpu")


def _torchao(config) -> Callable[[nn.Linear, torch.dtype | None], nn.Module]:
    def quantized(linear: nn.Linear, _: torch.dtype | None) -> nn.Module:
        quantize_(linear.requires_grad_(False), config)
        return linear

    return quantized


#: By name, functions of a plain linear layer and a dtype for products, None for the input's.
FORMATS: dict[str, Callable[..., nn.Module]] = {
    "nf4": lambda *args: _4bit(*args, quant_type="nf4"),
    "nf4, one level": lambda *args: _4bit(*args, quant_type="nf4", compress_statistics=False),
    "fp4": lambda *args: _4bit(*args, quant_type="fp4"),
    "bitsandbytes int8": _int8,
    "torchao int8": _torchao(Int8WeightOnlyConfig()),
    "torchao int4": _torchao(
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))
    ),
    "hqq": _hqq,
}


def quantize(
    model: nn.Module, name: str, compute: torch.dtype | None = None, but: tuple[str, ...] = ()
) -> nn.Module:
    """Freeze a model, and quantize its linear layers except the head and those named in `but`."""
    model.requires_grad_(False)
    for path, module in [*model.named_modules()]:
        if type(module) is nn.Linear and not path.endswith(("lm_head", *but)):
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, FORMATS[name](module, compute))
    # By which PEFT chooses its classes, and transformers' loader sets.
    model.is_loaded_in_4bit = name.startswith(("nf4", "fp4"))
    model.is_loaded_in_8bit = name.startswith("bitsandbytes")
    return model


def adapt(model: nn.Module, **options) -> nn.Module:
    """Return a model with LoRA on its quantized layers, whose matrices are random."""
    names = {path.rpartition(".")[2] for path, m in model.named_modules() if _takes_adapter(m)}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=sorted(names - {"lm_head"}), **options)
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0.0, 0.05)
    return model.train()


def _takes_adapter(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "HQQLinear"
