"""Rules by which operations become the steps of a block, by the names of the operations.

A rule `rule(t, number, op)` of a tracer `t` returns a function that adds the step of a value and
returns its name, or None if the operation is no such step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fused_remat.layers.eligibility import parameters_of
from fused_remat.spec import PackedSpec
from fused_remat.steps.activation import ACTIVATIONS, MLPActivation
from fused_remat.steps.dora import Dora
from fused_remat.steps.linear import Linear
from fused_remat.steps.low_rank import LowRank
from fused_remat.steps.norm import HeadNorm, Norm
from fused_remat.steps.residual import Add, DrawMask
from fused_remat.tracing import attention, mixture, modulation, streams
from fused_remat.tracing.builder import CASTS, Build, Builder
from fused_remat.tracing.heads import norm_of
from fused_remat.tracing.replays import region, replay
from fused_remat.tracing.values import ADD, MATMUL, MULTIPLY, Op, Ref, refs

_TRANSPOSES = ("t", "get", "transpose", "swapaxes")


def _linear(t: Builder, number: int, op: Op) -> Build | None:
    """Trace F.linear, addmm, or a product with a matrix that is no activation."""
    args = [*op.args, *op.kwargs.values()]
    bias, x, weight = args[:3] if op.name == "addmm" else ([*args, None][2], *args[:2])
    if not t.live(x) or t.live(weight) or t.live(bias) or len(args) > 3:
        return None
    if not isinstance(weight, Ref) or t.recording.values[weight.index].dim() != 2:
        return None
    if not all((layout := t.layout(n)) and layout.is_last for n in (number, x.index)):
        return None

    def build() -> str:
        input, inner, transposed = t.build(x.index), weight.index, op.name != "linear"
        producer = t.producer(inner)
        if transposed and producer is not None and producer.kind in _TRANSPOSES:
            source = refs(producer.args)[0]
            a, b = (t.recording.values[n] for n in (inner, source))
            if b.dim() == 2 and torch.equal(a, b.t()):
                inner, transposed = source, False
        w, own_bias = t.param(inner, transposed), _param(t, bias)
        name = t.recording.sources.get(inner, "")
        name = name[:-7] if name.endswith((".weight", "_weight")) else op.inside
        packed = _formats(t, w)
        return t.add(
            Linear(name=t.unique(name), x=input, weights=(w,), biases=(own_bias,), packed=packed)
        )

    return build


def _dora(t: Builder, number: int, op: Op) -> Build | None:
    """Trace a linear layer with DoRA."""
    x, *params = op.args
    if not t.live(x) or any(map(t.live, params)):
        return None
    if not all((layout := t.layout(n)) and layout.is_last for n in (number, x.index)):
        return None

    def build() -> str:
        input, name = t.build(x.index), t.unique(op.inside)
        weight, bias, a, b, magnitude = (_param(t, value) for value in params)
        mask = _add_mask(t, f"{name}.mask", input, op.p) if op.p and t.drops else ""
        update = Dora(
            a=a, b=b, low=f"{name}.low", scale=op.info.scale, mask=mask, magnitude=magnitude,
            weight=weight, bias=bias, dtype=_own_dtype(t, params[2].index, params[0].index),
        )  # fmt: skip
        return t.add(
            Linear(
                name=name, x=input, weights=(weight,), biases=(bias,), updates=(update,),
                packed=_formats(t, weight),
            )
        )  # fmt: skip

    return build


def _formats(t: Builder, weight: str) -> tuple[PackedSpec, ...]:
    return (t.formats[weight],) if weight in t.formats else ()


def _own_dtype(t: Builder, matrix: int, weight: int) -> torch.dtype | None:
    """Return the dtype of an adapter's matrix if it is not that of its layer's weight."""
    params, names = parameters_of(t.layer), t.recording.sources
    known = [params.get(names.get(n, "")) for n in (matrix, weight)]
    own, other = (None if param is None else param.dtype for param in known)
    return own if t.mixes_dtypes and own != other else None


def _norm(t: Builder, number: int, op: Op) -> Build | None:
    """Trace a norm's module, F.layer_norm or F.rms_norm over the width."""
    spec, x, weight, bias = norm_of(t, op)
    if spec is None or not t.live(x) or t.live(weight) or t.live(bias):
        return None
    layout = t.layout(number)
    if layout is None or layout != t.layout(x.index):
        return None
    # RMS norms of heads are a part of the step that rotates them.
    is_of_heads = spec.kind == "layer_norm" and len(layout.features) == 2
    if not (layout.is_last or is_of_heads):
        return None

    def build() -> str:
        input, w, b = t.build(x.index), _param(t, weight), _param(t, bias)
        name = t.unique(op.inside or "norm")
        if layout.is_last:
            return t.add(Norm(name=name, x=input, weight=w, bias=b, spec=spec))
        heads = layout.features[0]
        return t.add(HeadNorm(name=name, x=input, weight=w, bias=b, spec=spec, heads=heads))

    return build


