"""Rules for attention: a call of PyTorch's, or softmax between two products."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.layers.eligibility import parameters_of
from fused_remat.spec import AttentionSpec
from fused_remat.steps.attention import Attention
from fused_remat.tracing.builder import CASTS, Build, Builder
from fused_remat.tracing.heads import packed, without_repeats
from fused_remat.tracing.program import Layout, run_op
from fused_remat.tracing.sizes import Size
from fused_remat.tracing.streams import packed_streams
from fused_remat.tracing.values import ADD, ALGEBRA, MATMUL, Op, Ref, map_tree, refs

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
_SCALES = ("mul", "__mul__", "__rmul__", "mul_", "div", "__truediv__", "div_", "true_divide")
#: Operations that do not change probabilities.
_SAME = (*CASTS, "view", "reshape", "nan_to_num")
_ALL_BUT_LAST = (..., slice(None, -1))
#: Operations on scores whose effect on large scores is known.
_ON_SCORES = {*ALGEBRA, "tanh", "nan_to_num"}
#: Scores to which this or less is added are those of keys that a query does not see.
_UNSEEN = -1e4


class Scores(NamedTuple):
    """The computation of the scores before softmax from the product of queries and keys."""

    scale: float | None = None
    softcap: float = 0.0
    causal: bool = False
    mask: Ref | None = None  # the value that is added
    dropout: float = 0.0
    fill: float | None = None  # with which the mask replaces scores (`TracedBlock.fills`)
    sinks: int | None = None  # the value (H,) of scores next to those of keys


def from_call(t: Builder, number: int, op: Op) -> Build | None:
    args = {**_DEFAULTS, **dict(zip(_ARGUMENTS, op.args, strict=False)), **op.kwargs}
    q, k, v, mask = (args[name] for name in _ARGUMENTS[:4])
    if t.live(mask) or not all(map(t.live, (q, k, v))):
        return None
    scores = Scores(args["scale"], 0.0, bool(args["is_causal"]), mask, float(args["dropout_p"]))
    return _attention(t, number, op, (q.index, k.index, v.index), scores)


def from_softmax(t: Builder, number: int, op: Op) -> Build | None:
    """Trace matmul(softmax(f(matmul(q, k))), v), where f changes the scores.

    With sinks, softmax is that of the scores and one more column, which is dropped.
    """
    if len(op.args) != 2 or not all(map(t.live, op.args)):
        return None
    p, n, is_after = 0.0, op.args[0].index, True
    drops_last, sinks = False, None
    chain: list[Op] = []
    while True:  # from the product with the values back to that of queries and keys
        producer = t.producer(n)
        if producer is None or producer.path is not None:
            return None
        args = producer.args[:1] if producer.name in CASTS else (producer.args, producer.kwargs)
        read = [i for i in refs(args) if i in t.recording.live]
        if not is_after and not chain and _subtracts_maximum(t, producer):
            n = read[0]
            continue
        if not is_after and len(read) == 2 and producer.kind in MATMUL:
            break
        if len(read) != 1:
            return None
        if producer.name == "softmax" and is_after:
            if producer.kwargs.get("dim", (*producer.args, None)[1]) not in (-1, 3):
                return None
            is_after = False
        elif producer.name == "dropout" and is_after:
            p = producer.p or 0.0
        elif is_after and not drops_last and producer.args[1:] == (_ALL_BUT_LAST,):
            drops_last = True
        elif not is_after and not chain and drops_last and sinks is None:
            sinks = _sinks(t, producer)
            chain += [producer] if sinks is None else []
        elif not is_after:
            chain.append(producer)
        elif producer.name not in _SAME:
            return None
        n = read[0]
    scores = _scores(t, producer, chain[::-1])
    if scores is None or drops_last != (sinks is not None):
        return None
    scores = scores._replace(dropout=p, sinks=sinks)
    return _attention(t, number, op, (*read, op.args[1].index), scores)


def _subtracts_maximum(t: Builder, op: Op) -> bool:
    """Return whether an operation subtracts each row's maximum, which softmax ignores."""
    if op.kind != "sub" or len(op.args) != 2 or op.kwargs or not all(map(t.live, op.args)):
        return False
    top = t.producer(op.args[1].index)
    if top is None or top.name not in ("max", "amax") or top.args[:1] != op.args[:1]:
        return False
    dim = top.kwargs.get("dim", (*top.args, None, None)[1])
    keeps = top.kwargs.get("keepdim", (*top.args, None, None)[2])
    return dim in (-1, 3) and keeps is True and top.outs[0] == op.args[1].index


