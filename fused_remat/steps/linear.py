"""Linear layers: products, their gradients, low-rank updates; and the step of one or several.

On CPUs without native bf16/fp16 products, low-precision products run in float32 on float32 copies
of the operands (faster there than ATen's, and rounded once): the copies are the size of a chunk and
of one weight, and live for one product.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.random import DropoutMask
from fused_remat.steps.node import Input, Mask, Node, Params, Shapes
from fused_remat.steps.operations import operation
from fused_remat.steps.residual import dropout, residual_add

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk

_LOW = (torch.bfloat16, torch.float16)


@functools.cache
def _cpu_has_native(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def widens(x: Tensor) -> bool:
    """Whether products over `x` are better computed in float32: low precision, not native."""
    return x.dtype in _LOW and x.device.type == "cpu" and not _cpu_has_native(x.dtype)


def says_product(dtype: torch.dtype, device: torch.device) -> str:
    """What a product runs, of operands in a dtype on a device."""
    if not widens(torch.empty(0, dtype=dtype, device=device)):
        return "ATen's addmm"
    return f"ATen's addmm on float32 copies: this CPU has no {str(dtype)[6:]} products"


def _key(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    mask: DropoutMask | None = None,
    out: Tensor | None = None,
) -> tuple[Any, ...]:
    """Dtype and device, and whether the product ends in dropout or a residual."""
    return x.dtype, x.device, residual is not None or mask is not None


@operation(key=_key, says=lambda key, *_, **__: says_product(key[0], key[1]))
def linear_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    mask: DropoutMask | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """residual + mask * (x @ weight.T + bias), in the dtype of x.

    Without residual and mask, `out` may be columns of a matrix.
    """
    assert weight is not None
    wide = x.dtype in _LOW and widens(x)
    if wide:
        y = F.linear(x.float(), weight.float(), bias if bias is None else bias.float())
    elif out is None:
        y = F.linear(x, weight, bias)
    elif bias is None:
        y = torch.mm(x, weight.t(), out=out)
    else:
        y = torch.addmm(bias, x, weight.t(), out=out)
    if mask is not None:
        y.mul_(mask.tensor())
    if residual is not None:
        y.add_(residual)
    if not wide:
        return y
    return y.to(x.dtype) if out is None else out.copy_(y)


@operation(
    key=lambda dy, weight, into=None: (dy.dtype, dy.device),
    says=lambda key, *_, **__: says_product(*key),
)
def linear_dx(dy: Tensor, weight: Tensor | None, into: Tensor | None = None) -> Tensor:
    """into + dy @ weight, in `into` if given; dy may be columns of a matrix."""
    assert weight is not None
    if dy.dtype in _LOW and widens(dy):
        dx = torch.mm(dy.float(), weight.float())
        return dx.to(dy.dtype) if into is None else into.add_(dx)
    if into is None:
        return torch.mm(dy, weight)
    return torch.addmm(into, dy, weight, out=into)  # not addmm_: FLOP counters miss it


@operation(
    key=lambda dy, x, into, partial, exact=False: (x.dtype, x.device, partial or exact),
    says=lambda key, *_, **__: says_product(key[0], key[1]),
)
def linear_dw(
    dy: Tensor, x: Tensor, into: Tensor | None, partial: bool, exact: bool = False
) -> Tensor:
    """into + dy.T @ x, in `into` if given.

    `partial`: more will be added, so the sum is held in float32; `exact`: so is the product, which
    is not rounded to 16 bits before it is added.
    """
    if x.dtype in _LOW and (exact or widens(x)):
        dy, x = dy.float(), x.float()
    if into is not None and into.dtype == x.dtype:
        return torch.addmm(into, dy.t(), x, out=into)  # not addmm_: FLOP counters miss it
    dw = torch.mm(dy.t(), x)
    if into is not None:
        return into.add_(dw)
    return dw.float() if partial and dw.dtype in _LOW else dw


@operation(key=lambda dy: (dy.dtype, dy.device), says="ATen's sum")
def bias_grad(dy: Tensor) -> Tensor:
    """The sum of dy over tokens, in float32 (float64 for float64)."""
    return dy.sum(0, dtype=torch.float32) if dy.dtype in _LOW else dy.sum(0)


@operation(key=lambda y, x, *_: (x.dtype, x.device), says=lambda key, *_, **__: says_product(*key))
def low_rank_add(y: Tensor, x: Tensor, weight: Tensor | None, scale: float) -> None:
    """y += scale * x @ weight.T; y may be columns of a matrix, and of a lower dtype."""
    assert weight is not None
    if x.dtype == y.dtype and not widens(x):
        torch.addmm(y, x, weight.t(), alpha=scale, out=y)
        return
    wide = torch.promote_types(x.dtype, torch.float32)
    y.add_(torch.mm(x.to(wide), weight.t().to(wide)), alpha=scale)


#: A weight and a bias, either of which may be absent.
Affine = tuple[Tensor | None, Tensor | None]
#: (first, last, rows): the rows from first to last of a tensor of `rows`.
Part = tuple[int, int, int]


def rows_of(tensor: Tensor | None, part: Part | None) -> Tensor | None:
    """A part of a tensor, as a view.

    >>> rows_of(torch.arange(6), (2, 4, 6))
    tensor([2, 3])
    """
    return tensor if tensor is None or part is None else tensor[part[0] : part[1]]


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A low-rank update of a linear layer (LoRA): + scale * (keep * x) @ A.T @ B.T.

    Attributes:
        a, b: names of the matrices, A (rank, in) and B (out, rank).
        columns: of the step's activation, first and end, that it is added to; None for all.
        low: the name of (keep * x) @ A.T while it is there.
        dtype: of the matrices and of what is between them; None for the step's.
    """

    a: str
    b: str
    low: str
    scale: float
    mask: str = ""
    columns: tuple[int, int] | None = None
    dtype: torch.dtype | None = None

    def of(self, y: Tensor) -> Tensor:
        """The columns of y that it is added to."""
        return y if self.columns is None else y[:, slice(*self.columns)]