def _param(t: Builder, value: Any) -> str:
    return t.param(value.index) if isinstance(value, Ref) else ""


def _operands(t: Builder, op: Op | None) -> list[int]:
    """Return the two activations that an operation reads, or nothing if these are not all."""
    args = [] if op is None else [*op.args, *op.kwargs.values()]
    return [arg.index for arg in args] if len(args) == 2 and all(map(t.live, args)) else []


class _Update(NamedTuple):
    """The numbers of base + scale * B(A(dropout(x))), where `base` is a linear layer of x."""

    base: int
    a: int
    b: int
    scale: float
    p: float
    x: int


def _sum(t: Builder, number: int, op: Op) -> Build | None:
    """Trace a sum of activations as wide as the stream, or an update of a linear layer."""
    if (update := _update(t, op)) is not None:
        return lambda: _add_update(t, update)
    terms = _terms(t, number)
    if terms is None:
        return modulation.norm(t, number)
    return lambda: _add_sum(t, number, terms)


def _cast(t: Builder, number: int, op: Op) -> Build | None:
    """Trace a norm or a sum in another dtype, which is rounded to the stream's."""
    inner = t.source(number)
    producer = t.producer(inner)
    if inner == number or producer is None:
        return None
    if t.step(inner) is not None:
        return lambda: t.build(inner)
    if producer.kind not in ADD or (terms := _terms(t, inner)) is None:
        return modulation.norm(t, number)
    return lambda: _add_sum(t, number, terms)


def _update(t: Builder, op: Op | None) -> _Update | None:
    args = _operands(t, op)
    for base, other in zip(args, args[::-1], strict=True):
        scale, n = 1.0, t.source(other)
        product = t.producer(n)
        factor = product.args[1] if product is not None and product.kind in MULTIPLY else None
        if product is not None and isinstance(factor, (int, float)):
            scale, n = float(factor), t.source(product.args[0].index)
        up = _layer(t, n)
        down = None if up is None else _layer(t, up[0])
        if up is None or down is None or up[2] is not None or down[2] is not None:
            continue
        p, n = 0.0, down[0]
        dropout = t.producer(n)
        if dropout is not None and dropout.name == "dropout" and dropout.p:
            p, n = dropout.p, t.source(dropout.args[0].index)
        if _updated_input(t, t.source(base)) == n:
            return _Update(base, down[1], up[1], scale, p, n)
    return None


def _updated_input(t: Builder, number: int) -> int | None:
    """Return the input of a linear layer, with or without updates."""
    layer, op = _layer(t, number), t.producer(number)
    update = _update(t, op) if op is not None and op.kind in ADD else None
    return layer[0] if layer is not None else update and update.x


def _layer(t: Builder, number: int) -> tuple[int, int, Ref | None] | None:
    """Return x, weight and bias of a value that `F.linear` computes, or None."""
    op = t.producer(number)
    if op is None or op.name != "linear" or _linear(t, number, op) is None:
        return None
    x, weight, bias = [*op.args, *op.kwargs.values(), None][:3]
    return t.source(x.index), weight.index, bias


def _add_update(t: Builder, update: _Update) -> str:
    name = t.build(update.base)
    node = t.nodes[name]
    assert isinstance(node, Linear)
    low, mask = f"{name}.low{len(node.updates)}", ""
    if update.p and t.drops:
        mask = _add_mask(t, f"{low}.mask", node.x, update.p)
    adapter = LowRank(
        a=t.param(update.a), b=t.param(update.b), low=low, scale=update.scale, mask=mask,
        dtype=_own_dtype(t, update.a, t.values[node.weight]),
    )  # fmt: skip
    t.nodes[name] = replace(node, updates=(*node.updates, adapter))
    return name


def _terms(t: Builder, number: int) -> list[int] | None:
    """Return the terms of a sum no wider than the stream, and of those that nothing else reads."""
    op, layout = t.producer(number), t.layout(number)
    if op is None or op.kind not in ADD or op.path is not None or _update(t, op):
        return None
    args = _operands(t, op)
    if len({*args}) < 2 or layout is None or not layout.is_last:
        return None
    if any(t.layout(arg) != layout for arg in args):
        return None
    if layout.width > t.widths["input"]:  # within an activation
        return None
    products = [t.producer(t.source(arg)) for arg in args]
    if all(product is not None and product.kind in MULTIPLY for product in products):
        _, sources, _ = region(t, (number,), op.inside)
        if len(sources) == 1 and sources[0] not in args:  # a function of one activation
            return None
    inner = [_terms(t, arg) if t.uses.count(arg) == 1 else None for arg in args]
    return [n for arg, terms in zip(args, inner, strict=True) for n in terms or [arg]]


