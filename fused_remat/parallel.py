"""Tensor and sequence parallel: fused layers divided among the ranks of a mesh.

    mesh = init_device_mesh("cuda", (8, 8), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], tensor_parallel_plan(model, sequence=True))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])

Each rank computes some of the heads and some of the MLP's hidden units. Parameters become DTensors,
and the fused path runs on their local shards. With `sequence`, the residual stream between the
first layer and the last is divided by tokens too, and so is what layers keep of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fused_remat.autograd.shards import local_shards
from fused_remat.huggingface.head import HuggingFaceHead
from fused_remat.layers.fused_layer import FusedLayer
from fused_remat.layers.modules import without_adapters
from fused_remat.layers.tensor_parallel import TensorParallel, VocabularyParallelLinear
from fused_remat.spec import ParallelSpec

#: Linear layers whose outputs are divided, by the block's names, and those whose inputs are.
_COLUMNS = ("q", "k", "v", "gate", "fc1", "cross_q", "cross_k", "cross_v")
_ROWS = ("proj", "cross_proj", "fc2")
_UNPACKED = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
#: Parameters that several modules of a model share, with those modules and the names there.
_Shared = dict[nn.Parameter, list[tuple[nn.Module, str]]]


class _Style(ParallelStyle):
    """A style whose module's parameters become DTensors, also in other modules that share them."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: _Shared = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"expected a mesh of one dimension, such as mesh['tensor'], got {device_mesh}"
            )
        self._divide(module, device_mesh)
        return module

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        raise NotImplementedError

    def _distribute(
        self, module: nn.Module, attribute: str, mesh: DeviceMesh, placement: Placement
    ) -> None:
        """Make a parameter a DTensor; raise ValueError if it is one with another placement."""
        p: Any = module._parameters[attribute]
        if isinstance(p, DTensor) and p in self._shared:
            if p.placements != (placement,):
                raise ValueError(
                    f"modules share a parameter of shape {tuple(p.shape)}, which would be "
                    f"{placement} in one and {p.placements[0]} in another"
                )
            return
        t = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=self.src_data_rank)
        dtensor = nn.Parameter(t, p.requires_grad)
        holders = self._shared.pop(p, [])
        for holder, name in holders or [(module, attribute)]:
            holder.register_parameter(name, dtensor)
        if holders:
            self._shared[dtensor] = holders


class LayerParallel(_Style):
    """A `ParallelStyle` for `parallelize_module` that divides a fused layer.

    q, k, v, gate and up (linear1) are divided by rows, proj and down (linear2) by columns; norms
    are on every rank. The packed `in_proj_weight` of `nn.MultiheadAttention` becomes
    `q_proj_weight`, `k_proj_weight` and `v_proj_weight`, PyTorch's names of separate ones, since a
    DTensor cannot hold a rank's heads of a packed weight; `pack_attention` undoes it in a full
    state dict.

    Args:
        sequence: the layer's input and output are this rank's tokens, S / ranks of each sequence,
            in order, and so are norms, residual sums and what is kept of them.
        split, join: with `sequence`, every rank has the entire input, which is divided first; the
            output is gathered on every rank.

    A call off the fused path raises RuntimeError: PyTorch's own forward does not support shards.
    Compiled, the layer runs outside the compiled graph. Each rank draws the dropout of divided
    activations; of others, all ranks draw the same. `accumulate_into`, low-rank updates and
    activation functions without a name are not supported.

    Raises (when applied): TypeError for a module that is not a fused layer; ValueError for a traced
        layer, heads or widths that cannot be divided evenly, packed projections (GPT-2), adapters,
        and parameters that are DTensors already (divide before `fully_shard`).
    Source: Shoeybi et al. 2019 (arXiv 1909.08053), Korthikanti et al. 2022 (arXiv 2205.05198).

    >>> LayerParallel(sequence=True)
    LayerParallel(sequence=True, split=False, join=False)
    """

    def __init__(self, *, sequence: bool = False, split: bool = False, join: bool = False) -> None:
        super().__init__()
        if (split or join) and not sequence:
            raise ValueError("split and join need sequence=True")
        self.sequence, self.split, self.join = sequence, split, join
        self._encoder: nn.TransformerEncoder | None = None
        self._lengths: set[int] | None = None

    def __repr__(self) -> str:
        return f"LayerParallel(sequence={self.sequence}, split={self.split}, join={self.join})"

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        kind = type(module).__name__
        if not isinstance(module, FusedLayer):
            raise TypeError(f"LayerParallel takes a fused layer, got a {kind}")
        if not hasattr(module, "_map"):
            raise ValueError(f"the {kind} is traced; only layers with a table entry can be divided")
        if module._tensor_parallel is not None:
            raise ValueError(f"the {kind} is divided among ranks already")
        if module.accumulate_into is not None:
            raise ValueError(
                f"accumulate_into={module.accumulate_into!r}: the gradients of a divided layer are "
                "DTensors, which only autograd adds; set it to None"
            )
        _check_sizes(module, list(_parameters(module)), mesh.size(), self._shared)
        for child in module.modules():
            if isinstance(child, nn.MultiheadAttention):
                _unpack(child)
        for child, attribute, name in _parameters(module):
            self._distribute(child, attribute, mesh, _placement(name))
        place = ParallelSpec.of(mesh, self.sequence)
        module._tensor_parallel = TensorParallel(place, self.split, self.join, self._lengths)
        if self._encoder is not None:  # it would hand nested tensors to layers in evaluation
            self._encoder.use_nested_tensor = False


