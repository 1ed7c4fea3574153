"""Launches of `fused_remat.triton` with data, and what they should give, in float64.

By the operations' own bodies, or by their definitions where the launch gives parts of a result.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.random import DropoutMask
from fused_remat.steps import expert_activation, modulation_aten, norm, rotary
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.linear import linear_dx, linear_fwd
from fused_remat.steps.modulation_aten import Rows
from fused_remat.steps.residual import dropout, residual_add
from fused_remat.triton import cross_entropy, experts, pointwise, products
from fused_remat.triton import norm as norms
from fused_remat.triton import rotary as rotaries

#: Names of what launches write; those of `experts` are in `OF_EXPERTS`.
RESULTS = {
    "y", "total", "pre", "pres", "dx", "dweight", "dbias", "dgate", "dup", "dups", "dz", "highs",
    "sums", "totals", "picked", "exps", "dq_weight", "dk_weight",
}  # fmt: skip


#: Function of `fused_remat.triton.experts` -> names of what it writes, but for lists of tiles.
OF_EXPERTS: dict[Any, set[str]] = {
    experts.experts_tiles: set(), experts.experts_product: {"y"}, experts.experts_up_act: {"y"},
    experts.experts_act_fwd: {"y"}, experts.experts_act_bwd: {"dpre", "act", "dweights"},
    experts.experts_dw: {"dw"}, experts.experts_bias_bwd: {"dbias"},
}  # fmt: skip


# --- tensors with data


class Maker:
    """Random tensors for those without data; the same for the same.

    `rows`: of matrices that are not weights. `stacks`: weights are stacks of matrices.
    """

    def __init__(self, rows: int, stacks: bool = False) -> None:
        self.rows, self.made, self.dims = rows, {}, 3 if stacks else 2

    def __call__(self, value: Any) -> Any:
        if isinstance(value, experts.Rows):
            pairs, ends = torch.randperm(len(value.pairs)), self(value.ends)
            tiles = tiles_of(ends, len(pairs), len(value.tiles), value.block_m)
            return value._replace(pairs=pairs, ends=ends, tiles=tiles)
        if isinstance(value, tuple):
            made = [self(v) for v in value]
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        if isinstance(value, Tensor):
            if id(value) not in self.made:
                self.made[id(value)] = self.new(value), value  # whose id nothing else may get
            return self.made[id(value)][0]
        if dataclasses.is_dataclass(value):
            fields = {f.name: self(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        return value

    def new(self, like: Tensor) -> Tensor:
        if like.dtype == torch.int64:
            if like.dim() == 0:
                return random.site_keys(torch.tensor(-7))[random.MLP]
            return torch.zeros(like.shape, dtype=like.dtype)
        if like.dtype == torch.bool:
            return torch.rand(like.shape) < 0.2
        if like.dtype == torch.int32:  # bounds of sequences, or lengths
            return torch.randint(1, self.rows, like.shape, dtype=like.dtype).sort().values
        x = torch.empty_strided(like.shape, like.stride()).normal_()
        if like.dim() == self.dims and like.shape[0] != self.rows:  # a weight
            x *= like.shape[-1] ** -0.5
        return x.to(like.dtype)


def tiles_of(ends: Tensor, rows: int, count: int, block_m: int) -> Tensor:
    """Return the tiles of each expert and of dropped rows, then those of no expert."""
    bounds = [0, *ends.tolist(), rows]
    spans = enumerate(itertools.pairwise(bounds))
    tiles = [(e, row) for e, (first, end) in spans for row in range(first, end, block_m)]
    tiles += [(len(ends) + 1, rows)] * (count - len(tiles))
    return torch.tensor(tiles, dtype=torch.int32)


def wide(value: Any) -> Any:
    if isinstance(value, tuple):
        made = [wide(v) for v in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if isinstance(value, DropoutMask):
        return dataclasses.replace(value, dtype=torch.float64, _tensor=None)
    if isinstance(value, rotary.RotaryTables):
        names = ("cos", "sin", "q_weight", "k_weight")
        return dataclasses.replace(value, **{name: wide(getattr(value, name)) for name in names})
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from tensors_in(v)


# --- what each should give: pairs of a result and its value in float64. `i` holds the arguments in
# float64; `o` the same after the launch


def norm_fwd(i, o):
    total = i.x
    if i.residual is not None:
        yield o.total, residual_add(i.x, i.residual, i.mask)
        total = o.total.double()  # what is rounded is no error of the norm
    if i.sequences is None:
        y, *stats = norm.norm_fwd(i.spec, total, i.weight, i.bias)
    else:
        rows = Rows(*i.sequences[:2])
        y, *stats = modulation_aten.modulated_norm_fwd(i.spec, total, i.weight, i.bias, rows)
    yield o.y, y
    if not i.has_stats:
        yield from zip(o.stats, stats, strict=True)


def norm_bwd(i, o):
    marks = (True, i.dweight is not None, i.dbias is not None)
    found, given = (o.dx, o.dweight, o.dbias), (i.spec, i.dy, i.x, i.stats, i.weight)
    if i.sequences is None:
        exact = norm.norm_bwd(*given, marks, i.add)
    else:
        rows = Rows(*i.sequences[:2])
        exact = [
            t.flatten() for t in modulation_aten.modulated_norm_bwd(*given, rows, marks, i.add)
        ]
        found = [t.flatten() for t in found]
    yield from zip(found, exact, strict=True)


def gate_add_fwd(i, o):
    residual = torch.zeros_like(i.x) if i.residual is None else i.residual
    yield o.y, modulation_aten.gated_add(i.x, residual, i.gate, Rows(*i.sequences[:2]))


def gate_add_bwd(i, o):
    given = i.dy, i.x, i.gate, Rows(*i.sequences[:2]), torch.float64
    dx, sums = modulation_aten.gated_add_bwd(*given)
    yield from ((o.dx, dx), (o.sums, sums.flatten()))


def dropout_add_fwd(i, o):
    yield o.y, dropout(i.x, i.mask) if i.residual is None else residual_add(i.x, i.residual, i.mask)


def site_keys(i, o):
    yield o.keys, torch.stack(random.site_keys(o.seed, o.first))


def act_fwd(i, o):
    yield o.y, activation_fwd(i.act, None, i.x, i.mask)


def act_bwd(i, o):
    yield o.dx, activation_bwd(i.act, i.dy, None, i.x, i.mask, False)[1]
    if o.y is not None:
        yield o.y, activation_fwd(i.act, None, i.x, i.mask)


def act_sum_bwd(i, o):
    if i.x is None:
        exact = dropout(i.dy, i.mask)
    else:
        exact = activation_bwd(i.act, i.dy, None, i.x, i.mask, False)[1]
    yield from ((o.dx, exact), (o.total, exact.sum(0)))
    if o.y is not None:
        yield o.y, activation_fwd(i.act, None, i.x, i.mask)


def pack_heads(i, o):
    yield o.dx, rotary_packed(i)
    if o.sums is not None:
        yield o.sums, rotary_packed(i).sum(0)


def rotary_packed(i):
    packed = torch.cat([x.transpose(1, 2) for x in i.heads], 2).flatten(0, 1).flatten(1)
    return rotary.rotary_bwd(packed, None, i.call, (True, False, False), False)[0]


def gated_fwd(i, o):
    yield o.y, activation_fwd(i.act, i.gate, i.up, i.mask)


def gated_bwd(i, o):
    exact = activation_bwd(i.act, i.dy, i.gate, i.up, i.mask, False)
    yield from zip((o.dgate, o.dup), exact[:2], strict=True)
    if o.y is not None:
        yield o.y, activation_fwd(i.act, i.gate, i.up, i.mask)


def rotary_fwd(i, o):
    if i.back:
        yield o.y, rotary.rotary_bwd(i.x, None, i.call, (True, False, False), False)[0]
    else:
        yield o.y, rotary.rotary_fwd(i.x, i.call)


def rotary_norm_bwd(i, o):
    exact = rotary.rotary_bwd(i.dy, i.x, i.call, (True,) * 3, True, i.heads)
    yield from zip((o.dx, o.dq_weight, o.dk_weight), exact, strict=True)


def rounded(o, x):
    """As a kernel reads it: an element's rounding is no error of the function after it."""
    return x.to(o.y.dtype).double()


