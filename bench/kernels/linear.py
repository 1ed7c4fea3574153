"""Linear layers, alone or with an activation: y, and the gradients of x, weight and bias."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import Function, Op, Problem, Ways, failing, through_autograd
from bench.kernels.products import QUACK_PLAIN, Products, gradients
from bench.kernels.shapes import Size
from bench.measure.contest import Results, Rig, Way
from bench.measure.registry import Absent
from fused_remat.triton import products
from fused_remat.triton.launch import Launch


class Linear(Products):
    """act(x @ weightᵀ + bias), x (T, D), weight (F, D)."""

    def __init__(
        self, rig: Rig, tokens: int, width: int, out: int, act: str | None = None, bias: bool = True
    ) -> None:
        name = "linear" if act is None else f"linear + {act}"
        shapes = {"x": (tokens, width), "weight": (out, width)} | ({"bias": (out,)} if bias else {})
        sizes = {"tokens": tokens, "width": width, "out": out}
        super().__init__(rig, name if bias else f"{name}, no bias", sizes, act, shapes, out)

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


@OP.provider("bare")
def bare(p: Linear) -> Ways:
    """The products alone: what a kernel would take that does the rest for nothing."""
    if p.act is None and "bias" not in p.shapes:
        raise Absent("there is nothing but the products")

    def forward(x: Tensor, weight: Tensor) -> Results:
        return {"product": torch.mm(x, weight.t())}

    def backward(x: Tensor, weight: Tensor, dy: Tensor) -> Results:
        return {"dx": torch.mm(dy, weight), "dweight": torch.mm(dy.t(), x)}

    def exact(x: Tensor, weight: Tensor, dy: Tensor) -> Results:
        dx, dweight = gradients(F.linear, dy, x, weight)
        return {"dx": dx, "dweight": dweight}

    def operands(index: int) -> tuple[Tensor, Tensor]:
        return p.sets[index]["x"], p.sets[index]["weight"]

    return {
        "fwd": p.way(forward, operands, lambda x, weight: {"product": F.linear(x, weight)}),
        "bwd": p.way(backward, lambda index: (*operands(index), p.dys[index]), exact),
    }


@OP.provider("quack", module="quack", needs="cuda", optional=True, autotunes=True)
def quack(p: Linear) -> Function | Ways:
    """QuACK's product; with the activation in it, forward only, and as ours keeping no more."""
    from quack.linear import linear_act_func, linear_func

    if p.act is None:
        return linear_func
    if p.act not in QUACK_PLAIN:
        raise Absent(f"it has no {p.act}")

    def activated(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        given = x, weight, QUACK_PLAIN[p.act], *bias
        made: Tensor = linear_act_func(*given, store_preact=False)[1]
        return made

    forward = dataclasses.replace(through_autograd(activated, p)["fwd"], optional=True)
    return {"fwd": forward, "bwd": failing(Absent("its gradient is only in its MLP"))}


@OP.provider("fused_remat triton", needs="triton", ours=True)
def triton(p: Linear) -> Ways:
    """Ours, bias and activation in the product's kernel; our blocks' backwards use ATen's."""

    def prepare(index: int) -> tuple[Launch, Tensor]:
        x, weight, *bias = p.sets[index].values()
        y = p.rig.poisoned(p.tokens, p.out)
        given = x, weight, bias[0] if bias else None, None, None, p.act, None, y
        return products.linear_fwd(*given, p.rig.target), y

    def run(given: tuple[Launch, Tensor]) -> Results:
        launch, y = given
        launch.run()
        return {"y": y}

    return {
        "fwd": Way(run, prepare=prepare),
        "bwd": failing(Absent("our backwards take ATen's products, or are a whole MLP's")),
    }
