"""A graph that keeps some of its names packed, in the formats of `fused_remat.formats`.

Forward is the graph's own, with a `Pack` after each step whose result is named; nobody in forward
reads what that makes, so that no format changes an output. In backward (`Graph.again`) such an
activation is an `Unpack` of it, and the steps that can load packed elements ask for those instead,
so that nothing is unpacked whole for them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

from fused_remat import random
from fused_remat.formats import NATIVE, split_name
from fused_remat.graph.graph import Graph
from fused_remat.graph.text import builder
from fused_remat.spec import USER_FUNCTION
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.attention import Attention
from fused_remat.steps.node import Node
from fused_remat.steps.storage import Pack, Unpack


def in_formats(graph: Graph, save: Collection[str]) -> Graph:
    """`graph`, for keeping the names in `save`, of which "x:format" are packed.

    The same object for equal formats; `graph` itself where all are native.

    Raises: ValueError for a format that does not hold what backward asks of an activation: that of
        the output, which is the caller's tensor, and signs of anything but a ReLU's input.

    >>> from fused_remat.graph.build import block_graph
    >>> from fused_remat.spec import nn_layer_spec
    >>> graph = in_formats(block_graph(nn_layer_spec(True, 4, 16, "gelu")), {"attn", "up:int8"})
    >>> [node.name for node in graph.nodes if node.packs], [str(node.label) for node in graph.again]
    (['up:int8'], ['up from up:int8', 'act from up:int8'])
    """
    stored = tuple(sorted(name for name in save if split_name(name)[1] != NATIVE))
    if not stored:
        return graph
    return (packed if graph.recipe else _packed_once)(graph, stored)


@builder
def packed(graph: Graph, names: tuple[str, ...]) -> Graph:
    """`in_formats` for the names that are not native, sorted; one object for each pair."""
    return _with_packs(graph, names)


@functools.lru_cache(maxsize=1024)
def _packed_once(graph: Graph, names: tuple[str, ...]) -> Graph:
    return _with_packs(graph, names)


def _with_packs(graph: Graph, names: tuple[str, ...]) -> Graph:
    valid = graph.names
    packs = {}
    for name in names:
        x, stored = split_name(name)
        if x == "output":
            raise ValueError(
                f"the output is the caller's tensor and kept as it is, not as {stored!r}"
            )
        packs[x] = Pack(name=name, x=x, site=random.PACKING + valid.index(x))
    nodes = []
    for node in graph.nodes:
        nodes += [node, packs[node.name]] if node.name in packs else [node]
    again: list[Node] = [
        Unpack(name=pack.x, quantized=(pack,)) for pack in packs.values() if not pack.format.signs
    ]
    for node in graph.nodes:
        loaded = _loading(node, [packs[x] for x in node.inputs if x in packs])
        again += [] if loaded is None else [loaded]
    params = graph.params
    if any(pack.params for pack in packs.values()) and "seed" not in params:
        params += ("seed",)
    return replace(graph, nodes=tuple(nodes), params=params, again=tuple(again), recipe="")


def _loading(node: Node, packs: list[Pack]) -> Node | None:
    """The node that loads these inputs packed in place of `node`; None where it cannot.

    Raises: ValueError for signs that are not all that the node's backward needs.
    """
    signs = [pack for pack in packs if pack.format.signs]
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
    return replace(node, quantized=tuple(packs)) if packs and loads else None
