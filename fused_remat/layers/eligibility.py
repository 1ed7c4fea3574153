"""Checks of what the fused path supports, which raise `Unsupported` with the reason.

The fused path reads parameters instead of calling submodules. It applies to a layer only if that
makes no difference: submodules of exactly the known classes, without hooks, parametrizations or
overrides. Bad input is also a reason: the stock forward then raises its own error.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.utils._device import DeviceContext

from fused_remat.execution.executor import autocast_on
from fused_remat.layer_specs import cached
from fused_remat.moe_spec import MoESpec
from fused_remat.ops.checks import CASTABLE
from fused_remat.spec import BlockSpec, PackedSpec
from fused_remat.steps.collective import in_context_parallel, is_dtensor
from fused_remat.steps.linear import LOW

PLAIN = (Tensor, nn.Parameter)
_ATTENTION = F.scaled_dot_product_attention
#: PyTorch's own forwards of the classes that a block supports; of any other registered norm, the
#: forward of its class when a layer was first read.
_FORWARDS: dict[type, Any] = {
    kind: kind.forward
    for kind in (
        nn.Dropout, nn.Identity, nn.LayerNorm, nn.Linear, nn.MultiheadAttention, nn.RMSNorm,
    )
}  # fmt: skip
_GLOBAL_HOOKS = tuple(
    getattr(_module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)
#: Modules whose global hooks only observe: FlopCounterMode, its module tracker, CommDebugMode.
_OBSERVERS = (
    "torch.utils.module_tracker",
    "torch.utils.flop_counter",
    "torch.distributed.tensor.debug._comm_mode",
)
#: Why a layer or a submodule cannot be part of a block; hooks of diffusers move or cast weights.
REPLACED = "forward was replaced by a hook, which a block would not call"
#: Module of transformers' recorders, hooks that act only while a model returns their outputs.
RECORDERS = "transformers.utils.output_capturing"
#: The one of these outputs that a block returns.
ROUTER_LOGITS = "router_logits"
#: Devices on which the fused path supports autocast.
_DEVICES = ("cpu", "cuda")
#: What the names of norms in blocks begin with.
_NORMS = ("norm", "post", "q_norm", "k_norm")


class Unsupported(Exception):
    """A call that the fused path does not support. The text is the reason."""


@dataclass(frozen=True)
class Reason:
    """The reason why a call runs the stock forward."""

    text: str  # for messages
    quiet: bool = False  # whether the stock forward is intended, so that there is no warning
    uncompiled: bool = False  # whether the reason is that the call is compiled
    #: Whether a second forward would compute something else, or change other state again.
    once: bool = False
    #: Conditions on the sizes of a call, with their outcomes where a trace failed.
    conditions: tuple[tuple[str, bool], ...] = ()


def qualified(kind: type) -> str:
    """Return the name of a class with its module, shortened to torch.nn and torch if possible."""
    name = kind.__qualname__
    for package in (nn, torch):
        if getattr(package, name, None) is kind:
            return f"{package.__name__}.{name}"
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


def parameters_of(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Return a module's parameters by name, plain tensors that stand for parameters included.

    Replicas of `nn.DataParallel` and modules of FSDP1 have such tensors as attributes.
    """
    found: dict[str, Tensor] = dict(module.named_parameters(recurse=recurse))
    for path, owner in module.named_modules() if recurse else (("", module),):
        former = owner.__dict__.get("_former_parameters", ())  # of a replica, frozen ones too
        for name, t in owner.__dict__.items():
            if type(t) is Tensor and (t.requires_grad or name in former):
                found[f"{path}.{name}" if path else name] = t
    return found


def check_module(module: Any, path: str, *kinds: type) -> None:
    """Raise `Unsupported` unless calling `module` runs PyTorch's forward of one of `kinds`."""
    kind = type(module)
    if kind not in kinds:
        raise wrong_class(module, path, " or ".join([qualified(kind) for kind in kinds]))
    state = module.__dict__
    if (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
    ):
        raise Unsupported(f"{path} has hooks")
    if "forward" in state or kind.forward is not _FORWARDS.setdefault(kind, kind.forward):
        raise Unsupported(f"{path}.forward was replaced")


