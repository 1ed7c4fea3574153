"""Quantized weights of linear layers of other libraries, read as tensors and a `PackedSpec`.

Classes are recognized by name, and no library is imported. A format is compared once with the
module's own forward and backward; what is not known, or differs, is `Unsupported`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fused_remat.layers.eligibility import (
    PLAIN,
    Unsupported,
    check_foreign_module,
    check_module,
    parameters_of,
    qualified,
)
from fused_remat.spec import PackedSpec
from fused_remat.steps.packed import dequantize, of_experts, packed_product


class Packed(NamedTuple):
    """A quantized weight: its format, and the tensors that it names."""

    spec: PackedSpec
    tensors: tuple[Tensor, ...]


#: Relative differences of a product by a format from that of its module, which are rounding errors.
_LIMITS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_TOKENS = 8
_STACK = ("bitsandbytes.nn.parametrize", "Bnb4bitParametrization")
#: By class, format, device and dtype, why a format does not compute what its module does.
_TESTED: dict[Any, str | None] = {}
_spec = functools.lru_cache(1024)(PackedSpec)
_without_compute = functools.lru_cache(1024)(functools.partial(replace, compute=None))


def packed_weight(module: Any, path: str, x: Tensor) -> Packed | None:
    """Return the quantized weight of a linear layer; None for any other module.

    `x` has the dtype and device of the layer's input. `path` names the module in messages.

    Raises: RuntimeError if the weight requires a gradient; ValueError for blocks of another size
        than the weight's; Unsupported for a format that a block cannot dequantize.
    """
    read = reader_of(module)
    if read is None:
        return None
    if torch.compiler.is_compiling():  # which traces neither the trial nor the libraries' classes
        raise Unsupported(f"{path}.weight is quantized", "not compiled")
    found: Packed = read(module, path)
    for t in found.tensors:
        if t.device != x.device:
            raise Unsupported(f"{path}.weight is on {t.device}, its layer's input on {x.device}")
    key = type(module), found.spec, x.device, x.dtype, module.training
    if key not in _TESTED:
        _TESTED[key] = _difference(module, found, x)
    if (reason := _TESTED[key]) is not None:
        raise Unsupported(f"{path} is {qualified(type(module))}, and {reason}")
    if found.spec.compute == x.dtype:  # as before the module's first call, which may set it
        return Packed(_without_compute(found.spec), found.tensors)
    return found


def reader_of(module: Any) -> Callable[[Any, str], Packed] | None:
    """Return the function that reads a module's quantized weight, or None if it has none."""
    kind = type(module)
    read = _READERS.get(_kind(module))
    if kind is ParametrizationList and _kind(module[0]) == _STACK:
        return _bnb_stack
    if read is None and kind is nn.Linear:
        weight = type(module._parameters.get("weight"))
        read = _torchao if weight.__module__.startswith("torchao.") else None
    return read


def _kind(module: Any) -> tuple[str, str]:
    kind = type(module)
    return kind.__module__, kind.__qualname__


