"""Reads attention: from a call of PyTorch's, or from softmax between two products."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.spec import AttentionSpec, NormSpec, RotarySpec
from fused_remat.steps.attention import Attention
from fused_remat.steps.linear import Linear
from fused_remat.steps.replay import Replay
from fused_remat.steps.rotary import Rotary, RotaryTables, rotary_fwd
from fused_remat.tracing.program import ALGEBRA, run_op
from fused_remat.tracing.simplify import readers
from fused_remat.tracing.values import Op, Ref, Size, map_tree, refs

if TYPE_CHECKING:
    from fused_remat.tracing.read import Reader

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
MATMUL = ("matmul", "__matmul__", "bmm", "mm")
_ADDS = ("add", "__add__", "__radd__", "add_", "__iadd__")
SCALES = ("mul", "__mul__", "__rmul__", "mul_", "div", "__truediv__", "div_", "true_divide")
_SAME = ("to", "float", "type_as", "type", "contiguous", "double", "view", "reshape", "nan_to_num")
#: What may be done to scores: of other operations, what they do to large scores is not known.
_ON_SCORES = {*ALGEBRA, "tanh", "nan_to_num"}
#: Scores to which this or less is added are those of keys that a query does not see.
_UNSEEN = -1e4

Build = Callable[[], str]


class Scores(NamedTuple):
    """What is done to the product of queries and keys before softmax.

    Attributes:
        mask: the value that is added, or None.
    """

    scale: float | None = None
    softcap: float = 0.0
    causal: bool = False
    mask: Ref | None = None
    dropout: float = 0.0


def from_call(r: Reader, number: int, op: Op) -> Build | None:
    """`F.scaled_dot_product_attention`."""
    given = {**_DEFAULTS, **dict(zip(_ARGUMENTS, op.args, strict=False)), **op.kwargs}
    q, k, v, mask = (given[name] for name in _ARGUMENTS[:4])
    if r.live(mask) or not all(map(r.live, (q, k, v))):
        return None
    scores = Scores(given["scale"], 0.0, bool(given["is_causal"]), mask, float(given["dropout_p"]))
    return _attention(r, number, op, (q.index, k.index, v.index), scores)


def from_softmax(r: Reader, number: int, op: Op) -> Build | None:
    """matmul(softmax(matmul(q, k) and what is done to the scores), v)."""
    if len(op.args) != 2 or not all(map(r.live, op.args)):
        return None
    p, n, after = 0.0, op.args[0].index, True
    chain: list[Op] = []
    while True:  # from the product with the values back to that of queries and keys
        made = r.producer(n)
        if made is None or made.path is not None:
            return None
        read = [i for i in refs((made.args, made.kwargs)) if i in r.recording.live]
        if not after and len(read) == 2 and made.name in (*MATMUL, "baddbmm"):
            break
        if len(read) != 1:
            return None
        if made.name == "softmax" and after:
            if made.kwargs.get("dim", (*made.args, None)[1]) not in (-1, 3):
                return None
            after = False
        elif made.name == "dropout" and after:
            p = made.p or 0.0
        elif not after:
            chain.append(made)
        elif made.name not in _SAME:
            return None
        n = read[0]
    chain += [made] if made.name == "baddbmm" else []
    scores = _scores(r, made, chain[::-1])
    if scores is None:
        return None
    return _attention(r, number, op, (*read, op.args[1].index), scores._replace(dropout=p))


# --- the step


def _attention(
    r: Reader, number: int, op: Op, heads: tuple[int, ...], scores: Scores
) -> Build | None:
    """Attention of three values (B, H, S, E), or of keys (B, H, E, S)."""
    layouts = [layout for n in (*heads, number) if (layout := r.layout(n)) is not None]
    features = [layout.features for layout in layouts]
    if len(layouts) < 4 or len({len(f) for f in features}) > 1 or len(features[0]) > 2:
        return None
    if len(features[0]) == 1 and len(r.recording.shapes[number] or ()) > 3:
        return None
    (q_heads, width), (kv_heads, k_width), (v_heads, _), _ = [(1, 1, *f)[-2:] for f in features]
    if kv_heads != v_heads or width != k_width or q_heads % kv_heads:
        return None
    if layouts[1].names != layouts[2].names or layouts[0].names != layouts[3].names:
        return None
    mask = scores.mask
    if mask is not None and r.recording.values[mask.index].dim() not in (2, 4):
        return None

    def build() -> str:
        q, k, v = (r.build(n) for n in heads)
        k, v, shared = _unrepeated(r, k, v, kv_heads)
        spec = AttentionSpec(
            num_heads=q_heads,
            num_kv_heads=kv_heads // shared,
            head_dim=width,
            scale=width**-0.5 if scores.scale is None else float(scores.scale),
            softcap=scores.softcap,
            dropout=scores.dropout if r.drops else 0.0,
            window=(-1, 0 if scores.causal else -1),
            align="start" if layouts[1].names != layouts[0].names else "end",
            masks=("mask",) * (mask is not None) + ("cu_seqlens",) * (r.bounds is not None),
        )
        q, k, v, spec = _packed(r, op.inside, (q, k, v), spec)
        bounds = "" if r.bounds is None else r.param(r.bounds)
        return r.add(
            Attention(
                name=r.unique(op.inside or "attention"), q=q, k=k, v=v, spec=spec, site=r.site(),
                mask="" if mask is None else r.param(mask.index), cu_q=bounds, cu_k=bounds,
                role="attention",
            )
        )  # fmt: skip

    return build


# --- heads


def _unrepeated(r: Reader, k: str, v: str, heads: int) -> tuple[str, str, int]:
    """Keys and values of which each head is there once, and how often each was repeated."""
    shared = math.gcd(*[_repeats(r, name, heads) for name in (k, v)])
    if shared == 1:
        return k, v, 1
    return _once(r, k, heads, shared), _once(r, v, heads, shared), shared


def _repeats(r: Reader, name: str, heads: int) -> int:
    """How often a replay repeats each head, one after the other."""
    program = r.programs.get(name)
    if program is None:
        return 1
    y = r.sample(program)[0].view(-1, heads, program.layout.width // heads)
    for count in range(heads, 1, -1):
        groups = y.unflatten(1, (-1, count)) if heads % count == 0 else None
        if groups is not None and bool((groups == groups[:, :, :1]).all()):
            return count
    return 1


def _once(r: Reader, name: str, heads: int, shared: int) -> str:
    """A replay without the repetitions of its heads; or what it repeats."""
    node, width = r.nodes[name], r.programs[name].layout.width // heads
    assert isinstance(node, Replay)
    pick = tuple([h * width + e for h in range(0, heads, shared) for e in range(width)])
    program = replace(r.programs[name], pick=pick)
    y, xs, _ = r.sample(program)
    r.widths[name] = len(pick)
    r.programs[name], r.nodes[name] = program, replace(node, columns=len(pick))
    if len(xs) == 1 and program.only_moves:
        if xs[0].shape == y.shape and torch.equal(xs[0], y):
            r.remove(name)
            return node.xs[0]
        r.note_pick(name, y, xs)
    return name


def _packed(
    r: Reader, inside: str, names: tuple[str, str, str], spec: AttentionSpec
) -> tuple[str, str, str, AttentionSpec]:
    """q, k and v as one activation, rotated by the step of a block, where they are that."""
    picks = [r.picks.get(name) for name in names]
    if all(picks) and [p[1:] for p in picks if p] == [*spec.columns.values()]:
        whole = picks[0][0]  # type: ignore[index]
        if {p[0] for p in picks if p} == {whole} and r.width(whole) == picks[2][2]:  # type: ignore[index]
            r.remove(*names)
            return whole, whole, whole, spec
    source = _source(r, names, spec)
    if source is None:
        return *names, spec
    rotation = _rotation(r, names, source, spec)
    if rotation is None and any(isinstance(r.nodes[name], Replay) for name in names[:2]):
        return *names, spec
    r.remove(*[name for name in names if isinstance(r.nodes[name], Replay)])
    whole = source[0]
    if len(set(source)) > 1:
        layers = [r.nodes[name] for name in source]
        updates = [
            replace(update, columns=columns)
            for n, columns in zip(layers, spec.columns.values(), strict=True)
            for update in n.updates  # type: ignore[attr-defined]
        ]
        whole = r.unique(f"{inside}.qkv".lstrip("."))
        r.remove(*source)
        r.add(
            Linear(
                name=whole, x=layers[0].x, weights=tuple([n.weight for n in layers]),  # type: ignore[attr-defined]
                biases=tuple([n.bias for n in layers]),  # type: ignore[attr-defined]
                sizes=tuple([last - first for first, last in spec.columns.values()]),
                updates=tuple(updates),
            )
        )  # fmt: skip
    if rotation is None:
        return whole, whole, whole, spec
    spec, cos, sin, weights = rotation
    tables = (r.param(cos), r.param(sin)) if spec.rotary else ("", "")
    rotated = r.add(
        Rotary(
            name=r.unique(f"{inside}.rotated".lstrip(".")), x=whole, spec=spec, cos=tables[0],
            sin=tables[1], q_weight=r.param(weights[0]) if weights else "",
            k_weight=r.param(weights[1]) if weights else "",
        )
    )  # fmt: skip
    return rotated, rotated, rotated, spec


def _source(
    r: Reader, names: tuple[str, str, str], spec: AttentionSpec
) -> tuple[str, str, str] | None:
    """Of what q, k and v are made: one activation, or three linear layers of one."""
    found = []
    for name in names:
        node = r.nodes.get(name)
        if name in r.picks:
            found.append(r.picks[name][0])
        elif isinstance(node, Replay) and len(node.xs) == 1:
            found.append(node.xs[0])
        elif isinstance(node, Linear):
            found.append(name)
        else:
            return None
    if isinstance(r.nodes[names[2]], Replay) and names[2] not in r.picks:
        return None  # the step rotates queries and keys, and leaves values as they are
    sizes = [last - first for first, last in spec.columns.values()]
    count = readers(r.nodes)
    if len(set(found)) == 1 and r.width(found[0]) == sum(sizes) and names[2] in r.picks:
        return found[0], found[0], found[0]
    layers = [r.nodes.get(name) for name in found]
    plain = all(
        isinstance(n, Linear) and not (n.sizes or n.residual or n.mask or n.part) for n in layers
    )
    if len(set(found)) < 3 or not plain or len({n.x for n in layers}) > 1:  # type: ignore[union-attr]
        return None
    read = [count[name] for name in found]
    if [r.width(name) for name in found] != sizes or read != [
        int(n != f) for n, f in zip(names, found, strict=True)
    ]:
        return None
    return found[0], found[1], found[2]


Rotation = tuple[AttentionSpec, int, int, tuple[int, int] | None]


def _rotation(
    r: Reader, names: tuple[str, str, str], source: tuple[str, str, str], spec: AttentionSpec
) -> Rotation | None:
    """How queries and keys are rotated and normed, if as `steps.rotary` does."""
    q, k = (r.programs.get(name) for name in names[:2])
    norms = [None if p is None else _head_norm(p.ops) for p in (q, k)]
    if q is None or k is None or (norms[0] and norms[0][0]) != (norms[1] and norms[1][0]):
        return None
    if not (q.is_algebra and k.is_algebra):
        return None
    columns = [*spec.columns.values()]
    (y_q, (x_q,), _), (y_k, (x_k,), given) = r.sample(q), r.sample(k, seed=1)
    if len(set(source)) == 1:  # queries and keys are columns of one activation
        y_k, packed = r.run(k, [x_q], given), x_q.detach()
    else:
        values = x_k.new_zeros(len(x_k), columns[2][1] - columns[2][0])
        packed = torch.cat([x_q, x_k, values], 1).detach()
    norm = norms[0][0] if norms[0] else None
    weights = None if norms[0] is None or norms[1] is None else (norms[0][1], norms[1][1])
    w_q, w_k = (r.recording.values[n].to(packed) if n >= 0 else None for n in weights or (-1, -1))
    slack = 1e-9 if y_q.dtype == y_k.dtype == torch.float64 else 1e-4
    for cos, sin, table, interleaved in _tables(r, q.params):
        c, s = (table.of(r, n).to(packed) for n in (cos, sin))
        if 2 * c.shape[-1] > spec.head_dim or c.shape != s.shape:
            continue
        one = replace(spec, rotary=RotarySpec(interleaved=interleaved), head_norm=norm)
        with torch.no_grad():
            made = rotary_fwd(packed, RotaryTables(one, c, s, w_q, w_k, 0, c.shape[-2]))
        pairs = zip(columns, (y_q, y_k), strict=False)
        if all(torch.allclose(made[:, a:b], y.to(made), slack, slack) for (a, b), y in pairs):
            r.fix(cos, sin)
            return one, table.add(r, cos), table.add(r, sin), weights
    return None


def _head_norm(ops: tuple[Op, ...]) -> tuple[NormSpec, int] | None:
    """The RMSNorm of heads among operations, and the number of its weight."""
    norms = [op for op in ops if isinstance(op.info, NormSpec) and op.info.kind == "rms_norm"]
    if len(norms) != 1 or len(norms[0].args) != 2:
        return None
    return norms[0].info, norms[0].args[1].index


class _Table(NamedTuple):
    """The columns of a table of angles that are each angle once."""

    stop: int
    step: int

    def of(self, r: Reader, number: int) -> Tensor:
        """The table (S, R/2) or (B, S, R/2) of a value, in the recording."""
        sizes, shape = r.recording.sizes, _table_shape(r, number) or ()
        shape = tuple([n.of(sizes) if isinstance(n, Size) else n for n in shape])
        return _columns(r.recording.values[number].detach(), shape, *self)

    def add(self, r: Reader, number: int) -> int:
        """The table as a value of its own."""
        args = Ref(number), _table_shape(r, number), *self
        return r.new_value("table", _columns, args, self.of(r, number))


def _columns(t: Tensor, shape: tuple[int, ...], stop: int, step: int) -> Tensor:
    return t.reshape(shape)[..., :stop:step]


def _tables(r: Reader, params: tuple[int, ...]) -> Iterator[tuple[int, int, _Table, bool]]:
    """Pairs of values that may be cosines and sines, their columns, and whether interleaved."""
    found = [n for n in params if _table_shape(r, n) is not None]
    for cos, sin in itertools.permutations(found, 2):
        value = r.recording.values[cos]
        width, half = value.shape[-1], value.shape[-1] // 2
        ways = [(_Table(width, 1), False), (_Table(width, 1), True)]
        pairs = width % 2 == 0 and torch.equal(value[..., ::2], value[..., 1::2])
        halves = width % 2 == 0 and torch.equal(value[..., :half], value[..., half:])
        if pairs and halves:  # all angles are the same, by chance
            continue
        if pairs:
            ways = [(_Table(width, 2), True), (_Table(width, 2), False), *ways]
        if halves:
            ways = [(_Table(half, 1), False), (_Table(half, 1), True), *ways]
        yield from [(cos, sin, table, interleaved) for table, interleaved in ways]


def _table_shape(r: Reader, number: int) -> tuple[Any, ...] | None:
    """The shape of a table (B, S, R) or (S, R), without dimensions of size 1; None for others."""
    value, shape = r.recording.values[number], r.recording.shapes[number]
    if shape is None or not value.is_floating_point():
        return None
    kept = tuple([n for n in shape if n != 1])
    tokens = Size(1, ("S",)) if "S" in r.recording.sizes else r.tokens
    if len(kept) not in (2, 3) or kept[-2] != tokens or not isinstance(kept[-1], int):
        return None
    return kept if len(kept) == 2 or kept[0] == Size(1, ("B",)) else None


# --- scores


def _scores(r: Reader, product: Op, chain: list[Op]) -> Scores | None:
    """What a chain of operations does to scores; its first may be the product itself (baddbmm)."""
    first = product.outs[0]
    assert first is not None
    if not all(op.name.strip("_") in _ON_SCORES and op.path is None for op in chain):
        return None
    added = [n for op in chain for n in refs((op.args, op.kwargs)) if n not in r.recording.live]
    factors = [n for op in chain if op.name in SCALES for n in refs((op.args, op.kwargs))]
    given = {n for n in r.recording.inputs if n is not None}
    if any(not given.isdisjoint(r.roots(n)) for n in factors if n in added):
        return None
    r.fix(*added)
    base = torch.zeros_like(r.recording.values[first], dtype=r.recording.exact)
    capped = [i for i, op in enumerate(chain) if op.name == "tanh"]

    after = functools.partial(_after, r, product)

    def slope(ops: list[Op], start: int, step: float = 1e-2) -> float:
        zero = after(base, ops, start).detach().double()
        steps = after(base + step, ops, start).detach().double() - zero
        exact = zero.abs().nan_to_num(math.inf).argmin()  # a mask of -1e9 leaves few digits
        return float(steps.flatten()[exact]) / step

    try:
        if len(capped) == 1:
            end = chain[capped[0]].outs[0]
            assert end is not None
            softcap = slope([op for op in chain[capped[0] + 1 :] if op.name in SCALES][:1], end)
            scale = slope(chain[: capped[0]], first) * softcap
        elif not capped:
            softcap, scale = 0.0, slope(chain, first, 1.0)
        else:
            return None
        constant = after(base, chain, first)
    except RuntimeError:
        return None
    if not chain or not bool((constant != 0).any()):
        return Scores(scale, softcap)
    mask = _added(r, chain, constant) or _mask(r, product, chain, first, constant)
    fills = any(op.name.strip("_") in ("masked_fill", "where") for op in chain)
    if fills and bool(constant.isfinite().all()) and not given.isdisjoint(r.roots(mask.index)):
        r.fills[mask.index] = float(constant.min())
    rows, keys = constant.shape[-2:]
    if rows == keys and given.isdisjoint(r.roots(mask.index)):
        later = torch.ones(rows, keys, dtype=torch.bool, device=constant.device).triu(1)
        unseen = constant <= _UNSEEN
        others = constant.masked_fill(unseen, 0.0)
        if torch.equal(unseen, later.expand_as(unseen)) and not bool(others.any()):
            return Scores(scale, softcap, causal=True)
    return Scores(scale, softcap, mask=mask)


def _after(r: Reader, product: Op, value: Tensor, ops: list[Op], start: int) -> Tensor:
    """What a chain of operations makes of scores `value`."""
    values: dict[int, Any] = _Values(r.recording.values, r.recording.exact)
    values[start] = value
    for op in ops:
        if op is product:
            values[start] = _plus(value, values[op.args[0].index], **_weights(op))
        else:
            run_op(op, values, r.layer.get_submodule, r.recording.sizes, r.recording.exact)
    out = ops[-1].outs[0] if ops else start
    return values[out]  # type: ignore[index, no-any-return]


def _is_shared(r: Reader, product: Op, chain: list[Op], first: int, constant: Tensor) -> bool:
    """Whether scores of one sequence and head give the mask, which broadcasts to all."""
    base = constant.new_zeros((1, 1, *constant.shape[-2:]))
    try:
        made = _after(r, product, base, chain, first)
        return torch.equal(made.expand_as(constant), constant)
    except RuntimeError:
        return False


class _Values(dict[int, Any]):
    """Recorded values in another dtype, with others in the places of some."""

    def __init__(self, recorded: list[Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.recorded, self.dtype = recorded, dtype

    def __missing__(self, number: int) -> Tensor:
        t = self.recorded[number]
        return t.to(self.dtype) if t.is_floating_point() else t


def _plus(scores: Tensor, bias: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    return alpha * scores + beta * bias


def _weights(op: Op) -> dict[str, Any]:
    return {name: op.kwargs.get(name, 1) for name in ("beta", "alpha")}


def _added(r: Reader, chain: list[Op], constant: Tensor) -> Ref | None:
    """The value that is added to the scores, if the chain adds one as it is."""
    for op in chain:
        for n in refs((op.args, op.kwargs)) if op.name in _ADDS else ():
            t = r.recording.values[n]
            fits = n not in r.recording.live and t.dim() in (2, 4) and t.dim() <= constant.dim()
            if fits and torch.equal(t.to(constant).expand_as(constant), constant):
                return Ref(n)
    return None


def _mask(r: Reader, product: Op, chain: list[Op], first: int, constant: Tensor) -> Ref:
    """What is added to the scores, as a value of its own: the chain, of scores of zero."""
    recording, numbers = r.recording, dict[int, int]()
    device = recording.values[first].device

    def zeros(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    shape, dtype = recording.shapes[first] or (), recording.dtypes[first]
    if len(shape) == 4 and _is_shared(r, product, chain, first, constant):
        shape = (1, 1, *shape[2:])
    numbers[first] = r.new_value("zeros", zeros, shape, of=first, dtype=dtype)
    last = first
    for op in chain:
        if op is product:
            args: Any = (Ref(numbers[first]), op.args[0])
            numbers[first] = r.new_value("plus", _plus, args, of=first, **_weights(op))
            continue
        args, kwargs = map_tree((op.args, op.kwargs), lambda a: _renamed(a, numbers))
        last = op.outs[0]  # type: ignore[assignment]
        numbers[last] = r.new_value(op.name, op.run, args, of=last, **kwargs)
    return Ref(numbers[last])


def _renamed(leaf: Any, numbers: Mapping[int, int]) -> Any:
    return Ref(numbers[leaf.index]) if isinstance(leaf, Ref) and leaf.index in numbers else leaf