def check_foreign_module(
    module: Any, path: str, package: str, name: str, decorates: bool = False, source: str = ""
) -> None:
    """Raise `Unsupported` unless calling `module` runs what `package` wrote for its class `name`.

    `decorates`: the package decorates its forwards; else a decorator means that it was patched.
    `source`: the Python module of its forward, if not `package`. Hooks by which transformers
    records outputs are allowed.
    """
    kind = type(module)
    if (kind.__module__, kind.__qualname__) != (package, name):
        raise wrong_class(module, path, f"{package}.{name}")
    state, forward = module.__dict__, kind.forward  # whose module is that of the patch
    wrapped = not decorates and hasattr(forward, "__wrapped__")
    if "forward" in state or forward.__module__ != (source or package) or wrapped:
        raise Unsupported(f"{path}.forward was replaced")
    acts = state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]
    for hook in state["_forward_hooks"].values():
        acts = acts or getattr(hook, "__module__", None) != RECORDERS
    if acts:
        raise Unsupported(f"{path} has hooks")


def is_recording() -> bool:
    """Return whether transformers records outputs of submodules now."""
    capturing = sys.modules.get(RECORDERS)
    return capturing is not None and bool(capturing._active_collector.get())


@contextlib.contextmanager
def unrecorded_outputs() -> Iterator[None]:
    """Hide calls of submodules inside from the recorders of transformers."""
    collector: Any = sys.modules[RECORDERS]._active_collector if is_recording() else None
    token = None if collector is None else collector.set(None)
    try:
        yield
    finally:
        if collector is not None:
            collector.reset(token)


def recorded(hook: Any) -> str:
    """Return the key of the model's output that a recorder of transformers records now, or ""."""
    if not is_recording():
        return ""
    requested = sys.modules[RECORDERS]._active_collector.get()
    key: str = inspect.getclosurevars(hook).nonlocals["key"]
    return key if key in requested else ""


def wrong_class(module: Any, path: str, supported: str) -> Unsupported:
    if module is None:
        return Unsupported(f"{path} is missing")
    return Unsupported(f"{path} is {qualified(type(module))}; the fused path supports {supported}")


def check_global_hooks() -> None:
    """Raise `Unsupported` if a hook is registered on all modules that may act."""
    for hooks in _GLOBAL_HOOKS:
        for hook in hooks.values():
            if getattr(hook, "__module__", None) not in _OBSERVERS:
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise Unsupported(f"the hook {name} is registered on all modules")


def check_input(x: Any, name: str, dims: tuple[int, ...]) -> None:
    """Raise `Unsupported` unless the layer's input is a plain floating tensor, outside modes."""
    if type(x) not in PLAIN:
        raise Unsupported(f"{name} is {qualified(type(x))}; the fused path supports torch.Tensor")
    if x.is_nested:
        raise Unsupported(f"{name} is a nested tensor")
    if x.dim() not in dims:
        supported = " or ".join(map(str, dims))
        raise Unsupported(
            f"{name} has shape {tuple(x.shape)}; the fused path supports tensors of {supported} "
            "dimensions"
        )
    if not x.dtype.is_floating_point:
        raise Unsupported(f"{name} is {x.dtype}; the fused path supports floating-point dtypes")
    if F.scaled_dot_product_attention is not _ATTENTION and in_context_parallel():
        raise Unsupported("context_parallel is active, whose attention a block does not call")
    if torch._C._len_torch_function_stack():
        for mode in torch.overrides._get_current_function_mode_stack():
            if not isinstance(mode, DeviceContext):
                raise Unsupported(f"the function mode {qualified(type(mode))} is active")


def check_mask(
    name: str, mask: Any, x: Tensor, low: torch.dtype | None, *shapes: tuple[int, ...],
    bools: bool = True,
) -> None:  # fmt: skip
    """Raise `Unsupported` unless a mask has one of `shapes`, and a dtype of the call's on `x`."""
    if type(mask) not in PLAIN:
        raise wrong_class(mask, name, "torch.Tensor")
    dtypes = (x.dtype, torch.float32, low, torch.bool if bools else None)
    if mask.dtype not in dtypes or mask.device != x.device or tuple(mask.shape) not in shapes:
        raise Unsupported(
            f"{name} is {mask.dtype} of shape {tuple(mask.shape)} on {mask.device}, expected "
            f"{'bool or ' if bools else ''}{x.dtype} of shape {' or '.join(map(str, shapes))} on "
            f"{x.device}"
        )


