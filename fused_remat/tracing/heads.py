"""Queries, keys and values as attention's step reads them: packed, rotated, and not repeated."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.spec import AttentionSpec, NormSpec, RotarySpec
from fused_remat.steps.linear import Linear
from fused_remat.steps.norm import HeadNorm
from fused_remat.steps.replay import Replay
from fused_remat.steps.rotary import Rotary, RotaryTables, rotary_fwd
from fused_remat.steps.streams import Concat
from fused_remat.tracing.builder import Builder
from fused_remat.tracing.program import Program, leaf_value
from fused_remat.tracing.replays import add_columns, columns_of, run, sample
from fused_remat.tracing.sizes import Size
from fused_remat.tracing.values import MOVES, STREAM, Op, Ref, map_tree, refs

#: Names of queries, keys and values.
Heads = tuple[str, str, str]
#: Rotated attention, the numbers of its tables, if any, and names of weights of norms.
Rotation = tuple[AttentionSpec, list[int], list[str]]
#: Most parts from which a table is built.
_MOST_PARTS = 8


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
    for count in [n for n in range(heads, 1, -1) if heads % n == 0]:
        groups = y.unflatten(1, (-1, count))
        if bool((groups == groups[:, :, :1]).all()):
            return count
    return 1


def _unrepeated(t: Builder, name: str, heads: int, shared: int) -> str:
    """Return a replay without the repetitions of its heads, or its input if that is equal."""
    node: Any = t.nodes[name]
    width = t.programs[name].layout.width // heads
    pick = tuple([(h * width, (h + 1) * width) for h in range(0, heads, shared)])
    program, t.widths[name] = replace(t.programs[name], pick=pick), heads // shared * width
    if columns_of(t, program) == [*range(t.widths[node.xs[0]])]:
        t.remove(name)
        return str(node.xs[0])
    t.programs[name], t.nodes[name] = program, replace(node, columns=t.widths[name])
    return name


class _Part(NamedTuple):
    """Queries, keys or values as columns of an activation, and what is computed from them."""

    source: str
    columns: Sequence[int]
    rest: Program | None = None


def packed(
    t: Builder, inside: str, names: Heads, spec: AttentionSpec
) -> tuple[str, str, str, AttentionSpec]:
    """Return q, k and v, as one activation and rotated by a step where they are equal to that."""
    q, k, v = (part_of(t, name) for name in names)
    if q is None or k is None:
        return *names, spec
    found, of_heads = None, spec
    if q.rest is not None and k.rest is not None:
        found = rotation(t, q.rest, k.rest, spec)
        if found is None and spec.num_heads == spec.num_kv_heads:  # with a table for each head
            width = spec.num_heads * spec.head_dim
            of_heads = replace(spec, num_heads=1, num_kv_heads=1, head_dim=width)
            found = rotation(t, q.rest, k.rest, of_heads)
    with_values = v is not None and v.rest is None
    if found is None and (q.rest or k.rest or not with_values):
        return *names, spec
    parts = [q, k]
    if v is not None:
        parts = [q, k, v] if with_values else _split(t, f"{inside}.qk", names, q, k, v)
    name, is_rotated = f"{inside}.qkv", found is not None
    qkv = _joined(t, name, names[: len(parts)], parts, any_order=is_rotated)
    every = [[*part.columns] == [*range(t.widths[part.source])] for part in (q, k)]
    if qkv is None and found is not None and all(every) and _aligned(q, k):
        with_values = False
        qkv = t.add(Concat(name=t.unique(f"{inside}.qk"), xs=(q.source, k.source)))
        t.remove(*names[:2])
    if qkv is None:
        return *names, spec
    if found is None:
        return qkv, qkv, qkv, spec
    rotated_spec, name = rotated(t, inside, qkv, found, with_values)
    spec = rotated_spec if of_heads is spec else spec
    return name, name, name if with_values else names[2], spec


def _aligned(q: _Part, k: _Part) -> bool:
    """Return whether queries and keys are of the same tokens."""
    return q.rest is not None and k.rest is not None and q.rest.layout == k.rest.layout


def rotated(
    t: Builder, inside: str, qkv: str, found: Rotation, with_values: bool
) -> tuple[AttentionSpec, str]:
    """Add a step that rotates packed heads; return the attention's spec, and the step's name."""
    spec, tables, weights = found
    cos, sin = (t.param(table) for table in tables) if tables else ("", "")
    name = t.add(
        Rotary(
            name=t.unique(f"{inside}.rotated"), x=qkv, spec=spec, cos=cos, sin=sin,
            q_weight=weights[0], k_weight=weights[1], values=with_values,
        )
    )  # fmt: skip
    return spec, name


def part_of(t: Builder, name: str) -> _Part | None:
    """Return the columns that a linear layer computes, or that a replay reads; or None."""
    program = t.programs.get(name)
    if program is None:
        return _Part(name, range(t.widths[name])) if isinstance(t.nodes.get(name), Linear) else None
    if len(program.sources) != 1:
        return None
    ((number, layout),), chain = program.sources, list[Op]()
    moved = Program((), program.sources, (), number, layout)
    read = {program.target, *[n for op in program.ops for n in op.reads]}
    while True:  # as far as each operation moves what alone the later ones read
        users = [op for op in program.ops if number in op.reads]
        if len(users) != 1 or users[0].kind not in MOVES or users[0].reads != [number]:
            break
        outs, chain = [n for n in users[0].writes if n in read], [*chain, users[0]]
        if len(outs) != 1:
            break
        (number,), known = outs, t.layout(outs[0])
        is_real = t.recording.values[number].is_floating_point()
        if known is not None and is_real and t.is_of_stream(number):
            moved = Program(tuple(chain), program.sources, (), number, known)
    is_all, rest = moved.target == program.target, None
    columns = columns_of(t, replace(moved, pick=program.pick) if is_all else moved)
    if columns is None or len({*columns}) < len(columns):
        return None
    if not is_all:
        ops = tuple([op for op in program.ops if op not in moved.ops])
        rest = replace(program, ops=ops, sources=((moved.target, moved.layout),))
    return _Part(t.nodes[name].inputs[0], columns, rest)


def _split(t: Builder, name: str, heads: Heads, q: _Part, k: _Part, v: _Part) -> list[_Part]:
    """Return queries and keys, of a linear layer of their own if the packed one can be split.

    That layer then computes the values alone, which a replay changes.
    """
    node, width, first = t.nodes[q.source], t.widths[q.source], len(q.columns) + len(k.columns)
    is_packed = [*q.columns, *k.columns, *v.columns] == [*range(width)]
    if {q.source} != {k.source, v.source} or t.use_counts()[q.source] != 3 or not is_packed:
        return [q, k]
    if v.rest is None or not isinstance(node, Linear) or not node.plain or node.part is not None:
        return [q, k]
    both = t.add(replace(node, name=t.unique(name), part=(0, first, width)))
    t.add(replace(node, part=(first, width, width)))
    t.widths |= {both: first, node.name: width - first}
    ((number, _),) = t.programs[heads[2]].sources
    del t.built[number]  # all columns, which another step may read
    t.programs[heads[2]] = v.rest
    t.remove(*heads[:2])
    return [part._replace(source=both) for part in (q, k)]


def _joined(
    t: Builder, name: str, names: tuple[str, ...], parts: list[_Part], any_order: bool
) -> str | None:
    """Return one activation with the columns of all parts, or None."""
    (source, *others) = dict.fromkeys(part.source for part in parts)
    columns = [*itertools.chain(*[part.columns for part in parts])]
    if not others:
        every, first = [*range(t.widths[source])], columns[0]
        is_span = columns == [*range(first, first + len(columns))]
        if not is_span and not (any_order and sorted(columns) == every):
            return None
        if columns != every:
            source = add_columns(t, name, source, t.programs[names[0]].sources[0], columns)
        t.remove(*names)
        return source
    layers = [n for part in parts if isinstance(n := t.nodes.get(part.source), Linear)]
    if len({n.name for n in layers}) < len(parts) or len({n.x for n in layers}) > 1:
        return None
    if any(n.sizes or n.residual or n.mask or n.part for n in layers):
        return None
    counts = t.use_counts()
    for own, part in zip(names, parts, strict=True):
        is_whole = [*part.columns] == [*range(t.widths[part.source])]
        if not is_whole or counts[part.source] != int(own != part.source):
            return None
    t.remove(*[own for own in names if isinstance(t.nodes[own], Replay)])
    sizes = tuple([len(part.columns) for part in parts])
    spans = itertools.pairwise((0, *itertools.accumulate(sizes)))
    updates = [
        replace(update, columns=span)
        for layer, span in zip(layers, spans, strict=True)
        for update in layer.updates
    ]
    packed = tuple([spec for n in layers for spec in n.packed or (None,)])
    name = t.unique(name)
    t.remove(*[n.name for n in layers])
    return t.add(
        Linear(
            name=name, x=layers[0].x, weights=tuple([n.weight for n in layers]),
            biases=tuple([n.bias for n in layers]), sizes=sizes, updates=tuple(updates),
            packed=packed if any(packed) else (),
        )
    )  # fmt: skip


def rotation(t: Builder, q: Program, k: Program, spec: AttentionSpec) -> Rotation | None:
    """Return how queries and keys are normed and rotated, or None."""
    (q_heads, norm, q_weight), (k_heads, k_norm, k_weight) = _head_norm(t, q), _head_norm(t, k)
    if norm != k_norm or not (q_heads.is_algebra and k_heads.is_algebra):
        return None
    (_, (x_q,), q_tensors), (_, (x_k,), k_tensors) = sample(t, q), sample(t, k, seed=1)
    numbers, x = (*q.params, *k.params), torch.cat([x_q, x_k], 1).detach()
    recorded = {n: v.detach() for n, v in zip(numbers, (*q_tensors, *k_tensors), strict=True)}
    drawn = {n: _drawn(n, v) for n, v in recorded.items()}
    found = _tables(t, q_heads, spec.head_dim, drawn, len(x))
    if found is None and norm is None:
        return None
    interleaved, tables = found or (False, ())
    rotary = RotarySpec(interleaved=interleaved) if tables else None
    spec = replace(spec, rotary=rotary, head_norm=norm)
    written = [t.recording.values[n] for op in (*q.ops, *k.ops) for n in op.writes]
    is_exact = all(v.dtype in (torch.float64, torch.complex128) for v in written)
    slack = 1e-6 if is_exact else 1e-4  # more than what the eps of a norm adds in float32
    for values in (drawn, recorded):  # what holds for any tables does not depend on their values
        known = functools.partial(leaf_value, values=values, call=t.context)
        cos, sin = [_table(*map_tree((*args, x.dtype), known)) for args in tables] or (None, None)
        ones = x.new_ones(spec.head_dim)
        w_q, w_k = (values.get(n, ones) if norm else None for n in (q_weight, k_weight))
        tokens = len(x) if cos is None else cos.shape[-2]
        call = RotaryTables(spec, cos, sin, w_q, w_k, 0, tokens, False)
        heads = [run(t, p, [x_p], [values[n] for n in p.params]) for p, x_p in ((q, x_q), (k, x_k))]
        out = rotary_fwd(x, call)
        if torch.allclose(out, torch.cat(heads, 1).to(out), slack, slack):
            break
    else:
        return None
    if values is recorded:
        used = refs(tables)
        read, of_tables = ({r for n in ns for r in t.roots(n)} for ns in (numbers, used))
        # Another table may be equal in this call alone, and a scale may be 1.
        if not read.intersection(t.recording.inputs) <= of_tables:
            return None
        t.fix(*q.params, *k.params)
    made = [
        t.new_value("table", _table, (*args, STREAM), refs(args)[0], table, args[1])
        for args, table in zip(tables, (cos, sin), strict=False)
    ]
    weights = [n for n in (q_weight, k_weight) if norm]
    if -1 in weights and not made:
        return None
    if -1 in weights:  # ones, on the device of a table
        args = Ref(made[0]), (spec.head_dim,)
        number = t.new_value("ones", Tensor.new_ones, args, made[0], ones, dtype=STREAM)
        weights = [number if n < 0 else n for n in weights]
    return spec, made, [t.param(n) for n in weights] or ["", ""]


def norm_of(t: Builder, op: Op) -> tuple[NormSpec | None, Any, Any, Any]:
    """Return the norm over the last dimension that an operation computes, its input and weights."""
    if op.name == "norm":
        return op.info, *(*op.args, None, None)[:3]
    if op.name not in ("layer_norm", "rms_norm"):
        return (None,) * 4
    affine = ("weight", "bias") if op.name == "layer_norm" else ("weight",)
    names = ("input", "normalized_shape", *affine, "eps")
    args = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    eps = args.get("eps", 1e-5 if op.name == "layer_norm" else None)
    if eps is None:  # ATen's default
        own = t.call.leaves[t.call.x].dtype
        eps = torch.finfo(torch.promote_types(own, torch.float32)).eps
    is_over_last = len(args["normalized_shape"]) == 1
    spec = NormSpec(kind=op.name, eps=float(eps)) if is_over_last else None
    return spec, args["input"], args.get("weight"), args.get("bias")


def _head_norm(t: Builder, program: Program) -> tuple[Program, NormSpec | None, int]:
    """Return a program without its RMSNorm of heads, that norm, and the number of its weight.

    The number is -1 without a weight.
    """
    for op in program.ops:
        spec, x, weight, bias = norm_of(t, op)
        if spec is not None and spec.kind == "rms_norm" and bias is None:
            nothing = replace(op, name="norm", run=lambda x: x, args=(x,), kwargs={})
            ops = tuple([nothing if other is op else other for other in program.ops])
            number = weight.index if isinstance(weight, Ref) else -1
            return replace(program, ops=ops), spec, number
    return program, None, -1


def norms_of_heads(t: Builder) -> None:
    """Replace replays that are RMS norms of heads alone, which no step rotates."""
    for name, program in [*t.programs.items()]:
        node, (rest, spec, number) = t.nodes[name], _head_norm(t, program)
        if spec is None or number < 0 or rest.params != (number,) or not isinstance(node, Replay):
            continue
        ops = tuple([replace(op, name="clone") if op.name == "norm" else op for op in rest.ops])
        moves = replace(rest, params=(), ops=ops)
        every = [*range(t.widths[node.xs[0]])] if len(node.xs) == 1 else []
        width = len(t.recording.values[number])
        if every and columns_of(t, moves) == every and rest.layout.features[-1] == width:
            del t.programs[name]
            t.add(
                HeadNorm(
                    name=name, x=node.xs[0], weight=t.param(number), bias="", spec=spec,
                    heads=len(every) // width,
                )
            )  # fmt: skip


def _drawn(seed: int, value: Tensor) -> Tensor:
    """Return random numbers like the elements of a value; itself if these are integers."""
    if not (value.is_floating_point() or value.is_complex()):
        return value
    generator = torch.Generator(value.device).manual_seed(seed)
    like = value.float() if value.dtype == torch.float64 else value  # which a layer may round to
    return torch.empty_like(like).normal_(generator=generator).to(value.dtype)


def _tables(
    t: Builder, program: Program, width: int, drawn: Mapping[int, Tensor], rows: int
) -> tuple[bool, tuple[Any, Any]] | None:
    """Return whether pairs of a head are adjacent, and the arguments of `_table` for both tables.

    A program that rotates turns the pairs (1, 0) of a head into cosines and sines. Which columns of
    which values these are is seen in values that are `drawn`, where all numbers differ.
    """
    tensors, heads = [drawn[n] for n in program.params], program.sources[0][1].width // width

    def turned(ones: slice) -> list[float]:
        x = torch.zeros(rows, heads, width, dtype=t.context.dtype, device=t.context.device)
        x[..., ones] = 1.0
        y = run(t, program, [x.flatten(1)], tensors).detach()
        row: list[float] = y[0, :width].tolist()
        return row

    partners = [i for i, value in enumerate(turned(slice(1))) if i and value]
    if width % 2 or len(partners) > 1:
        return None
    half = [*partners, 1][0]
    firsts, seconds = slice(half), slice(half, 2 * half)
    if half == 1:
        firsts, seconds = slice(0, None, 2), slice(1, None, 2)
    row = turned(firsts)
    pairs = [*zip(row[firsts], row[seconds], strict=True)]
    while half == 1 and pairs and pairs[-1] == (1.0, 0.0):
        pairs.pop()
    if not pairs:
        return None
    leads, where = dict[int, Any](), {1.0: (-1, 0, 1.0), 0.0: (-1, 0, 0.0)}
    sizes = functools.partial(leaf_value, values=drawn, call=t.context)
    for n in program.params:
        if lead := _lead(t, n, program.layout.names):
            leads[n] = lead
            first = _flat(drawn[n], map_tree(lead, sizes)).flatten(0, -2)[0]
            for i, value in enumerate(first.tolist()):
                where |= {value: (n, i, 1.0), -value: (n, i, -1.0)}
    cos, sin = (_arguments(column, where, leads) for column in zip(*pairs, strict=True))
    return None if cos is None or sin is None else (half == 1, (cos, sin))


def _lead(t: Builder, number: int, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the dimensions of the tokens `names` of a table, (B, S) or (S,), or ()."""
    value, shape = t.recording.values[number], t.recording.shapes[number] or ()
    if value.requires_grad or not (value.is_floating_point() or value.is_complex()):
        return ()
    kept, batch = [n for n in shape if n != 1], Size(1, ("B",))
    for lead, columns in ((kept[:2], kept[2:]), (kept[:1], kept[1:])):
        is_tokens = bool(lead) and t.counts(lead[-1], names) and lead[:-1] in ([], [batch])
        if is_tokens and not any(isinstance(n, Size) for n in columns):
            return tuple(lead)
    return ()