def _sinks(t: Builder, op: Op) -> int | None:
    """Return the scores (H,) that an operation appends to those of keys, or None."""
    if op.kind not in ("cat", "concat") or len(op.args[0]) != 2 or t.live(op.args[0][1]):
        return None
    if op.kwargs.get("dim", (*op.args, None)[1]) not in (-1, 3):
        return None
    source = next(iter(t.roots(op.args[0][1].index)), -1)
    if source not in t.recording.sources:
        return None
    own, value = t.recording.values[source], t.recording.values[op.args[0][1].index]
    same = own.dim() == 1 and value.dim() == 4 and value.shape[1] == len(own)
    same = same and torch.equal(own.view(-1, 1, 1).expand(value.shape).to(value), value)
    return source if same and value.shape[-1] == 1 else None


def _attention(
    t: Builder, number: int, op: Op, heads: tuple[int, ...], scores: Scores
) -> Build | None:
    """Return a function that adds attention of values (B, H, S, E), or of keys (B, H, E, S)."""
    layouts = [layout for n in (*heads, number) if (layout := t.layout(n)) is not None]
    features = [layout.features for layout in layouts]
    if len(layouts) < 4 or len({len(f) for f in features}) > 1 or len(features[0]) > 2:
        return None
    if len(features[0]) == 1 and len(t.recording.shapes[number] or ()) > 3:
        return None
    (q_heads, width), (kv_heads, k_width), (v_heads, _), _ = [(1, 1, *f)[-2:] for f in features]
    if kv_heads != v_heads or width != k_width or q_heads % kv_heads:
        return None
    if layouts[1].names != layouts[2].names or layouts[0].names != layouts[3].names:
        return None
    mask = scores.mask
    if mask is not None and t.recording.values[mask.index].dim() not in (2, 4):
        return None
    windows = {_windows(t, n, layout) for n, layout in zip((*heads, number), layouts, strict=True)}
    if len(windows) > 1 or (mask is not None and not _is_for_windows(t, mask.index, *windows)):
        return None

    def build() -> str:
        if mask is not None and scores.fill is not None:
            t.fills[mask.index] = scores.fill
        q, k, v = (t.build(n) for n in heads)
        k, v, shared = without_repeats(t, k, v, kv_heads)
        spec = AttentionSpec(
            num_heads=q_heads,
            num_kv_heads=kv_heads // shared,
            head_dim=width,
            scale=width**-0.5 if scores.scale is None else float(scores.scale),
            softcap=scores.softcap,
            dropout=scores.dropout if t.drops else 0.0,
            sinks=scores.sinks is not None,
            window=(-1, 0 if scores.causal else -1),
            align="start" if layouts[1].names != layouts[0].names else "end",
            masks=("mask",) * (mask is not None) + ("cu_seqlens",) * (t.bounds is not None),
        )
        q, k, v, spec = packed_streams(t, op.inside, (q, k, v), spec)
        q, k, v, spec = packed(t, op.inside, (q, k, v), spec)
        bounds = "" if t.bounds is None else t.param(t.bounds)
        return t.add(
            Attention(
                name=t.unique(op.inside or "attention"), q=q, k=k, v=v, spec=spec,
                mask="" if mask is None else t.param(mask.index), cu_q=bounds, cu_k=bounds,
                site=next(t.sites), role="attention",
                sinks="" if scores.sinks is None else t.param(scores.sinks),
                windows=next(iter(windows)),
            )
        )  # fmt: skip

    return build


def _windows(t: Builder, number: int, layout: Layout) -> int:
    """Return the number of windows that heads are in: the product of their sizes, or 1."""
    if number not in t.heads or len(layout.tokens) < 3:
        return 1
    return math.prod(int(layout.flat[i]) for i in layout.tokens[1:-1])


def _is_for_windows(t: Builder, mask: int, windows: int) -> bool:
    """Return whether a mask broadcasts to the heads of that many windows of each sequence."""
    shape = t.recording.shapes[mask] or ()
    return windows == 1 or len(shape) == 2 or shape[0] in (1, Size(windows, ("B",)))


# Scores.


