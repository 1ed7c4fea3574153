"""Experts of a mixture without its router: fixed experts and weights of every token.

Ours are the library's operations, and for a grouped product the launches of its kernels. The
reference computes one expert after the other. The kernels have not run on a GPU yet.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import Function, Op, Problem, Size, Ways
from bench.measure.contest import Results, Rig, Way, Work
from bench.subjects.mixtures import MIXTURES
from fused_remat.execution.choose import ops_for
from fused_remat.moe_spec import CLAMPED, ExpertsSpec
from fused_remat.steps import experts
from fused_remat.steps.stacks import Into, Operands, Order, Stack, StackGrads

#: Widths are divided by it on a CPU: what is exact, in float64, is to fit its memory.
_CPU_PART = 4
_CLAMPED = {"activation": CLAMPED, "interleaved": True, "limit": 7.0, "alpha": 1.702}


@dataclass(eq=False)
class _OfExperts(Problem):
    """A problem of T tokens, each of which `top_k` of E experts drawn at random compute."""

    #: Kind of mixture -> the problem's name, and its hidden width in those of an expert.
    forms: ClassVar[dict[str, tuple[str, int]]]
    tokens: int
    width: int
    hidden: int
    experts: int
    top_k: int

    @property
    def spec(self) -> ExpertsSpec:
        clamped = self.name == "clamped"
        more: dict[str, Any] = _CLAMPED | {"transposed": True} if clamped else {}
        return ExpertsSpec(experts=self.experts, top_k=self.top_k, **more)

    @functools.cached_property
    def indices(self) -> Tensor:
        scores = torch.rand(self.tokens, self.experts, device=self.rig.device)
        return scores.topk(self.top_k).indices

    @functools.cached_property
    def order(self) -> Order:
        return experts.experts_order(self.indices, self.experts)

    @functools.cached_property
    def spans(self) -> list[tuple[Tensor, Tensor]]:
        """The pairs and tokens of each expert."""
        pairs = self.order.pairs.tensor_split(self.order.ends[:-1].long().cpu())
        return [(own, own // self.top_k) for own in pairs]

    def draw(self) -> dict[str, Tensor]:
        """Return fresh inputs, whose products are about as large as x; weights are positive."""
        drawn = {}
        for name, shape in self.shapes.items():
            columns = shape[1] if self.spec.transposed else shape[-1]
            scale = columns**-0.5 if len(shape) == 3 else 1.0
            drawn[name] = self.rig.normal(*shape, scale=scale)
        if "weights" in drawn:
            drawn["weights"] = drawn["weights"].abs_().clamp_min_(0.1).div_(self.top_k)
        return drawn

    def _work(self, direction: str, matrices: int, rows: int) -> Work:
        """Count a product per matrix, two backward; inputs and y, and backward their gradients."""
        flops = 2.0 * self.tokens * self.top_k * matrices
        given = (self.experts * matrices + self.tokens * self.width) * self.rig.dtype.itemsize
        times = {"fwd": 1, "bwd": 2}[direction]
        y = rows * self.rig.dtype.itemsize
        return Work(flops=times * flops, bytes=float(times * given + y))


# --- one product


class Grouped(_OfExperts):
    """y = x @ weightᵀ of each pair of a token and its expert, by expert; x (T, D), y (k·T, N)."""

    forms: ClassVar = {"Qwen3Moe": ("up", 2), "GptOss": ("up", 2)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.tokens, self.width), "weight": (self.experts, self.hidden, self.width)}

    def reference(self, *inputs: Tensor) -> Tensor:
        x, weight = inputs
        rows = [x[own] @ w.t() for (_, own), w in zip(self.spans, weight, strict=True)]
        return torch.cat(rows)

    def work(self, direction: str) -> Work:
        rows = self.tokens * self.top_k * self.hidden
        return self._work(direction, self.width * self.hidden, rows)


def _mixtures(rig: Rig, size: Size, kind: type[_OfExperts]) -> Iterator[Problem]:
    m, part = size.model, _CPU_PART if rig.device.type == "cpu" and not rig.dry else 1
    name, times = kind.forms[m.kind]
    hidden = times * m.expert // part
    yield kind(rig, name, size.tokens, m.d_model // part, hidden, m.experts, m.top_k)


def _op(name: str, kind: type[_OfExperts]) -> Op:
    return Op(name, functools.partial(_mixtures, kind=kind), stock=False, models=MIXTURES)


GROUPED = _op("grouped", Grouped)


@GROUPED.provider("aten", baseline=True)
def aten(p: Grouped) -> Function:
    return p.reference


@GROUPED.provider("grouped_mm")
def grouped_mm(p: Grouped) -> Function:
    """Gather rows, and call torch.nn.functional.grouped_mm."""
    tokens, ends = p.order.pairs // p.top_k, p.order.ends
    return lambda x, weight: F.grouped_mm(x[tokens], weight.transpose(1, 2), offs=ends)


@GROUPED.provider("fused_remat kernel", needs="triton")
def kernels(p: Grouped) -> Ways:
    """Launch our kernels, which gather rows as they are read; each direction lists its tiles."""
    from fused_remat.triton import experts as triton
    from fused_remat.triton.launch import run

    target, pairs = p.rig.target, p.tokens * p.top_k
    assert target is not None

    def listed() -> triton.Rows:
        rows = triton.rows_of(p.spec, p.order, target)
        run(triton.experts_tiles, rows.ends, rows.tiles, len(rows.pairs), rows.block_m)
        return rows

    def forward(index: int) -> Results:
        x, weight = p.sets[index].values()
        y = x.new_empty(pairs, p.hidden)
        run(triton.experts_product, x, weight, None, None, listed(), y, False, "gather", target)
        return {"y": y}

    def backward(index: int) -> Results:
        (x, weight), dy, rows = p.sets[index].values(), p.dys[index], listed()
        into, by_pair = Into(torch.empty_like(weight), fresh=True), x.new_empty(pairs, p.width)
        run(triton.experts_dw, dy, x, rows, into, (False, True), target)
        given = dy, weight, None, None, rows, by_pair, True, "scatter", target
        run(triton.experts_product, *given)
        return {"dx": by_pair.view(p.tokens, p.top_k, p.width).sum(1), "dweight": into.grad}

    return {"fwd": Way(forward), "bwd": Way(backward)}


# --- experts


class Experts(_OfExperts):
    """y = sum of weight * down(act(up(x))) over a token's experts; x and y (T, D).

    "swiglu" of Qwen3-30B-A3B: stacks (E, out, in); "clamped" of gpt-oss-20b: (E, in, out), biases.
    """

    forms: ClassVar = {"Qwen3Moe": ("swiglu", 1), "GptOss": ("clamped", 1)}
    #: The activation and its gradient are rounded too.
    factor: ClassVar[float] = 2.0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        e, d, f = self.experts, self.width, self.hidden
        shapes = {"x": (self.tokens, d), "weights": (self.tokens, self.top_k)}
        if self.spec.transposed:
            biases = {"up_bias": (e, 2 * f), "down_bias": (e, d)}
            return shapes | {"up": (e, d, 2 * f), "down": (e, f, d)} | biases
        return shapes | {"up": (e, 2 * f, d), "down": (e, d, f)}

    def stacks(self, up: Tensor, down: Tensor, *biases: Tensor) -> tuple[Stack, Stack]:
        up_bias, down_bias = biases or (None, None)
        transposed = self.spec.transposed
        return Stack(up, up_bias, transposed), Stack(down, down_bias, transposed)

    def reference(self, *inputs: Tensor) -> Tensor:
        x, weights, *given = inputs
        up, down = self.stacks(*given)
        y = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for expert, (pairs, tokens) in enumerate(self.spans):
            act = self._act(self._linear(x[tokens], up, expert))
            row = weights.flatten()[pairs][:, None] * self._linear(act, down, expert)
            y = y.index_add(0, tokens, row.to(y.dtype))
        return y.to(x.dtype)

    @staticmethod
    def _linear(x: Tensor, stack: Stack, expert: int) -> Tensor:
        bias = None if stack.bias is None else stack.bias[expert]
        return F.linear(x, stack.matrices([expert], x.dtype)(expert), bias)

    def _act(self, pre: Tensor) -> Tensor:
        spec = self.spec
        if spec.activation != CLAMPED:
            gate, up = pre.chunk(2, 1)
            return F.silu(gate) * up
        gate, up = pre[:, ::2].clamp(max=spec.limit), pre[:, 1::2].clamp(-spec.limit, spec.limit)
        return gate * torch.sigmoid(spec.alpha * gate) * (up + 1.0)

    def work(self, direction: str) -> Work:
        return self._work(direction, 3 * self.width * self.hidden, self.tokens * self.width)


EXPERTS = _op("experts", Experts)


@EXPERTS.provider("aten", baseline=True)
def aten_experts(p: Experts) -> Function:
    return p.reference


@EXPERTS.provider("transformers", module="transformers")
def transformers_experts(p: Experts) -> Function:
    """Call transformers' experts in its default implementation, grouped products."""
    folder, kind = ("gpt_oss", "GptOss") if p.spec.transposed else ("qwen3_moe", "Qwen3Moe")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(importlib.import_module("transformers"), f"{kind}Config")(
        hidden_size=p.width, num_experts_per_tok=p.top_k,
        **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), p.hidden),
        **dict.fromkeys(("num_experts", "num_local_experts"), p.experts),
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        own = getattr(module, f"{kind}Experts")(config)
    names = "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"

    def call(x: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        given = dict(zip(names, stacks, strict=False))
        y: Tensor = torch.func.functional_call(own, given, (x, p.indices, weights))
        return y

    return call


@EXPERTS.ours("none", "full")
def our_experts(p: Experts, backend: str, policy: str) -> Ways:
    """Keep the pre-activations ("none") or the input ("full"), of which backward computes them."""
    of = ops_for(backend, p.sets[0]["x"])

    def prepare(index: int) -> Operands:
        x, weights, *tensors = p.sets[index].values()
        up, down = p.stacks(*tensors)
        keeps, given = policy == "none", (p.spec, x, None, p.order, up)
        pre = of[experts.experts_up_fwd](*given) if keeps else None
        return Operands(p.spec, p.dys[index], x, pre, weights, p.order, up, down, True, True)

    def forward(index: int) -> Results:
        spec, _, x, pre, weights, order, up, down, *_ = prepare(index)
        if pre is None:
            return {"y": of[experts.experts_fwd](spec, x, weights, order, up, down)}
        return {"y": of[experts.experts_down_fwd](spec, pre, weights, order, down)}

    def backward(read: Operands) -> Results:
        stacks = {"up": read.up, "down": read.down}
        tensors = {name: stack.weight for name, stack in stacks.items()}
        tensors |= {f"{n}_bias": s.bias for n, s in stacks.items() if s.bias is not None}
        grads = {name: Into(torch.empty_like(t), fresh=True) for name, t in tensors.items()}
        own = [StackGrads(grads[name], grads.get(f"{name}_bias")) for name in stacks]
        dx, dweights = of[experts.experts_bwd](read, *own)
        found = {f"d{name}": into.grad for name, into in grads.items()}
        return {"dx": dx, "dweights": dweights, **found}

    return {"fwd": Way(forward), "bwd": Way(backward, prepare=prepare)}
