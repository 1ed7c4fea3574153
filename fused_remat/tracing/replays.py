"""Replays: recorded operations between the steps of a block, and what a trial shows of them."""

from __future__ import annotations

import itertools
import math
import posixpath
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.replay import At, Replay, order_of
from fused_remat.tracing.builder import Builder
from fused_remat.tracing.functions import activation_of
from fused_remat.tracing.isolation import Trial
from fused_remat.tracing.program import Layout, Program, ReplayedSubmodule
from fused_remat.tracing.sizes import LENGTHS, Size, size_of
from fused_remat.tracing.values import SHAPES, Op, Opaque

#: A replay of more operations than this, or of one of `HEAVY`, is named in reports.
_FEW = 24
HEAVY = (
    "matmul", "__matmul__", "bmm", "mm", "einsum", "baddbmm", "linear", "dora", "conv1d", "conv2d",
    "grouped_mm", "_grouped_mm", "softmax", "topk", "scatter", "index_add",
)  # fmt: skip
#: Operations that may change the dtype.
_TO = ("to", "float", "double", "half", "bfloat16", "type", "type_as")
#: Operations that choose by values: another bit in their input may change the choice.
CHOICES = ("topk", "sort", "argsort", "argmax", "argmin", "one_hot", "gt", "ge", "lt", "le", "eq")


def replay(t: Builder, number: int) -> str:
    """Add a replay or an activation function that computes a value; return its name."""
    op, layout = t.producer(number), t.layout(number)
    assert op is not None
    if layout is None:
        raise Opaque(op.inside, f"the result of {op.name} has no dimension of tokens")
    ops, sources, params = region(t, (number,), op.inside)
    sources.sort(key=lambda n: getattr(t.layout(n), "names", ()) != layout.names)
    layouts = [known for n in sources if (known := t.layout(n)) is not None]
    xs = tuple([t.build(n) for n in sources])
    pairs = tuple(zip(sources, layouts, strict=True))
    program = Program(tuple(ops), pairs, tuple(params), number, layout)
    is_opaque = op.path is not None
    if len(xs) == 1 and columns_of(t, program) == [*range(t.widths[xs[0]])]:
        return xs[0]
    if len(set(xs)) < len(xs):
        raise Opaque(op.inside, "it reads one activation in two layouts")
    paths = [o.inside.replace(".", "/") for o in ops]
    inside = posixpath.commonpath(paths).replace("/", ".")  # of the innermost module of all
    draws = {o for o in ops if o.random or o.p}
    if t.drops and any(draws.intersection(known.ops) for known in t.programs.values()):
        path = inside.rpartition(".")[0] if op.module else inside
        raise Opaque(path, "several of its steps read what random numbers decide")
    is_alone = layouts == [layout] and not (params or is_opaque or program.draws)
    if is_alone and t.is_of_stream(number):
        (like,) = sample(t, program)[1]
        act = activation_of(lambda x: run(t, program, [x], []), like)
        if act is not None:
            name = t.unique(f"{inside}.act")
            return t.add(MLPActivation(name=name, up=xs[0], act=act))
    shapes: dict[int, Any] = {n: t.recording.shapes[n] for n in params}
    if None in shapes.values():
        raise Opaque(op.inside, "no size explains the shape of a value that it reads")
    batched = [n for n, shape in shapes.items() if "B" in sizes_in(shape)]
    per_batch = (
        program.draws
        or not _keeps_sizes(t, program, layout.names[:-1])
        or any(shapes[n][0] != Size(1, ("B",)) for n in batched)
    )
    path = op.function or str(op.path) if is_opaque else inside
    is_reported = is_opaque or len(ops) > _FEW or any(o.name in HEAVY for o in ops)
    name = path or "forward" if is_reported else f"{path}.{op.kind}"
    name, kinds = t.unique(name), dict.fromkeys(o.kind for o in ops)
    if is_reported:
        heavy = ", ".join(dict.fromkeys(o.kind for o in ops if o.name in HEAVY))
        why = str(op.info) if is_opaque else f"it runs {heavy or f'{len(ops)} operations'}"
        t.replayed[name] = ReplayedSubmodule(path or "forward", why)
    tensors = tuple([t.param(n) for n in params])
    t.add(
        Replay(
            name=name, xs=xs, tensors=tensors, function=name,
            what=name if is_reported else " → ".join(kinds),
            columns=layout.width, per_batch=per_batch,
            tokens=() if layouts[0].names == layout.names else t.tokens_of(layout),
            batched=() if per_batch else tuple([t.param(n) for n in batched]),
            needed_for=_needed_for(t, program, (*xs, *tensors)),
            chooses=is_opaque or not kinds.keys().isdisjoint(CHOICES),
            stages=_stages(t, ops, params),
            tokenwise=not (is_opaque or per_batch or any(map(sizes_in, shapes.values())))
            and is_tokenwise(t, program),
        )
    )  # fmt: skip
    t.programs[name] = program
    return name