def _scores(t: Builder, product: Op, chain: list[Op]) -> Scores | None:
    """Return what a chain of operations does to scores, or None if that is no entry of `Scores`."""
    recording, (first,) = t.recording, product.writes
    if not all(op.kind in _ON_SCORES and op.path is None for op in chain):
        return None
    added = [n for op in chain for n in op.reads if n not in recording.live]
    factors = [n for op in chain if op.name in _SCALES for n in op.reads if n in added]
    arguments = {n for n in recording.inputs if n is not None}
    params = {*parameters_of(t.layer)}
    learned = {n for n, name in recording.sources.items() if name in params}
    if not all((arguments | learned).isdisjoint(t.roots(n)) for n in factors):
        return None
    t.fix(*added)
    base = torch.zeros_like(recording.values[first], dtype=recording.exact)
    caps = [i for i, op in enumerate(chain) if op.name == "tanh"]

    def slope(ops: list[Op], start: int, step: float = 1e-2) -> float:
        zero = _after(t, base, ops, start).detach().double()
        steps = _after(t, base + step, ops, start).detach().double() - zero
        exact = zero.abs().nan_to_num(math.inf).argmin()  # a mask of -1e9 leaves few digits
        return float(steps.flatten()[exact]) / step

    try:
        if len(caps) == 1:
            (end,) = chain[caps[0]].writes
            softcap = slope([op for op in chain[caps[0] + 1 :] if op.name in _SCALES][:1], end)
            scale = slope(chain[: caps[0]], first) * softcap
        elif not caps:
            softcap, scale = 0.0, slope(chain, first, 1.0)
        else:
            return None
        constant = _after(t, base, chain, first)
    except RuntimeError:
        return None
    given = [n for n in added if not arguments.isdisjoint(t.roots(n))]
    if not bool((constant != 0).any()):  # other arguments may hide keys
        return None if given else Scores(scale, softcap)
    mask = _added(t, chain, constant) or _mask(t, chain, first, constant)
    is_argument = not arguments.isdisjoint(t.roots(mask.index))
    if not is_argument and _is_causal(constant):
        return Scores(scale, softcap, causal=True)
    fills = is_argument and any(op.kind in ("masked_fill", "where") for op in chain)
    fill = float(constant.min()) if fills and bool(constant.isfinite().all()) else None
    return Scores(scale, softcap, mask=mask, fill=fill)


def _is_causal(mask: Tensor) -> bool:
    """Return whether values that are added to scores hide all later keys, and do no more."""
    queries, keys = mask.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu(1)
    unseen = mask <= _UNSEEN
    others = mask.masked_fill(unseen, 0.0)
    same = queries == keys and torch.equal(unseen, later.expand_as(unseen))
    return same and not bool(others.any())


def _after(t: Builder, value: Tensor, ops: list[Op], start: int) -> Tensor:
    recording = t.recording
    read = {n for op in ops for n in op.reads} - recording.live
    recorded = {n: recording.values[n] for n in read}
    values = {n: v.to(t.context.dtype) if v.is_floating_point() else v for n, v in recorded.items()}
    values[start] = value
    for op in ops:
        run_op(op, values, t.context)
    result: Tensor = values[ops[-1].writes[0] if ops else start]
    return result


def _added(t: Builder, chain: list[Op], constant: Tensor) -> Ref | None:
    """Return the value that is added to the scores, if the chain adds one unchanged."""
    for n in [n for op in chain if op.kind in ADD for n in op.reads]:
        value = t.recording.values[n]
        fits = value.dim() in (2, 4) and value.dim() <= constant.dim()
        if n in t.recording.live or not fits:
            continue
        if torch.equal(value.to(constant).expand_as(constant), constant):
            return Ref(n)
    return None


def _mask(t: Builder, chain: list[Op], first: int, constant: Tensor) -> Ref:
    """Return what is added to the scores, as a new value: the chain on scores of zero."""
    recording, numbers = t.recording, dict[int, int]()
    shape: tuple[Any, ...] = recording.shapes[first] or ()
    if len(shape) == 4:
        base = constant.new_zeros((1, 1, *constant.shape[-2:]))
        with contextlib.suppress(RuntimeError):  # which needs all sequences and heads
            if torch.equal(_after(t, base, chain, first).expand_as(constant), constant):
                shape = (1, 1, *shape[2:])

    def renumbered(leaf: Any) -> Any:
        return Ref(numbers.get(leaf.index, leaf.index)) if isinstance(leaf, Ref) else leaf

    more = {"dtype": recording.dtypes[first], "device": recording.values[first].device}
    numbers[first] = t.new_value("zeros", torch.zeros, (shape,), like=first, **more)
    for op in chain:
        args, kwargs = map_tree((op.args, op.kwargs), renumbered)
        (last,) = op.writes
        numbers[last] = t.new_value(op.name, op.run, args, like=last, **kwargs)
    return Ref(numbers[last])
