"""Linear layers, alone or with an activation: y, and the gradients of x, weight and bias."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import Function, Op, Problem, Ways, failing, through_autograd
from bench.kernels.shapes import Size
from bench.measure.contest import Results, Rig, Way, Work
from bench.measure.registry import Absent
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.triton import products
from fused_remat.triton.launch import Launch

#: Our name of an activation -> QuACK's.
QUACK = {"relu": "relu", "gelu_tanh": "gelu_tanh_approx", "silu": "silu", "tanh": "tanh"}


class Products(Problem):
    """x (..., D) times weights as `nn.Linear` holds them; `act`: of an activation, or None."""

    def __init__(
        self, rig: Rig, name: str, sizes: Mapping[str, Any], act: str | None, **shapes: Any
    ) -> None:
        if act is not None and act not in ACTIVATIONS:
            raise ValueError(f"unknown activation {act!r}; valid: {', '.join(ACTIVATIONS)}")
        super().__init__(rig, name)
        self.sizes, self.act, self.shapes = dict(sizes), act, shapes

    def activate(self, x: Tensor) -> Tensor:
        """`act` of x; x itself where there is none."""
        return x if self.act is None else ACTIVATIONS[self.act].fwd(x)

    def work(self, direction: str) -> Work:
        """A product per weight, two backward; no activation is kept or read again.

        Bytes forward: inputs and y. Backward: x, weights and dy, the gradients of all inputs.
        """
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        *_, (out, _) = (shape for name, shape in self.shapes.items() if "weight" in name)
        weights, tokens = self.weights(sizes), math.prod(self.shapes["x"][:-1])
        moved = sum(sizes.values()) + tokens * out
        if direction == "bwd":
            moved += sizes["x"] + sum(weights)
        flops = {"fwd": 2.0, "bwd": 4.0}[direction] * tokens * sum(weights)
        return Work(flops=flops, bytes=float(moved * self.rig.dtype.itemsize))

    @staticmethod
    def weights(inputs: Mapping[str, Any]) -> list[Any]:
        """Of what is given of each input by name, that of the weights."""
        return [given for name, given in inputs.items() if "weight" in name]


def bare(p: Products) -> Ways:
    """The products alone: what would be taken by who does the rest for nothing.

    Of an MLP, the product into the hidden width stands for the activation, dy's with the last
    weight for the gradient of each that goes into it.
    """
    if p.act is None and "bias" not in p.shapes:
        raise Absent("there is nothing but the products")

    def forward(x: Tensor, *weights: Tensor) -> Results:
        *into, last = weights
        hidden = {f"hidden{i}": torch.mm(x, weight.t()) for i, weight in enumerate(into)}
        return hidden | {"y": torch.mm([x, *hidden.values()][-1], last.t())}

    def backward(x: Tensor, hidden: Tensor, dy: Tensor, *weights: Tensor) -> Results:
        *into, last = weights
        found = {"dhidden": torch.mm(dy, last), "dlast": torch.mm(dy.t(), hidden)}
        for i, weight in enumerate(into):
            found[f"dx{i}"] = torch.mm(found["dhidden"], weight)
            found[f"dweight{i}"] = torch.mm(found["dhidden"].t(), x)
        return found

    def operands(index: int) -> tuple[Tensor, ...]:
        return p.sets[index]["x"].view(-1, p.shapes["x"][-1]), *p.weights(p.sets[index])

    def and_gradients(index: int) -> tuple[Tensor, ...]:
        x, *weights = operands(index)
        hidden = [x, *(torch.mm(x, into.t()) for into in weights[:-1])][-1]
        return x, hidden, p.dys[index].view(len(x), -1), *weights

    def way(run: Callable[..., Results], prepare: Callable[[int], tuple[Tensor, ...]]) -> Way:
        exact = lambda found: run(*(t.double() for t in prepare(0)))  # noqa: E731
        return Way(lambda given: run(*given), exact, prepare=prepare)

    return {"fwd": way(forward, operands), "bwd": way(backward, and_gradients)}


class Linear(Products):
    """act(x @ weightᵀ + bias), x (T, D), weight (F, D)."""

    def __init__(
        self, rig: Rig, tokens: int, width: int, out: int, act: str | None = None, bias: bool = True
    ) -> None:
        name = "linear" if act is None else f"linear + {act}"
        shapes = {"x": (tokens, width), "weight": (out, width)} | ({"bias": (out,)} if bias else {})
        sizes = {"tokens": tokens, "width": width, "out": out}
        super().__init__(rig, name if bias else f"{name}, no bias", sizes, act, **shapes)

    def reference(self, *inputs: Tensor) -> Tensor:
        return self.activate(F.linear(*inputs))


def of_model(rig: Rig, size: Size) -> Iterator[Problem]:
    """The feed-forward's first layer: alone, and with its activation where nothing gates it."""
    model = size.model
    sizes = size.tokens, model.d_model, model.d_ff
    yield Linear(rig, *sizes, bias=model.bias)
    if not model.gated:
        yield Linear(rig, *sizes, act=model.activation, bias=model.bias)


OP = Op("linear", of_model)
OP.add_stock()
OP.provider("bare")(bare)


@OP.provider("quack", module="quack", needs="cuda", optional=True, autotunes=True)
def quack(p: Linear) -> Function | Ways:
    """QuACK's product; with the activation in it, forward only, and as ours keeping no more."""
    from quack.linear import linear_act_func, linear_func

    if p.act is None:
        return linear_func
    if p.act not in QUACK:
        raise Absent(f"it has no {p.act}")

    def activated(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return linear_act_func(x, weight, QUACK[p.act], *bias, store_preact=False)[1]

    forward = dataclasses.replace(through_autograd(activated, p)["fwd"], optional=True)
    return {"fwd": forward, "bwd": failing(Absent("its gradient is only in its MLP"))}


@OP.provider("fused_remat triton", needs="triton", ours=True)
def triton(p: Linear) -> Ways:
    """Ours, bias and activation in the product's kernel; our blocks' backwards use ATen's."""

    def prepare(index: int) -> tuple[Launch, Tensor]:
        x, weight, *bias = p.sets[index].values()
        y = p.rig.poisoned(len(x), len(weight))
        given = x, weight, bias[0] if bias else None, None, None, p.act, None, y
        return products.linear_fwd(*given, p.rig.target), y

    def run(given: tuple[Launch, Tensor]) -> Results:
        given[0].run()
        return {"y": given[1]}

    absent = Absent("our backwards take ATen's products, or are a whole MLP's")
    return {"fwd": Way(run, prepare=prepare), "bwd": failing(absent)}