def check_dropout(*probabilities: float) -> None:
    """Raise `Unsupported` unless all probabilities are between 0 and 1."""
    for p in probabilities:
        if not 0.0 <= p <= 1.0:
            raise Unsupported(f"a dropout probability is {p}, outside [0, 1]")


def is_readable(param: Tensor) -> bool:
    """Return whether a parameter is a plain tensor, or a DTensor (of which a shard is read)."""
    return type(param) in PLAIN or is_dtensor(param)


def packed_as(module: nn.Module, param: Tensor) -> str:
    """Return the class or dtype of a packed (e.g. quantized) parameter; "" if it is not packed."""
    if not (is_readable(param) or getattr(param, "_is_flat_param", False)):  # FSDP1's own
        return qualified(type(param))
    wide = param.is_complex() or (param.is_floating_point() and param.itemsize > 1)
    return "" if wide and module.__dict__.get("quant_state") is None else str(param.dtype)


def check_unpacked(module: nn.Module, path: str) -> None:
    """Raise `Unsupported` if a parameter of `module` itself is packed; messages call it `path`."""
    for name, param in module._parameters.items():
        kind = "" if param is None else packed_as(module, param)
        if kind:
            what = f"{qualified(type(module))} with a packed {name} ({kind})"
            raise Unsupported(f"{path or 'it'} is {what}, which a block does not support")


def check_weights(
    x: Tensor, layer_map: Any, weights: Mapping[str, Tensor | None], spec: BlockSpec,
    low: torch.dtype | None,
) -> None:  # fmt: skip
    """Raise `Unsupported` unless the weights of a layer fit a block of `spec` on `x`."""
    name, path_of = layer_map.input, layer_map.path_of
    dtype, device, on_cpu = x.dtype, x.device, x.is_cpu
    floating = unpacked(weights, spec) if spec.packed else weights
    packed = dict(spec.packed)
    for key, p in floating.items():
        if p is None:
            continue
        if type(p) not in PLAIN and not is_dtensor(p):
            raise wrong_class(p, path_of(key), "torch.nn.Parameter")
        elsewhere = not p.is_cpu if on_cpu else p.device != device
        fits = p.dtype is dtype or low is not None
        if packed and key.endswith(".bias"):  # may have the dtype of the product
            fits = fits or key[:-5] in packed
        # Adapters may be float32 on weights of 16 bits, and so may the bias of choices.
        wide = key.startswith(("lora.", "router.correction")) and p.dtype is torch.float32
        if elsewhere or not (fits or wide):
            raise Unsupported(
                f"{name} is {x.dtype} on {x.device} but {path_of(key)} is {p.dtype} on {p.device}"
            )
    if low is not None:
        check_autocast(x, name, floating, low, path_of)
    fc1 = weights.get("fc1.weight")
    if fc1 is not None:
        hidden = packed["fc1"].shape[0] if "fc1" in packed else fc1.shape[0], 0
    else:
        hidden = _hidden(weights, packed)
    expected = _shapes(spec, x.shape[-1], *hidden)
    for key, p in floating.items():
        if p is not None and key in expected and p.shape != expected[key]:
            raise Unsupported(
                f"{path_of(key)} has shape {tuple(p.shape)}, expected {expected[key]}"
            )
    for layer, own in packed.items():
        if own.shape != expected[f"{layer}.weight"]:
            raise Unsupported(
                f"{path_of(layer + '.weight')} has shape {own.shape}, expected "
                f"{expected[f'{layer}.weight']}"
            )
    for i, lora in enumerate(spec.loras):
        a, b = weights[f"lora.{i}.A"], weights[f"lora.{i}.B"]
        out, columns = expected[f"{lora.layer}.weight"]
        assert a is not None and b is not None
        if (*a.shape, *b.shape) != (a.shape[0], columns, out, a.shape[0]):
            raise Unsupported(
                f"an adapter of {path_of(lora.layer + '.weight')} has matrices {tuple(a.shape)} "
                f"and {tuple(b.shape)}, expected (rank, {columns}) and ({out}, rank)"
            )


def unpacked(weights: Mapping[str, Tensor | None], spec: BlockSpec) -> Mapping[str, Tensor | None]:
    """Return the weights of a block but the tensors of quantized ones."""
    names = {n for layer, packed in spec.packed for n in packed.names(f"{layer}.weight")}
    return {name: t for name, t in weights.items() if name not in names}