@dataclass(frozen=True, kw_only=True)
class Linear(Node):
    """name = residual + keep * (x @ weight.T + bias); or of several layers, side by side.

    Under autocast the product is in `compute`, and added to a residual in the residual's dtype.

    Attributes:
        weights, biases: of each layer.
        sizes: how many columns each layer makes, where there are several.
        part: the layer has the rows from first to last of a weight and a bias that it shares with
            others.
        updates: low-rank updates, of a step without residual and dropout.
    """

    x: Input
    residual: Input = ""
    weights: Params
    biases: Params
    mask: Mask = ""
    sizes: tuple[int, ...] = ()
    part: Part | None = None
    updates: tuple[LowRank, ...] = ()

    @functools.cached_property
    def weight(self) -> str:
        """The weight of the one layer."""
        return self.weights[0]

    @functools.cached_property
    def bias(self) -> str:
        """The bias of the one layer."""
        return self.biases[0]

    @functools.cached_property
    def plain(self) -> bool:
        """Whether it is one layer that ends in nothing else."""
        return not (self.sizes or self.residual or self.mask or self.updates)

    @functools.cached_property
    def _weights(self) -> frozenset[str]:
        return frozenset(self.weights)

    @functools.cached_property
    def _affine(self) -> frozenset[str]:
        return frozenset((*self.weights, *self.biases))

    @functools.cached_property
    def params(self) -> tuple[str, ...]:
        names = (*self.weights, *self.biases, *[n for u in self.updates for n in (u.a, u.b)])
        return tuple([name for name in names if name])

    @functools.cached_property
    def masks(self) -> tuple[str, ...]:
        return tuple([name for name in (self.mask, *[u.mask for u in self.updates]) if name])

    @property
    def transients(self) -> tuple[str, ...]:
        return tuple([update.low for update in self.updates])

    @property
    def says(self) -> tuple[str, str]:
        mixed = self.compute is not None and self.residual
        return "added to the residual in the stream's dtype" if mixed else "", ""

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        if self.sizes:
            return sum(self.sizes)
        return shapes[self.weight][0] if self.part is None else self.part[1] - self.part[0]

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        columns = shapes[self.weights[0]][1]
        low = sum(shapes[m][0] * shapes[m][1] for u in self.updates for m in (u.a, u.b))
        return 2 * (self.width(widths, shapes) * columns + low)

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        wanted = not {self.x, *self.params}.isdisjoint(needs_grad)
        updated = any(u.a in needs_grad or u.b in needs_grad for u in self.updates)
        x = (self.x,) if updated or not self._weights.isdisjoint(needs_grad) else ()
        return (*x, *(self.masks if wanted else ()))

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        read = [*self.weights] if self.x in needs_grad else []
        for u in self.updates:
            read += [u.a] if self.x in needs_grad or u.b in needs_grad else []
            read += [u.b] if self.x in needs_grad or u.a in needs_grad else []
        return tuple(read)

    def affine(self, chunk: Chunk) -> Affine:
        """The weight and the bias of the one layer."""
        weight, bias = chunk.param(self.weight), chunk.param(self.bias)
        return rows_of(weight, self.part), rows_of(bias, self.part)

    def operand(self, chunk: Chunk) -> Tensor:
        """x as the product takes it."""
        return chunk[self.x] if self.compute is None else chunk[self.x].to(self.compute)

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        x = chunk[self.x] if self.compute is None else chunk[self.x].to(self.compute)
        residual = chunk[self.residual] if self.residual else None
        mask = chunk.mask(self.mask) if self.mask else None
        weight, bias = chunk.param(self.weight), chunk.param(self.bias)
        if self.part is not None:
            weight, bias = self.affine(chunk)
        if self.sizes:
            y = x.new_empty((x.shape[0], sum(self.sizes))) if out is None else out
            for w, b, columns in self._layers(y):
                chunk.ops[linear_fwd](x, chunk.param(w), chunk.param(b), out=columns)
        elif residual is not None and self.compute is not None:
            product = chunk.ops[linear_fwd](x, weight, bias)
            del x
            y = chunk.ops[residual_add](product, residual, mask, out)
        else:
            y = chunk.ops[linear_fwd](x, weight, bias, residual, mask, out)
        for update in self.updates:
            self._add_update(chunk, y, update)
        chunk.put(self.name, y)

    def _layers(self, y: Tensor) -> list[tuple[str, str, Tensor]]:
        """Each layer's weight, bias and columns of y."""
        return [*zip(self.weights, self.biases, y.split(self.sizes, 1), strict=True)]

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        lows = (
            [self._update_backward(chunk, dy, u, needs_grad) for u in self.updates]
            if self.updates
            else []
        )
        if self.x in needs_grad or not self._affine.isdisjoint(needs_grad):
            mask, dz = chunk.mask(self.mask) if self.mask else None, dy
            if mask is not None:
                dz = chunk.ops[dropout](dy, mask, self.compute)
            elif self.compute is not None:
                dz = dy.to(self.compute)
            layers = self._layers(dz) if self.sizes else ((self.weight, self.bias, dz),)
            x: Tensor | None = None
            for weight, bias, part in layers:
                if weight in needs_grad:
                    if x is None:
                        x = chunk[self.x] if self.updates else chunk.last(self.x)
                        x = x if self.compute is None else x.to(self.compute)
                    chunk.add_weight_grad(weight, part, x, self.part)
                if bias in needs_grad:
                    chunk.add_param_grad(bias, chunk.ops[bias_grad](part), self.part)
            del x
            if self.x in needs_grad:
                dx: Tensor | None = None
                for weight, _, part in layers:
                    w = chunk.param(weight)
                    w = w if self.part is None else rows_of(w, self.part)
                    dx = chunk.ops[linear_dx](part, w, dx)
                assert dx is not None
                dx = dx if self.compute is None else dx.to(chunk.dtype_of(self.x))
                chunk.add_grad(self.x, dx, owned=True)
                del dx
            del dz, part, layers
        for update, dlow in reversed([*zip(self.updates, lows, strict=True)]) if lows else ():
            if dlow is not None:
                self._low_backward(chunk, dlow, update, needs_grad)
        if self.residual in needs_grad:
            chunk.add_grad(self.residual, dy, owned)

    # --- low-rank updates

    def _add_update(self, chunk: Chunk, y: Tensor, update: LowRank) -> None:
        low = self._low(chunk, update)
        for rows in _pieces(y, low.dtype):
            chunk.ops[low_rank_add](
                update.of(y[rows]), low[rows], chunk.param(update.b), update.scale
            )
        chunk.put(update.low, low)

    def _low(self, chunk: Chunk, update: LowRank) -> Tensor:
        """(keep * x) @ A.T, unless it is there."""
        if update.low in chunk:
            return chunk[update.low]
        x, mask, weight = chunk[self.x], chunk.mask(update.mask), chunk.param(update.a)
        assert weight is not None
        dtype = update.dtype or self.compute or x.dtype
        low = x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)
        for rows in _pieces(x, dtype):
            # A multiplier of its own: one that the frame holds would stay until backward.
            operand = _dropped(chunk, x[rows], _of_rows(mask, rows), dtype)
            chunk.ops[linear_fwd](operand, weight, None, out=low[rows])
        return low

    def _update_backward(
        self, chunk: Chunk, dy: Tensor, update: LowRank, needs_grad: Collection[str]
    ) -> Tensor | None:
        """Adds the gradient of B; returns that of `low`, None if nobody wants it."""
        dtype, parts = update.dtype or dy.dtype, []
        asked = self.x in needs_grad or update.a in needs_grad
        low = self._low(chunk, update) if update.b in needs_grad else None
        for rows in _pieces(dy, dtype):
            mine = update.of(dy[rows]).to(dtype)
            if low is not None:
                chunk.add_weight_grad(update.b, mine, low[rows] * update.scale)
            if asked:
                parts.append(chunk.ops[linear_dx](mine, chunk.param(update.b)).mul_(update.scale))
        if not asked:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _low_backward(
        self, chunk: Chunk, dy: Tensor, update: LowRank, needs_grad: Collection[str]
    ) -> None:
        """The gradients of A and of x, from that of (keep * x) @ A.T."""
        mask, weight = chunk.mask(update.mask), chunk.param(update.a)
        dx = self._target(chunk, dy.shape[0]) if self.x in needs_grad else None
        x = chunk[self.x] if update.a in needs_grad else None
        wide = dy.new_empty((dy.shape[0], 0), dtype=chunk.dtype_of(self.x))
        for rows in _pieces(wide, dy.dtype):
            mine = _of_rows(mask, rows)
            if x is not None:
                operand = _dropped(chunk, x[rows], mine, dy.dtype)
                cut = rows.stop - rows.start < dy.shape[0]
                chunk.add_weight_grad(update.a, dy[rows], operand, partial=cut)
                del operand
            if dx is None:
                continue
            if mine is None and dx.dtype == dy.dtype:
                chunk.ops[linear_dx](dy[rows], weight, into=dx[rows])
            else:
                part = chunk.ops[linear_dx](dy[rows], weight)
                dx[rows].add_(part if mine is None else chunk.ops[dropout](part, mine))

    def _target(self, chunk: Chunk, rows: int) -> Tensor:
        """The gradient of x, to be added to."""
        grad, owned = chunk.grads.get(self.x, (None, False))
        if grad is None or not owned:
            shape, dtype = (rows, chunk.owner.widths[self.x]), chunk.dtype_of(self.x)
            chunk.add_grad(
                self.x, torch.zeros(shape, dtype=dtype, device=chunk.owner.device), owned=True
            )
            grad, _ = chunk.grads[self.x]
        return grad


#: So many tokens are converted at a time where adapters are of another dtype than the block.
_ROWS = 4096


def _pieces(x: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """The rows of x, in pieces if x is to be converted to `dtype`: no copy is larger than one."""
    rows = x.shape[0]
    step = max(rows, 1) if x.dtype == dtype else _ROWS
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _of_rows(mask: DropoutMask | None, rows: slice) -> DropoutMask | None:
    return None if mask is None else mask.of_rows(rows.start, rows.stop - rows.start)


def _dropped(chunk: Chunk, x: Tensor, mask: DropoutMask | None, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if mask is None else chunk.ops[dropout](x, mask, dtype)