def add_columns(t: Builder, name: str, x: str, of: tuple[int, Layout], columns: list[int]) -> str:
    """Add a replay that returns columns of an activation x, the value `of`, in another order."""
    ends = [i for i in range(1, len(columns)) if columns[i] != columns[i - 1] + 1]
    spans = itertools.pairwise((0, *ends, len(columns)))
    pick = tuple([(columns[a], columns[b - 1] + 1) for a, b in spans])
    program, name = Program((), (of,), (), *of, pick), t.unique(name)
    t.programs[name], t.widths[name] = program, len(columns)
    return t.add(
        Replay(
            name=name, xs=(x,), function=name, what="columns in another order",
            columns=len(columns), needed_for=((),), tokenwise=is_tokenwise(t, program),
        )
    )  # fmt: skip


def region(
    t: Builder, targets: Collection[int], inside: str, known: Collection[int] = ()
) -> tuple[list[Op], list[int], list[int]]:
    """Return the operations up to the next steps, and the activations and others they read.

    `known`: activations in addition to steps.
    """
    live, ops = t.recording.live, set[Op]()
    sources, params, seen, todo = list[int](), list[int](), set[int](), [*targets]
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        op = t.producer(n)
        if n not in live:
            if op is None or op.name not in SHAPES or live.isdisjoint(op.reads):
                params.append(n)
                continue
            ops.add(op)  # like an activation, whose dtype autocast decides
            todo += op.reads
        elif n in (*t.inputs.values(), *known) or (n not in targets and t.step(n) is not None):
            sources.append(n)
            if not t.recording.values[n].is_floating_point():
                raise Opaque(inside, "it reads indices of tokens")
        else:
            assert op is not None
            if op.path is not None and n not in targets:
                reason = f"a result of {op.function or op.path} has no dimension of tokens"
                raise Opaque(op.inside.rpartition(".")[0], reason)
            ops.add(op)
            todo += op.reads
    return [op for op in t.recording.ops if op in ops], sources[::-1], params[::-1]


def _stages(t: Builder, ops: list[Op], params: list[int]) -> tuple[tuple[str, ...], ...]:
    last = {n: i for i, op in enumerate(ops) for n in op.reads if n in params}
    stages: dict[int, list[str]] = {}
    for number in sorted(last, key=last.__getitem__, reverse=True):
        stages.setdefault(last[number], []).append(t.param(number))
    return tuple(map(tuple, stages.values()))


# Trials.


