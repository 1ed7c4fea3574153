"""The steps of experts: the first product of all pairs, and their weighted sum.

`graph.fusions` joins the two: the pre-activations of all experts exist only where they are kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_remat.moe_spec import ExpertsSpec
from fused_remat.spec import PackedSpec
from fused_remat.steps.experts import (
    experts_bwd,
    experts_bwd_stages,
    experts_down_fwd,
    experts_fwd,
    experts_order,
    experts_up_fwd,
)
from fused_remat.steps.node import Input, Mask, Node, Shapes
from fused_remat.steps.packed import of_experts
from fused_remat.steps.stacks import Adapter, Into, Operands, Stack, StackGrads

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


@dataclass(frozen=True, kw_only=True)
class ExpertAdapter:
    """Names of the low-rank update of a stack, as PEFT has it: A (E * rank, in), B (out, rank * E).

    The ranks of one expert are rows next to each other of A, and every E-th column of B.
    """

    a: str
    b: str
    scale: float

    @staticmethod
    def a_of(a: Tensor, experts: int) -> Tensor:
        """Return A as (E, rank, in)."""
        return a.view(experts, -1, a.shape[1])

    @staticmethod
    def b_of(b: Tensor, experts: int) -> Tensor:
        """Return B as (E, out, rank)."""
        return b.view(len(b), -1, experts).permute(2, 0, 1)


@dataclass(frozen=True, kw_only=True)
class ExpertStack:
    """Names of the tensors of a stack of matrices."""

    weight: str
    bias: str = ""
    adapters: tuple[ExpertAdapter, ...] = ()
    packed: PackedSpec | None = None  # of the entire stack

    @functools.cached_property
    def params(self) -> tuple[str, ...]:
        names = self.packed.names(self.weight) if self.packed else (self.weight,)
        low = [name for adapter in self.adapters for name in (adapter.a, adapter.b)]
        return tuple([name for name in (*names, self.bias, *low) if name])

    def tensors(self, chunk: Chunk, spec: ExpertsSpec) -> Stack:
        """Return the stack that a pass reads."""
        read: Any = chunk.param
        adapters = tuple(
            [
                Adapter(
                    low.a_of(read(low.a), spec.experts),
                    low.b_of(read(low.b), spec.experts),
                    low.scale,
                )
                for low in self.adapters
            ]
        )
        weight, packed, parts = read(self.weight), self.packed, list[Tensor]()
        if packed is not None:
            own = [read(name) for name in packed.names(self.weight)]
            packed, (weight, *parts) = of_experts(packed, own)
        return Stack(weight, read(self.bias), spec.transposed, adapters, packed, tuple(parts))

    def grads(
        self, chunk: Chunk, spec: ExpertsSpec, needs_grad: Collection[str], dtype: torch.dtype
    ) -> StackGrads:
        """Return the buffers of the gradients that are needed, new ones in `dtype`."""

        def buffer(name: str, view: Callable[[Tensor], Tensor] | None = None) -> Into | None:
            into = _buffer(chunk, name, needs_grad, dtype)
            return into if into is None or view is None else into._replace(grad=view(into.grad))

        adapters = []
        for low in self.adapters:
            a, b = (functools.partial(view, experts=spec.experts) for view in (low.a_of, low.b_of))
            adapters.append((buffer(low.a, a), buffer(low.b, b)))
        return StackGrads(buffer(self.weight), buffer(self.bias), tuple(adapters))


def _buffer(
    chunk: Chunk, name: str, needs_grad: Collection[str], dtype: torch.dtype
) -> Into | None:
    """Return the buffer of a tensor's gradient, a new one unless the pass has it already."""
    if not name or name not in needs_grad:
        return None
    owner: Any = chunk.owner
    if name in owner.param_grads:
        return Into(owner.param_grads[name], False, owner.exact)
    shape, wide = owner.tensors[name].shape, dtype
    if owner.partial or len(shape) < 3:  # of a bias, as `bias_grad` does
        wide = torch.promote_types(dtype, torch.float32)
    grad = owner.param_grads[name] = torch.empty(shape, dtype=wide, device=owner.device)
    return Into(grad, True, owner.exact)