def _hidden(
    weights: Mapping[str, Tensor | None], packed: Mapping[str, PackedSpec]
) -> tuple[int, int]:
    """Return the hidden units of the shared expert, and of each of other experts."""
    shared, down = weights.get("shared_fc1.weight"), weights["experts_down.weight"]
    assert down is not None  # a layer without it is not read
    of = (
        packed["shared_fc1"].shape
        if "shared_fc1" in packed
        else (0,)
        if shared is None
        else shared.shape
    )
    return of[0], down.shape[-1]


@cached
def _shapes(
    spec: BlockSpec, width: int, hidden: int, experts_hidden: int
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in spec.linear_shapes(width, hidden).items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name in spec.norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for branch in spec.branches:
        if isinstance(branch.op, MoESpec):
            shapes |= branch.op.stack_shapes(width, experts_hidden)
    return shapes | {f"{name}_norm.weight": (spec.attention.head_dim,) for name in "qk"}


def needs_grad(value: Any) -> bool:
    """Return whether `value` is a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def wants_grad(*values: Any) -> bool:
    """Return whether grad mode is on and one of `values` requires a gradient."""
    return torch.is_grad_enabled() and any(map(needs_grad, values))


@dataclass(frozen=True)
class Precision:
    """The dtypes of one call under `torch.autocast`: those of the stock layer.

    There autocast acts on every operator. Products take autocast's dtype and sums promote. Norms
    compute in float32, which they also return on CUDA; on CPU they return the dtype of their input.
    float64 is not converted.
    """

    stream: torch.dtype  # of the residual stream and of the result; the input is converted to it
    compute: torch.dtype | None = None  # of everything else, if it is another
    autocast: torch.dtype | None = None  # of autocast where the user's own function runs

    def cast(
        self, tensors: Mapping[str, Tensor | None], streams: Iterable[str]
    ) -> dict[str, Tensor | None]:
        """Return the tensors with residual streams in the stream's dtype."""
        cast = {**tensors}
        for name in streams:
            x = tensors[name]
            cast[name] = None if x is None else x.to(self.stream)
        return cast


def low_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on the device of `x`; None if it is off."""
    return torch.get_autocast_dtype(x.device.type) if autocast_on(x) else None


def check_autocast(
    x: Tensor,
    name: str,
    weights: Mapping[str, Tensor | None],
    low: torch.dtype,
    path_of: Callable[[str], str] = str,
) -> None:
    """Raise `Unsupported` unless the fused path supports these dtypes under autocast to `low`.

    The stock layer raises for the same dtypes, except on other devices.
    """
    kind = x.device.type
    if kind not in _DEVICES or low not in LOW:
        raise Unsupported(
            f"autocast to {low} on {kind} is on; the fused path supports autocast to 16 bits on "
            f"{' and '.join(_DEVICES)}"
        )
    dtypes = {key: p.dtype for key, p in weights.items() if p is not None}
    fit = (torch.float64,) if x.dtype == torch.float64 else CASTABLE
    for key, dtype in dtypes.items():
        if dtype not in fit:
            both = f"{name} is {x.dtype} and {path_of(key)} is {dtype}"
            raise Unsupported(f"{both}, and autocast does not convert one of them")
    norms = {dtype for key, dtype in dtypes.items() if key.startswith(_NORMS)} - {torch.float64}
    if kind == "cpu" and norms and norms != {torch.float32} and not norms == {x.dtype} == {low}:
        shown = ", ".join(sorted(map(str, norms)))
        raise Unsupported(f"the norms' parameters are {shown}, and autocast on CPU converts none")


def precision_of(
    x: Tensor, weights: Mapping[str, Tensor | None], low: torch.dtype, norm_first: bool
) -> Precision:
    """Return the dtypes of a call that passed `check_autocast`."""
    if x.dtype == torch.float64:
        return Precision(x.dtype, autocast=low)
    # On CUDA a post-norm layer's last norm makes float32 of anything; else sums promote.
    keeps = x.dtype == low and (norm_first or x.device.type == "cpu")
    stream = low if keeps else torch.float32
    plain = stream == low and all(p is None or p.dtype == low for p in weights.values())
    return Precision(stream, None if plain else low, low)
