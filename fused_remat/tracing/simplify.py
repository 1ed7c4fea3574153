"""Traced steps as the steps that a block has: joined, in order, and with roles."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.attention import Attention
from fused_remat.steps.linear import Linear
from fused_remat.steps.node import Node
from fused_remat.steps.norm import Norm
from fused_remat.steps.replay import Replay
from fused_remat.steps.residual import Add, DrawMask
from fused_remat.steps.rotary import Rotary

#: By the name of a replay: the activation whose columns it is, and the first and last of them.
Picks = Mapping[str, tuple[str, int, int]]


def simplified(nodes: dict[str, Node], picks: Picks) -> list[Node]:
    """Return the nodes, by name, as those of a block; the last computes "output"."""
    _split_linears(nodes, picks)
    _join_sums(nodes)
    return _with_roles(_ordered(nodes))


def use_counts(nodes: Mapping[str, Node]) -> Counter[str]:
    """Return how many nodes read each activation."""
    return Counter(n for node in nodes.values() for n in (*node.inputs, *node.masks))


def _split_linears(nodes: dict[str, Node], picks: Picks) -> None:
    """Split linear layers of which others read columns alone, such as a packed gate."""
    for name, node in [*nodes.items()]:
        if not isinstance(node, Linear) or not node.plain or node.part is not None:
            continue
        users = [n.name for n in nodes.values() if name in n.inputs]
        if not users or not all(n in picks and isinstance(nodes[n], Replay) for n in users):
            continue
        columns = sorted(picks[user][1:] for user in users)
        ends = sorted({0, *itertools.chain(*columns)})
        if columns != [*itertools.pairwise(ends)]:
            continue
        for user, first, last in [(n, *picks[n][1:]) for n in users]:
            nodes[user] = replace(node, name=user, part=(first, last, ends[-1]))
        del nodes[name]


def _join_sums(nodes: dict[str, Node]) -> None:
    """Join dropout with the sum after it, and both with the linear layer before."""
    count = use_counts(nodes)
    for node in [*nodes.values()]:
        if not isinstance(node, Add) or not node.residual:
            continue
        x = nodes.get(node.x)
        if isinstance(x, Add) and not x.residual and count[x.name] == 1 and not node.mask:
            node = nodes[node.name] = replace(node, x=x.x, mask=x.mask)
            del nodes[x.name]
            x = nodes.get(node.x)
        if isinstance(x, Linear) and x.plain and count[x.name] == 1:
            nodes[node.name] = replace(x, name=node.name, residual=node.residual, mask=node.mask)
            mask = nodes.get(node.mask)
            if isinstance(mask, DrawMask):  # the layer's result, which it was like, is gone
                nodes[mask.name] = replace(mask, like=x.weight, of=x.x)
            del nodes[x.name]


def _ordered(nodes: Mapping[str, Node]) -> list[Node]:
    """Return the nodes that the output depends on, each after its inputs.

    The steps of a sum's residual come before those of the branch that is added to it: backward then
    finishes the branch before it rebuilds anything for the residual.
    """
    done: dict[str, Node] = {}

    def visit(node: Node) -> None:
        if node.name in done:
            return
        likes = (node.like, node.of) if isinstance(node, DrawMask) else ()
        for name in (getattr(node, "residual", ""), *node.inputs, *likes, *node.masks):
            if name in nodes:
                visit(nodes[name])
        done[node.name] = node

    visit(nodes["output"])
    return [*done.values()]


def _with_roles(nodes: list[Node]) -> list[Node]:
    """Return the nodes with the roles by which presets keep them (`graph.build`)."""
    roles: dict[str, str] = {}
    by_name = {node.name: node for node in nodes}
    residuals = {getattr(node, "residual", "") for node in nodes}
    for node in nodes:
        if isinstance(node, Attention):
            for name in node.inputs:
                head = by_name.get(name)
                needs = head.needs(head.inputs) if isinstance(head, (Replay, Rotary)) else ()
                source = needs[0] if len(needs) == 1 and needs[0] in by_name else name
                roles.setdefault(source, "heads")
        if isinstance(node, MLPActivation):
            for name in filter(None, (node.gate, node.up)):
                roles.setdefault(name, "hidden")
        x = by_name.get(node.x) if isinstance(node, Norm) else None
        if x is not None and x.name not in residuals:
            residual = getattr(x, "residual", "")
            if (residual and x.name != "output") or (
                not residual and isinstance(x, (Linear, Replay))
            ):
                roles[x.name] = "normed"
        ends_in_norm = isinstance(node, Add) and isinstance(by_name.get(node.x), Norm)
        if getattr(node, "residual", "") and node.name != "output" and not ends_in_norm:
            roles.setdefault(node.name, "stream")
    return [
        replace(node, role=roles[node.name]) if node.name in roles and not node.role else node
        for node in nodes
    ]