def linear(i, o):
    pre = linear_fwd(i.x, i.weight, i.bias)
    if i.pre is not None:
        yield o.pre, pre
    yield o.y, activation_fwd(i.act, None, rounded(o, pre), i.mask)


def gated_mlp_fwd(i, o):
    layers = (i.gate_weight, i.gate_bias), (i.weight, i.bias)
    pres = [linear_fwd(i.x, *layer) for layer in layers]
    yield o.y, activation_fwd(i.act, *(rounded(o, pre) for pre in pres), i.mask)
    for kept, pre in zip(o.pres, pres, strict=True):
        if kept is not None:
            yield kept, pre


def mlp_bwd(i, o):
    gate, up = ([None] + [rounded(o, linear_fwd(i.x, *layer)) for layer in i.ups])[-2:]
    yield o.y, activation_fwd(i.act, gate, up, i.mask)
    exact = activation_bwd(i.act, linear_dx(i.dy, i.out_weight), gate, up, i.mask, False)[:2]
    yield from zip(o.dups, exact[-len(o.dups) :], strict=True)


def logits(i):
    z = getattr(i, "scale", 1.0) * linear_fwd(i.x, i.weight, i.bias)
    return i.softcap * torch.tanh(z / i.softcap) if i.softcap else z


def cross_entropy_fwd(i, o):
    z = logits(i)
    tiles = z.split(i.tile.block_n, 1)
    yield o.highs, torch.stack([tile.amax(1) for tile in tiles])
    sums = [(t - high[:, None]).exp().sum(1) for t, high in zip(tiles, o.highs, strict=True)]
    yield o.sums, torch.stack(sums)
    if o.totals is not None:
        yield o.totals, torch.stack([tile.sum(1) for tile in tiles])
    yield o.picked, z.gather(1, i.target[:, None] - i.first)[:, 0]
    if o.exps is not None:
        tops = o.highs.repeat_interleave(i.tile.block_n, 0)[: z.shape[1]].t()
        yield o.exps, (z - tops).exp()


