"""Steps of a program that one operation computes: rows of `FUSIONS`.

A fusion rewrites a program once it is known what is kept, rebuilt and asked for: where the steps
stand that a routine covers, and nobody else reads what the routine does not write, one step takes
their place. What a policy keeps, and what backward asks for, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.fused import LinearNorm, MlpBackward, MlpUp
from fused_remat.steps.linear import Linear
from fused_remat.steps.node import Node
from fused_remat.steps.norm import Norm
from fused_remat.steps.storage import Quantize


@dataclass(frozen=True, eq=False)
class Draft:
    """A step before it is known what it frees.

    Attributes:
        kind: "compute", "backward" or "tiles".
        node: whose step it is; None for "tiles".
        wants: of a backward step, what it gives gradients of.
        touched: every name that it uses or makes.
    """

    kind: str
    node: Node | None
    needs_grad: frozenset[str]
    touched: tuple[str, ...]


Steps = Sequence[Draft]


def _users(steps: Steps, name: str) -> list[Draft]:
    return [step for step in steps if name in step.touched]


def _computes(steps: Steps, name: str) -> Draft | None:
    """The step that computes `name` by itself."""
    for step in steps:
        if step.kind == "compute" and step.node is not None and step.node.name == name:
            return step
    return None


def _packs(steps: Steps, name: str) -> Draft | None:
    """The step that packs `name` by itself."""
    return next((s for s in steps if s.node is not None and s.node.quantizes == name), None)


def _alike(steps: Sequence[Draft | None]) -> bool:
    """Whether each step computes a linear layer of one input that ends in nothing else."""
    nodes = [step.node for step in steps if step is not None and isinstance(step.node, Linear)]
    plain = len(nodes) == len(steps) and all(node.plain for node in nodes)
    return plain and len({node.x for node in nodes}) == 1


def _replaced(steps: Steps, old: Sequence[Draft], node: Node, gone: Collection[str]) -> list[Draft]:
    """`steps` with `node`'s in place of the last of `old`, which it covers, and without `gone`."""
    last = max(old, key=steps.index)
    touched = dict.fromkeys(name for step in old for name in step.touched if name not in gone)
    new = Draft(last.kind, node, old[-1].needs_grad, tuple(touched))
    return [new if step is last else step for step in steps if step is last or step not in old]


def linear_act(steps: Steps, fusions: Collection[str], held: Collection[str]) -> list[Draft]:
    """compute up, compute act -> compute act; also with a gate, and with what packs either."""
    for step in steps:
        node = step.node
        if step.kind != "compute" or not isinstance(node, MLPActivation):
            continue
        sources = [_computes(steps, name) for name in node.inputs]
        if f"linear_act {node.act}" not in fusions or not _alike(sources):
            continue
        packing = [_packs(steps, name) for name in node.inputs]
        old = [s for s in (*sources, *packing, step) if s is not None]
        at = steps.index(step)
        others = {n: [u for u in _users(steps, n) if u not in old] for n in node.inputs}
        used = [name for name in node.inputs if name in held or others[name]]
        if any(steps.index(user) < at for name in used for user in others[name]):
            continue  # wanted before the activation is
        layers = [s.node for s in sources if s is not None and isinstance(s.node, Linear)]
        quantizes = [
            s.node if s is not None and isinstance(s.node, Quantize) else None for s in packing
        ]
        new = MlpUp(
            name=node.name, ups=tuple(layers), act=node,
            kept=tuple([name in used for name in node.inputs]), packed=tuple(quantizes),
        )  # fmt: skip
        steps = _replaced(steps, old, new, set(node.inputs) - set(used))
        return linear_act(steps, fusions, held)
    return list(steps)


def linear_norm(steps: Steps, fusions: Collection[str], held: Collection[str]) -> list[Draft]:
    """compute sum (a linear layer and a residual), compute norm -> both in one step."""
    for step in steps:
        node = step.node
        if step.kind != "compute" or not isinstance(node, Norm) or "linear_norm" not in fusions:
            continue
        source = _computes(steps, node.x)
        if source is None or not isinstance(source.node, Linear) or not source.node.residual:
            continue
        packing = _packs(steps, node.x)
        pack = None if packing is None else packing.node
        if [user for user in _users(steps, node.x) if user is not packing][1] is not step:
            continue  # somebody reads the sum before the norm does
        assert pack is None or isinstance(pack, Quantize)
        new = LinearNorm(name=node.name, linear=source.node, norm=node, pack=pack)
        old = [s for s in (source, packing, step) if s is not None]
        return linear_norm(_replaced(steps, old, new, ()), fusions, held)
    return list(steps)


def mlp_bwd(steps: Steps, fusions: Collection[str], held: Collection[str]) -> list[Draft]:
    """compute up and act, backward out and act -> one backward step; also with a gate."""
    for step in steps:
        node = step.node
        if step.kind != "backward" or not isinstance(node, MLPActivation):
            continue
        if f"mlp_bwd {node.act}" not in fusions or not set(node.inputs) <= step.needs_grad:
            continue
        ups = [_computes(steps, name) for name in node.inputs]
        out = _only_source(steps, step, node.name)
        if out is None or not _alike(ups):
            continue
        layer, act = out.node, _computes(steps, node.name)
        assert isinstance(layer, Linear)
        if (act is not None) != (layer.weight in out.needs_grad):
            continue  # the activation is kept
        old = [s for s in (*ups, act, step, out) if s is not None]
        if any(s not in old for name in (*node.inputs, node.name) for s in _users(steps, name)):
            continue  # somebody else reads what would not be written
        layers = tuple(s.node for s in ups if s is not None and isinstance(s.node, Linear))
        new = MlpBackward(name=layer.name, ups=layers, act=node, out=layer)
        steps = _replaced(steps, old, new, {*node.inputs, node.name})
        return mlp_bwd(steps, fusions, held)
    return list(steps)


def _only_source(steps: Steps, taker: Draft, name: str) -> Draft | None:
    """The linear layer whose backward gives all of the gradient of `name`, its input.

    None also if a node that this layer gives another gradient to runs before `taker`, which is
    when the layer's backward would run.
    """
    givers = [s for s in steps if s.kind == "backward" and name in s.needs_grad]
    if len(givers) != 1:
        return None
    node = givers[0].node
    if not isinstance(node, Linear) or node.x != name or node.residual == name:
        return None
    if len(node.weights) > 1 or node.updates:
        return None
    between = steps[steps.index(givers[0]) + 1 : steps.index(taker)]
    takes = {s.node.name for s in between if s.kind == "backward" and s.node is not None}
    if any(s.kind == "tiles" for s in between) or takes & givers[0].needs_grad:
        return None
    return givers[0]


#: Name -> rewriting; applied in this order. Those of an activation are asked for by both names,
#: "mlp_bwd gelu". `held`: names that outlive the program.
FUSIONS: dict[str, Callable[[Steps, Collection[str], Collection[str]], list[Draft]]] = {
    "mlp_bwd": mlp_bwd,
    "linear_act": linear_act,
    "linear_norm": linear_norm,
}


def fuse(steps: Steps, fusions: Collection[str], held: Collection[str]) -> list[Draft]:
    """`steps`, rewritten by those of `FUSIONS` that `fusions` names."""
    if fusions:
        for rewrite in FUSIONS.values():
            steps = rewrite(steps, fusions, held)
    return list(steps)
