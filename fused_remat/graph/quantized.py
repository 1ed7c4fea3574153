"""A graph that keeps some of its names in a storage format (`fused_remat.formats`).

Forward is the graph's own, with a `Quantize` step after each named activation. No step of forward
reads the quantized copy, so a format never changes an output. In backward (`Graph.quantized_nodes`)
the activation is dequantized, and steps that can load quantized elements read those directly.
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
    """`graph`, for keeping the names in `save`, of which "x:format" are packed.

    The same object for equal formats; `graph` itself where all are native.

    Raises: ValueError for a format that does not hold what backward asks of an activation: that of
        the output, which is the caller's tensor, and signs of anything but a ReLU's input.

    >>> from fused_remat.graph.build import block_graph
    >>> from fused_remat.spec import nn_layer_spec
    >>> graph = in_formats(block_graph(nn_layer_spec(True, 4, 16, "gelu")), {"attn", "up:int8"})
    >>> [node.name for node in graph.nodes if node.quantizes]
    ['up:int8']
    >>> [node.label for node in graph.quantized_nodes]
    ['up from up:int8', 'act from up:int8']
    """
    stored = tuple(sorted(name for name in save if split_name(name)[1] != NATIVE))
    if not stored:
        return graph
    return (packed if graph.text else _packed_once)(graph, stored)


@block
def packed(graph: Graph, names: tuple[str, ...]) -> Graph:
    """`in_formats` for the names that are not native, sorted; one object for each pair."""
    return _with_packs(graph, names)


@functools.lru_cache(maxsize=1024)
def _packed_once(graph: Graph, names: tuple[str, ...]) -> Graph:
    return _with_packs(graph, names)


def _with_packs(graph: Graph, names: tuple[str, ...]) -> Graph:
    valid = graph.names
    quantizes = {}
    for name in names:
        x, stored = split_name(name)
        if x == "output":
            raise ValueError(
                f"the output is the caller's tensor and kept as it is, not as {stored!r}"
            )
        quantizes[x] = Quantize(name=name, x=x, site=random.PACKING + valid.index(x))
    nodes = []
    for node in graph.nodes:
        nodes += [node, quantizes[node.name]] if node.name in quantizes else [node]
    quantized_nodes: list[Node] = [
        Dequantize(name=pack.x, quantized=(pack,))
        for pack in quantizes.values()
        if not pack.format.signs
    ]
    for node in graph.nodes:
        loaded = _loading(node, [quantizes[x] for x in node.inputs if x in quantizes])
        quantized_nodes += [] if loaded is None else [loaded]
    params = graph.params
    if any(pack.params for pack in quantizes.values()) and "seed" not in params:
        params += ("seed",)
    return replace(
        graph, nodes=tuple(nodes), params=params, quantized_nodes=tuple(quantized_nodes), text=""
    )


def _loading(node: Node, quantizes: list[Quantize]) -> Node | None:
    """The node that loads these inputs packed in place of `node`; None where it cannot.

    Raises: ValueError for signs that are not all that the node's backward needs.
    """
    signs = [pack for pack in quantizes if pack.format.signs]
    relu = isinstance(node, MLPActivation) and node.act == "relu" and not node.gate
    if signs and not relu:
        raise ValueError(
            f"the format {signs[0].stored!r} keeps signs alone, for the input of a ReLU; "
            f"{node.name!r} needs the values of {signs[0].x!r}"
        )
    if isinstance(node, MLPActivation):
        loads = node.act != USER_FUNCTION
    else:  # keys that no query sees are cut off, of what is in memory
        loads = isinstance(node, Attention) and not node.cuts_keys
    return replace(node, quantized=tuple(quantizes)) if quantizes and loads else None
