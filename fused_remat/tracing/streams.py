"""Rules for two streams of tokens that attend together (`steps.streams`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fused_remat.spec import AttentionSpec
from fused_remat.steps.streams import Concat, Join, Take
from fused_remat.tracing.builder import STREAMS, Build, Builder
from fused_remat.tracing.heads import Heads, packed, rotated, rotation
from fused_remat.tracing.program import Program
from fused_remat.tracing.replays import sample
from fused_remat.tracing.sizes import JOINT
from fused_remat.tracing.values import Op, Opaque


def join(t: Builder, number: int, op: Op) -> Build | None:
    """Trace a concatenation of the tokens of both streams, or of columns."""
    layout, parts = t.layout(number), [*op.args, *op.kwargs.values()][0]
    if layout is None or not all(map(t.live, parts)):
        return None
    layouts = [t.layout(part.index) for part in parts]
    names = {of.names for of in layouts if of is not None and of.is_last}
    if layout.is_last and None not in layouts and names == {layout.names}:
        return lambda: _concat(t, op, [t.build(part.index) for part in parts])
    if layout.names[-1:] != (JOINT,):
        return None
    if len(parts) != 2 or None in layouts or len({of.names for of in layouts if of}) < 2:
        return None
    if any(of.features != layout.features for of in layouts if of):
        return None

    def build() -> str:
        xs = tuple([t.build(part.index) for part in parts])
        of = [t.tokens_of(known)[0] for known in layouts if known is not None]
        return t.add(Join(name=t.unique(f"{op.inside}.joined"), xs=xs, tokens=tuple(of)))

    return build


def _concat(t: Builder, op: Op, xs: list[str]) -> str:
    if len({*xs}) < len(xs):
        raise Opaque(op.inside, "it reads one activation several times, side by side")
    name = t.add(Concat(name=t.unique(f"{op.inside}.cat"), xs=tuple(xs)))
    t.widths[name] = sum(t.widths[x] for x in xs)
    return name


def take(t: Builder, number: int, op: Op) -> Build | None:
    """Trace the tokens of one stream out of those of both."""
    layout, read = t.layout(number), [n for n in op.reads if n in t.recording.live]
    source = t.layout(read[0]) if len(read) == 1 else None
    if layout is None or source is None or source.names[-1:] != (JOINT,):
        return None
    if source.names[:-1] != layout.names[:-1] or source.width != layout.width:
        return None
    if not (own := t.tokens_of(layout)) or layout.names == source.names:
        return None
    y, (x,), _ = sample(t, Program((op,), ((read[0], source),), (), number, layout))
    sizes = t.recording.sizes
    tokens, batch = sizes[layout.names[-1]], sizes.get("B", 1)
    whole = x.view(batch, -1, source.width)
    parts = {(): whole[:, :tokens], other(own): whole[:, -tokens:]}
    after = [key for key, part in parts.items() if torch.equal(part.flatten(0, 1), y)]
    if not after:
        return None

    def build() -> str:
        joint = t.build(read[0])
        name = t.unique(f"{STREAMS[own[0]]}.{op.inside}".rstrip("."))
        return t.add(Take(name=name, x=joint, after=after[0], tokens=own))

    return build


def other(stream: tuple[str, ...]) -> tuple[str, ...]:
    """Return the other stream."""
    return tuple([name for name in STREAMS if name not in stream])


def packed_streams(
    t: Builder, inside: str, names: Heads, spec: AttentionSpec
) -> tuple[str, str, str, AttentionSpec]:
    """Return q, k and v of both streams as one activation, rotated by a step, if possible."""
    joins, programs = list[Join](), [t.programs.get(name) for name in names]
    for name, program in zip(names, programs, strict=True):
        node: Any = t.nodes[name]
        source = t.nodes.get(node.inputs[0]) if program is not None else node
        if not isinstance(source, Join) or (len(node.inputs) > 1 and program is not None):
            return *names, spec
        joins.append(source)
    q, k, v = programs
    if v is not None or (q is None) != (k is None) or len({j.xs for j in joins}) < 3:
        return *names, spec
    if len({j.tokens for j in joins}) > 1:
        return *names, spec
    found = None if q is None or k is None else rotation(t, q, k, spec)
    if q is not None and found is None:
        return *names, spec
    before = {**t.nodes}, {**t.programs}, {**t.widths}, {**t.built}, {**t.replayed}
    t.remove(*[name for name, program in zip(names, programs, strict=True) if program])
    t.remove(*[node.name for node in joins])
    xs = list[str]()
    for i, stream in enumerate(joins[0].tokens):
        own = joins[0].xs[i], joins[1].xs[i], joins[2].xs[i]
        *parts, _ = packed(t, f"{STREAMS[stream]}.{inside}", own, spec)
        if len({*parts}) > 1:
            t.nodes, t.programs, t.widths, t.built, t.replayed = before
            return *names, spec
        xs.append(parts[0])
    name = t.add(replace(joins[0], name=t.unique(f"{inside}.qkv"), xs=tuple(xs)))
    if found is None:
        return name, name, name, spec
    spec, name = rotated(t, inside, name, found, True)
    return name, name, name, spec
