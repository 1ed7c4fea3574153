"""Fusions: rewriting a program so that one operation computes several of its steps.

A fusion applies after it is known what is kept, rebuilt and needed. Where a program has the steps
that a fused operation covers, and no other step reads what the operation does not write, one step
replaces them. A fusion changes neither what a policy keeps nor what backward reads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.fused import LinearNorm, MlpBackward, MlpUp
from fused_remat.steps.linear import Linear
from fused_remat.steps.mixture import ExpertsBackward, ExpertsDown, ExpertsForward, ExpertsUp
from fused_remat.steps.modulation import GatedLinear
from fused_remat.steps.node import Node
from fused_remat.steps.norm import Norm


@dataclass(frozen=True, eq=False)
class Draft:
    """A step of a program, before it is known what it frees."""

    kind: str  # "compute", "backward" or "tiles"
    node: Node | None  # None for "tiles"
    needs_grad: frozenset[str]  # backward only: what the step computes gradients of
    touched: tuple[str, ...]  # all names that it reads or makes


Steps = Sequence[Draft]


def _users(steps: Steps, name: str) -> list[Draft]:
    return [step for step in steps if name in step.touched]


def _computes(steps: Steps, name: str) -> Draft | None:
    """Return the unfused step that computes `name`."""
    for step in steps:
        if step.kind == "compute" and step.node is not None and step.node.name == name:
            return step
    return None


def _linears(steps: Steps, names: Sequence[str]) -> tuple[list[Draft], tuple[Linear, ...]]:
    """Return the steps of `names` and their nodes, if all are plain linear layers of one input."""
    found = [step for name in names if (step := _computes(steps, name)) is not None]
    nodes = tuple([s.node for s in found if isinstance(s.node, Linear) and s.node.plain])
    alike = len(nodes) == len(names) and len({node.x for node in nodes}) == 1
    return (found, nodes) if alike else ([], ())


def _replaced(steps: Steps, old: Sequence[Draft], node: Node, gone: Collection[str]) -> list[Draft]:
    """Return `steps` with a step of `node` for the last of `old`, which does not write `gone`."""
    last = max(old, key=steps.index)
    touched = dict.fromkeys(name for step in old for name in step.touched if name not in gone)
    new = Draft(last.kind, node, old[-1].needs_grad, tuple(touched))
    return [new if step is last else step for step in steps if step is last or step not in old]


def linear_act(
    steps: Steps, step: Draft, fusions: Collection[str], held: Collection[str]
) -> list[Draft] | None:
    """Fuse the steps of `up` (and a gate) and `act`, which is `step`, into one of `act`."""
    node = step.node
    if step.kind != "compute" or not isinstance(node, MLPActivation):
        return None
    sources, ups = _linears(steps, node.inputs)
    if f"linear_act {node.act}" not in fusions or not ups:
        return None
    old = [*sources, step]
    at = steps.index(step)
    others = {n: [u for u in _users(steps, n) if u not in old] for n in node.inputs}
    used = [name for name in node.inputs if name in held or others[name]]
    if any(steps.index(user) < at for name in used for user in others[name]):
        return None  # a product is read before the activation is computed
    new = MlpUp(
        name=node.name, ups=ups, act=node, kept=tuple([name in used for name in node.inputs])
    )
    return _replaced(steps, old, new, set(node.inputs) - set(used))


def linear_norm(
    steps: Steps, step: Draft, fusions: Collection[str], held: Collection[str]
) -> list[Draft] | None:
    """Fuse a linear layer with a residual and the norm of its sum, which is `step`."""
    node = step.node
    if step.kind != "compute" or type(node) is not Norm or "linear_norm" not in fusions:
        return None
    source = _computes(steps, node.x)
    if source is None or type(source.node) is not Linear or not source.node.residual:
        return None
    if _users(steps, node.x)[1] is not step:
        return None  # another step reads the sum before the norm does
    new = LinearNorm(name=node.name, linear=source.node, norm=node)
    return _replaced(steps, [source, step], new, ())


def mlp_bwd(
    steps: Steps, step: Draft, fusions: Collection[str], held: Collection[str]
) -> list[Draft] | None:
    """Fuse rebuilds of `up` (and a gate) and `act` with the backward of `out` and `act`."""
    node = step.node
    if step.kind != "backward" or not isinstance(node, MLPActivation):
        return None
    if f"mlp_bwd {node.act}" not in fusions or not set(node.inputs) <= step.needs_grad:
        return None
    if node.name in held:  # whose gradient the caller adds to
        return None
    sources, ups = _linears(steps, node.inputs)
    out = _only_source(steps, step, node.name)
    if out is None or not ups:
        return None
    layer, act = out.node, _computes(steps, node.name)
    assert isinstance(layer, Linear)
    if (act is not None) != (layer.x in layer.needs(out.needs_grad)):
        return None  # the activation is kept
    old = [s for s in (*sources, act, step, out) if s is not None]
    if any(s not in old for name in (*node.inputs, node.name) for s in _users(steps, name)):
        return None  # another step reads what would not be written
    new = MlpBackward(name=layer.name, ups=ups, act=node, out=layer)
    return _replaced(steps, old, new, {*node.inputs, node.name})


def _only_source(steps: Steps, taker: Draft, name: str) -> Draft | None:
    """Return the backward step of the one linear layer that has `name` as its input, or None."""
    givers = [s for s in steps if s.kind == "backward" and name in s.needs_grad]
    if len(givers) != 1:
        return None
    node = givers[0].node
    if type(node) not in (Linear, GatedLinear):
        return None
    assert isinstance(node, Linear)
    if node.x != name or node.residual == name:
        return None
    if node.sizes or node.updates or node.packed or node.part is not None:
        return None
    between = steps[steps.index(givers[0]) + 1 : steps.index(taker)]
    takes = {s.node.name for s in between if s.kind == "backward" and s.node is not None}
    if any(s.kind == "tiles" for s in between) or takes & givers[0].needs_grad:
        return None
    return givers[0]


def experts(
    steps: Steps, step: Draft, fusions: Collection[str], held: Collection[str]
) -> list[Draft] | None:
    """Fuse both steps of experts in forward, or in backward, where nothing else reads their result.

    Forward and backward of every policy do so: each product is the same.
    """
    node = step.node
    if not isinstance(node, ExpertsDown):
        return None
    rebuilt, users = _computes(steps, node.pre), _users(steps, node.pre)
    up = rebuilt and rebuilt.node
    if step.kind == "compute":
        if rebuilt is None or node.pre in held or len(users) > 2:
            return None
        assert isinstance(up, ExpertsUp)
        fused: Node = ExpertsForward(name=node.name, up=up, down=node)
        return _replaced(steps, [rebuilt, step], fused, {node.pre})
    givers = [s for s in steps if s.kind == "backward" and isinstance(s.node, ExpertsUp)]
    given = [s for s in givers if s.node is not None and s.node.name == node.pre]
    if not given or node.pre not in step.needs_grad:
        return None
    up = given[0].node
    assert isinstance(up, ExpertsUp)
    old = [s for s in (rebuilt, step, given[0]) if s is not None]
    rebuilds = rebuilt is not None and all(user in old for user in users)
    if rebuilt is not None and not rebuilds:  # the sum is rebuilt, too
        old.remove(rebuilt)
    fused = ExpertsBackward(name=node.name, up=up, down=node, rebuilds=rebuilds)
    steps = _replaced(steps, old, fused, {node.pre} if rebuilds else ())
    needs = step.needs_grad | given[0].needs_grad
    return [replace(s, needs_grad=needs) if s.node is fused else s for s in steps]


def fuse(steps: Steps, fusions: Collection[str], held: Collection[str]) -> list[Draft]:
    """Return `steps` with the fusions that `fusions` names; an activation's as "mlp_bwd gelu".

    `held`: names that outlive the program.
    """
    for rewrite in (experts, *((mlp_bwd, linear_act, linear_norm) if fusions else ())):
        pending = [*steps]
        while pending:
            fused = rewrite(steps, pending.pop(0), fusions, held)
            if fused is not None:
                steps, pending = fused, [*fused]
    return list(steps)