def unpacked_parameters(layer: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters by name, except quantized weights."""
    paths = tuple([f"{path}." for path, module in layer.named_modules() if reader_of(module)])
    params = parameters_of(layer)
    return {
        n: p for n, p in params.items() if n.endswith(".bias") or not n.startswith(paths or (" ",))
    }


def _difference(module: Any, packed: Packed, x: Tensor) -> str | None:
    """Return how a module and its format differ for random tokens, or None."""
    spec, generator = packed.spec, torch.Generator().manual_seed(0)
    random = functools.partial(torch.randn, generator=generator)
    given = random(_TOKENS, spec.shape[1]).to(x.device, x.dtype).requires_grad_()
    dy = random(_TOKENS, spec.shape[0]).to(given)
    if type(module) is ParametrizationList:
        with torch.no_grad():
            return _stack_difference(module, packed)
    try:
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            y = type(module).forward(module, given)
            (dx,) = torch.autograd.grad(y, given, dy)
            bias = module.bias
            dtype = spec.compute or x.dtype
            own, own_bias = given.detach().to(dtype), None if bias is None else bias.to(dtype)
            mine = packed_product(spec, packed.tensors, own, own_bias)
            if mine is None:
                mine = F.linear(own, dequantize(spec, packed.tensors, dtype), own_bias)
            mine_dx = dy.to(dtype) @ dequantize(spec, packed.tensors, spec.dtype or dtype).to(dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"a trial of its format raises {type(error).__name__}: {error}"
    limit = max(_LIMITS[d] for d in (x.dtype, dtype, spec.dtype or dtype))
    for what, a, b in (("result", mine, y), ("gradient", mine_dx, dx)):
        distance = float((a - b).detach().double().norm() / b.detach().double().norm())
        if not distance <= limit:
            return f"its weight as a block dequantizes it gives another {what} ({distance:.0e})"
    return None


def _stack_difference(module: Any, packed: Packed) -> str | None:
    entire, (spec, tensors) = module(), of_experts(*packed)
    for expert, matrix in enumerate(entire):
        own = dequantize(spec, [t[expert] for t in tensors], matrix.dtype)
        if not torch.equal(own, matrix):
            return f"expert {expert} alone has other elements, for rows of {spec.shape[1]} elements"
    return None


def _checked(
    path: str, spec: PackedSpec, param: Tensor, tensors: Sequence[Tensor], blocks: Sequence[Any]
) -> Packed:
    """Return a packed weight after checks; `blocks`: what has blocks, its elements, size, count."""
    error: Exception | None = None
    if param.requires_grad:
        error = RuntimeError(
            f"{path}.weight is quantized ({spec.kind}) and has requires_grad=True, but a quantized "
            "weight cannot be trained: call requires_grad_(False) on it, and train an adapter"
        )
    for what, elements, size, count in blocks:
        if math.ceil(elements / size) != count:
            error = ValueError(
                f"{path}.weight: {what} has {elements} elements in blocks of {size}, which is "
                f"{math.ceil(elements / size)} blocks, but it has scales of {count} blocks, of "
                f"{elements / max(count, 1):g} elements; quantize the weight again"
            )
    if error is not None:
        error.callers = True  # type: ignore[attr-defined]  # no block's own, which is contained
        raise error
    for t in tensors:
        if type(t) not in PLAIN:
            raise Unsupported(f"{path}.weight is {qualified(type(t))}")
    return Packed(spec, tuple(tensors))


def _bnb_4bit(module: Any, path: str) -> Packed:
    check_foreign_module(module, path, "bitsandbytes.nn.modules", type(module).__qualname__)
    weight = module.weight
    state = getattr(weight, "quant_state", None) or module.quant_state
    if state is None:
        raise Unsupported(f"{path} is not quantized yet: move it to its device")
    return _with_state(
        path, weight, state, module.compute_dtype if module.compute_type_is_set else None
    )


def _bnb_stack(module: Any, path: str) -> Packed:
    """Read a stack of experts' matrices that `bitsandbytes.nn.parametrize` quantized."""
    if len(module) > 1:
        raise Unsupported(
            f"{path} has {len(module)} parametrizations, one of which dequantizes it; PEFT 0.21 "
            "leaves its own behind in each forward"
        )
    shape, size = module[0].quant_state.shape, module[0].quant_state.blocksize
    if len(shape) != 3 or math.prod(shape[1:]) % size:
        raise Unsupported(
            f"{path} has shape {tuple(shape)} in blocks of {size} elements, which do not end where "
            "experts do"
        )
    return _with_state(path, module.original, module[0].quant_state, None)


def _with_state(path: str, weight: Any, state: Any, compute: torch.dtype | None) -> Packed:
    if getattr(state, "packing_format_for_cpu", False):
        raise Unsupported(
            f"bitsandbytes has packed {path}.weight for inference on this CPU, and its own forward "
            "then gives its input no gradient; load the model again, and call train() before the "
            "first forward"
        )
    shape, inner = tuple(state.shape), getattr(state, "state2", None)
    blocks = [("the weight", math.prod(shape), state.blocksize, state.absmax.numel())]
    tensors, parts = [weight.detach(), state.absmax], ["absmax"]
    if inner is not None:
        blocks.append(("absmax", state.absmax.numel(), inner.blocksize, inner.absmax.numel()))
        tensors += [inner.code, inner.absmax, state.offset]
        parts += ["nested_code", "nested_absmax", "offset"]
    spec = _spec(
        kind="bnb_4bit", shape=shape, dtype=state.dtype, parts=tuple(parts),
        compute=compute,
        options=(state.blocksize, state.quant_type, 0 if inner is None else inner.blocksize),
    )  # fmt: skip
    return _checked(path, spec, weight, tensors, blocks)


def _bnb_int8(module: Any, path: str) -> Packed:
    check_foreign_module(module, path, "bitsandbytes.nn.modules", type(module).__qualname__)
    weight, state = module.weight, module.state
    if state.has_fp16_weights or weight.dtype != torch.int8:
        raise Unsupported(f"{path} quantizes its weight at every call (has_fp16_weights)")
    scale = state.SCB if weight.SCB is None else weight.SCB
    spec = _spec(
        kind="bnb_int8", shape=tuple(weight.shape), parts=("scale",),
        options=(float(state.threshold),),
    )  # fmt: skip
    return _checked(path, spec, weight, [weight.detach(), scale], ())


def _torchao(module: Any, path: str) -> Packed:
    check_module(module, path, nn.Linear)
    weight = module.weight
    state, name = vars(weight), type(weight).__qualname__
    bounds = {"Int8Tensor": (None, None), "IntxUnpackedToInt8Tensor": _bounds(state)}.get(name)
    quantizes = [n for n in ("act_quant_kwargs", "activation_quantization") if state.get(n)]
    quantizes += [n for n in ("act_pre_scale", "act_quant_scale") if state.get(n) is not None]
    if bounds is None or quantizes or weight.dim() != 2:
        why = f" with {quantizes[0]}" if quantizes else ""
        raise Unsupported(
            f"{path}.weight is {name} of torchao{why}, which a block does not dequantize"
        )
    tensors, parts = [weight.qdata, weight.scale], ["scale"]
    if weight.zero_point is not None:
        tensors.append(weight.zero_point)
        parts.append("zero_point")
    block = tuple(weight.block_size)
    spec = _spec(
        kind="torchao", shape=tuple(weight.shape), dtype=weight.dtype, parts=tuple(parts),
        options=(block, bounds),
    )  # fmt: skip
    blocks = ("the weight", weight.numel(), math.prod(block), weight.scale.numel())
    return _checked(path, spec, weight, tensors, [blocks])


def _bounds(state: Any) -> tuple[int, int] | None:
    target = str(state.get("target_dtype")).removeprefix("torch.int")
    return (-(2 ** (int(target) - 1)), 2 ** (int(target) - 1) - 1) if target.isdigit() else None


def _hqq(module: Any, path: str) -> Packed:
    check_foreign_module(module, path, "hqq.core.quantize", "HQQLinear")
    meta: Any = module.meta
    if not module.ready or not {"scale", "zero"} <= {*meta} or meta["quant_scale"]:
        raise Unsupported(f"{path} has quantized or offloaded scales, which a block does not read")
    keys = ("nbits", "group_size", "axis", "packing", "view_as_float")
    for key in ("scale", "zero"):
        if meta[key].is_inference():  # no graph of autograd may save it
            meta[key] = meta[key].clone()
    view = str(meta["unpack_view_dtype"]).removeprefix("torch.")
    spec = _spec(
        kind="hqq", shape=tuple(meta["shape"]), dtype=module.compute_dtype,
        parts=("scale", "zero"), options=(view, *[(key, meta[key]) for key in keys]),
    )  # fmt: skip
    size = meta["group_size"] or spec.shape[meta["axis"]]
    blocks = ("the weight", math.prod(spec.shape), size, meta["scale"].numel())
    tensors = [module.W_q.detach(), meta["scale"], meta["zero"]]
    return _checked(path, spec, module.W_q, tensors, [blocks])


_READERS: dict[tuple[str, str], Callable[[Any, str], Packed]] = {
    **dict.fromkeys(
        [("bitsandbytes.nn.modules", f"Linear{kind}") for kind in ("4bit", "NF4", "FP4")], _bnb_4bit
    ),
    ("bitsandbytes.nn.modules", "Linear8bitLt"): _bnb_int8,
    ("hqq.core.quantize", "HQQLinear"): _hqq,
}