@dataclass(frozen=True, kw_only=True)
class _Experts(Node):
    """A product of all pairs with the matrices of their experts."""

    chosen: Mask
    stack: ExpertStack
    spec: ExpertsSpec

    @functools.cached_property
    def params(self) -> tuple[str, ...]:
        return self.stack.params

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return {}  # each matrix is converted when it is used

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return self.params

    def features(self, shapes: Shapes) -> tuple[int, int]:
        """Return (out, in) of the matrix of an expert."""
        shape = self.stack.packed.shape if self.stack.packed else shapes[self.stack.weight]
        rows, columns = shape[-2:]
        return (columns, rows) if self.spec.transposed else (rows, columns)

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        out, columns = self.features(shapes)
        low = [shapes[name] for pair in self.stack.adapters for name in (pair.a, pair.b)]
        rank = sum(math.prod(shape) for shape in low) // self.spec.experts
        return 2 * self.spec.top_k * (out * columns + rank)

    def operand(self, chunk: Chunk, name: str) -> Tensor:
        """Return an activation in the dtype of the product."""
        return chunk[name] if self.compute is None else chunk[name].to(self.compute)


@dataclass(frozen=True, kw_only=True)
class ExpertsUp(_Experts):
    """name = the pre-activations of a token's experts (T, k * columns), sorted by expert."""

    x: Input
    weights: Input = ""  # of the pairs, if they weigh the input

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        reads = self.weights or not set(self.params).isdisjoint(needs_grad)
        return tuple([n for n in (self.x if reads else "", self.weights, self.chosen) if n])

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return self.spec.top_k * self.features(shapes)[0]

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        x, weights = self.operand(chunk, self.x), chunk[self.weights] if self.weights else None
        order = chunk.ops[experts_order](chunk[self.chosen], self.spec.experts)
        stack = self.stack.tensors(chunk, self.spec)
        pre = chunk.ops[experts_up_fwd](self.spec, x, weights, order, stack)
        chunk.put(self.name, pre.view(len(x), -1))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        raise NotImplementedError("`graph.fusions` joins it with that of `ExpertsDown`")


@dataclass(frozen=True, kw_only=True)
class ExpertsDown(_Experts):
    """name = the sum of a token's experts, from their pre-activations."""

    pre: Input
    weights: Input  # of the pairs

    @property
    def follows(self) -> str:
        return self.weights

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.pre, self.weights, self.chosen)

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return self.features(shapes)[0]

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        order = chunk.ops[experts_order](chunk[self.chosen], self.spec.experts)
        pre = self.operand(chunk, self.pre).view(len(order.pairs), -1)
        stack = self.stack.tensors(chunk, self.spec)
        y = chunk.ops[experts_down_fwd](self.spec, pre, chunk[self.weights], order, stack)
        self.give(chunk, y, out)

    def give(self, chunk: Chunk, y: Tensor, out: Tensor | None) -> None:
        """Put the sum into the chunk, and into `out` unless None."""
        chunk.put(self.name, y.to(chunk.dtype_of(self.name)) if out is None else out.copy_(y))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        for _ in experts_backward(chunk, None, self, dy, needs_grad, chunk[self.pre]):
            pass


@dataclass(frozen=True, kw_only=True)
class _Joined(Node):
    """Both steps of experts."""

    up: ExpertsUp
    down: ExpertsDown

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        return (self.up.x, self.down.weights)

    @functools.cached_property
    def params(self) -> tuple[str, ...]:
        return (*self.up.params, *self.down.params)

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.inputs, self.up.chosen)

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        return self.up.flops(widths, shapes, seq_len) + self.down.flops(widths, shapes, seq_len)


@dataclass(frozen=True, kw_only=True)
class ExpertsForward(_Joined):
    """Both steps of experts, without writing the pre-activations."""

    @property
    def label(self) -> str:
        return f"{self.up.name} and {self.down.name}"

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        up, down, spec = self.up, self.down, self.down.spec
        x, weights = up.operand(chunk, up.x), chunk[down.weights]
        order = chunk.ops[experts_order](chunk[up.chosen], spec.experts)
        stacks = up.stack.tensors(chunk, spec), down.stack.tensors(chunk, spec)
        down.give(chunk, chunk.ops[experts_fwd](spec, x, weights, order, *stacks), out)


