"""Rotary position embedding, and RMSNorm, of the query and key heads of a packed projection.

The arithmetic is float32 (float64 for float64), and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_remat.spec import AttentionSpec
from fused_remat.steps.attention_call import Heads
from fused_remat.steps.linear import bias_grad
from fused_remat.steps.node import Input, Node, Param
from fused_remat.steps.norm import shifted
from fused_remat.steps.operations import operation

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


@dataclass(eq=False, slots=True)
class RotaryTables:
    """Tables and weights of one rotary step over consecutive tokens."""

    spec: AttentionSpec  # the heads, and how they are rotated and normed
    # cos, sin: (S, R/2) or (B, S, R/2), in float32 or the dtype of the heads. The first R
    # elements of a head are rotated; R is at most its width E. Both None: no rotation.
    cos: Tensor | None
    sin: Tensor | None
    # q_weight, k_weight: (E,), weights of the norms of query and key heads
    # (`AttentionSpec.head_norm`). Both None: no norm.
    q_weight: Tensor | None
    k_weight: Tensor | None
    # token0, seq_len: the number of the first token in the call, and the tokens of a
    # sequence: token t of the call is (b, s) = divmod(t, seq_len)
    token0: int
    seq_len: int
    values: bool = True  # whether value heads follow the key heads

    @property
    def rotated(self) -> int:
        """Number R of elements of a head that are rotated."""
        return 0 if self.cos is None else 2 * self.cos.shape[-1]

    @property
    def eps(self) -> float:
        """Constant of the norms of heads; 0 if there are none."""
        return self.spec.head_norm.eps if self.spec.head_norm else 0.0

    def width(self, x: Tensor) -> int:
        """Return E, the width of a head of x."""
        return x.shape[1] // (self.spec.num_heads + (1 + self.values) * self.spec.num_kv_heads)

    def norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the norms' weights, with the offset of the spec; None without norms."""
        offset = self.spec.head_norm.offset if self.spec.head_norm else 0.0
        return shifted(self.q_weight, offset), shifted(self.k_weight, offset)


def _key(x: Tensor, call: RotaryTables, *_: Any) -> tuple[Any, ...]:
    # The last is whether 32 bits can count the tokens.
    return x.dtype, x.device, call.width(x), x.shape[0] + call.seq_len < 2**31


@operation(key=_key, description="pointwise, eager")
def rotary_fwd(x: Tensor, call: RotaryTables, out: Tensor | None = None) -> Tensor:
    """Return x (T, (H + 2·Hkv)·E) with query and key heads normed and rotated, values copied.

    Without values, x is (T, (H + Hkv)·E). n = x * rstd * weight with norms, else n = x. A pair
    (n1, n2) of elements becomes (n1 * cos - n2 * sin, n2 * cos + n1 * sin). `out` may be x.
    """
    return _forward(x, call, out)


def _forward(x: Tensor, call: RotaryTables, out: Tensor | None, back: bool = False) -> Tensor:
    """Run `rotary_fwd`; with `back`, by opposite angles: the inverse if there are no norms."""
    y = x.new_empty(x.shape) if out is None else out
    in_place = y is x and call.q_weight is None
    (source, values), (target, copied) = _split(x, call), _split(y, call)
    if y is not x:
        copied.copy_(values)
    if call.q_weight is not None:
        source, _ = _normed(source, call)
        _scale(source, call)
    if call.rotated < target.shape[-1] and not in_place:
        target[..., call.rotated :].copy_(source[..., call.rotated :])
    _rotate(source, call, back, target, in_place)
    return y


