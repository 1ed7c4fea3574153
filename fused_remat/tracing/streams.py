"""Rules for two streams of tokens that attend together (`steps.streams`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fused_remat.spec import AttentionSpec
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.linear import Linear
from fused_remat.steps.modulation import GatedAdd
from fused_remat.steps.node import Node
from fused_remat.steps.norm import HeadNorm
from fused_remat.steps.streams import Concat, Join, Take
from fused_remat.tracing.builder import STREAMS, Build, Builder
from fused_remat.tracing.heads import Heads, packed, part_of, rotated, rotation
from fused_remat.tracing.program import Program
from fused_remat.tracing.replays import sample
from fused_remat.tracing.sizes import JOINT
from fused_remat.tracing.values import Op, Opaque

#: The steps that read each activation.
Users = Mapping[str, list[Node]]


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
    joint = x.view(batch, -1, source.width)
    parts = {(): joint[:, :tokens], other(own): joint[:, -tokens:]}
    after = [key for key, part in parts.items() if torch.equal(part.flatten(0, 1), y)]
    if not after:
        return None

    def build() -> str:
        joint = t.build(read[0])
        name = t.unique(f"{STREAMS[own[0]]}.{op.inside}".rstrip("."))
        return t.add(Take(name=name, x=joint, after=after[0], tokens=own))

    return build


def assigned(t: Builder, number: int, op: Op) -> Build | None:
    """Trace an assignment to the tokens of one stream among those of both."""
    layout, read = t.layout(number), [n for n in op.reads if n in t.recording.live]
    layouts = [known for n in read if (known := t.layout(n)) is not None]
    if layout is None or layout.names[-1:] != (JOINT,) or len(layouts) != 2 or len(read) != 2:
        return None
    if layouts[0].names != layout.names or layouts[1].names == layout.names:
        return None
    pairs, own = tuple(zip(read, layouts, strict=True)), t.tokens_of(layouts[1])
    if {of.width for of in layouts} != {layout.width} or not layouts[1].names[:-1]:
        return None
    y, (x, value), _ = sample(t, Program((op,), pairs, (), number, layout))
    batch = t.recording.sizes[layout.names[0]]
    x, value, y = (part.view(batch, -1, layout.width) for part in (x, value, y))
    tokens = value.shape[1]
    if torch.equal(torch.cat([x[:, :-tokens], value], 1), y):
        order = (*other(own), *own)
    elif torch.equal(torch.cat([value, x[:, tokens:]], 1), y):
        order = (*own, *other(own))
    else:
        return None

    def build() -> str:
        base, new, rest = t.build(read[0]), t.build(read[1]), other(own)
        after = () if order[0] == rest[0] else own
        name = t.unique(f"{STREAMS[rest[0]]}.{op.inside}".rstrip("."))
        old = t.add(Take(name=name, x=base, after=after, tokens=rest))
        xs = (old, new) if order[0] == rest[0] else (new, old)
        return t.add(Join(name=t.unique(f"{op.inside}.joined"), xs=xs, tokens=order))

    return build


def split_streams(t: Builder) -> None:
    """Compute each stream alone where only steps of one stream read a result of both.

    The sums after these then apply a gate without their product.
    """
    nodes = t.nodes
    users = {name: [n for n in nodes.values() if name in n.inputs] for name in nodes}
    gated = {n.x for n in nodes.values() if isinstance(n, GatedAdd)}
    for take in [n for n in nodes.values() if isinstance(n, Take) and n.name in gated]:
        if _is_alone(nodes, users, take.x):
            _of_stream(t, users, take.x, take, take.name)
    t.remove(*[name for name in reversed([*nodes]) if users.get(name)])


def _is_alone(nodes: Mapping[str, Any], users: Users, name: str) -> bool:
    """Return whether a step computes each token alone, and takes of streams alone depend on it."""
    node = nodes[name]
    drops = node.masks or any(update.mask for update in getattr(node, "updates", ()))
    is_plain = not (drops or getattr(node, "residual", ""))
    others = [user for user in users[name] if not isinstance(user, Take)]
    is_alone = all(_is_alone(nodes, users, user.name) for user in others)
    return type(node) in (Linear, MLPActivation, HeadNorm) and is_plain and is_alone


def _of_stream(t: Builder, users: Users, name: str, take: Take, made: str) -> str:
    """Return the step that computes a stream's part of an activation; `made`: its name, or ""."""
    node: Any = t.nodes[name]
    stream = take.tokens[0]
    if isinstance(node, Join) and not made:
        return node.xs[node.tokens.index(stream)]
    made = made or t.unique(f"{STREAMS[stream]}.{name}")
    if name not in users or not _is_alone(t.nodes, users, name):
        return t.add(replace(take, name=made, x=name))
    given = {field: getattr(node, field, "") for field in ("x", "up", "gate")}
    inputs: dict[str, Any] = {f: _of_stream(t, users, x, take, "") for f, x in given.items() if x}
    if isinstance(node, Linear):
        inputs["updates"] = tuple([replace(u, low=f"{made}.{u.low}") for u in node.updates])
    return t.add(replace(node, name=made, **inputs))