def _add_sum(t: Builder, number: int, terms: list[int]) -> str:
    """Add the terms to the residual stream, the earliest of them, one after the other."""
    parts = [modulation.term(t, term) for term in terms]
    if all(part.weight != 1 for part in parts):
        parts[0] = modulation.Affine(terms[0], 1, 0)
    gates = {t.build(modulation.of_stream(t, part.base)): part.weight for part in parts}
    if len(gates) < len(terms):
        return replay(t, number)
    order = [*t.inputs, *t.nodes]
    stream = min([name for name, gate in gates.items() if gate == 1], key=order.index)
    for name, gate in [(n, gate) for n, gate in gates.items() if n != stream]:
        stream = t.add(modulation.added(t, name, stream, gate))
        t.widths[stream] = t.widths[name]
    return stream


def _dropout(t: Builder, number: int, op: Op) -> Build | None:
    if not (op.p and t.drops):
        return None
    p, name = op.p, op.inside or "dropout"

    def build() -> str:
        x = t.build(op.args[0].index)
        mask = _add_mask(t, f"{name}.mask", x, p)
        return t.add(Add(name=t.unique(f"{name}.dropped"), x=x, mask=mask))

    return build


def _add_mask(t: Builder, name: str, x: str, p: float) -> str:
    return t.add(DrawMask(name=t.unique(name), site=next(t.sites), p=p, like=x, of=x))


def _activation(t: Builder, op: Op | None) -> tuple[str, Any] | None:
    """Return the entry of `ACTIVATIONS` that an operation computes, and its input, or None."""
    if op is None or not isinstance(next(iter(op.args), None), Ref):
        return None
    if op.kind == "square" or (op.kind == "pow" and op.args[1:] == (2,)):
        inner = _activation(t, t.producer(op.args[0].index))
        return ("relu2", inner[1]) if inner is not None and inner[0] == "relu" else None
    if op.name == "act":
        return op.info, op.args[0]
    if op.name == "gelu":
        is_tanh = "tanh" in (*op.args, *op.kwargs.values())
        return "gelu_tanh" if is_tanh else "gelu", op.args[0]
    return (op.kind, op.args[0]) if op.kind in ACTIVATIONS else None


def _act(t: Builder, number: int, op: Op) -> Build | None:
    traced = _activation(t, op)
    if traced is None or not t.live(traced[1]):
        return None
    act, x = traced
    if t.layout(x.index) != t.layout(number):
        return None
    return lambda: t.add(
        MLPActivation(up=t.build(x.index), name=t.unique(op.inside or "act"), act=act)
    )


def _product(t: Builder, number: int, op: Op) -> Build | None:
    args, layout = _operands(t, op), t.layout(number)
    for one, up in zip(args, args[::-1], strict=True):
        traced = _activation(t, t.producer(t.source(one)))
        if traced is None:
            continue
        act, gate = traced
        if t.live(gate) and layout == t.layout(gate.index) == t.layout(up):

            def build(gate: int = gate.index, up: int = up, act: str = act) -> str:
                inputs = t.build(gate), t.build(up)
                name = t.unique(f"{op.inside}.act")
                return t.add(MLPActivation(name=name, gate=inputs[0], up=inputs[1], act=act))

            return build
    return None


#: Rules by the names of operations without underscores.
STEPS: Mapping[str, Callable[[Builder, int, Op], Build | None]] = {
    "linear": _linear,
    "dora": _dora,
    "experts": mixture.from_call,
    "addmm": _linear,
    "norm": _norm,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "dropout": _dropout,
    "act": _act,
    "scaled_dot_product_attention": attention.from_call,
    **dict.fromkeys(("cat", "concat", "concatenate"), streams.join),
    **dict.fromkeys(("getitem", "narrow", "split", "split_with_sizes", "chunk"), streams.take),
    "setitem": streams.assigned,
    **dict.fromkeys(ADD, _sum),
    **dict.fromkeys(MULTIPLY, lambda t, n, op: _product(t, n, op) or modulation.norm(t, n)),
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys(MATMUL, lambda *args: _linear(*args) or attention.from_softmax(*args)),
    **dict.fromkeys((*ACTIVATIONS, "square", "pow"), _act),
}