def _arguments(
    row: Sequence[float], where: Mapping[float, tuple[int, int, float]], leads: Mapping[int, Any]
) -> tuple[Any, Any, Any] | None:
    """Return the arguments of `_table` for a table whose first row is `row`, or None.

    `where`: by number in a row, the value that has it, or -1 if none, its column and its factor.
    """
    if not where.keys() >= {*row}:
        return None
    entries = [where[value] for value in row]
    steps = (b[1] - a[1] for a, b in itertools.pairwise(entries) if a[0] == b[0] >= 0)
    step = max(1, next(steps, 1))

    def start(entry: Any) -> tuple[int, int, float]:
        i, (n, column, factor) = entry
        return n, 0 if n < 0 else column - i * step, factor

    groups = [[*group] for _, group in itertools.groupby(enumerate(entries), start)]
    numbers = [*dict.fromkeys(n for n, *_ in entries if n >= 0)]
    if len(groups) > _MOST_PARTS or len({leads[n] for n in numbers}) != 1:
        return None
    parts = list[tuple[int, int, int, int, float]]()
    for group in groups:
        _, (n, first, factor) = group[0]
        parts.append((numbers.index(n) if n >= 0 else n, first, len(group), step, factor))
    return tuple(map(Ref, numbers)), leads[numbers[0]], tuple(parts)


def _flat(value: Tensor, lead: Sequence[int]) -> Tensor:
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return real.reshape(*lead, -1)


def _table(
    values: Sequence[Tensor], lead: Sequence[int], parts: Sequence[Any], dtype: torch.dtype
) -> Tensor:
    """Return columns of values side by side; a view, if they are regular columns of one value.

    Each part is the index of a value, or -1 for ones, the first column, the number and the step of
    columns, and a factor.
    """
    flat, columns = [_flat(value, lead) for value in values], list[Tensor]()
    for i, first, count, step, factor in parts:
        ones = flat[0].new_ones(()).expand(*lead, count)
        x = ones if i < 0 else flat[i][..., first : first + count * step : step]
        columns.append(x if factor == 1.0 else factor * x)
    table = columns[0] if len(columns) == 1 else torch.cat(columns, -1)
    return table.float() if table.dtype == torch.float64 != dtype else table
