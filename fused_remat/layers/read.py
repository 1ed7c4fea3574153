"""Describe the block that a layer computes, by the `LayerMap` of its class.

Every call reads the submodules again: between two calls they may be replaced, or get hooks or other
parameters, without notice to the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.graph.graph import Graph
from fused_remat.layers.eligibility import (
    Precision,
    Reason,
    Unsupported,
    check_foreign_module,
    check_global_hooks,
    check_input,
    check_module,
    check_weights,
    low_dtype,
    precision_of,
    qualified,
    unpacked,
)
from fused_remat.layers.modules import (
    active_module,
    affine_of,
    read_dropout,
    read_linear,
    read_projections,
    update_tensors,
)
from fused_remat.layers.packed import Packed
from fused_remat.spec import BlockSpec, LoraSpec, PackedSpec
from fused_remat.steps.norm import NORMS


@dataclass(frozen=True, kw_only=True)
class LayerMap:
    """Layout of a layer class: where it has the modules of its block. Paths lead from the layer."""

    package: str = ""  # module of a class of transformers, and its name
    layer: str = ""
    describe: Callable[[Parts, Mapping[str, Any]], BlockInputs]
    name: str = ""  # of the architecture, for messages
    input: str = "hidden_states"  # forward's argument that the block transforms
    dims: tuple[int, ...] = (3,)  # numbers of dimensions that it may have
    methods: Mapping[str, Any] = field(default_factory=dict)  # of the class; the block replaces
    #: Paths of modules whose forward the block replaces, and their classes' names in `package`.
    containers: Mapping[str, str] = field(default_factory=dict)
    attention: str = ""  # path of the module that attends
    #: Paths of `nn.MultiheadAttention`s, and the block's names of the packed projection, of q, k
    #: and v, and of the output projection.
    projections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Paths by the block's names "fc1", "norm1", "q_norm", ...
    linears: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=dict)
    head_norms: Mapping[str, str] = field(default_factory=dict)
    norm: str = ""  # key of `NORMS`, "" for any
    norm_class: str = ""  # name of the norms' class in `package`, "" for torch.nn's
    offset: float = 0.0  # added to the norms' weights
    placement: str = "pre"  # of the norms; or "post", "sandwich"
    rotary: bool = False
    activation: str = ""  # path of the MLP's activation function
    dropouts: Mapping[str, str] = field(default_factory=dict)  # paths by the names in `describe`
    #: Attributes of the attention, by the fields "head_dim", "dropout", "softcap", "window".
    numbers: Mapping[str, str] = field(default_factory=dict)
    #: (path, attribute, meaning): layers for which it is true are not supported.
    excluded: tuple[tuple[str, str, str], ...] = ()
    #: By the path of every module, the path of its parent and its name in it, in order.
    steps: Mapping[str, tuple[str, str]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        paths = [self.attention, self.activation.rpartition(".")[0]]
        paths += [*self.containers, *self.projections, *(path for path, *_ in self.excluded)]
        paths += [f"{path}.out_proj" for path in self.projections]
        for group in (self.linears, self.norms, self.head_norms, self.dropouts):
            paths += group.values()
        steps: dict[str, tuple[str, str]] = {}
        for names in [path.split(".") for path in paths if path]:
            for end in range(1, len(names) + 1):
                steps[".".join(names[:end])] = ".".join(names[: end - 1]), names[end - 1]
        object.__setattr__(self, "steps", steps)

    def path_of(self, name: str) -> str:
        """Return the layer's name, for messages, of the weight or bias `name` of the block."""
        layer, _, kind = name.rpartition(".")
        for path, (packed, *split, output) in self.projections.items():
            if layer == output:
                return f"{path}.out_proj.{kind}"
            if layer == packed or (layer in split and kind == "bias"):
                return f"{path}.in_proj_{kind}"
            if layer in split:
                return f"{path}.{layer[-1]}_proj_weight"
        module = {**self.linears, **self.norms, **self.head_norms}.get(layer)
        return name if module is None else f"{module}.{kind}"

    def modules(self, layer: nn.Module) -> dict[str, Any]:
        """Return the submodules of `layer` by path, None for missing ones; `layer` is at ""."""
        modules: dict[str, Any] = {"": layer}
        for path, (parent, name) in self.steps.items():
            holder = modules[parent]
            modules[path] = None if holder is None else holder._modules.get(name)
        return modules


@dataclass
class Parts:
    """The parts of a layer, for `LayerMap.describe`."""

    layer: Any
    layer_map: LayerMap
    modules: Mapping[str, Any]  # by path
    x: Tensor
    low: torch.dtype | None  # dtype of autocast, None if it is off
    weights: dict[str, Tensor | None]  # by the block's names
    loras: tuple[LoraSpec, ...]
    rows: Mapping[str, int]  # outputs of linear layers, by name
    packed: tuple[tuple[str, PackedSpec], ...]  # formats of quantized weights
    norm: str  # kind of the norms
    eps: list[float]
    head_eps: list[float]
    dropout: Mapping[str, float]  # current probabilities, by the names in `LayerMap.dropouts`

    def one_eps(self, of_heads: bool = False) -> Any:
        """Return the eps of all norms over the width, or of all norms of heads, if any."""
        eps, what = (self.head_eps, "norms of heads") if of_heads else (self.eps, "norms")
        if len(set(eps)) > 1:
            raise Unsupported(f"the {what} differ in eps: {sorted(set(eps))}")
        return eps[0] if eps else None


