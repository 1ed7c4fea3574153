"""Rules by which a condition becomes the weight of a norm, or the gate of a sum.

A chain of products and sums with values of shape (B, 1, D), or (B, S, D) where each token has its
own, turns an activation h into h * weight + bias. Both are computed before the block, under
autograd.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_remat.steps.linear import Linear
from fused_remat.steps.modulation import GatedAdd, GatedLinear, ModulatedNorm
from fused_remat.steps.norm import Norm, shifted
from fused_remat.steps.residual import Add
from fused_remat.steps.streams import Join
from fused_remat.tracing.builder import STREAMS, Build, Builder
from fused_remat.tracing.heads import norm_of
from fused_remat.tracing.program import leaf_value
from fused_remat.tracing.sizes import Size
from fused_remat.tracing.values import ADD, MULTIPLY, Op, Ref, map_tree, refs

_DIVIDE = ("div", "truediv", "itruediv", "true_divide")
#: A number, a `Ref`, or (kind, a, b) of "add", "mul", "div" or "shift"; 1 and 0 where absent.
Term = Any


@dataclass(frozen=True)
class Affine:
    """base * weight + bias, where `base` is the number of an activation."""

    base: int
    weight: Term
    bias: Term


def affine(t: Builder, number: int) -> Affine:
    """Return a value as a chain of products and sums, each of which one operation reads."""
    base, steps = number, list[tuple[str, Term]]()
    while True:
        inner = t.source(base)
        op = t.producer(inner)
        found = None if op is None else _operand(t, op)
        if found is None or (steps and max(map(t.uses.count, (base, inner))) > 1):
            break
        base, step = found
        steps.append(step)
    weight, bias = 1, 0
    for kind, value in reversed(steps):
        if kind == "add":
            bias = _joined("add", bias, value)
        else:
            weight, bias = (_joined(kind, term, value) for term in (weight, bias))
    return Affine(base, weight, bias)


def _joined(kind: str, a: Term, b: Term) -> Term:
    if kind == "add":
        return b if a == 0 else (kind, a, b)
    if b == 1 or a == 0:
        return a
    return b if kind == "mul" and a == 1 else (kind, a, b)


def _operand(t: Builder, op: Op) -> tuple[int, tuple[str, Term]] | None:
    """Return the activation that an operation scales or shifts, and by what; or None."""
    args = [*op.args, *op.kwargs.values()]
    if op.path is not None or len(args) != 2:
        return None
    divides, multiplies = op.kind in _DIVIDE, op.kind in MULTIPLY
    if not (divides or multiplies or op.kind in ADD):
        return None
    for x, value in [args] if divides else [args, args[::-1]]:
        if t.live(x) and _is_condition(t, x.index, value):
            return x.index, ("div" if divides else "mul" if multiplies else "add", value)
    return None


def _is_condition(t: Builder, x: int, value: Any) -> bool:
    """Return whether a value is a number, or scales or shifts each sequence or token of x."""
    if isinstance(value, (int, float)):
        return True
    layout = t.layout(x)
    if not isinstance(value, Ref) or t.live(value) or layout is None or not layout.is_last:
        return False
    shape = t.recording.shapes[value.index]
    if shape is None or layout.tokens != (0, 1) or len(layout.factors) != 3:
        return False
    if not t.recording.values[value.index].is_floating_point():
        return False
    batch, rows, width = (1, 1, 1, *shape)[-3:]
    is_of_tokens = len(shape) == 3 and t.counts(rows, layout.names) and width == layout.width
    if rows != 1 and not is_of_tokens:
        return False  # such as the values (B, S, 1) of a mask
    return len(shape) < 4 and batch in (1, Size(1, ("B",))) and width in (1, layout.width)


def _has_batch(t: Builder, term: Term) -> bool:
    return any(shape[0] == Size(1, ("B",)) for shape in _shapes(t, term))


def _tokens_of(t: Builder, *terms: Term) -> Any:
    """Return the tokens of terms whose values differ by token, or 1."""
    rows = (shape[1] for term in terms for shape in _shapes(t, term))
    return next((n for n in rows if n != 1), 1)


def _shapes(t: Builder, term: Term) -> list[Any]:
    shapes = (t.recording.shapes[n] for n in refs(term))
    return [shape for shape in shapes if shape and len(shape) == 3]


def _value(term: Term, shape: Any) -> Tensor:
    """Return the value (B, 1, D) or (B, S, D) of a term."""
    made: Tensor = _computed(term)
    return made.expand(shape)


def _computed(term: Term) -> Any:
    if not isinstance(term, tuple):
        return term
    kind, a, b = term[0], _computed(term[1]), _computed(term[2])
    if kind == "shift":
        return shifted(a, b)
    return a + b if kind == "add" else a * b if kind == "mul" else a / b


def _param(t: Builder, term: Term, rows: Any, width: int) -> str:
    """Return the block's name of a term's value, of shape (B, rows, width)."""
    lead = Size(1, ("B",)), rows
    if isinstance(term, Ref) and t.recording.shapes[term.index] == (*lead, width):
        return t.param(term.index)
    args = term, (*lead, width)
    known = {n: t.recording.values[n] for n in refs(term)}
    with torch.no_grad():
        result = _value(*map_tree(args, lambda leaf: leaf_value(leaf, known, t.context)))
    number = t.new_value("modulation", _value, args, refs(term)[0], result, lead)
    return t.param(number)


def norm(t: Builder, number: int, op: Op | None = None) -> Build | None:
    """Trace a norm whose result is scaled or shifted for each sequence, in any dtype."""
    chain = affine(t, number)
    inner = t.producer(t.source(chain.base))
    if inner is None or inner.path is not None:
        return None
    spec, x, weight, bias = norm_of(t, inner)
    if spec is None or not t.live(x) or t.live(weight) or t.live(bias):
        return None
    layout, source = t.layout(number), of_stream(t, x.index)
    if layout is None or not layout.is_last or layout != t.layout(source):
        return None
    is_plain = (chain.weight, chain.bias) == (1, 0)
    by_token = _tokens_of(t, chain.weight) != 1 or _tokens_of(t, chain.bias) != 1
    is_read_again = max(map(t.uses.count, (chain.base, t.source(chain.base)))) > 1
    if by_token and (is_read_again or _tokens_of(t, chain.weight) == 1):
        return None  # a rotation, or positions that are added: no weight for each token
    if not (is_plain or _has_batch(t, chain.weight) or _has_batch(t, chain.bias)):
        return None

    def build() -> str:
        name, source = t.unique(inner.inside or "norm"), t.build(of_stream(t, x.index))
        if is_plain:
            names = [t.param(v.index) if isinstance(v, Ref) else "" for v in (weight, bias)]
            return t.add(Norm(name=name, x=source, weight=names[0], bias=names[1], spec=spec))
        w, b = chain.weight, chain.bias
        if isinstance(weight, Ref):
            w = _joined("mul", ("shift", weight, spec.offset) if spec.offset else weight, w)
        if isinstance(bias, Ref):
            b = _joined("add", b, _joined("mul", bias, chain.weight))
        rows = _tokens_of(t, w, b)
        names = ["" if term in (0, 1) else _param(t, term, rows, layout.width) for term in (w, b)]
        return t.add(
            ModulatedNorm(
                name=name, x=source, weight=names[0], bias=names[1], by_token=rows != 1,
                spec=replace(spec, offset=0.0),
            )
        )  # fmt: skip

    return build


def term(t: Builder, number: int) -> Affine:
    """Return a term of a sum as an activation that is scaled for each sequence, or not at all."""
    chain, itself = affine(t, number), Affine(number, 1, 0)
    if chain.bias != 0 or t.layout(chain.base) != t.layout(number) or t.uses.count(number) > 1:
        return itself
    inner = t.producer(t.source(chain.base))
    is_norm = inner is not None and norm_of(t, inner)[0] is not None
    is_gated = not is_norm and _has_batch(t, chain.weight)
    return chain if is_gated or chain.weight == 1 else itself


def stream_of(t: Builder, name: str) -> str:
    """Return the prefix of names of an activation's stream, "" unless both streams attend."""
    if not any(isinstance(node, Join) for node in t.nodes.values()):
        return ""
    while (node := t.nodes.get(name)) is not None:
        if len(node.tokens) > 1:
            return ""
        name = node.tokens[0] if node.tokens else getattr(node, "residual", "") or node.follows
    return f"{STREAMS[name]}."


def added(t: Builder, x: str, residual: str, gate: Term) -> Add:
    """Return the step that adds an activation with a gate, or 1, to the residual."""
    name = t.unique(f"{stream_of(t, residual)}mid")
    if gate == 1:
        return Add(name=name, x=x, residual=residual)
    rows = _tokens_of(t, gate)
    own = _param(t, gate, rows, t.widths[x])
    return GatedAdd(name=name, x=x, residual=residual, gate=own, by_token=rows != 1)


def joined(layer: Linear, node: Add) -> Linear:
    """Return a plain linear layer with the residual sum after it."""
    if not isinstance(node, GatedAdd):
        return replace(layer, name=node.name, residual=node.residual, mask=node.mask)
    return GatedLinear(
        name=node.name, x=layer.x, residual=node.residual, weights=layer.weights,
        biases=layer.biases, part=layer.part, gate=node.gate, by_token=node.by_token,
    )  # fmt: skip


def of_stream(t: Builder, number: int) -> int:
    """Return the value of the stream's dtype behind casts, or a value itself."""
    inner = t.source(number)
    return inner if t.is_of_stream(inner) else number