def sample(
    t: Builder, program: Program, seed: int = 0
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run a program on random activations; return its result, these, and the other values."""
    _, sizes, dtype, device, _ = t.context
    generator = torch.Generator(device).manual_seed(seed)
    xs = []
    for _, layout in program.sources:
        tokens = math.prod(size_of(n, sizes) for n in layout.names)
        tokens *= 1 if {*LENGTHS} & {*layout.names} else t.tokens
        x = torch.randn((tokens, layout.width), generator=generator, dtype=dtype, device=device)
        xs.append(x.requires_grad_())
    tensors = [t.recording.values[n].detach() for n in program.params]
    tensors = [v.to(dtype).requires_grad_() if v.is_floating_point() else v for v in tensors]
    return run(t, program, xs, tensors), xs, tensors


def columns_of(t: Builder, program: Program) -> list[int] | None:
    """Return the columns of its one input that a program returns, or None if it is no choice."""
    if len(program.sources) != 1 or not program.only_moves:
        return None
    y, (x,), _ = sample(t, program)
    index = {tuple(column): i for i, column in enumerate(x[:4].t().tolist())}
    columns = [index.get(tuple(column), -1) for column in y[:4].t().tolist()]
    is_same = x.dtype == y.dtype and -1 not in columns and torch.equal(x[:, columns], y)
    return columns if is_same else None


def reorders(t: Builder, node: Replay) -> bool:
    """Return whether a replay returns the tokens of each sequence in another order."""
    program, tokens = t.programs[node.function], t.tokens
    kinds = {op.kind for op in program.ops}
    if not program.only_moves or program.draws or program.pick or not kinds.isdisjoint(_TO):
        return False

    def moved(x: Tensor) -> Tensor:
        return run(t, program, [x], [], At(1, tokens, 0))

    layouts = [program.layout, *[layout for _, layout in program.sources]]
    is_one = len(layouts) == 2 and layouts[0].width == layouts[1].width and not node.per_batch
    if not is_one or {t.tokens_of(layout) for layout in layouts} != {("input",)}:
        return False
    order = order_of(moved, tokens, program.layout.width)
    return order is not None and not order.equal(torch.arange(tokens))


def run(
    t: Builder, program: Program, xs: list[Tensor], tensors: list[Tensor], at: At | None = None
) -> Tensor:
    sizes, names = t.recording.sizes, program.layout.names
    tokens = size_of(names[-1], sizes) if names and names[-1] in LENGTHS else t.tokens
    given = at or At(sizes.get("B", 1), tokens, 0), xs, tensors
    try:
        return program.run(t.context, *given)
    except Opaque:  # what it converts to float32 meets parameters in float64
        with Trial(exact=t.context.dtype == torch.float64):
            return program.run(t.context, *given)


def sizes_in(shape: Sequence[Any]) -> set[str]:
    return {name for n in shape if isinstance(n, Size) for name in n.names}


def is_tokenwise(t: Builder, program: Program) -> bool:
    """Return whether each token's result depends on that token alone, by mixing tokens."""
    names = program.layout.names
    if names[-1:] != ("S",) or any(layout.names != names for _, layout in program.sources):
        return False
    if not _keeps_sizes(t, program, names):
        return False
    y, xs, tensors = sample(t, program)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).to(y.device)
    try:
        mixed = run(t, program, [x[order] for x in xs], tensors, At(1, len(y), 0))
    except RuntimeError:  # a number that follows from the batch
        return False
    slack = 64 * torch.finfo(y.dtype).eps
    return torch.allclose(mixed, y[order], rtol=slack, atol=slack)


def _keeps_sizes(t: Builder, program: Program, names: Sequence[str]) -> bool:
    """Return whether results have all sizes `names`, without which one mixes tokens."""
    live = [n for op in program.ops for n in op.writes if n in t.recording.live]
    sizes = (sizes_in(t.recording.shapes[n] or ()) for n in live)
    return program.is_algebra or all(known.issuperset(names) for known in sizes)


def _needed_for(
    t: Builder, program: Program, names: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Return for each activation the names whose gradients depend on its value, by trial."""
    if program.draws or not program.is_algebra:
        return (names,) * len(program.sources)
    y, xs, tensors = sample(t, program)
    if not y.requires_grad:
        return ((),) * len(xs)
    # A coefficient that is 0 may become another.
    tensors = [_moved(v) if v.requires_grad else v for v in tensors]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype).to(y)

    def grads(xs: list[Tensor]) -> dict[str, Tensor | None]:
        pairs = zip(names, (*xs, *tensors), strict=True)
        inputs = {name: v for name, v in pairs if v.requires_grad}
        y = run(t, program, xs, tensors)
        found = torch.autograd.grad(y, [*inputs.values()], dy, allow_unused=True)
        return dict(zip(inputs, found, strict=True))

    def is_other(g: Tensor | None, h: Tensor | None) -> bool:
        return g is not h and (g is None or h is None or not g.equal(h))

    expected, needed = grads(xs), []
    for i, x in enumerate(xs):
        others = grads([*xs[:i], torch.zeros_like(x).requires_grad_(), *xs[i + 1 :]])
        needed.append(tuple([name for name, g in expected.items() if is_other(g, others[name])]))
    return tuple(needed)


def _moved(t: Tensor) -> Tensor:
    step = torch.sin(1.0 + torch.arange(t.numel()).to(t)).view(t.shape)
    return (t.detach() + 0.1 * step).requires_grad_()
