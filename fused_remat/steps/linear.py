"""Linear layers: products, their gradients, and the step of one or more layers.

On CPUs without native bf16 or fp16 products, 16-bit products run in float32 on float32 copies of
the operands: that is faster there than ATen's product, and rounds once. The copies are as large as
a chunk and one weight, and live for one product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.random import DropoutMask
from fused_remat.spec import PackedSpec
from fused_remat.steps.chunk import Chunk, Part
from fused_remat.steps.node import Input, Mask, Node, Params, Shapes
from fused_remat.steps.operations import operation
from fused_remat.steps.packed import dequantize, packed_product
from fused_remat.steps.residual import dropout, residual_add

#: The dtypes of 16 bits.
LOW = (torch.bfloat16, torch.float16)


@functools.cache
def cpu_has_native(dtype: torch.dtype) -> bool:
    """Return whether this CPU has products of matrices in a dtype of 16 bits."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def widens(x: Tensor) -> bool:
    """Return whether products of `x` run in float32: this CPU has none in the 16 bits of x."""
    return x.dtype in LOW and x.device.type == "cpu" and not cpu_has_native(x.dtype)


def describe_product(key: tuple[Any, ...], *_: Any, **__: Any) -> str:
    """Describe a product for `explain`; the key begins with its operands' dtype and device."""
    dtype, device = key[:2]
    if not widens(torch.empty(0, dtype=dtype, device=device)):
        return "ATen's addmm"
    return f"ATen's addmm on float32 copies: this CPU has no {str(dtype)[6:]} products"


# In the key, the third is whether dropout or a residual follows the product.
@operation(
    key=lambda x, weight, bias, residual=None, mask=None, out=None: (
        x.dtype, x.device, residual is not None or mask is not None, (x.shape[0], *weight.shape)
    ),
    description=describe_product,
)  # fmt: skip
def linear_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    mask: DropoutMask | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return residual + mask * (x @ weight.T + bias), in the dtype of x.

    Without a residual and a mask, `out` may be columns of a matrix.
    """
    assert weight is not None
    wide = x.dtype in LOW and widens(x)
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
    key=lambda dy, weight, into=None: (dy.dtype, dy.device, (dy.shape[0], *weight.shape)),
    description=describe_product,
)
def linear_dx(dy: Tensor, weight: Tensor | None, into: Tensor | None = None) -> Tensor:
    """Return dy @ weight, added in place to `into` unless None; dy may be columns of a matrix."""
    assert weight is not None
    if dy.dtype in LOW and widens(dy):
        dx = torch.mm(dy.float(), weight.float())
        return dx.to(dy.dtype) if into is None else into.add_(dx)
    if into is None:
        return torch.mm(dy, weight)
    return torch.addmm(into, dy, weight, out=into)  # not addmm_: FLOP counters miss it


@operation(
    key=lambda dy, x, into, partial, exact=False: (x.dtype, x.device, partial or exact),
    description=describe_product,
)
def linear_dw(
    dy: Tensor, x: Tensor, into: Tensor | None, partial: bool, exact: bool = False
) -> Tensor:
    """Return dy.T @ x, added in place to `into` unless None.

    `partial`: several products will be added, so the sum is float32. `exact`: the product itself is
    also float32, and is not rounded to 16 bits before it is added.
    """
    if x.dtype in LOW and (exact or widens(x)):
        dy, x = dy.float(), x.float()
    if into is not None and into.dtype == x.dtype:
        return torch.addmm(into, dy.t(), x, out=into)  # not addmm_: FLOP counters miss it
    dw = torch.mm(dy.t(), x)
    if into is not None:
        return into.add_(dw)
    return dw.float() if partial and dw.dtype in LOW else dw


@operation(key=lambda dy: (dy.dtype, dy.device), description="ATen's sum")
def bias_grad(dy: Tensor) -> Tensor:
    """Return the sum of dy over tokens, in float32 (float64 for float64)."""
    return dy.sum(0, dtype=torch.float32) if dy.dtype in LOW else dy.sum(0)


@operation(key=lambda x, *_: (x.dtype, x.device), description="pointwise, and ATen's sum")
def dropout_sum(
    x: Tensor, mask: DropoutMask, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return `dropout` of x, and the `bias_grad` of that."""
    y = dropout(x, mask, dtype)
    return y, bias_grad(y)


