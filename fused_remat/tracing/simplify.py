"""Steps that were read one by one, as the steps that a block has: joined, in order, with roles."""

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

#: By the name of a replay: the activation of which it is columns, and the first and last of them.
Picks = Mapping[str, tuple[str, int, int]]


def simplified(nodes: dict[str, Node], picks: Picks) -> list[Node]:
    """The nodes, by name, as those of a block; the last makes "output"."""
    _split(nodes, picks)
    _drop_and_add(nodes)
    return _with_roles(_ordered(nodes))


def readers(nodes: Mapping[str, Node]) -> Counter[str]:
    """How many nodes read each activation."""
    return Counter(n for node in nodes.values() for n in (*node.inputs, *node.masks))


def _split(nodes: dict[str, Node], picks: Picks) -> None:
    """Linear layers of which others read columns alone, as one layer for each: a packed gate."""
    for name, node in [*nodes.items()]:
        if not isinstance(node, Linear) or not node.plain or node.part is not None:
            continue
        mine = [n for n in nodes.values() if name in n.inputs]
        if not mine or not all(n.name in picks and isinstance(n, Replay) for n in mine):
            continue
        width = max(picks[n.name][2] for n in mine)
        if sorted(picks[n.name][1:] for n in mine) != sorted(_tiling(mine, picks, width)):
            continue
        for reader in mine:
            _, first, last = picks[reader.name]
            nodes[reader.name] = replace(node, name=reader.name, part=(first, last, width))
        del nodes[name]


def _tiling(replays: list[Node], picks: Picks, width: int) -> list[tuple[int, int]]:
    """Columns side by side, from 0 to `width`, with the ends that the replays have."""
    ends = sorted({end for r in replays for end in picks[r.name][1:]} | {0, width})
    return list(itertools.pairwise(ends))


def _drop_and_add(nodes: dict[str, Node]) -> None:
    """Dropout and the sum after it as one step, and as a part of the linear layer before."""
    count = readers(nodes)
    for node in [*nodes.values()]:
        if not isinstance(node, Add) or not node.residual:
            continue
        made = nodes.get(node.x)
        if isinstance(made, Add) and not made.residual and count[made.name] == 1 and not node.mask:
            node = nodes[node.name] = replace(node, x=made.x, mask=made.mask)
            del nodes[made.name]
            made = nodes.get(node.x)
        if isinstance(made, Linear) and made.plain and count[made.name] == 1:
            nodes[node.name] = replace(made, name=node.name, residual=node.residual, mask=node.mask)
            mask = nodes.get(node.mask)
            if isinstance(mask, DrawMask):  # it no longer has the layer's result to be like
                nodes[mask.name] = replace(mask, like=made.weight, of=made.x)
            del nodes[made.name]


def _ordered(nodes: Mapping[str, Node]) -> list[Node]:
    """Those that the output is made of, each after what it reads.

    What makes a sum's residual comes before what is added to it: backward then finishes the branch
    before it rebuilds anything for the residual.
    """
    done: dict[str, Node] = {}

    def place(node: Node) -> None:
        if node.name in done:
            return
        likes = (node.like, node.of) if isinstance(node, DrawMask) else ()
        for name in (getattr(node, "residual", ""), *node.inputs, *likes, *node.masks):
            if name in nodes:
                place(nodes[name])
        done[node.name] = node

    place(nodes["output"])
    return [*done.values()]


def _with_roles(nodes: list[Node]) -> list[Node]:
    """The nodes with the roles by which presets keep them (`graph.build`)."""
    roles: dict[str, str] = {}
    by_name = {node.name: node for node in nodes}
    residuals = {getattr(node, "residual", "") for node in nodes}
    for node in nodes:
        if isinstance(node, Attention):
            for name in node.inputs:
                made = by_name.get(name)
                reads = made.needs(made.inputs) if isinstance(made, (Replay, Rotary)) else ()
                roles.setdefault(
                    reads[0] if len(reads) == 1 and reads[0] in by_name else name, "heads"
                )
        if isinstance(node, MLPActivation):
            for name in filter(None, (node.gate, node.up)):
                roles.setdefault(name, "hidden")
        made = by_name.get(node.x) if isinstance(node, Norm) else None
        if made is not None and made.name not in residuals:
            ends = isinstance(made, (Linear, Replay)) and not getattr(made, "residual", "")
            follows = getattr(made, "residual", "") and made.name != "output"
            if ends or follows:
                roles[made.name] = "normed"
        ends_in_norm = isinstance(node, Add) and isinstance(by_name.get(node.x), Norm)
        if getattr(node, "residual", "") and node.name != "output" and not ends_in_norm:
            roles.setdefault(node.name, "stream")
    return [
        replace(node, role=roles[node.name]) if node.name in roles and not node.role else node
        for node in nodes
    ]
