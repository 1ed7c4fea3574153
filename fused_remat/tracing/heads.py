"""Queries, keys and values as attention's step reads them: packed, rotated, and not repeated."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_remat.spec import AttentionSpec, NormSpec, RotarySpec
from fused_remat.steps.linear import Linear
from fused_remat.steps.replay import Replay
from fused_remat.steps.rotary import Rotary, RotaryTables, rotary_fwd
from fused_remat.tracing.builder import Builder
from fused_remat.tracing.program import leaf_value
from fused_remat.tracing.replays import note_pick, run, sample
from fused_remat.tracing.sizes import Size
from fused_remat.tracing.values import Op, Ref, map_tree

#: Names of queries, keys and values.
Heads = tuple[str, str, str]


def without_repeats(t: Builder, k: str, v: str, heads: int) -> tuple[str, str, int]:
    """Return keys and values without repeated heads, and how often each head was repeated."""
    shared = math.gcd(*[_repeats(t, name, heads) for name in (k, v)])
    if shared == 1:
        return k, v, 1
    return _unrepeated(t, k, heads, shared), _unrepeated(t, v, heads, shared), shared


def _repeats(t: Builder, name: str, heads: int) -> int:
    """Return how often a replay repeats each head, one after the other."""
    program = t.programs.get(name)
    if program is None:
        return 1
    y = sample(t, program)[0].view(-1, heads, program.layout.width // heads)
    for count in range(heads, 1, -1):
        groups = y.unflatten(1, (-1, count)) if heads % count == 0 else None
        if groups is not None and bool((groups == groups[:, :, :1]).all()):
            return count
    return 1


def _unrepeated(t: Builder, name: str, heads: int, shared: int) -> str:
    """Return a replay without the repetitions of its heads, or its input if that is equal."""
    node: Any = t.nodes[name]
    width = t.programs[name].layout.width // heads
    pick = tuple([h * width + e for h in range(0, heads, shared) for e in range(width)])
    program = replace(t.programs[name], pick=pick)
    y, xs, _ = sample(t, program)
    t.widths[name] = len(pick)
    t.programs[name], t.nodes[name] = program, replace(node, columns=len(pick))
    if len(xs) == 1 and program.only_moves:
        if xs[0].shape == y.shape and torch.equal(xs[0], y):
            t.remove(name)
            return str(node.xs[0])
        note_pick(t, name, y, xs)
    return name


def packed(
    t: Builder, inside: str, names: Heads, spec: AttentionSpec
) -> tuple[str, str, str, AttentionSpec]:
    """Return q, k and v as one activation, rotated by a step, where they are equal to that."""
    picks = [pick for name in names if (pick := t.picks.get(name))]
    if [pick[1:] for pick in picks] == [*spec.columns.values()]:
        parent = picks[0][0]
        if {pick[0] for pick in picks} == {parent} and t.widths[parent] == picks[2][2]:
            t.remove(*names)
            return parent, parent, parent, spec
    source = _source(t, names, spec)
    if source is None:
        return *names, spec
    rotation = _rotation(t, names, source, spec)
    if rotation is None and any(isinstance(t.nodes[name], Replay) for name in names[:2]):
        return *names, spec
    t.remove(*[name for name in names if isinstance(t.nodes[name], Replay)])
    qkv = source[0]
    if len(set(source)) > 1:
        qkv = _packed_linear(t, f"{inside}.qkv".lstrip("."), source, spec)
    if rotation is None:
        return qkv, qkv, qkv, spec
    spec, cos, sin, norms = rotation
    weights = [t.param(n) for n in norms] or ["", ""]
    rotated = t.add(
        Rotary(
            name=t.unique(f"{inside}.rotated".lstrip(".")), x=qkv, spec=spec, cos=t.param(cos),
            sin=t.param(sin), q_weight=weights[0], k_weight=weights[1],
        )
    )  # fmt: skip
    return rotated, rotated, rotated, spec


def _packed_linear(t: Builder, name: str, source: Heads, spec: AttentionSpec) -> str:
    layers: list[Any] = [t.nodes[name] for name in source]
    columns = spec.columns.values()
    updates = [
        replace(update, columns=part)
        for layer, part in zip(layers, columns, strict=True)
        for update in layer.updates
    ]
    name = t.unique(name)
    t.remove(*source)
    return t.add(
        Linear(
            name=name, x=layers[0].x, weights=tuple([n.weight for n in layers]),
            biases=tuple([n.bias for n in layers]),
            sizes=tuple([last - first for first, last in columns]), updates=tuple(updates),
        )
    )  # fmt: skip


def _source(t: Builder, names: Heads, spec: AttentionSpec) -> Heads | None:
    """Return the source of q, k and v: one activation, or three linear layers of one."""
    sources = []
    for name in names:
        node = t.nodes.get(name)
        if name in t.picks:
            sources.append(t.picks[name][0])
        elif isinstance(node, Replay) and len(node.xs) == 1:
            sources.append(node.xs[0])
        elif isinstance(node, Linear):
            sources.append(name)
        else:
            return None
    if isinstance(t.nodes[names[2]], Replay) and names[2] not in t.picks:
        return None  # the step rotates queries and keys, and leaves values unchanged
    sizes = [last - first for first, last in spec.columns.values()]
    q, k, v = sources
    if len(set(sources)) == 1 and t.widths[q] == sum(sizes) and names[2] in t.picks:
        return q, q, q
    layers = [node for name in sources if isinstance(node := t.nodes.get(name), Linear)]
    if len(layers) < 3 or any(n.sizes or n.residual or n.mask or n.part for n in layers):
        return None
    if len(set(sources)) < 3 or len({n.x for n in layers}) > 1:
        return None
    counts = t.use_counts()
    uses = [int(name != source) for name, source in zip(names, sources, strict=True)]
    if [t.widths[name] for name in sources] != sizes or [counts[n] for n in sources] != uses:
        return None
    return q, k, v


def _rotation(
    t: Builder, names: Heads, source: Heads, spec: AttentionSpec
) -> tuple[AttentionSpec, int, int, tuple[int, ...]] | None:
    """Return rotated attention, and the numbers of cosines, sines and weights of norms, or None."""
    q, k = (t.programs.get(name) for name in names[:2])
    if q is None or k is None or not (q.is_algebra and k.is_algebra):
        return None
    (norm, *w_q), (k_norm, *w_k) = _head_norm(q.ops), _head_norm(k.ops)
    if norm != k_norm:
        return None
    weights = (*w_q, *w_k)
    columns = [*spec.columns.values()]
    (y_q, (x_q,), _), (y_k, (x_k,), tensors) = sample(t, q), sample(t, k, seed=1)
    if len(set(source)) == 1:  # queries and keys are columns of one activation
        y_k, qkv = run(t, k, [x_q], tensors), x_q.detach()
    else:
        values = x_k.new_zeros(len(x_k), columns[2][1] - columns[2][0])
        qkv = torch.cat([x_q, x_k, values], 1).detach()
    recording = t.recording
    known = functools.partial(leaf_value, values=recording.values, call=t.context)
    q_weight, k_weight = [recording.values[n].to(qkv) for n in weights] or (None, None)
    slack = 1e-9 if y_q.dtype == y_k.dtype == torch.float64 else 1e-4
    arguments = {n for n in recording.inputs if n is not None}
    given = {n for n in (*q.params, *k.params) if not arguments.isdisjoint(t.roots(n))}
    for cos, sin, part, interleaved in _tables(t, q.params):
        if not given <= {cos, sin}:  # such as a scale that is 1 at the first positions
            continue
        args = [(Ref(n), _table_shape(t, n), *part) for n in (cos, sin)]
        tables = [_columns(*map_tree(arg, known)).detach() for arg in args]
        c, s = (table.to(qkv) for table in tables)
        if 2 * c.shape[-1] > spec.head_dim or c.shape != s.shape:
            continue
        rotated = replace(spec, rotary=RotarySpec(interleaved=interleaved), head_norm=norm)
        with torch.no_grad():
            out = rotary_fwd(qkv, RotaryTables(rotated, c, s, q_weight, k_weight, 0, c.shape[-2]))
        pairs = zip(columns, (y_q, y_k), strict=False)
        if all(torch.allclose(out[:, a:b], y.to(out), slack, slack) for (a, b), y in pairs):
            t.fix(cos, sin)
            numbers = zip((cos, sin), args, tables, strict=True)
            cos, sin = (t.new_value("table", _columns, a, n, table) for n, a, table in numbers)
            return rotated, cos, sin, weights
    return None


def _head_norm(ops: tuple[Op, ...]) -> tuple[Any, ...]:
    """Return the RMSNorm of heads among operations and the number of its weight, or (None,)."""
    norms = [op for op in ops if isinstance(op.info, NormSpec) and op.info.kind == "rms_norm"]
    if len(norms) != 1 or len(norms[0].args) != 2:
        return (None,)
    return norms[0].info, norms[0].args[1].index


def _columns(t: Tensor, shape: tuple[int, ...], stop: int, step: int) -> Tensor:
    return t.reshape(shape)[..., :stop:step]


def _tables(
    t: Builder, params: tuple[int, ...]
) -> Iterator[tuple[int, int, tuple[int, int], bool]]:
    """Yield pairs of values that may be cosines and sines, their columns, and if interleaved.

    The columns, as a stop and a step, are those that hold each angle once.
    """
    candidates = [n for n in params if _table_shape(t, n) is not None]
    for cos, sin in itertools.permutations(candidates, 2):
        value = t.recording.values[cos]
        width, half = value.shape[-1], value.shape[-1] // 2
        is_even = width % 2 == 0
        are_pairs = is_even and torch.equal(value[..., ::2], value[..., 1::2])
        are_halves = is_even and torch.equal(value[..., :half], value[..., half:])
        if are_pairs and are_halves:  # all angles are equal by chance
            continue
        yield from [(cos, sin, (width, 2), is_pair) for is_pair in (True, False) if are_pairs]
        yield from [(cos, sin, (half, 1), is_pair) for is_pair in (False, True) if are_halves]
        yield from [(cos, sin, (width, 1), is_pair) for is_pair in (False, True)]


def _table_shape(t: Builder, number: int) -> tuple[Any, ...] | None:
    """Return the shape of a table (B, S, R) or (S, R) without dimensions of 1, or None."""
    value, shape = t.recording.values[number], t.recording.shapes[number]
    if shape is None or not value.is_floating_point():
        return None
    kept = tuple([n for n in shape if n != 1])
    tokens = Size(1, ("S",)) if "S" in t.recording.sizes else t.tokens
    if len(kept) not in (2, 3) or kept[-2] != tokens or not isinstance(kept[-1], int):
        return None
    return kept if len(kept) == 2 or kept[0] == Size(1, ("B",)) else None