class VocabularyParallel(_Style):
    """A `ParallelStyle` that divides the rows of an `nn.Linear` head, one for each word.

    `ops.linear_cross_entropy(hidden, head.weight, labels)` then computes the loss with this rank's
    logits alone, and sums three numbers per token over ranks; every rank has all of hidden
    (..., D). A call of the head makes all logits on every rank.

    Raises (when applied): TypeError for another module; ValueError for a vocabulary that cannot be
        divided evenly.

    >>> plan = {"head": VocabularyParallel()}  # for `parallelize_module`
    """

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if type(module) is not nn.Linear:
            raise TypeError(f"VocabularyParallel takes an nn.Linear, got a {type(module).__name__}")
        size = mesh.size()
        if module.out_features % size:
            raise ValueError(
                f"a vocabulary of {module.out_features} cannot be divided evenly among {size} "
                "ranks; pad it"
            )
        for attribute in ("weight", "bias"):
            if module._parameters[attribute] is not None:
                self._distribute(module, attribute, mesh, Shard(0))
        module.__class__ = VocabularyParallelLinear


class _Replicated(_Style):
    """A module that computes the same on every rank; its parameters are DTensors like all others.

    Optimizers and `clip_grad_norm_` accept no mixture of both kinds. Its forward sees local
    tensors; compiled, DTensors.
    """

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        # Attention reads the parameters of its child and does not call it.
        holders = list(module.modules()) if isinstance(module, nn.MultiheadAttention) else [module]
        for holder in holders:
            for attribute, own in holder._parameters.items():
                if own is not None:
                    self._distribute(holder, attribute, mesh, Replicate())
        group = mesh.get_group().group_name
        before: list[tuple[nn.Module, str, Any]] = []

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            if torch.compiler.is_compiling():
                return _as_dtensors(inputs, mesh)
            named = [(holder, *item) for holder in holders for item in holder._parameters.items()]
            dtensors = [entry for entry in named if isinstance(entry[2], DTensor)]
            shards = local_shards(group, (False,) * len(dtensors), [p for *_, p in dtensors])
            for (holder, name, _own), local in zip(dtensors, shards, strict=True):
                holder._parameters[name] = local  # type: ignore[assignment]
            before.extend(dtensors)
            return inputs

        def leave(_: nn.Module, inputs: Any, out: Any) -> Any:
            for owner, name, p in before:
                owner._parameters[name] = p
            before.clear()
            return _as_local(out)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)


class _ParallelEmbedding(_Style):
    """An `nn.Embedding` whose rows are divided, like those of the head that shares its weight."""

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._distribute(module, "weight", mesh, Shard(0))
        module.register_forward_pre_hook(lambda _, inputs: _as_dtensors(inputs, mesh))
        module.register_forward_hook(lambda _, inputs, out: _as_local(out))