def other(stream: tuple[str, ...]) -> tuple[str, ...]:
    """Return the other stream."""
    return tuple([name for name in STREAMS if name not in stream])


def packed_streams(
    t: Builder, inside: str, names: Heads, spec: AttentionSpec
) -> tuple[str, str, str, AttentionSpec]:
    """Return q, k and v of both streams as one activation, rotated by a step, if possible."""
    joins, programs = list[Any](), [t.programs.get(name) for name in names]
    for own, program in zip(names, programs, strict=True):
        node: Any = t.nodes[own]
        is_replay = program is not None and len(node.inputs) == 1
        source = t.nodes.get(node.inputs[0]) if is_replay else node
        joins.append(source if isinstance(source, Join) else None)
    (q, k, v), found = programs, None
    can = all(joins) and v is None and (q is None) == (k is None)
    if can and len({j.xs for j in joins}) == 3 and len({j.tokens for j in joins}) == 1:
        found = None if q is None or k is None else rotation(t, q, k, spec)
        name = None if q and found is None else _packed(t, inside, names, joins, spec)
        if name is not None:
            if found is not None:
                spec, name = rotated(t, inside, name, found, True)
            return name, name, name, spec
    if isinstance(t.nodes[names[0]], Join) and isinstance(t.nodes[names[1]], Join):
        _rotate_streams(t, inside, joins[:2], spec)
    return *names, spec


def _packed(
    t: Builder, inside: str, names: Heads, joins: list[Join], spec: AttentionSpec
) -> str | None:
    """Add the join of the packed projections of both streams; None if one has no such."""
    before = {**t.nodes}, {**t.programs}, {**t.widths}, {**t.built}, {**t.replayed}
    t.remove(*[name for name in names if name in t.programs], *[node.name for node in joins])
    xs = list[str]()
    for i, stream in enumerate(joins[0].tokens):
        own = joins[0].xs[i], joins[1].xs[i], joins[2].xs[i]
        *parts, _ = packed(t, f"{STREAMS[stream]}.{inside}".rstrip("."), own, spec)
        if len({*parts}) > 1:
            t.nodes, t.programs, t.widths, t.built, t.replayed = before
            return None
        xs.append(parts[0])
    return t.add(replace(joins[0], name=t.unique(f"{inside}.qkv"), xs=tuple(xs)))


def _rotate_streams(t: Builder, inside: str, joins: list[Join], spec: AttentionSpec) -> None:
    """Rotate queries and keys of a stream, each by a step of its own, before they are joined."""
    if spec.num_heads != spec.num_kv_heads or spec.num_heads < 2:
        return
    for pair in zip(*[node.xs for node in joins], strict=True):
        q, k = (part_of(t, name) for name in pair)
        if q is None or k is None or q.rest is None or k.rest is None:
            continue
        found = rotation(t, q.rest, k.rest, spec)
        every = [[*part.columns] == [*range(t.widths[part.source])] for part in (q, k)]
        if found is None or found[0].head_norm is not None or not all(every):
            continue
        # Heads of one tensor, some of which are called queries and some keys.
        alone = replace(found[0], num_heads=spec.num_heads - 1, num_kv_heads=1)
        for node, name, part in zip(joins, pair, (q, k), strict=True):
            _, new = rotated(t, inside, part.source, (alone, *found[1:]), False)
            xs = tuple([new if x == name else x for x in t.nodes[node.name].inputs])
            t.nodes[node.name] = replace(node, xs=xs)
            t.remove(name)
