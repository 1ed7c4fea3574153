"""A block in two dtypes, as under autocast: the residual stream in one, all else in a lower one.

The stream (`Graph.stream`) is the block's inputs and output, sums with a residual, and what is used
as a residual. Products round operands and weights to the lower dtype, and their result too; norms
and sums with a residual compute in float32. Backward mirrors that: a gradient is rounded before a
product, and gradients of the stream are summed in the stream's dtype.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fused_remat.graph.graph import Graph
from fused_remat.graph.text import block
from fused_remat.steps.collective import CollectiveStep
from fused_remat.steps.linear import Linear
from fused_remat.steps.mixture import ExpertsDown, ExpertsUp
from fused_remat.steps.node import Node
from fused_remat.steps.norm import Norm
from fused_remat.steps.replay import Replay
from fused_remat.steps.residual import Add, DrawMask
from fused_remat.steps.streams import Join, Take


@block
def mixed_precision(graph: Graph, compute: torch.dtype) -> Graph:
    """Return `graph` with all that is outside the residual stream in `compute`.

    Raises: NotImplementedError if a step other than a norm, linear layer, sum or collective reads
        or writes the stream.
    """
    nodes = tuple([_in_precision(graph, node, compute) for node in graph.nodes])
    return replace(graph, nodes=nodes, compute=compute)


def _in_precision(graph: Graph, node: Node, compute: torch.dtype) -> Node:
    inside = node.name in graph.stream
    if isinstance(node, Norm):
        return replace(node, mixed=True, compute=None if inside else compute)
    if isinstance(node, Linear) and (node.residual or not inside):
        updates = tuple([replace(update, dtype=None) for update in node.updates])
        return replace(node, compute=compute, updates=updates)
    if isinstance(node, Add) and node.x not in graph.stream:
        return replace(node, compute=compute)
    if isinstance(node, (ExpertsUp, ExpertsDown)):
        return replace(node, compute=compute)
    if isinstance(node, (CollectiveStep, Replay)) and not inside:
        return replace(node, compute=compute)
    reads_stream = graph.stream.intersection((node.name, *node.inputs))
    if isinstance(node, (Add, Replay, DrawMask, Join, Take)) or not reads_stream:
        return node
    raise NotImplementedError(
        f"{graph.kind} cannot run under autocast: the step {node.name!r} "
        f"({type(node).__name__}) has no rule for two dtypes"
    )