def _as_dtensors(inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    return tuple(
        DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        if isinstance(x, Tensor) and not isinstance(x, DTensor)
        else x
        for x in inputs
    )


def _as_local(out: Any) -> Any:
    if not isinstance(out, DTensor):
        return out
    return out.redistribute(placements=[Replicate()]).to_local()


def tensor_parallel_plan(
    model: nn.Module, *, sequence: bool = False, head: str | None = None
) -> dict[str, ParallelStyle]:
    """Return the plan for `parallelize_module`: all of `model`, with its fused layers divided.

    With `sequence`, the first of the layers in one container (`layers.0`) divides its input by
    tokens, and the last gathers its output. The modules around them compute the same on every rank,
    with full parameters that are DTensors too. If these draw random numbers, such as for dropout,
    ranks need the same seed. A head is divided (`VocabularyParallel`) where
    `convert(loss=True)` computes its loss, and so is an `nn.Linear` named `head`, whose loss has to
    be `ops.linear_cross_entropy`; an embedding that shares its weight is divided with it.

    Raises: AttributeError for a `head` that does not exist; ValueError for a model without fused
        layers and for an nn.RNNBase; with `sequence`, for a module with parameters between the
        layers of a container, whose gradients would be those of one rank's tokens, and for a
        container with a repeated layer.

    >>> from fused_remat import FusedRematCausalLayer
    >>> model = nn.Sequential(*(FusedRematCausalLayer(16, 2, 32) for _ in range(2)))
    >>> tensor_parallel_plan(model, sequence=True)["0"]
    LayerParallel(sequence=True, split=True, join=False)
    """
    plan: dict[str, _Style] = {}
    for name, container in model.named_modules():
        plan.update(_layers_plan(f"{name}." if name else "", container, sequence))
    for name, encoder in model.named_modules():
        first = plan.get(f"{name}.layers.0".lstrip("."))
        if isinstance(encoder, nn.TransformerEncoder) and isinstance(first, LayerParallel):
            first._encoder = encoder
    if isinstance(model, FusedLayer):
        plan[""] = LayerParallel(sequence=sequence, split=sequence, join=sequence)
    if not plan:
        raise ValueError(f"{type(model).__name__} has no fused layer; call convert(model) first")
    heads = _heads_of(model, head)
    rows = {head.weight for head in heads.values()}
    plan.update({name: VocabularyParallel() for name in heads})
    done = list(plan)
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if not own or any(name == at or name.startswith(f"{at}.") or not at for at in done):
            continue
        if isinstance(module, nn.RNNBase):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which cannot take DTensors; plan the "
                "modules around it one by one"
            )
        shares = isinstance(module, nn.Embedding) and any(p in rows for p in own)
        plan[name] = _ParallelEmbedding() if shares else _Replicated()
        if isinstance(module, nn.MultiheadAttention):
            done.append(name)
    shared = _shared_parameters(model)
    for style in plan.values():
        style._shared = shared
    return dict(plan)


def _shared_parameters(model: nn.Module) -> _Shared:
    holders: _Shared = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and not isinstance(p, DTensor):
                holders.setdefault(p, []).append((module, name))
    # Only shared ones: others would stay in memory until the entire model is divided.
    return {p: names for p, names in holders.items() if len(names) > 1}


def _layers_plan(prefix: str, container: nn.Module, sequence: bool) -> dict[str, LayerParallel]:
    """Return the plan of the fused layers that are children of `container`.

    Raises: ValueError for modules that would see parts of sequences, and for repeated layers.
    """
    children = [(name, child) for name, child in container._modules.items() if child is not None]
    at = [i for i, (_, child) in enumerate(children) if isinstance(child, FusedLayer)]
    styles: dict[str, LayerParallel] = {}
    if len({children[i][1] for i in at}) < len(at) and sequence:
        raise ValueError(f"{prefix[:-1] or 'the model'} has a repeated layer; use sequence=False")
    lengths: set[int] = set()
    for i, (name, child) in enumerate(children):
        if isinstance(child, FusedLayer):
            ends = {"split": i == at[0], "join": i == at[-1]} if sequence else {}
            style = styles[prefix + name] = LayerParallel(sequence=sequence, **ends)
            style._lengths = lengths if sequence else None
        elif sequence and at and at[0] < i < at[-1] and any(True for _ in child.parameters()):
            raise ValueError(
                f"{prefix}{name}, a {type(child).__name__} between fused layers, would have the "
                "gradients of one rank's tokens; use sequence=False or another container"
            )
    return styles


def _heads_of(model: nn.Module, head: str | None) -> dict[str, nn.Module]:
    """Return the heads whose loss this library computes, by name, and the one called `head`."""
    heads: dict[str, nn.Module] = {}
    if head is not None:
        try:
            heads[head] = model.get_submodule(head)
        except AttributeError as error:
            raise AttributeError(f"head={head!r}: {error}") from None
    for prefix, module in model.named_modules():
        if isinstance(module, HuggingFaceHead):
            name = f"{prefix}.{module.loss_head}".lstrip(".")
            own = model.get_submodule(name)
            if type(own) is nn.Linear:
                heads[name] = own
    return heads


