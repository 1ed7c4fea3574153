"""A graph that keeps some activations in a storage format (`fused_remat.formats`).

Forward has a `Quantize` step after each of them. No other step of forward reads the quantized copy,
so a format never changes an output. In backward (`Graph.quantized_nodes`) steps that can load
quantized elements read them directly, and a `Dequantize` step serves the others.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

from fused_remat import random
from fused_remat.formats import NATIVE, split_name
from fused_remat.graph.graph import Graph
from fused_remat.graph.text import block
from fused_remat.spec import USER_FUNCTION
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.attention import Attention
from fused_remat.steps.node import Node
from fused_remat.steps.storage import Dequantize, Quantize


def in_formats(graph: Graph, save: Collection[str]) -> Graph:
    """`graph` for a policy that keeps `save`, where "x:format" names a format.

    Equal formats give the same object; without formats that is `graph` itself.

    Raises: ValueError for a format of the output, which is the caller's tensor; and for a format
        that keeps signs only, of anything but a ReLU's input.
    """
    stored = tuple(sorted(name for name in save if split_name(name)[1] != NATIVE))
    if not stored:
        return graph
    return (quantized if graph.text else _quantized)(graph, stored)


@block
def quantized(graph: Graph, names: tuple[str, ...]) -> Graph:
    """`graph` with the sorted `names`, as "x:format", quantized; equal arguments, one object."""
    return _quantized(graph, names)


@functools.lru_cache(maxsize=1024)
def _quantized(graph: Graph, names: tuple[str, ...]) -> Graph:
    valid, quantizes = graph.names, {}
    for name in names:
        x, stored = split_name(name)
        if x == "output":
            raise ValueError(
                f"the output cannot be kept as {stored!r}: it is the caller's tensor; keep it "
                "without a format"
            )
        quantizes[x] = Quantize(name=name, x=x, site=random.ROUNDING + valid.index(x))
    nodes = []
    for node in graph.nodes:
        nodes += [node, quantizes[node.name]] if node.name in quantizes else [node]
    quantized_nodes: list[Node] = [
        Dequantize(name=x, quantized=(quantize,))
        for x, quantize in quantizes.items()
        if not quantize.format.signs
    ]
    for node in graph.nodes:
        loaded = _loading(node, [quantizes[x] for x in node.inputs if x in quantizes])
        quantized_nodes += [] if loaded is None else [loaded]
    params = graph.params
    if any(quantize.params for quantize in quantizes.values()) and "seed" not in params:
        params += ("seed",)
    return replace(
        graph, nodes=tuple(nodes), params=params, quantized_nodes=tuple(quantized_nodes), text=""
    )


def _loading(node: Node, quantizes: list[Quantize]) -> Node | None:
    """`node` reading these inputs as they are stored; None if it cannot."""
    signs = [quantize for quantize in quantizes if quantize.format.signs]
    relu = isinstance(node, MLPActivation) and node.act == "relu" and not node.gate
    if signs and not relu:
        raise ValueError(
            f"the format {signs[0].stored!r} keeps signs only, which is enough for the input of a "
            f"ReLU; backward of {node.name!r} needs the values of {signs[0].x!r}: choose another "
            "format for it"
        )
    if isinstance(node, MLPActivation):
        loads = node.act != USER_FUNCTION
    else:  # keys that no query sees are cut off, which needs heads in memory
        loads = isinstance(node, Attention) and not node.cuts_keys
    return replace(node, quantized=tuple(quantizes)) if quantizes and loads else None