@dataclass(frozen=True, kw_only=True)
class ExpertsBackward(_Joined):
    """Backward of both steps of experts; `rebuilds`: their pre-activations are computed again."""

    rebuilds: bool

    @property
    def label(self) -> str:
        up = f"{self.up.name}, computed again" if self.rebuilds else self.up.name
        return f"{self.down.name} and {up}"

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        again = self.up.flops(widths, shapes, seq_len) // 2 if self.rebuilds else 0
        return super().flops(widths, shapes, seq_len) + again

    def in_order(self, names: Collection[str]) -> Sequence[Collection[str]]:
        first, last = ([n for n in o.stack.params if n in names] for o in (self.down, self.up))
        return [first] if first and last else ()

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        for _ in self.backward_in_parts(chunk, dy, owned, needs_grad, ()):
            pass

    def backward_in_parts(
        self,
        chunk: Chunk,
        dy: Tensor,
        owned: bool,
        needs_grad: Collection[str],
        parts: Sequence[Collection[str]],
    ) -> Iterator[None]:
        """Run `backward`, but yield when the gradients of each of the `parts` are complete."""
        pre = None if self.rebuilds else chunk[self.up.name]
        yield from experts_backward(chunk, self.up, self.down, dy, needs_grad, pre, parts)


def experts_backward(
    chunk: Chunk,
    up: ExpertsUp | None,
    down: ExpertsDown,
    dy: Tensor,
    needs_grad: Collection[str],
    pre: Tensor | None,
    parts: Sequence[Collection[str]] = (),
) -> Iterator[None]:
    """Add the gradients of both steps; of the second alone where `up` is None.

    Yields when the gradients of each of the `parts` are complete.
    """
    spec, weights = down.spec, chunk[down.weights]
    order = chunk.ops[experts_order](chunk[down.chosen], spec.experts)
    dy = dy.to(down.compute or dy.dtype)
    x, up_stack = None, Stack(dy)
    up_grads: Callable[[], StackGrads] = StackGrads
    if up is not None:
        needs = up.needs(needs_grad)
        x = up.operand(chunk, up.x) if pre is None or up.x in needs else None
        up_stack = up.stack.tensors(chunk, spec)
        up_grads = functools.partial(up.stack.grads, chunk, spec, needs_grad, dy.dtype)
    read = Operands(
        spec, dy, x, None if pre is None else pre.view(len(order.pairs), -1), weights, order,
        up_stack, down.stack.tensors(chunk, spec), up is not None and up.x in needs_grad,
        down.weights in needs_grad,
    )  # fmt: skip
    down_grads = functools.partial(down.stack.grads, chunk, spec, needs_grad, dy.dtype)
    if parts:
        results = chunk.ops[experts_bwd_stages](read, up_grads, down_grads())
        next(results)
        yield
        dx, dweights = next(results)
    else:
        dx, dweights = chunk.ops[experts_bwd](read, up_grads(), down_grads())
    if dx is not None:
        assert up is not None
        chunk.add_grad(up.x, dx.to(chunk.dtype_of(up.x)), owned=True)
    if dweights is not None:
        chunk.add_grad(down.weights, dweights, owned=True)


@dataclass(frozen=True, kw_only=True)
class SigmoidScale(Node):
    """name = x * sigmoid(gate), where the gate has one column."""

    x: Input
    gate: Input

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.x, self.gate) if self.gate in needs_grad else (self.gate,)

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        x = chunk[self.x]
        chunk.put(self.name, torch.mul(x, chunk[self.gate].sigmoid().to(x.dtype), out=out))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        wide = torch.promote_types(dy.dtype, torch.float32)
        gate = chunk[self.gate].to(wide).sigmoid()
        if self.gate in needs_grad:
            dot = (dy * chunk[self.x]).sum(-1, keepdim=True, dtype=wide)
            dgate = dot.mul_(gate).mul_(1.0 - gate).to(chunk.dtype_of(self.gate))
            chunk.add_grad(self.gate, dgate, owned=True)
        if self.x in needs_grad:
            gate = gate.to(dy.dtype)
            dx = dy.mul_(gate) if owned else dy * gate
            chunk.add_grad(self.x, dx, owned=True)