def pack_attention(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a full state dict of divided `nn.Transformer*` layers with the stock layers' names.

    `q_proj_weight`, `k_proj_weight` and `v_proj_weight` of an attention become `in_proj_weight`.

    Raises: ValueError for DTensors; it needs a full state dict.

    >>> parts = {f"self_attn.{name}_proj_weight": torch.ones(2, 2) for name in "qkv"}
    >>> {name: tuple(t.shape) for name, t in pack_attention(parts).items()}
    {'self_attn.in_proj_weight': (6, 2)}
    """
    packed: dict[str, Any] = {}
    for name, t in state.items():
        prefix, _, last = name.rpartition(".")
        if last not in _UNPACKED:
            packed[name] = t
        elif last == _UNPACKED[0]:
            parts = [state[f"{prefix}.{part}"] for part in _UNPACKED]
            if any(isinstance(part, DTensor) for part in parts):
                raise ValueError(f"{name} is a DTensor; pack_attention takes a full state dict")
            packed[f"{prefix}.in_proj_weight"] = torch.cat(parts)
    return packed


def unpack_attention(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of stock `nn.Transformer*` layers with the names of divided ones.

    >>> list(unpack_attention({"self_attn.in_proj_weight": torch.ones(6, 2)}))
    ['self_attn.q_proj_weight', 'self_attn.k_proj_weight', 'self_attn.v_proj_weight']
    """
    unpacked: dict[str, Any] = {}
    for name, t in state.items():
        prefix, _, last = name.rpartition(".")
        if last == "in_proj_weight":
            names = [f"{prefix}.{part}" for part in _UNPACKED]
            unpacked.update(zip(names, t.chunk(3), strict=True))
        else:
            unpacked[name] = t
    return unpacked


def _parameters(layer: FusedLayer) -> Iterable[tuple[nn.Module, str, str]]:
    """Return the modules of a layer's parameters, their names there, and the block's names."""
    layer_map = layer._map
    modules = layer_map.modules(layer)
    for path, module in modules.items():
        if without_adapters(module) is not module:
            raise ValueError(f"{path} has low-rank updates, which are not divided among ranks")
    parameters, kinds = list[tuple[str, str, str]](), ("weight", "bias")
    for path, (packed, *split, output) in layer_map.projections.items():
        names = {"in_proj_weight": f"{packed}.weight", "in_proj_bias": f"{packed}.bias"}
        names |= {own: f"{name}.weight" for own, name in zip(_UNPACKED, split, strict=True)}
        parameters += [(path, own, name) for own, name in names.items()]
        parameters += [(f"{path}.out_proj", kind, f"{output}.{kind}") for kind in kinds]
    for name, path in {**layer_map.linears, **layer_map.norms, **layer_map.head_norms}.items():
        parameters += [(path, kind, f"{name}.{kind}") for kind in kinds]
    for path, attribute, name in parameters:
        if modules[path] is not None and modules[path]._parameters.get(attribute) is not None:
            yield modules[path], attribute, name


def _placement(name: str) -> Placement:
    layer, _, kind = name.rpartition(".")
    if layer in _COLUMNS:
        return Shard(0)
    return Shard(1) if layer in _ROWS and kind == "weight" else Replicate()


def _check_sizes(
    layer: FusedLayer, parameters: list[tuple[nn.Module, str, str]], size: int, shared: _Shared
) -> None:
    kind = type(layer).__name__
    for module, attribute, name in parameters:
        p: Any = module._parameters[attribute]
        its = f"{name} of the {kind} is"
        if isinstance(p, DTensor) and p not in shared:
            raise ValueError(f"{its} a DTensor already; apply the plan before fully_shard")
        if attribute == "in_proj_weight" and p in shared:
            raise ValueError(f"{its} shared with another module, and cannot be split")
        if name == "qkv.weight" and not isinstance(module, nn.MultiheadAttention):
            raise ValueError(f"the {kind} has one weight for q, k and v, which cannot be divided")
        placement = _placement(name)
        dim = placement.dim if isinstance(placement, Shard) else None
        if dim is not None and p.shape[dim] % size:
            raise ValueError(f"{its} {tuple(p.shape)}, not divisible by {size} ranks at dim {dim}")
    for what, heads in layer._heads().items():
        if heads % size:
            raise ValueError(f"{heads} {what} cannot be divided evenly among {size} ranks")


def _unpack(attention: nn.MultiheadAttention) -> None:
    """Replace the packed weight by three, as `nn.MultiheadAttention` has for other widths."""
    packed = attention.in_proj_weight
    if packed is None:
        return
    for name, part in zip(_UNPACKED, packed.detach().chunk(3), strict=True):
        attention.register_parameter(name, nn.Parameter(part.clone(), packed.requires_grad))
    attention.register_parameter("in_proj_weight", None)
    attention._qkv_same_embed_dim = False
