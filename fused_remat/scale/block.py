"""A layer as one tensor-parallel rank runs it: its graph, with tensors that have no memory."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fused_remat.blocks.program import Graph
from fused_remat.calls import BlockCall
from fused_remat.cli.shapes import Model
from fused_remat.graph.build import block_graph, linear_cross_entropy_graph
from fused_remat.layers.causal_call import call_of
from fused_remat.planner.calibration import Example
from fused_remat.scale.layout import Layout, layer_module, parameters_of, tables_of
from fused_remat.spec import ParallelSpec
from fused_remat.steps.cross_entropy import LinearCrossEntropy

#: The blocks' names of a layer's linear layers, where they differ.
_NAMES = {"up": "fc1", "down": "fc2"}


@functools.lru_cache(maxsize=256)
def example_of(model: Model, layout: Layout, batch: int, seq: int, dtype: torch.dtype) -> Example:
    """A rank's call of a layer: local heads, local shards, the tokens that it has of the stream.

    The graph is the layer's own (`FusedRematCausalLayer`), divided as `parallelize_module` does.

    Raises: ValueError if the layer does not take the fused path.

    >>> from fused_remat.cli.shapes import LARGE
    >>> from fused_remat.scale.layout import Mesh
    >>> layout = Layout(Mesh(1, 8))
    >>> example = example_of(LARGE["llama3-70b"], layout, 1, 8192, torch.bfloat16)
    >>> tuple(example.shapes["input"]), tuple(example.shapes["q.weight"])
    ((1, 1024, 8192), (1024, 8192))
    """
    whole = torch.empty(batch, seq, model.d_model, device="meta", dtype=dtype)
    tables = tables_of(model, seq, dtype)
    call = call_of(layer_module(model, seq, dtype), whole, *tables)
    if isinstance(call, str):
        raise ValueError(f"a layer of {model.name} is not fused: {call}")
    spec, tensors = call.spec, dict(call.tensors)
    tensor = layout.mesh.tensor
    if tensor > 1:
        place = ParallelSpec(group="on paper", size=tensor, rank=0, sequence=layout.sequence)
        spec = spec.on_rank(place)
        tensors["input"] = whole[:, : seq // layout.stream].contiguous()
        tensors |= _shards(model, layout, seq, dtype)
    graph = block_graph(spec)
    given = tuple(tensors.get(name) for name in graph.tensors)
    named = zip(graph.tensors, given, strict=True)
    given_too = ("cos", "sin")
    wants = frozenset(name for name, t in named if t is not None and name not in given_too)
    return Example(BlockCall(graph, frozenset(), wants, "eager"), given, {})


def _shards(model: Model, layout: Layout, seq: int, dtype: torch.dtype) -> dict[str, Tensor]:
    shards = {}
    for p in parameters_of(model, seq).layer:
        module, _, kind = p.name.rpartition(".")
        name = f"{_NAMES.get(module, module)}.{kind}"
        shards[name] = torch.empty(p.gathered(layout), device="meta", dtype=dtype)
    return shards


def loss_graph() -> Graph:
    """Of `ops.linear_cross_entropy`."""
    node = LinearCrossEntropy(
        name="output", x="input", weight="head.weight", bias="head.bias", target="target"
    )
    return linear_cross_entropy_graph(node)