@dataclass
class BlockInputs:
    """A call of a layer as a block."""

    graph: Graph
    tensors: Mapping[str, Tensor | None]  # inputs and weights by the names of `graph`
    spec: BlockSpec | None = None  # None for a traced layer
    functions: Mapping[str, Any] = field(default_factory=dict)  # the user's own activation function
    seq_first: bool = False  # whether the inputs are (S, B, D)
    unbatched: bool = False  # whether they are (S, D), passed as (1, S, D)
    precision: Precision | None = None  # dtypes under autocast, None if it is off
    preserve_strides: bool = True  # of the input, in the result; else it is contiguous
    finish: Callable[[Tensor], Any] | None = None  # from the block's output to the layer's result


def read_block(
    layer: Any, layer_map: LayerMap, arguments: Mapping[str, Any]
) -> BlockInputs | Reason:
    """Return the block that computes `layer.forward(**arguments)`, or why there is none."""
    try:
        return _read(layer, layer_map, arguments)
    except Unsupported as reason:
        return Reason(reason.args[0], uncompiled="not compiled" in reason.args)


def _read(layer: Any, layer_map: LayerMap, arguments: Mapping[str, Any]) -> BlockInputs:
    x = arguments[layer_map.input]
    check_input(x, layer_map.input, layer_map.dims)
    check_global_hooks()
    modules = layer_map.modules(layer)
    kind = type(layer)
    for name, method in layer_map.methods.items():
        if getattr(kind, name) is not method or name in layer.__dict__:
            raise Unsupported(f"{kind.__name__}.{name} is overridden")
    for path, name in layer_map.containers.items():
        check_foreign_module(modules[path], path, layer_map.package, name, decorates=True)
    low, updates = low_dtype(x), {}
    # Not dict[...](), which Dynamo does not trace.
    packed: dict[str, PackedSpec] = {}
    rows: dict[str, int] = {}
    weights: dict[str, Tensor | None] = {}
    for path, names in layer_map.projections.items():
        weights |= read_projections(modules, path, names, x.shape[-1])
    for name, path in layer_map.linears.items():
        weight, bias, adapters = read_linear(modules[path], path, x)
        if isinstance(weight, Packed):
            packed[name], rows[name] = weight.spec, weight.spec.shape[0]
            names = weight.spec.names(f"{name}.weight")
            weights.update(zip(names, weight.tensors, strict=True))
        else:
            weights[f"{name}.weight"], rows[name] = weight, weight.shape[0]
        weights[f"{name}.bias"] = bias
        if adapters:
            updates[name] = adapters
    norm, eps, head_eps = _read_norms(layer_map, modules, x.shape[-1], weights)
    dropout = {name: read_dropout(modules[path], path) for name, path in layer_map.dropouts.items()}
    loras: tuple[LoraSpec, ...] = ()
    if updates:
        matrices, loras = update_tensors(updates, x.dtype if low is None else None)
        weights |= matrices
    parts = Parts(
        layer, layer_map, modules, x, low, weights, loras, rows, (*packed.items(),), norm, eps,
        head_eps, dropout,
    )  # fmt: skip
    inputs = layer_map.describe(parts, arguments)
    spec = inputs.spec
    assert spec is not None
    inputs.preserve_strides = spec.branches[-1].placement != "post"
    check_weights(x, layer_map, weights, spec, low)
    if low is not None and inputs.precision is None:
        floating = unpacked(weights, spec) if packed else weights
        inputs.precision = precision_of(x, floating, low, spec.norm_first)
    return inputs


def _read_norms(
    layer_map: LayerMap, modules: Mapping[str, Any], width: int, weights: dict[str, Tensor | None]
) -> tuple[str, list[float], list[float]]:
    """Add the norms' parameters to `weights`; return their kind, their eps, and those of heads'."""
    kinds = {NORMS[kind].module: kind for kind in ((layer_map.norm,) if layer_map.norm else NORMS)}
    eps, first, first_path = [], None, ""
    for name, path in layer_map.norms.items():
        norm, number = _read_norm(modules[path], path, layer_map, tuple(kinds))
        if first is None:
            first, first_path = type(norm), path
        elif type(norm) is not first:
            raise Unsupported(
                f"{first_path} is {qualified(first)} and {path} is {qualified(type(norm))}; the "
                "fused path supports norms of one class"
            )
        shape = norm.__dict__.get("normalized_shape", (width,))
        if shape != (width,):
            raise Unsupported(f"{path} is over {tuple(shape)}; the fused path supports {(width,)}")
        eps.append(number)
        weights[f"{name}.weight"], weights[f"{name}.bias"] = affine_of(norm)
    head_eps = []
    for name, path in layer_map.head_norms.items():
        norm, number = _read_norm(modules[path], path, layer_map, (nn.RMSNorm,))
        weights[f"{name}.weight"] = affine_of(norm)[0]
        if weights[f"{name}.weight"] is None:
            raise Unsupported(f"{path} has no weight")
        head_eps.append(number)
    return layer_map.norm or kinds[first], eps, head_eps  # type: ignore[index]


def _read_norm(
    norm: Any, path: str, layer_map: LayerMap, kinds: tuple[type, ...]
) -> tuple[nn.Module, float]:
    if type(norm) not in kinds:
        norm = active_module(norm, path)
    if layer_map.norm_class:
        check_foreign_module(norm, path, layer_map.package, layer_map.norm_class, decorates=True)
    else:
        check_module(norm, path, *kinds)
    state = norm.__dict__
    eps = state.get("variance_epsilon", state.get("eps"))
    if eps is None:
        raise Unsupported(f"{path} has no eps")
    return norm, float(eps)