def dropped(chunk: Chunk, dy: Tensor, layer: Linear, needs_grad: Collection[str]) -> Tensor:
    """Return dy through the layer's dropout, in the product's dtype; note its sum if needed."""
    mask, dtype = chunk.mask(layer.mask), layer.compute or dy.dtype
    if mask is None:
        return dy.to(dtype)
    if chunk.ops.name == "eager" or layer.bias not in needs_grad:
        return chunk.ops[dropout](dy, mask, dtype)
    dz, chunk.sums[layer.name] = chunk.ops[dropout_sum](dy, mask, dtype)
    return dz


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b in float32 (float64), in `out` unless None.

    It is rounded to 16 bits before only where ATen has no other product.
    """
    if a.dtype.itemsize == 2 and a.device.type == "cuda" and torch.version.hip is None:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    y = torch.mm(a, b)
    y = y.float() if y.dtype.itemsize == 2 else y
    return y if out is None else out.copy_(y)


def add_product(into: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a @ b to `into`, or write it there if it is the first."""
    if a.dtype != into.dtype:
        product(a, b, into) if first else into.add_(product(a, b))
    elif first:
        torch.mm(a, b, out=into)
    else:
        torch.addmm(into, a, b, out=into)  # not addmm_: FLOP counters miss it


#: A weight and a bias, either of which may be absent.
Affine = tuple[Tensor | None, Tensor | None]


def rows_of(tensor: Tensor | None, part: Part | None) -> Tensor | None:
    return tensor if tensor is None or part is None else tensor[part[0] : part[1]]


def add_weight_grad(
    chunk: Chunk, name: str, dy: Tensor, x: Tensor, part: Part | None = None, partial: bool = False
) -> None:
    """Add dy.T @ x to the gradient of a weight; `partial`: the step itself will add more."""
    owner, grads = chunk.owner, chunk.owner.param_grads
    partial = partial or owner.partial
    if part is not None:
        wide = torch.promote_types(x.dtype, torch.float32) if partial else x.dtype
        into = chunk.part_of_grad(name, part, x.shape[1:], wide)
        chunk.ops[linear_dw](dy, x, into, partial, owner.exact)
        return
    grads[name] = chunk.ops[linear_dw](dy, x, grads.get(name), partial, owner.exact)


def add_weight_grads(
    chunk: Chunk, names: tuple[str, ...], sizes: tuple[int, ...], dy: Tensor, x: Tensor
) -> None:
    """Add the weight gradients of layers whose columns of dy are side by side: one product.

    The gradients are rows of one tensor, unless some exist already.
    """
    owner, grads = chunk.owner, chunk.owner.param_grads
    joint = owner.joint_grads.get(names)
    if joint is None and not grads.keys().isdisjoint(names):
        for name, columns in zip(names, dy.split(sizes, 1), strict=True):
            add_weight_grad(chunk, name, columns, x)
        return
    joint = chunk.ops[linear_dw](dy, x, joint, owner.partial, owner.exact)
    owner.joint_grads[names] = joint
    # Of one tensor's memory, but each with a version counter of its own.
    grads.update(zip(names, [rows.data for rows in joint.split(sizes)], strict=True))


