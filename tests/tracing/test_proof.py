"""The proof rejects wrong descriptions: blocks that were read, with one thing changed in each.

`CHANGES` are the kinds of change, applied wherever they apply to the layers of `LAYERS`.
`ACCEPTED` is the list of those that the proof cannot see, each with its reason.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from models import MODELS, build
from torch import Tensor, nn

from fused_remat.autograd import run_block
from fused_remat.execution.prepare import chunks_of
from fused_remat.graph.graph import Graph
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.attention import Attention
from fused_remat.steps.linear import Linear
from fused_remat.steps.mixture import ExpertsDown
from fused_remat.steps.modulation import GatedAdd, GatedLinear, ModulatedNorm
from fused_remat.steps.node import Node
from fused_remat.steps.norm import Norm
from fused_remat.steps.replay import Reorder, Replay
from fused_remat.steps.rotary import Rotary
from fused_remat.steps.routing import Routing
from fused_remat.tracing.call import Trace
from fused_remat.tracing.isolation import Trial
from fused_remat.tracing.samples import Arguments
from fused_remat.tracing.trace import _CHUNK, EXACT, SCALE, difference, trace_call
from fused_remat.tracing.values import Sample, Untraceable

#: As the sizes that a proof chooses for layers without conditions on them.
SIZES = {"B": 2, "S": 13, "M": 6}
LAYERS = (
    "llama", "gemma2", "gpt2", "bert", "cohere2", "olmo2", "dinov2", "t5", "t5_gated", "phi3",
    "gpt_neox", "dit", "whisper", "mixtral", "qwen3", "bloom", "modernbert", "granite", "swin",
)  # fmt: skip

#: Kind of change, where (a pattern of "model: step"), and why the proof accepts it.
ACCEPTED = [
    ("bias dropped", "bert: attention.self.key.bias", "softmax is blind to a key bias"),
    ("bias dropped", "dinov2: attention.k_proj.bias", "softmax is blind to a key bias"),
    ("bias dropped", "swin: attention.k_proj.bias", "softmax is blind to a key bias"),
    ("norm eps x 10", "bert: *", "1e-12 is under the tolerance"),
    ("norm eps x 10", "gemma2: *", "1e-6 is under the tolerance after another norm"),
    ("causal dropped or added", "t5*: layer.0.SelfAttention", "the decoder's mask is causal"),
    ("window", "t5*: layer.0.SelfAttention", "the decoder's mask is causal"),
    ("window", "swin: attention", "a window of the image has four tokens"),
    ("a mask dropped", "t5*: layer.1.EncDecAttention", "the mask of the call hides nothing"),
    ("needed for nothing", "*: self_attn.*", "tables do not ask for gradients"),
    ("wrongly tokenwise", "*: self_attn.*", "what attention reads is not cut into tiles"),
    ("rotation interleaved, or not", "gpt_neox: *", "a head has one pair that is rotated"),
    ("wrongly tokenwise", "swin: *", "what is before a step that mixes tokens is not cut"),
]

Run = Callable[..., Tensor]


class Layer(NamedTuple):
    """A layer that was read, and what it is proved with."""

    name: str
    layer: nn.Module
    trace: Trace
    proof: Sample

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.trace.graph.nodes

    def of(self, kind: type[Node]) -> Iterator[Any]:
        return (node for node in self.nodes if isinstance(node, kind))

    def shape(self, param: str) -> tuple[int, ...]:
        """The shape of a tensor of the block; () if it is made at every call."""
        block = self.trace.block
        source = block.sources.get(block.values.get(param, -1), "")
        tensor = dict(self.layer.named_parameters()).get(source)
        if tensor is None:
            return ()
        return tuple(tensor.t().shape if param in block.transposed else tensor.shape)

    def width(self, name: str) -> int:
        """The width of an activation."""
        block = self.trace.block
        if name in block.inputs:
            return block.inputs[name][1].width
        node = self.trace.graph.producer[name]
        if isinstance(node, Replay):
            return node.columns
        if isinstance(node, Linear):
            if node.sizes:
                return sum(node.sizes)
            first, last, _ = node.part or (0, self.shape(node.weight)[0], 0)
            return last - first
        if isinstance(node, Attention):
            return node.spec.num_heads * node.spec.head_dim
        if isinstance(node, ExpertsDown):
            return node.features({n: self.shape(n) for n in node.params})[0]
        return self.width(node.up if isinstance(node, MLPActivation) else node.x)


@dataclass
class Wrong:
    """A wrong description.

    Attributes:
        where: the step that is changed.
        nodes: the steps.
        wraps: what is around the functions of replays, by name; that of a new one gets None.
        tensors: what is done to tensors of the block, by name.
    """

    where: str
    nodes: list[Node]
    wraps: Mapping[str, Callable[[Any], Run]] = field(default_factory=dict)
    tensors: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


Change = Callable[[Layer], Iterator[Wrong]]
CHANGES: dict[str, Change] = {}


def change(kind: str) -> Callable[[Change], Change]:
    def add(function: Change) -> Change:
        CHANGES[kind] = function
        return function

    return add


def changed(layer: Layer, node: Any, where: str = "", **fields: Any) -> Wrong:
    """The description with other fields in one step."""
    nodes = [replace(n, **fields) if n is node else n for n in layer.nodes]
    return Wrong(where or node.name, nodes)


def with_fields(kind: Any, fields: Callable[[Any], list[dict[str, Any]]]) -> Change:
    def change(layer: Layer) -> Iterator[Wrong]:
        for node in layer.of(kind):
            for one in fields(node):
                yield changed(layer, node, **one)

    return change


def with_spec(node: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"spec": replace(node.spec, **fields)}]


def other_rotation(node: Rotary) -> list[dict[str, Any]]:
    rotary = node.spec.rotary
    other = rotary and replace(rotary, interleaved=not rotary.interleaved)
    return with_spec(node, rotary=other) if rotary else []


def other_head_norms(node: Rotary) -> list[dict[str, Any]]:
    norm = node.spec.head_norm
    if norm is None:
        return []
    others = replace(norm, eps=10 * norm.eps), replace(norm, offset=1 - norm.offset)
    specs = [spec for other in others for spec in with_spec(node, head_norm=other)]
    return [*specs, {"q_weight": node.k_weight, "k_weight": node.q_weight}]


def needed_for_less(node: Replay) -> list[dict[str, Any]]:
    all_names = node.needed_for
    rests = [(*all_names[:i], (), *all_names[i + 1 :]) for i, n in enumerate(all_names) if n]
    return [{"needed_for": rest} for rest in rests]


OTHER = {"gelu": "gelu_tanh", "gelu_tanh": "gelu", "relu": "silu", "silu": "gelu"}
CHANGES |= {
    "attention scale x 1.001": with_fields(
        Attention, lambda n: with_spec(n, scale=n.spec.scale * 1.001)
    ),
    "causal dropped or added": with_fields(
        Attention, lambda n: with_spec(n, window=(n.spec.window[0], -1 - n.spec.window[1]))
    ),
    "window": with_fields(
        Attention,
        lambda n: [
            {"spec": replace(n.spec, window=window)}
            for window in ((3, n.spec.window[1]), (n.spec.window[0], 1))
            if n.spec.align == "end"
        ],
    ),
    "a mask dropped": with_fields(
        Attention, lambda n: [{"mask": "", "spec": replace(n.spec, masks=())}] if n.mask else []
    ),
    "rotation interleaved, or not": with_fields(Rotary, other_rotation),
    "cos and sin swapped": with_fields(
        Rotary, lambda n: [{"cos": n.sin, "sin": n.cos}] if n.cos else []
    ),
    "head norm: eps x 10, offset, weights swapped": with_fields(Rotary, other_head_norms),
    "norm eps x 10": with_fields(Norm, lambda n: with_spec(n, eps=10 * n.spec.eps)),
    "norm offset": with_fields(
        Norm, lambda n: with_spec(n, offset=1.0 - n.spec.offset) if n.weight else []
    ),
    "activation": with_fields(MLPActivation, lambda n: [{"act": OTHER[n.act]}]),
    "gate and up swapped": with_fields(
        MLPActivation, lambda n: [{"gate": n.up, "up": n.gate}, {"gate": ""}] if n.gate else []
    ),
    "wrongly tokenwise": with_fields(
        Replay, lambda n: [] if n.tokenwise else [{"tokenwise": True, "per_batch": False}]
    ),
    "needed for nothing": with_fields(Replay, needed_for_less),
    "branch dropped": lambda layer: (identity(layer, n, n.residual) for n in sums(layer)),
    "residual x 0.999": lambda layer: (
        around(layer, n, "residual", lambda x: 0.999 * x) for n in sums(layer)
    ),
    "branch x (1 + 1e-5)": lambda layer: (
        around(layer, n, "x", lambda x: (1.0 + 1e-5) * x) for n in sums(layer)
    ),
    "a replay x (1 + 1e-4)": lambda layer: (
        wrapped(layer, n, lambda run: lambda *given: run(*given) * (1.0 + 1e-4))
        for n in layer.of(Replay)
        if not isinstance(n, (Reorder, Routing))  # this returns experts, too
    ),
    "experts": with_fields(
        ExpertsDown,
        lambda n: [
            {"spec": replace(n.spec, **change)}
            for change in ({"interleaved": True}, {"activation": "relu"})
        ],
    ),
}


def around(layer: Layer, node: Any, read: str, function: Callable[[Tensor], Tensor]) -> Wrong:
    """The description where `node` reads `function` of the activation that its field names."""
    name, x = f"{node.name}.changed", getattr(node, read)
    step = through(name, layer.width(x), (x,))
    every = (f for f in ("q", "k", "v") if isinstance(node, Attention) and getattr(node, f) == x)
    fields = dict.fromkeys(every, name) or {read: name}
    nodes = list(
        itertools.chain(*([step, replace(n, **fields)] if n is node else [n] for n in layer.nodes))
    )
    return Wrong(f"{node.name}.{read}", nodes, {name: lambda _: lambda at, xs, ts: function(xs[0])})


def through(name: str, columns: int, xs: tuple[str, ...]) -> Replay:
    """A replay whose function is given by `Wrong.wraps`."""
    return Replay(
        name=name, xs=xs, function=name, what=name, columns=columns, needed_for=(xs,) * len(xs),
        per_batch=True,
    )  # fmt: skip


@change("query and key weights swapped")
def _queries(layer):
    yield from _swapped_projections(layer, 0, 1)


@change("key and value weights swapped")
def _keys(layer):
    yield from _swapped_projections(layer, 1, 2)


def _swapped_projections(layer, i, j):
    for node in layer.of(Linear):
        if node.sizes and node.sizes[i] == node.sizes[j]:
            order = [0, 1, 2]
            order[i], order[j] = j, i
            weights, biases = (tuple(t[n] for n in order) for t in (node.weights, node.biases))
            yield changed(layer, node, weights=weights, biases=biases)
    for node in layer.of(Attention):
        fields = ("q", "k", "v")[i], ("q", "k", "v")[j]
        a, b = (getattr(node, name) for name in fields)
        source = layer.trace.graph.source
        if a != b and layer.width(a) == layer.width(b) and source[a] == source[b]:
            yield changed(layer, node, **dict(zip(fields, (b, a), strict=True)))


@change("keys of the other input")
def _memory(layer):
    """Of both keys and values: of one alone, their numbers would differ."""
    if "memory" in layer.trace.graph.inputs and layer.width("memory") == layer.width("input"):
        read = [node for node in layer.of(Linear) if node.x == "memory"]
        nodes = [replace(n, x="input") if n in read else n for n in layer.nodes]
        yield Wrong(" and ".join(n.name for n in read), nodes)


@change("norm weights swapped")
def _norm_weights(layer):
    norms = [node for node in layer.of(Norm) if node.weight]
    for a, b in itertools.pairwise(norms):
        if layer.width(a.name) == layer.width(b.name):
            names = {a.name: b.weight, b.name: a.weight}
            nodes = [
                replace(n, weight=names[n.name]) if n.name in names else n for n in layer.nodes
            ]
            yield Wrong(f"{a.name} and {b.name}", nodes)


def identity(layer: Layer, node: Node, x: str, factor: float = 1.0) -> Wrong:
    """The description where a step returns one of the activations that it reads."""
    step = replace(through(node.name, layer.width(x), (x,)), function="identity")
    nodes = [step if n is node else n for n in layer.nodes]
    return Wrong(node.name, nodes, {"identity": lambda _: lambda at, xs, ts: xs[0] * factor})


@change("bias dropped")
def _bias(layer):
    for node in layer.of((Linear, Norm)):
        biases = node.biases if isinstance(node, Linear) else (node.bias,)
        for i, bias in enumerate(biases):
            if bias:
                fields = {"bias": ""}
                if isinstance(node, Linear):
                    fields = {"biases": (*biases[:i], "", *biases[i + 1 :])}
                yield changed(layer, node, bias, **fields)


@change("gate of another branch")
def _gates(layer):
    for a, b in itertools.permutations(layer.of(GatedLinear), 2):
        yield changed(layer, a, b.gate, gate=b.gate)


@change("weights of two linear layers swapped")
def _weights(layer):
    plain = [node for node in layer.of(Linear) if not node.sizes and layer.shape(node.weight)]
    for a, b in itertools.combinations(plain, 2):
        if layer.shape(a.weight) == layer.shape(b.weight) and a.weight != b.weight:
            other = {a.name: b.weights, b.name: a.weights}
            nodes = [
                replace(n, weights=other[n.name]) if n.name in other else n for n in layer.nodes
            ]
            yield Wrong(f"{a.name} and {b.name}", nodes)


@change("another activation is read")
def _reads(layer):
    for node in layer.of((Linear, Norm, MLPActivation)):
        read = "up" if isinstance(node, MLPActivation) else "x"
        for x in others(layer, node, getattr(node, read), 1):
            yield changed(layer, node, f"{node.name} of {x}", **{read: x})


def others(layer: Layer, node: Node, x: str, most: int = 2) -> list[str]:
    """Activations of the same tokens and width that come before a step, the nearest first."""
    names = [*layer.trace.graph.inputs]
    for n in layer.nodes:
        if n is node:
            break
        names.append(n.name)
    source = {**layer.trace.graph.source, **{name: name for name in layer.trace.graph.inputs}}
    fit = [n for n in names if n != x and source[n] == source[x]]
    return [n for n in fit[::-1] if layer.width(n) == layer.width(x)][:most]


def sums(layer: Layer) -> Iterator[Any]:
    return (node for node in layer.nodes if getattr(node, "residual", ""))


@change("residual of another activation")
def _residual(layer):
    for node in sums(layer):
        for x in others(layer, node, node.residual):
            if x != node.x:
                yield changed(layer, node, f"{node.name} and {x}", residual=x)


@change("residual dropped")
def _no_residual(layer):
    for node in sums(layer):
        if isinstance(node, Linear):
            yield changed(layer, node, residual="")
        else:
            yield identity(layer, node, node.x)


def wrapped(layer: Layer, node: Replay, around: Callable[[Run], Run], where: str = "") -> Wrong:
    return Wrong(where or node.name, [*layer.nodes], {node.function: around})


@change("tensors of another sequence")
def _sequence(layer):
    conditions = [(n, (n.weight, n.bias)) for n in layer.of(ModulatedNorm)]
    conditions += [(n, (n.gate,)) for n in layer.of((GatedLinear, GatedAdd))]
    for node, names in (*conditions, *[(n, n.batched) for n in layer.of(Replay)]):
        for name in filter(None, names):
            yield Wrong(
                f"{node.name} {name}", [*layer.nodes], tensors={name: lambda t: t.roll(1, 0)}
            )
    for node in layer.of(Replay):
        if node.batched:
            yield changed(layer, node, batched=())


@change("tokens in a wrong order")
def _order(layer):
    for node in layer.of(Reorder):  # a copy, which knows no order yet
        nodes = [replace(n) if n is node else n for n in layer.nodes]
        rolled = {node.function: lambda run: lambda *given: run(*given).roll(1, 0)}
        yield Wrong(node.name, nodes, rolled)


@change("a gradient of a replay is lost")
def _detached(layer):
    for node in layer.of(Replay):
        for i in range(len(node.xs) if not isinstance(node, Reorder) else 0):

            def lost(run, i=i):
                return lambda at, xs, *rest: run(at, [*xs[:i], xs[i].detach(), *xs[i + 1 :]], *rest)

            yield wrapped(layer, node, lost, f"{node.name} {node.xs[i]}")


def calls(name: str) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Each layer of a model, with the arguments of its call."""
    model, batch = build(name)
    found = []

    def note(module, args, kwargs):
        names = list(inspect.signature(module.forward).parameters)
        found.append((module, {**dict(zip(names, args, strict=False)), **kwargs}))

    for module in model.modules():
        if type(module).__name__ in MODELS[name].layers:
            module.register_forward_pre_hook(note, with_kwargs=True)
    model(**batch)
    yield from found


