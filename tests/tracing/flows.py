"""What flows where in a layer: in its traced block, and in the graphs that `torch.compile` records.

A flow is a set of names: of parameters, buffers and arguments, of products with parameters, and of
functions that are not linear (norms with their eps, activations, softmax, dropout with its p), each
with a digest of what flows into it. Nothing flows beyond a product with parameters but its name.
All else (reshapes, casts, sums, products of activations) unites flows.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fused_remat.spec import NormSpec
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.attention import Attention
from fused_remat.steps.linear import Linear
from fused_remat.steps.norm import Norm
from fused_remat.steps.replay import Replay
from fused_remat.steps.residual import Add, DrawMask
from fused_remat.steps.rotary import Rotary
from fused_remat.tracing.program import TracedBlock
from fused_remat.tracing.values import SHAPES, Op, Ref, leaves, map_tree

_PRODUCTS = (
    "linear", "matmul", "rmatmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d",
    "conv3d", "grouped_mm", "grouped_mm_fallback",
)  # fmt: skip
_SAME = ("sigmoid", "tanh", "relu", "erf", "exp", "log", "softplus", "softmax", "topk", "clamp")
_FUNCTIONS = {
    **{name: name for name in _SAME}, "silu": "sigmoid", "gelu": "erf", "gelu_tanh": "tanh",
    "relu2": "relu", "rsqrt": "norm", "sqrt": "norm",
}  # fmt: skip
_RANDOM = ("bernoulli", "rand", "rand_like", "randn", "randn_like", "multinomial")
_ADD = ("add", "iadd", "radd")
_IN_PLACE = re.compile(r"setitem|iadd|isub|imul|itruediv|.*[^_]_")
_ATTENTION = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale")


class Flow(frozenset[str]):
    added: float | None = None  # the number that was added last


def joined(*flows: Any) -> Flow:
    return Flow(frozenset().union(*[flow for flow in flows if isinstance(flow, Flow)]))


class Flows:
    """The flows of a layer, which `operation` collects; those of `own` are from its parameters."""

    def __init__(self, own: Iterable[str]) -> None:
        self.own = {*own}
        self.products: dict[tuple[str, Flow], None] = {}
        self.dropouts: Counter[float] = Counter()
        self.attentions: list[tuple[Any, ...]] = []  # heads, width, scale and whether causal
        self.opaque: dict[str, Flow] = {}  # what flows into submodules that are not traced
        self.texts: dict[str, str] = {}

    def function(self, label: str, of: Flow) -> Flow:
        digest = hashlib.sha256(repr((label, sorted(of))).encode()).hexdigest()[:8]
        self.texts[f"{label}#{digest}"] = f"{label}({', '.join(sorted(of))})"
        return joined(Flow({f"{label}#{digest}"}), of)

    def dropout(self, p: float, of: Flow) -> Flow:
        if not p:
            return of
        self.dropouts[p] += 1
        return self.function(f"dropout {p:.2e}", of)

    def product(self, *flows: Any) -> Flow:
        of, own = joined(*flows), [f for f in flows if isinstance(f, Flow) and f and f <= self.own]
        rest = joined(*[flow for flow in flows if flow not in own])
        if not own or not rest:
            return of
        label = " ".join(sorted(joined(*own)))
        self.products[label, rest] = None
        return Flow({f"[{label}]"})

    def submodule(self, path: str, *of: Any) -> Flow:
        """Return what flows out of a submodule that is not traced: its name."""
        self.opaque[path] = joined(self.opaque.get(path), *of)
        return Flow({path})

    def norm(self, x: Flow, eps: Any, *weights: Any) -> Flow:
        return joined(self.function(f"norm {eps}", x), *weights)

    def attention(self, q: Flow, k: Flow, v: Flow, mask: Any, p: float, softcap: float = 0) -> Flow:
        scores = self.function("tanh", joined(q, k)) if softcap else joined(q, k)
        return joined(self.dropout(p, self.function("softmax", joined(scores, mask))), v)

    def operation(self, kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Flow:
        """Return the flow of the result of an operation on flows and numbers."""
        every = leaves((args, kwargs))
        flows = [leaf for leaf in every if isinstance(leaf, Flow)]
        numbers = [leaf for leaf in every if type(leaf) is float]
        if kind in (*SHAPES, *_RANDOM):
            return Flow({"random"} if kind in _RANDOM else ())
        if "dropout" in kind:
            given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
            return self.dropout(given.get("p", 0.5) * given["training"], given["input"])
        if kind in _PRODUCTS:
            return self.product(*flows)
        if kind == "scaled_dot_product_attention":
            named = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
            return self.attention(*flows[:3], joined(*flows[3:]), named.get("dropout_p", 0.0))
        if kind in ("layer_norm", "rms_norm"):
            return self.norm(flows[0], [*numbers, None][0], *flows[1:])
        if kind == "gelu" and "tanh" in every:
            kind = "gelu_tanh"
        if kind == "pow" and not (numbers or [1.0])[0].is_integer():
            kind = "sqrt"
        if kind in _FUNCTIONS:
            label = _FUNCTIONS[kind]
            return self.function(
                f"norm {flows[0].added}" if label == "norm" else label, joined(*flows)
            )
        flow = joined(*flows)
        flow.added = numbers[0] if kind in _ADD and len(flows) == len(numbers) == 1 else None
        return flow


class Recorded(torch.fx.Interpreter):
    """A run of a graph of `torch.compile`, which adds its flows to `flows`.

    known: by id, tensors and their flows. opaque: paths of submodules that the block replays.
    """

    def __init__(
        self, graph: torch.fx.GraphModule, flows: Flows, known: dict[int, Any], opaque: list[str]
    ) -> None:
        super().__init__(graph)
        self.flows, self.known, self.opaque = flows, known, opaque
        #: By node, the tensor, its flow, and the submodule that computes it, of those `opaque`.
        self.held = dict[torch.fx.Node, tuple[Tensor, Flow, str]]()

    def run_node(self, node: torch.fx.Node) -> Any:
        value, path = super().run_node(node), self._path(node)
        name = getattr(node.target, "__name__", str(node.target))
        args, kwargs = map_tree((node.args, node.kwargs), lambda leaf: self._leaf(leaf, path))
        tensors = [t for t in leaves(value) if isinstance(t, Tensor)]
        if node.op == "output":
            for t, flow in zip(leaves(value), leaves(args), strict=True):
                self.known[id(t)] = t, flow
        elif node.op in ("placeholder", "get_attr"):
            for t in tensors:
                unknown = t, Flow({"?"} if t.dim() else ())
                self.held[node] = *self.known.get(id(t), unknown), ""
        elif tensors or name == "setitem":
            kind, every = name.strip("_"), leaves((args, kwargs))
            flow = joined(*every) if path else self.flows.operation(kind, args, kwargs)
            if kind == "scaled_dot_product_attention" and not path:
                q, named = self.held[node.args[0]][0], {"scale": None, "is_causal": False, **kwargs}
                scale = q.shape[-1] ** -0.5 if named["scale"] is None else named["scale"]
                found = q.shape[1], q.shape[-1], round(scale, 9), named["is_causal"]
                self.flows.attentions.append(found)
            if _IN_PLACE.fullmatch(name) or True in (kwargs.get("inplace"), *args[3:4]):
                changed = [self.held[n][0] for n in leaves(node.args[:1]) if n in self.held]
                for other, (t, old, inside) in self.held.items():
                    if any(_base(t) is _base(c) for c in changed):
                        self.held[other] = t, joined(old, flow), inside
                        if id(t) in self.known:
                            self.known[id(t)] = t, joined(old, flow)
            if tensors:
                self.held[node] = tensors[0], flow, path
        return value

    def _path(self, node: torch.fx.Node) -> str:
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        paths = [re.sub(r"\W+", ".", path.removeprefix("L['self']")).strip(".") for path in stack]
        return next((path for path in paths if path in self.opaque), "")

    def _leaf(self, leaf: Any, path: str) -> Any:
        if not isinstance(leaf, torch.fx.Node):
            return leaf
        if leaf not in self.held:
            return self.env.get(leaf)
        _, flow, inside = self.held[leaf]
        return flow if inside in ("", path) else self.flows.submodule(inside, flow)


def _base(t: Tensor) -> Tensor:
    return t if t._base is None else t._base


class BlockFlows(Flows):
    """The flows of a traced block; `arguments` are the names of the leaves of its arguments."""

    def __init__(self, block: TracedBlock, own: Mapping[str, Flow], arguments: list[Flow]):
        super().__init__(own)
        self.block, self.values = block, dict[int, Flow]()
        for number, flow in zip(block.arguments, arguments, strict=True):
            if number is not None:
                self.values.setdefault(number, flow)
        self.values |= {n: own.get(name, Flow({name})) for n, name in block.sources.items()}
        self.run(block.before, self.values)
        masks = [node for node in block.graph.nodes if isinstance(node, DrawMask)]
        self.masks = {mask.name: mask.p for mask in masks}
        #: By activation, the widths of its parts, and their flows; a width of 0 is all.
        self.parts = {n: [(0, self.values[number])] for n, (number, _) in block.inputs.items()}
        for node in block.graph.nodes:
            if not isinstance(node, DrawMask):
                self.parts[node.name] = self.step(node)

    def run(self, ops: Iterable[Op], values: dict[int, Flow]) -> None:
        def leaf(leaf: Any) -> Any:
            return values.get(leaf.index, Flow()) if isinstance(leaf, Ref) else leaf

        for op in ops:
            args, kwargs = map_tree((op.args, op.kwargs), leaf)
            if op.path is not None:
                flow = self.submodule(op.path, *leaves((args, kwargs)))
            elif op.p is not None:
                flow = self.dropout(op.p, args[0])
            elif isinstance(op.info, NormSpec):
                flow = self.norm(args[0], op.info.eps, *args[1:])
            else:
                flow = self.operation(op.info if op.name == "act" else op.kind, args, kwargs)
            values.update(dict.fromkeys(op.writes, flow))

    def of(self, *names: str) -> Flow:
        """Return the flow of activations or parameters of the block."""
        parts = [part for n in names for _, part in self.parts.get(n, ())]
        return joined(
            *parts, *[self.values[self.block.values[n]] for n in names if n and n not in self.parts]
        )

    def columns(self, name: str, first: int, last: int) -> Flow:
        flows, start = [], 0
        for width, part in self.parts[name]:
            if not width or (start < last and first < start + width):
                flows.append(part)
            start += width
        return joined(*flows)

    def step(self, node: Any) -> list[tuple[int, Flow]]:
        """Return the flows of the parts of a step's result."""
        p = self.masks.get(getattr(node, "mask", ""), 0.0)
        gates = [name for name in (getattr(node, "gate", ""),) if name in self.block.values]
        match node:
            case Linear():
                x, rest, parts = self.of(node.x), self.of(node.residual, *gates), []
                for update in node.updates:
                    low = self.dropout(self.masks.get(update.mask, 0.0), x)
                    low = self.product(low, self.of(update.a))
                    rest = joined(rest, self.product(low, self.of(update.b)))
                for i, weight in enumerate(node.weights):
                    y = self.product(x, self.of(weight), self.of(node.biases[i]))
                    parts.append(((node.sizes or (0,))[i], joined(self.dropout(p, y), rest)))
                return parts
            case Norm():
                flow = self.norm(self.of(node.x), node.spec.eps, self.of(node.weight, node.bias))
            case MLPActivation():
                y = self.function(_FUNCTIONS[node.act], self.of(node.gate or node.up))
                flow = self.dropout(p, joined(y, self.of(node.up)))
            case Rotary():
                norm, ends = node.spec.head_norm, node.spec.columns.values()
                parts = [self.columns(node.x, *pair) for pair in ends]
                for i, weight in enumerate((node.q_weight, node.k_weight)):
                    part = self.norm(parts[i], norm.eps, self.of(weight)) if norm else parts[i]
                    parts[i] = joined(part, self.of(node.cos, node.sin))
                return [(b - a, part) for (a, b), part in zip(ends, parts, strict=True)]
            case Attention():
                spec, heads = node.spec, [self.of(name) for name in (node.q, node.k, node.v)]
                if node.q == node.k == node.v:
                    heads = [self.columns(node.q, *pair) for pair in spec.columns.values()]
                causal = spec.window[1] == 0
                self.attentions.append(
                    (spec.num_heads, spec.head_dim, round(spec.scale, 9), causal)
                )
                masks = self.of(node.mask, node.padding, node.lengths, node.cu_q, node.cu_k)
                flow = self.attention(*heads, masks, spec.dropout, spec.softcap)
            case Add():
                flow = joined(self.dropout(p, self.of(node.x)), self.of(node.residual, *gates))
            case Replay():
                program = self.block.programs[node.function]
                values = dict(zip(program.params, map(self.of, node.tensors), strict=True))
                sources = [number for number, _ in program.sources]
                values |= dict(zip(sources, map(self.of, node.xs), strict=True))
                self.run(program.ops, values)
                flow = values[program.target]
            case _:
                raise NotImplementedError(type(node).__name__)
        return [(0, flow)]