@dataclass(frozen=True, kw_only=True)
class Linear(Node):
    """name = residual + mask * (x @ weight.T + bias), or the same of several layers, side by side.

    Under autocast the product is in `compute`; it is added to a residual in the residual's dtype.
    """

    x: Input
    residual: Input = ""
    weights: Params  # weights, biases: names of each layer's weight and bias
    biases: Params
    mask: Mask = ""
    sizes: tuple[int, ...] = ()  # output columns of each layer, if there are several
    # the rows of the weight and bias that are this layer's, if it shares them with others
    part: Part | None = None
    # low-rank updates (`low_rank.LowRank`). A step of several layers, or with updates, has no
    # residual and no mask.
    updates: tuple[Any, ...] = ()
    # for each layer, the format of its weight, or None; () if no weight is quantized. Such a step
    # has no residual and no mask.
    packed: tuple[PackedSpec | None, ...] = ()

    @functools.cached_property
    def weight(self) -> str:
        """Weight of the one layer."""
        return self.weights[0]

    @functools.cached_property
    def bias(self) -> str:
        """Bias of the one layer."""
        return self.biases[0]

    @functools.cached_property
    def plain(self) -> bool:
        """True for one layer without a residual, dropout, updates or a quantized weight."""
        return not (self.sizes or self.residual or self.mask or self.updates or self.packed)

    @functools.cached_property
    def _weights(self) -> frozenset[str]:
        return frozenset(self.weights)

    @functools.cached_property
    def _affine(self) -> frozenset[str]:
        return frozenset((*self.weights, *self.biases))

    @functools.cached_property
    def params(self) -> tuple[str, ...]:
        names = (*self.weights, *self.biases, *[n for u in self.updates for n in u.params])
        return tuple(dict.fromkeys([name for name in (*names, *self._packed_names) if name]))

    @functools.cached_property
    def _packed_names(self) -> tuple[str, ...]:
        pairs = zip(self.packed, self.weights, strict=False)
        return tuple([name for spec, weight in pairs if spec for name in spec.names(weight)])

    @functools.cached_property
    def masks(self) -> tuple[str, ...]:
        return tuple([name for name in (self.mask, *[u.mask for u in self.updates]) if name])

    @property
    def transients(self) -> tuple[str, ...]:
        return tuple([update.low for update in self.updates])

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        kept = {update.magnitude for update in self.updates}.union(self._packed_names)
        return {name: dtype for name, dtype in super().casts.items() if name not in kept}

    @property
    def description(self) -> tuple[str, str]:
        if any(update.magnitude for update in self.updates):
            return "columns scaled by DoRA", ""
        mixed = self.compute is not None and self.residual
        return "added to the residual in the stream's dtype" if mixed else "", ""

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        if self.sizes:
            return sum(self.sizes)
        return shapes[self.weight][0] if self.part is None else self.part[1] - self.part[0]

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        columns = shapes[self.weights[0]][1]
        # DoRA multiplies what dropout leaves by the weight, too.
        updates = [(u.a, u.b, u.mask and u.weight) for u in self.updates]
        low = sum(math.prod(shapes[m]) for names in updates for m in names if m)
        return 2 * (self.width(widths, shapes) * columns + low)

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        wanted = not {self.x, *self.params}.isdisjoint(needs_grad)
        updated = any(name in needs_grad for u in self.updates for name in u.params)
        x = (self.x,) if updated or not self._weights.isdisjoint(needs_grad) else ()
        own = any(u.magnitude in needs_grad and not u.mask for u in self.updates)
        return (*x, *(self.masks if wanted else ()), *((self.name,) if own else ()))

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        read = [*self.weights, *self._packed_names] if self.x in needs_grad else []
        for u in self.updates:
            read += [u.a] if self.x in needs_grad or u.b in needs_grad else []
            read += [u.b] if self.x in needs_grad or u.a in needs_grad else []
            read += [u.weight, *self._packed_names, u.bias, *u.params] if u.magnitude else []
        return tuple([name for name in read if name])

    def affine(self, chunk: Chunk) -> Affine:
        """Return the weight and the bias of the one layer."""
        weight, bias = chunk.param(self.weight), chunk.param(self.bias)
        return rows_of(weight, self.part), rows_of(bias, self.part)

    def operand(self, chunk: Chunk) -> Tensor:
        """Return x in the dtype of the product."""
        return chunk[self.x] if self.compute is None else chunk[self.x].to(self.compute)

    def base_weight(
        self, chunk: Chunk, i: int, dtype: torch.dtype, backward: bool = False
    ) -> Tensor:
        """Return the weight of the i-th layer; a copy in `dtype` if it is quantized."""
        weight, spec = chunk.param(self.weights[i]), self.packed[i] if self.packed else None
        assert weight is not None
        if spec is not None:
            tensors: Any = [chunk.param(name) for name in spec.names(self.weights[i])]
            first = spec.dtype or dtype if backward else dtype
            weight = chunk.ops[dequantize](spec, tensors, first).to(dtype)
        return weight if self.part is None else weight[self.part[0] : self.part[1]]

    def _product_dtype(self, i: int, dtype: torch.dtype) -> torch.dtype:
        spec = self.packed[i]
        return dtype if spec is None or self.compute is not None else spec.compute or dtype

    def _packed_fwd(self, chunk: Chunk, i: int, x: Tensor, out: Tensor | None) -> Tensor:
        """Return the product of the i-th layer, in `out` unless None, in the dtype of x."""
        spec, bias, dtype = self.packed[i], chunk.param(self.biases[i]), x.dtype
        x = x.to(self._product_dtype(i, dtype))
        bias = None if bias is None else rows_of(bias, self.part).to(x.dtype)  # type: ignore[union-attr]
        y = None
        if spec is not None and x.is_cuda and self.part is None:
            tensors: Any = [chunk.param(name) for name in spec.names(self.weights[i])]
            y = chunk.ops[packed_product](spec, tensors, x, bias)
        if y is None:
            into = out if x.dtype == dtype else None
            y = chunk.ops[linear_fwd](x, self.base_weight(chunk, i, x.dtype), bias, out=into)
        return y.to(dtype) if out is None or y is out else out.copy_(y)

    def _packed_dx(self, chunk: Chunk, i: int, dy: Tensor, into: Tensor | None) -> Tensor:
        """Return the gradient of x by the i-th layer, added in place to `into` unless None."""
        dtype = self._product_dtype(i, dy.dtype)
        weight = self.base_weight(chunk, i, dtype, backward=True)
        if dtype == dy.dtype:
            return chunk.ops[linear_dx](dy, weight, into)
        dx = chunk.ops[linear_dx](dy.to(dtype), weight)
        return dx.to(dy.dtype) if into is None else into.add_(dx)

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        x = chunk[self.x] if self.compute is None else chunk[self.x].to(self.compute)
        residual = chunk[self.residual] if self.residual else None
        mask = chunk.mask(self.mask) if self.mask else None
        if self.part is None:
            weight, bias = chunk.param(self.weight), chunk.param(self.bias)
        else:
            weight, bias = self.affine(chunk)
        if self.sizes:
            y = x.new_empty((x.shape[0], sum(self.sizes))) if out is None else out
            for i, (w, b, columns) in enumerate(self._layers(y)):
                if self.packed:
                    self._packed_fwd(chunk, i, x, columns)
                else:
                    chunk.ops[linear_fwd](x, chunk.param(w), chunk.param(b), out=columns)
        elif self.packed:
            y = self._packed_fwd(chunk, 0, x, out)
        elif residual is not None and self.compute is not None:
            product = chunk.ops[linear_fwd](x, weight, bias)
            del x
            y = chunk.ops[residual_add](product, residual, mask, out)
        else:
            y = chunk.ops[linear_fwd](x, weight, bias, residual, mask, out)
        for update in self.updates:
            update.add_to(y, chunk, self)
        chunk.put(self.name, y)

    def _add_bias_grads(
        self, chunk: Chunk, layers: Sequence[tuple[str, str, Tensor]], needs_grad: Collection[str]
    ) -> None:
        total = chunk.sums.pop(self.name, None)  # where another step has it
        totals = [total] * len(layers)
        if total is not None and self.sizes:  # each with a version counter of its own
            totals = [part.data for part in total.split(self.sizes)]
        for (_, bias, dz), known in zip(layers, totals, strict=True):
            if bias in needs_grad:
                grad = chunk.ops[bias_grad](dz) if known is None else known
                chunk.add_param_grad(bias, grad, self.part)

    def _layers(self, y: Tensor) -> list[tuple[str, str, Tensor]]:
        return [*zip(self.weights, self.biases, y.split(self.sizes, 1), strict=True)]

    def _before_scales(
        self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]
    ) -> tuple[Tensor, Collection[str]]:
        """Return the gradient of what DoRA scales, and what still needs a gradient."""
        scales = [update for update in self.updates if update.magnitude]
        dy = dy if owned or all(update.mask for update in scales) else dy.clone()
        layers = self._layers(dy) if self.sizes else ((self.weight, self.bias, dy),)
        self._add_bias_grads(chunk, layers, needs_grad)
        for update in scales:
            update.backward_scale(chunk, self, dy, needs_grad)
        return dy, set(needs_grad).difference(self.biases)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        if any(update.magnitude for update in self.updates):
            dy, needs_grad = self._before_scales(chunk, dy, owned, needs_grad)
        dlows = []
        for update in self.updates:
            dlows.append(update.backward_b(chunk, self, dy, needs_grad))
        if self.x in needs_grad or not self._affine.isdisjoint(needs_grad):
            dz = dropped(chunk, dy, self, needs_grad) if self.mask or self.compute else dy
            layers = self._layers(dz) if self.sizes else ((self.weight, self.bias, dz),)
            part = dz  # which a loop may not set
            wanted = self._weights.intersection(needs_grad)
            if wanted:
                x = chunk[self.x] if self.updates else chunk.last(self.x)
                x = x if self.compute is None else x.to(self.compute)
                if self.sizes and len(wanted) == len(self.sizes):  # all of them, each once
                    add_weight_grads(chunk, self.weights, self.sizes, dz, x)
                else:
                    for weight, _, part in layers:
                        if weight in wanted:
                            add_weight_grad(chunk, weight, part, x, self.part)
                del x
            self._add_bias_grads(chunk, layers, needs_grad)
            if self.x in needs_grad:
                dx = chunk.sum_of_grads(self.x, dz.dtype)
                for i, (weight, _, part) in enumerate(layers):
                    if self.packed:
                        dx = self._packed_dx(chunk, i, part, dx)
                        continue
                    w = chunk.param(weight)
                    w = w if self.part is None else rows_of(w, self.part)
                    dx = chunk.ops[linear_dx](part, w, dx)
                assert dx is not None
                dx = dx if self.compute is None else dx.to(chunk.dtype_of(self.x))
                chunk.add_grad(self.x, dx, owned=True)
                del dx
            del dz, part, layers
        for update, dlow in reversed([*zip(self.updates, dlows, strict=True)]):
            if dlow is not None:
                update.backward_a(chunk, self, dlow, needs_grad)
        if self.residual in needs_grad:
            chunk.add_grad(self.residual, dy, owned)
