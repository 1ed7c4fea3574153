"""One rank's layer: its call on tensors without memory, and the bytes that it keeps and uses."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.execution.prepare import BlockConfig
from fused_remat.graph.build import block_graph
from fused_remat.graph.schedule import schedule
from fused_remat.layers.causal import CausalLayer, read_call
from fused_remat.layers.eligibility import Reason
from fused_remat.planner.calibration import Example
from fused_remat.report.saved import SavedBytes
from fused_remat.scale.layout import Layout, on_meta, parameters_of
from fused_remat.scale.shapes import Model
from fused_remat.spec import ParallelSpec

#: Names in a layer whose names in its block differ.
_NAMES = {"up": "fc1", "down": "fc2"}


@functools.lru_cache(maxsize=256)
def example_of(model: Model, layout: Layout, batch: int, seq: int, dtype: torch.dtype) -> Example:
    """Return a rank's call of a layer, on "meta" tensors, with its heads, shards and tokens.

    The graph is that of `FusedRematCausalLayer`, divided as `parallelize_module` divides it.

    Raises: ValueError if the layer does not take the fused path.
    """
    whole = torch.empty(batch, seq, model.d_model, device="meta", dtype=dtype)
    one: Any = on_meta(model, seq, dtype)
    rope: Any = None if one.cos is None else (one.cos, one.sin)
    call = read_call(one.layers[0], whole, rope)
    if isinstance(call, Reason):
        raise ValueError(f"a layer of {model.name} does not take the fused path: {call.text}")
    assert call.spec is not None
    spec, tensors = call.spec, dict(call.tensors)
    tensor = layout.mesh.tensor
    if tensor > 1:
        place = ParallelSpec(group="on paper", size=tensor, rank=0, sequence=layout.sequence)
        spec = spec.on_rank(place)
        tensors["input"] = whole[:, : seq // layout.stream].contiguous()
        tensors |= _shards(model, layout, seq, dtype)
    graph = block_graph(spec)
    given = tuple(tensors.get(name) for name in graph.tensors)
    present = {name for name, t in zip(graph.tensors, given, strict=True) if t is not None}
    needs_grad = frozenset(present - {"cos", "sin"})
    return Example(BlockConfig(graph, frozenset(), needs_grad, "eager"), given, {})


def _shards(model: Model, layout: Layout, seq: int, dtype: torch.dtype) -> dict[str, Tensor]:
    shards = {}
    for p in parameters_of(model, seq).layer:
        module, _, kind = p.name.rpartition(".")
        name = f"{_NAMES.get(module, module)}.{kind}"
        shards[name] = torch.empty(p.gathered(layout), device="meta", dtype=dtype)
    return shards


def sizes_of(example: Example, save: Iterable[str] = ()) -> dict[str, int]:
    """Return the bytes of every input, activation and statistic of a rank's call."""
    graph, shapes = example.keeping(save).graph, example.shapes
    widths, lengths = graph.widths(shapes), graph.lengths(shapes)
    dtypes, batch = graph.dtypes(example.input.dtype), shapes[graph.inputs[0]][0]
    return {
        name: batch * lengths[name] * width * dtypes[name].itemsize
        for name, width in widths.items()
    }


def passes(example: Example, save: Iterable[str]) -> tuple[int, int]:
    """Return the most bytes of a rank's layer that keeps `save` in forward and in backward.

    They are upper bounds for its activations and their gradients, all tokens at once. Forward
    includes what is kept and the output, backward the gradient of the output.
    """
    call = example.keeping(save)
    plan = schedule(call.graph, call.save, call.needs_grad, tiled=False)
    nbytes = sizes_of(example, call.save)
    most = []
    for which in ("forward", "backward"):
        values, grads = set[str](), {"output"} if which == "backward" else set()
        peak = 0
        for step in plan.steps(which):
            node = step.node
            assert node is not None
            if step.kind == "compute":
                values.update(node.makes)
            else:
                grads.update(step.needs_grad.intersection(node.inputs))
            peak = max(peak, sum(nbytes[n] for of in (values, grads) for n in of))
            grads.discard(node.name if step.kind == "backward" else "")
            values.difference_update(step.free)
        most.append(peak)
    return most[0], most[1]


@functools.lru_cache(maxsize=256)
def kept_by_eager(model: Model, layout: Layout, seq: int, dtype: torch.dtype) -> int:
    """Return the bytes that autograd saves of a rank's plain layer for one sequence.

    Each storage counts once. The layer is divided as PyTorch's tensor parallelism does it: inputs
    of linear layers are gathered, and saved. `nn.LayerNorm` stands for an RMSNorm, which on
    CPUs consists of operations that keep more than its GPU kernel.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    tensor = layout.mesh.tensor
    with FakeTensorMode():
        layer = CausalLayer(
            model.d_model, model.nhead // tensor, model.d_ff // tensor, 0.0, model.activation,
            kv_heads=model.kv_heads // tensor, head_dim=model.head_dim, norm=model.norm,
            gated=model.gated, bias=model.bias, qkv_bias=model.qkv_bias, qk_norm=model.qk_norm,
            dtype=dtype,
        )  # fmt: skip
        for name, norm in list(layer.named_children()):
            if isinstance(norm, nn.RMSNorm):
                wide = list(norm.normalized_shape)
                setattr(layer, name, nn.LayerNorm(wide, bias=False, dtype=dtype))
        mine = seq // layout.stream
        if tensor > 1:
            parts: Any = layer
            parts.norm1, parts.norm2 = _With(parts.norm1, seq), _With(parts.norm2, seq)
            parts.proj, parts.down = _With(parts.proj, mine), _With(parts.down, mine)
        x = torch.empty(1, mine, model.d_model, dtype=dtype, requires_grad=True)
        half = model.head_dim // 2
        rope = (torch.empty(seq, half), torch.empty(seq, half)) if model.rope else None
        with SavedBytes(exclude=[*layer.parameters(), *(rope or ())]) as saved:
            layer(x, rope)
        return saved.total


class _Tokens(torch.autograd.Function):
    """A tensor like x with another number of tokens, as a collective makes it. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int) -> Tensor:
        ctx.tokens = x.shape[1]
        return x.new_empty(x.shape[0], tokens, x.shape[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.new_empty(dy.shape[0], ctx.tokens, dy.shape[2]), None


class _With(nn.Module):
    """A module whose output has another number of tokens."""

    def __init__(self, module: nn.Module, tokens: int) -> None:
        super().__init__()
        self.module, self.tokens = module, tokens

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Tokens.apply(self.module(x), self.tokens)
        return y