def traced_layers(name: str) -> Iterator[Layer]:
    """The layers of a model whose blocks are not the same."""
    seen = set()
    for layer, given in calls(name):
        layer._forward_pre_hooks.clear()
        for vary in (("B", "S", "M"), ("B",)):
            call = Arguments(given, vary)
            try:
                trace = trace_call(layer, type(layer).forward, call).proved
            except Untraceable:
                continue
            nodes = [str(n).split("mask=")[0] for n in trace.graph.nodes]
            what = type(layer), trace.graph.kind, nodes
            if str(what) not in seen:
                seen.add(str(what))
                proof = call.sample(layer, SIZES, torch.float64, 2, scale=SCALE)
                made = Layer(name, layer, trace, proof)
                assert is_rejected(made, None) is None, (name, type(layer))
                yield made
            break
        else:
            raise AssertionError(f"{name}: {type(layer).__name__} cannot be read")


def used(nodes: list[Node]) -> list[Node]:
    """The steps that the output is made of."""
    wanted, kept = {"output"}, []
    for node in nodes[::-1]:
        if node.name in wanted:
            kept.append(node)
            wanted.update(node.inputs)
    return kept[::-1]


def is_rejected(
    layer: Layer, wrong: Wrong | None, policy: str = "full", chunk: int = _CHUNK
) -> str | None:
    """Why the proof rejects a description, None if it does not; with None, the right one."""
    trace, graph = layer.trace, layer.trace.graph
    if wrong is not None:
        nodes = used(wrong.nodes)
        params = dict.fromkeys(p for node in nodes for p in node.params)
        graph = Graph(graph.kind, tuple(nodes), tuple(params), graph.inputs)

    mode = functools.partial(Trial, exact=True)

    def fused(module: nn.Module, named: Mapping[str, Tensor], given: Any, mode: Any) -> Any:
        tensors, functions, result = trace.bind(module, named, given, mode)
        if wrong is not None:
            tensors |= {n: made(tensors[n]) for n, made in wrong.tensors.items()}
            functions |= {n: made(functions.get(n)) for n, made in wrong.wraps.items()}
        with chunks_of(chunk):
            return result(run_block(graph, policy, tensors, functions=functions))

    forward = types.MethodType(type(layer.layer).forward, layer.layer)
    try:
        block = types.SimpleNamespace(run=fused, outs=trace.outs)
        return difference(layer.layer, forward, block, layer.proof, EXACT, mode)
    except (RuntimeError, ValueError, IndexError, KeyError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("policy", ["full", "balanced"])
def test_right_descriptions_are_accepted(policy):
    """In pieces of a few tokens, of a sequence, of some sequences, and as a whole."""
    pytest.importorskip("transformers")
    for name in LAYERS:
        for layer in traced_layers(name):
            for chunk in (4, 30, 1000):
                assert is_rejected(layer, None, policy, chunk) is None, (name, chunk)


def test_wrong_descriptions_are_rejected():
    """Of more than 700 descriptions, the proof accepts those of `ACCEPTED` alone."""
    pytest.importorskip("transformers")
    tried, accepted = Counter[str](), []
    for name in LAYERS:
        for layer in traced_layers(name):
            for kind, wrongs in CHANGES.items():
                for wrong in wrongs(layer):
                    tried[kind] += 1
                    if is_rejected(layer, wrong) is None:
                        accepted.append((kind, f"{name}: {wrong.where}"))
    assert set(tried) == set(CHANGES) and len(CHANGES) >= 25
    matched = {row: [a for a in accepted if matches(row, a)] for row in ACCEPTED}
    unexpected = [a for a in accepted if not any(matches(row, a) for row in ACCEPTED)]
    assert not unexpected, "\n".join(map(str, unexpected))
    assert all(matched.values()), [row for row, found in matched.items() if not found]
    assert sum(tried.values()) > 700, sum(tried.values())


def matches(row: tuple[str, str, str], accepted: tuple[str, str]) -> bool:
    return row[0] == accepted[0] and fnmatch.fnmatchcase(accepted[1], row[1])