@operation(key=lambda dy, x, call, *_: _key(dy, call), description="pointwise, eager")
def rotary_bwd(
    dy: Tensor,
    x: Tensor | None,
    call: RotaryTables,
    needs_grad: tuple[bool, ...],
    owned: bool,
    heads: Heads | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx and the gradients of both weights; one that `needs_grad` does not mark is None.

    With n = x * rstd, g = dy rotated back and w the weight: dw = sum(g * n) over tokens and heads,
    dx = rstd * (g * w - n * mean(g * w * n)). x is read only if there are norms. dy may be
    overwritten if `owned`. With `heads`, as in `pack_heads`, there are norms, and dy holds nothing.
    """
    if heads is not None:
        _copy(heads, dy)
    if call.q_weight is None:
        return _forward(dy, call, dy if owned else None, back=True), None, None
    assert x is not None
    (dheads, dvalues), (rows, _) = _split(dy, call), _split(x, call)
    normed, rstd = _normed(rows, call)
    g = dheads.to(normed.dtype, copy=True)
    _rotate(dheads, call, True, g)
    product = g * normed
    dq_weight, dk_weight = (
        part.sum((0, 1)) if wanted else None
        for wanted, part in zip(needs_grad[1:], _by_kind(product, call), strict=True)
    )
    if not needs_grad[0]:
        return None, dq_weight, dk_weight
    _scale(g, call)
    mean = torch.mul(g, normed, out=product).mean(-1, keepdim=True)
    dx = dy if owned else dy.new_empty(dy.shape)
    target, copied = _split(dx, call)
    target.copy_(normed.mul_(mean).neg_().add_(g).mul_(rstd))
    if dx is not dy:
        copied.copy_(dvalues)
    return dx, dq_weight, dk_weight


@operation(
    key=lambda heads, call, out, needs_sum: (
        out.dtype, out.device, heads[0].shape[3], out.shape[0] + call.seq_len < 2**31
    ),
    description="copies, then pointwise, eager",
)  # fmt: skip
def pack_heads(heads: Heads, call: RotaryTables, out: Tensor, needs_sum: bool) -> Tensor | None:
    """Fill out (T, (H + 2·Hkv)·E) with gradients of heads, those of queries and keys rotated back.

    The heads are (B, H, S, E) of any strides, T = B·S; the tables have no norms, and value heads.
    Returns the sum of `out` over tokens as `bias_grad` does if `needs_sum`, else None.
    """
    _copy(heads, out)
    if call.rotated:
        _forward(out, call, out, back=True)
    return bias_grad(out) if needs_sum else None


def _copy(heads: Heads, out: Tensor) -> None:
    batch, _, tokens, width = heads[0].shape
    views = out.view(batch, tokens, -1, width).transpose(1, 2)
    for target, x in zip(views.split([x.shape[1] for x in heads], 1), heads, strict=True):
        target.copy_(x)


def _split(x: Tensor, call: RotaryTables) -> tuple[Tensor, Tensor]:
    """Return views of query and key heads (T, H + Hkv, E), and of value heads, if any."""
    first = call.spec.num_heads + call.spec.num_kv_heads
    heads = x.view(len(x), first + call.values * call.spec.num_kv_heads, call.width(x))
    return heads[:, :first], heads[:, first:]


def _by_kind(heads: Tensor, call: RotaryTables) -> tuple[Tensor, Tensor]:
    return heads[:, : call.spec.num_heads], heads[:, call.spec.num_heads :]


def _scale(heads: Tensor, call: RotaryTables) -> None:
    for part, weight in zip(_by_kind(heads, call), call.norm_weights(), strict=True):
        assert weight is not None
        part.mul_(weight)


def _normed(heads: Tensor, call: RotaryTables) -> tuple[Tensor, Tensor]:
    """Return heads * rstd and rstd = (mean(heads**2) + eps) ** -0.5 over the width."""
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rstd = norm.square_().div_(wide.shape[-1]).add_(call.eps).rsqrt_()
    return wide * rstd, rstd


def _rotate(
    heads: Tensor, call: RotaryTables, back: bool, out: Tensor, in_place: bool = False
) -> None:
    """Write the rotated pairs of `heads` to `out`, which is `heads` if `in_place`."""
    rotated = call.rotated
    if not rotated:
        return
    dtype = torch.promote_types(heads.dtype, torch.float32)
    cos, sin = call.cos, call.sin
    assert cos is not None and sin is not None
    rows, seq_len = heads.shape[0], call.seq_len
    if cos.dim() == 2 and rows > seq_len and call.token0 % seq_len == rows % seq_len == 0:
        # Whole sequences, which share the rows of the tables.
        sizes = (rows // seq_len, seq_len, *heads.shape[1:])
        heads, out = heads.view(sizes), out.view(sizes)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    else:
        cos, sin = _of_tokens(cos, call, rows), _of_tokens(sin, call, rows)
    cos, sin = cos.to(dtype), sin.to(dtype)
    interleaved = call.spec.rotary is not None and call.spec.rotary.interleaved
    x, y = heads[..., :rotated], out[..., :rotated]
    if interleaved:
        turn = torch.complex(cos, -sin if back else sin)
        # Contiguous: bits would depend on strides, and so on whether y is x.
        pairs = x.to(dtype).contiguous().unflatten(-1, (-1, 2))
        y.copy_(torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2))
        return
    x = x.to(dtype, copy=in_place)
    both = torch.cat([cos, cos], -1)
    turned = torch.mul(x, both, out=y if y.dtype is dtype else None)
    (x1, x2), (y1, y2) = x.tensor_split(2, -1), turned.tensor_split(2, -1)
    sign = 1.0 if back else -1.0  # of the term added to y1; that of y2 has the opposite sign
    y1.addcmul_(x2, sin, value=sign)
    y2.addcmul_(x1, sin, value=-sign)
    if turned is not y:
        y.copy_(turned)


def _of_tokens(table: Tensor, call: RotaryTables, rows: int) -> Tensor:
    """Return rows (T, 1, R/2) of a table for the call's tokens: a view if consecutive."""
    if table.dim() == 3:
        flat = table.reshape(-1, table.shape[-1])
        return flat[call.token0 : call.token0 + rows, None]
    first = call.token0 % max(call.seq_len, 1)
    if first + rows <= call.seq_len:
        return table[first : first + rows, None]
    places = torch.arange(first, first + rows, device=table.device) % call.seq_len
    return table[places][:, None]


@dataclass(frozen=True, kw_only=True)
class Rotary(Node):
    """name = x with its query and key heads normed (RMSNorm), then rotated.

    Backward of a rotation rotates back and reads no activation. Backward of the norm reads x, and
    computes the statistics again.
    """

    x: Input  # the packed projection: query heads, key heads, and value heads if `values`
    spec: AttentionSpec  # the attention that reads the heads
    cos: Param = ""  # cos, sin: names of the tables, both "" for no rotation
    sin: Param = ""
    q_weight: Param = ""  # q_weight, k_weight: names of the norms' weights, both "" for no norm
    k_weight: Param = ""
    in_place: bool = False  # whether the result is written over x
    values: bool = True

    @property
    def description(self) -> tuple[str, str]:
        return "in place" if self.in_place else "", ""

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.x,) if self.q_weight else ()

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return self.params

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        x = chunk[self.x]
        out = x if self.in_place else out
        chunk.put(self.name, chunk.ops[rotary_fwd](x, self.call(chunk), out))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        heads = chunk.heads.pop(self.name, None)
        if heads is not None and not self.q_weight:
            call, needs_sum = self.call(chunk), self.x in chunk.owner.execution.summed
            total = chunk.ops[pack_heads](heads, call, dy, needs_sum)
            chunk.add_grad(self.x, dy, owned=True, total=total)
            return
        x = chunk[self.x] if self.q_weight else None
        marks = (self.x in needs_grad, self.q_weight in needs_grad, self.k_weight in needs_grad)
        dx, *dweights = chunk.ops[rotary_bwd](dy, x, self.call(chunk), marks, owned, heads)
        if dx is not None:
            chunk.add_grad(self.x, dx, owned=True)
        for name, dweight in zip((self.q_weight, self.k_weight), dweights, strict=True):
            if dweight is not None:
                chunk.add_param_grad(name, dweight)

    def call(self, chunk: Chunk) -> RotaryTables:
        """Return the tables and weights for the chunk's tokens."""
        param, seq_len = chunk.param, chunk.owner.execution.lengths[self.x]
        given = param(self.cos), param(self.sin), param(self.q_weight), param(self.k_weight)
        return RotaryTables(self.spec, *given, chunk.first_row(self.x), seq_len, self.values)
