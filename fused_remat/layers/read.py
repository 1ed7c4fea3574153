"""Describe the block that a layer computes, by the `LayerMap` of its class.

Every call reads the submodules again: between two calls they may be replaced, or get hooks or other
parameters, without notice to the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.layers.eligibility import (
    Reason,
    Unsupported,
    check_foreign_module,
    check_global_hooks,
    check_input,
    check_weights,
)
from fused_remat.layers.modules import (
    read_dropout,
    read_head_norms,
    read_linear,
    read_norms,
    read_projections,
    update_tensors,
)
from fused_remat.layers.precision import Precision, low_dtype, precision_of
from fused_remat.spec import BlockSpec, LoraSpec
from fused_remat.steps.replay import Function


@dataclass(frozen=True, kw_only=True)
class LayerMap:
    """Layout of a layer class: where it has the modules of its block. Paths lead from the layer.

    Attributes:
        package, layer: module and name of the class.
        describe: function that returns a `BlockInputs` for the parts and arguments of a call.
        name: name of the architecture, for messages.
        input, dims: forward's argument that the block transforms, and its numbers of dimensions.
        methods: methods of the class that the block replaces, by name.
        containers: paths of modules whose forward the block replaces, and their classes' names in
            `package`.
        attention: path of the module that attends.
        projections: paths of `nn.MultiheadAttention`s, and the block's names of the packed
            projection, of q, k and v, and of the output projection.
        linears, norms, head_norms: paths by the block's names "fc1", "norm1", "q_norm", ...
        norm, norm_class: key of `NORMS`, "" for any; name of the norms' class in `package`, ""
            for torch.nn's.
        offset: number added to the norms' weights.
        placement: placement of the norms, "pre", "post" or "sandwich".
        rotary: whether heads are rotated.
        activation: path of the MLP's activation function.
        dropouts: paths of dropout modules, by their names for `describe`.
        numbers: attributes of the attention, by the fields "head_dim", "dropout", "softcap",
            "window".
        excluded: (path, attribute, meaning): layers for which it is true are not supported.
        steps: by the path of every module, the path of its parent and its name in it, in order.
    """

    package: str
    layer: str
    describe: Callable[[Parts, Mapping[str, Any]], BlockInputs]
    name: str = ""
    input: str = "hidden_states"
    dims: tuple[int, ...] = (3,)
    methods: Mapping[str, Any] = field(default_factory=dict)
    containers: Mapping[str, str] = field(default_factory=dict)
    attention: str = ""
    projections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    linears: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=dict)
    head_norms: Mapping[str, str] = field(default_factory=dict)
    norm: str = ""
    norm_class: str = ""
    offset: float = 0.0
    placement: str = "pre"
    rotary: bool = False
    activation: str = ""
    dropouts: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    excluded: tuple[tuple[str, str, str], ...] = ()
    steps: Mapping[str, tuple[str, str]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        paths = [self.attention, self.activation.rpartition(".")[0]]
        paths += [*self.containers, *self.projections, *(row[0] for row in self.excluded)]
        paths += [f"{path}.out_proj" for path in self.projections]
        for group in (self.linears, self.norms, self.head_norms, self.dropouts):
            paths += group.values()
        steps: dict[str, tuple[str, str]] = {}
        for names in [path.split(".") for path in paths if path]:
            for end in range(1, len(names) + 1):
                steps[".".join(names[:end])] = ".".join(names[: end - 1]), names[end - 1]
        object.__setattr__(self, "steps", steps)

    def path_of(self, name: str) -> str:
        """Return the layer's name, for messages, of the weight or bias `name` of the block.

        >>> from fused_remat.layers.torch_nn import ENCODER
        >>> ENCODER.path_of("qkv.weight"), ENCODER.path_of("fc1.bias")
        ('self_attn.in_proj_weight', 'linear1.bias')
        """
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
    """The parts of a layer, for `LayerMap.describe`.

    Attributes:
        layer, row, modules: layer, layout of its class, and submodules by path.
        x, low: input of the call; dtype of autocast, None if it is off.
        weights, loras: tensors by the block's names, and specs of low-rank updates.
        norm, eps, head_eps: kind of the norms; eps of each, and of those of the heads.
        dropout: current probabilities, by the names in `LayerMap.dropouts`.
    """

    layer: Any
    row: LayerMap
    modules: Mapping[str, Any]
    x: Tensor
    low: torch.dtype | None
    weights: dict[str, Tensor | None]
    loras: tuple[LoraSpec, ...]
    norm: str
    eps: list[float]
    head_eps: list[float]
    dropout: Mapping[str, float]

    def precision(self, norm_first: bool) -> Precision:
        """Return the dtypes of the call, under autocast."""
        assert self.low is not None
        return precision_of(self.x, self.weights, self.low, norm_first)

    def one_eps(self) -> float:
        """Return the eps of all norms over the width."""
        return _one_of(self.eps, "norms")

    def one_head_eps(self) -> float | None:
        """Return the eps of the norms of heads; None without any."""
        return _one_of(self.head_eps, "norms of heads") if self.head_eps else None


def _one_of(values: list[float], what: str) -> float:
    first = values[0]
    if values.count(first) < len(values):
        raise Unsupported(f"the {what} differ in eps: {sorted(set(values))}")
    return first


@dataclass
class BlockInputs:
    """A call of a layer as a block.

    Attributes:
        spec: description of the block.
        tensors: inputs and weights by the block's names.
        functions: custom activation function, if any.
        seq_first, unbatched: whether the inputs are (S, B, D), or (S, D) passed as (1, S, D).
        precision: dtypes under autocast, None if it is off.
        warnings: warnings that PyTorch's own forward would show.
        graph: graph of the block.
        contiguous: whether the result is contiguous; else it has the strides of the input.
        finish: function from the block's output to the layer's result, if they differ.
    """

    spec: BlockSpec
    tensors: Mapping[str, Tensor | None]
    functions: Mapping[str, Function] = field(default_factory=dict)
    seq_first: bool = False
    unbatched: bool = False
    precision: Precision | None = None
    warnings: tuple[str, ...] = ()
    graph: Graph = field(default=None)  # type: ignore[assignment]  # `read_block` sets it
    contiguous: bool = False
    finish: Callable[[Tensor], Any] | None = None


class TracedInputs(NamedTuple):
    """A call of a traced layer as a block, which has no spec; otherwise as `BlockInputs`."""

    graph: Graph
    tensors: Mapping[str, Tensor | None]
    functions: Mapping[str, Any]
    precision: Precision | None
    finish: Callable[[Tensor], Any]
    seq_first: bool = False
    unbatched: bool = False
    contiguous: bool = False
    warnings: tuple[str, ...] = ()


def read_block(layer: nn.Module, row: LayerMap, given: Mapping[str, Any]) -> BlockInputs | Reason:
    """Return the block that computes `layer.forward(**given)`, or why there is none.

    >>> from fused_remat.layers.torch_nn import ENCODER
    >>> layer, given = nn.TransformerEncoderLayer(8, 2), {
    ...     "src": torch.zeros(3, 2, 8), "src_mask": None, "src_key_padding_mask": None,
    ...     "is_causal": False}
    >>> read_block(layer, ENCODER, given).spec.kind
    'encoder_postnorm'
    """
    try:
        return _read(layer, row, given)
    except Unsupported as reason:
        return Reason(reason.args[0])


def _read(layer: Any, row: LayerMap, given: Mapping[str, Any]) -> BlockInputs:
    x = given[row.input]
    check_input(x, row.input, row.dims)
    check_global_hooks()
    modules = row.modules(layer)
    _check_forwards(layer, row, modules)
    low = low_dtype(x)
    weights: dict[str, Tensor | None] = {}
    updates = {}
    for path, names in row.projections.items():
        weights |= read_projections(modules, path, names, x.shape[-1])
    for name, path in row.linears.items():
        weight, bias, found = read_linear(modules[path], path)
        weights[f"{name}.weight"], weights[f"{name}.bias"] = weight, bias
        if found:
            updates[name] = found
    kind, eps = read_norms(row, modules, x.shape[-1], weights)
    head_eps = read_head_norms(row, modules, weights) if row.head_norms else []
    dropout = {name: read_dropout(modules[path], path) for name, path in row.dropouts.items()}
    loras: tuple[LoraSpec, ...] = ()
    if updates:
        matrices, loras = update_tensors(updates, x.dtype if low is None else None)
        weights |= matrices
    parts = Parts(layer, row, modules, x, low, weights, loras, kind, eps, head_eps, dropout)
    call = row.describe(parts, given)
    call.graph = block_graph(call.spec)
    call.contiguous = call.spec.branches[-1].placement == "post"
    check_weights(x, row.input, weights, call.spec, low, row.path_of)
    if low is not None and call.precision is None:
        call.precision = parts.precision(call.spec.norm_first)
    return call


def _check_forwards(layer: Any, row: LayerMap, modules: Mapping[str, Any]) -> None:
    """Raise `Unsupported` if a method or forward that the block replaces was patched."""
    kind = type(layer)
    for name, method in row.methods.items():
        if getattr(kind, name) is not method or name in layer.__dict__:
            raise Unsupported(f"{kind.__name__}.{name} is overridden")
    for path, name in row.containers.items():
        check_foreign_module(modules[path], path, row.package, name, decorates=True)