def cross_entropy_grad(i, o):
    high, log_sum = i.stats
    tops = i.tops.repeat_interleave(i.block_n, 0)[: i.held.shape[1]].t()
    at, total = i.target[:, None], (high + log_sum)[:, None]
    softmax = i.held * (tops - total).exp()
    mass, spread, at_target = i.slopes
    exact = softmax * mass[:, None] + (0 if spread is None else spread[:, None])
    exact.scatter_add_(1, at, at_target[:, None])
    if i.softcap:
        z = i.held.log() + tops
        exact *= 1 - (z.clamp(min=-i.softcap) / i.softcap) ** 2
    yield o.held, exact


def cross_entropy_bwd(i, o):
    z, (high, log_sum), (mass, spread, at_target) = logits(i), i.stats, i.slopes
    exact = (z - (high + log_sum)[:, None]).exp() * mass[:, None]
    if spread is not None:
        exact += spread[:, None]
    exact.scatter_add_(1, i.target[:, None] - i.first, at_target[:, None])
    yield o.dz, exact * (1 - (z / i.softcap) ** 2) if i.softcap else exact


def experts_tiles(i, o):
    exact = tiles_of(i.ends, i.rows, len(i.tiles), i.block_m)
    kept = exact[:, 0] <= len(i.ends)
    yield o.tiles[:, 0], exact[:, 0]
    yield o.tiles[kept], exact[kept]


def by_expert(rows):
    """Yield each expert with its rows, their pairs and tokens."""
    for expert, bounds in enumerate(itertools.pairwise([0, *rows.ends.tolist()])):
        pairs = rows.pairs[slice(*bounds)]
        yield expert, slice(*bounds), pairs, pairs // rows.top_k


def weights_of(i, pairs):
    return 1.0 if i.weights is None else i.weights.flatten()[pairs][:, None]


def matrix_of(i, expert):
    return i.weight[expert] if i.is_kn else i.weight[expert].t()


def experts_product(i, o):
    """Rows of dropped pairs are 0."""
    y = torch.zeros(o.y.shape, dtype=torch.float64)
    for expert, own, pairs, tokens in by_expert(i.rows):
        product = i.x[tokens if i.how == "gather" else own] @ matrix_of(i, expert)
        if i.bias is not None:
            product += weights_of(i, pairs) * i.bias[expert]
        y[pairs if i.how == "scatter" else own] = product
    yield o.y, y


def experts_up_act(i, o):
    for expert, own, pairs, tokens in by_expert(i.rows):
        pre = i.x[tokens] @ matrix_of(i, expert)
        pre = rounded(o, pre if i.bias is None else pre + i.bias[expert])
        yield o.y[own], weights_of(i, pairs) * expert_activation.activation(i.spec, pre)


def experts_act_fwd(i, o):
    yield o.y, weights_of(i, i.rows.pairs) * expert_activation.activation(i.spec, i.pre)


def experts_act_bwd(i, o):
    dweights = torch.zeros(o.dweights.numel(), dtype=torch.float64)
    for expert, own, pairs, tokens in by_expert(i.rows):
        p, weights = i.dy[tokens] @ matrix_of(i, expert), weights_of(i, pairs)
        act, vjp = expert_activation.activation_vjp(i.spec, i.pre[own])
        dweights[pairs] = (p * act).sum(1)
        if i.bias is not None:
            dweights[pairs] += i.dy[tokens] @ i.bias[expert]
        yield o.act[own], weights * act
        yield o.dpre[own], vjp(p * weights)
    yield o.dweights.flatten(), dweights


def experts_dw(i, o):
    for expert, own, _, tokens in by_expert(i.rows):
        x, y = (
            t[tokens if gathered else own]
            for t, gathered in zip((i.x, i.y), i.by_token, strict=True)
        )
        dw = x.t() @ y
        yield o.dw.grad[expert], dw if i.dw.fresh else i.dw.grad[expert] + dw


def experts_bias_bwd(i, o):
    for expert, own, pairs, tokens in by_expert(i.rows):
        dbias = (weights_of(i, pairs) * i.dy[tokens if i.by_token else own]).sum(0)
        yield o.dbias.grad[expert], dbias


EXACT = {
    norms.norm_fwd: norm_fwd, norms.norm_bwd: norm_bwd, pointwise.act_fwd: act_fwd,
    pointwise.dropout_add_fwd: dropout_add_fwd, pointwise.act_bwd: act_bwd,
    pointwise.act_sum_bwd: act_sum_bwd, rotaries.pack_heads: pack_heads,
    pointwise.site_keys: site_keys, pointwise.gate_add_fwd: gate_add_fwd,
    pointwise.gate_add_bwd: gate_add_bwd,
    pointwise.gated_fwd: gated_fwd, pointwise.gated_bwd: gated_bwd,
    rotaries.rotary_fwd: rotary_fwd, rotaries.rotary_norm_bwd: rotary_norm_bwd,
    products.linear_fwd: linear, products.gated_mlp_fwd: gated_mlp_fwd,
    products.mlp_bwd: mlp_bwd,
    cross_entropy.cross_entropy_fwd: cross_entropy_fwd,
    cross_entropy.cross_entropy_bwd: cross_entropy_bwd,
    cross_entropy.cross_entropy_grad: cross_entropy_grad,
    experts.experts_tiles: experts_tiles, experts.experts_product: experts_product,
    experts.experts_up_act: experts_up_act, experts.experts_act_fwd: experts_act_fwd,
    experts.experts_act_bwd: experts_act_bwd, experts.experts_dw: experts_dw,
    experts.experts_bias_bwd: experts_bias_bwd,
}  # fmt: skip
