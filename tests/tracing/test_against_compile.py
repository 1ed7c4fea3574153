"""Traced blocks compared with what `torch.compile` records of the same layers: another tracer.

Every product with parameters has the same flow in both (`flows`), and so has the result; both have
the same dropouts and attentions, the same numbers at two sizes, and hold for the other size or not.
"""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import hard_layers as hard
import models
import pytest
import torch
import torch.nn.functional as F
from flows import BlockFlows, Flow, Flows, Recorded
from test_sweep import built
from tiers import exhaustive
from torch import Tensor, nn

from bench.subjects import architectures
from fused_remat import convert
from fused_remat.layers.converted import CACHES, LENGTH
from fused_remat.tracing.layer import KNOWN, TracedLayer, traced_class
from fused_remat.tracing.values import Ref, leaves

Call = tuple[tuple[Any, ...], dict[str, Any]]
#: Differences by model, as patterns, and why none is the tracer's. An entry without one fails.
EXPLAINED = {
    # Not traced: there is nothing to compare.
    r"(Cached|Written|AuxiliaryInObject|Counting|IBert\w+|RecurrentGemma\w+) not traced": (
        "its forward changes more than its result"
    ),
    r"(Float32|GuardedFloat32) not traced": "it switches autocast",
    r"(PositionalOnly|AnyArguments) not traced": "its arguments have no names",
    r"SignBranch not traced": "a parameter's value chooses what it computes",
    r"HeldByForward not traced": "the forward of a submodule is a closure with tensors",
    r"Skipped not traced": "a generator of its own draws numbers",
    r"Weights not traced": "the probabilities of attention are a result",
    r"(PegasusX\w+|xLSTM\w+) not traced": "it has several results",
    r"(OfOneSize|gemma3n|Gemma3n\w+|Inkling2\w+|Mpt\w+|Mra\w+) not traced": (
        "it runs only at sizes that follow from others"
    ),
    r"(Detached|AXK2\w+|DeepseekV32\w+|Dots3Note\w+|GlmMoeDsa\w+) not traced": (
        "a gradient that is None would be zero"
    ),
    r"(DiffLlama\w+|LED\w+|Longformer\w+) not traced": "its results in a proof are not finite",
    r"(DeepseekV4\w+|HYV4\w+|ProphetNet\w+|wide_dinov3) not traced": (
        "a trace at its length alone takes more memory than a step of two sequences"
    ),
    # Dynamo's graphs end where Python reads values, and `?` flows into the next.
    r"(Routed|RoutedEither|JetMoe\w+|LongcatFlash\w+) flow into result": (
        "how many tokens an expert gets is a value"
    ),
    r"RoutedEither compiled again": "one of its graphs is of one token",
    r"JetMoe\w+ dropouts": "a replayed submodule drops what is in another graph",
    r"qwen[23]_vl (flow into attn.proj.*|dropouts)": "Python reads lengths: an attention for each",
    # Dynamo records an autograd.Function as one operation, without its contents and module.
    r"(bloom|Bloom\w+) flow into mlp.dense_4h_to_h.*": "its GELU is an autograd.Function",
    r"Yoso\w+ flow into attention.output.dense.*": "its attention is an autograd.Function",
    # Whether what was traced or compiled holds for another size.
    r"(jamba|Jamba\w+|FalconMamba\w+|Mamba\w+|MiniMax\w+|Rwkv\w+) compiled again": (
        "Dynamo unrolls a loop over tokens, which a replay runs"
    ),
    r"whisper compiled again": "Dynamo takes equal lengths of text and sound for one size",
    r"(ConvBert|Funnel|GraniteMoeSWA|GraniteSWA|T5Gemma2)\w+ traced again": (
        "a number that Dynamo has as an expression of sizes is one of this length alone"
    ),
    # Random numbers.
    r"DroppedInPlace numbers.*": "its dropout of 0.5 draws other numbers",
    r"Phimoe\w+ numbers.*": "it draws numbers, and the seed of a block's dropout is one more",
}


@pytest.fixture(autouse=True)
def _traced(monkeypatch):
    """Every layer is traced, also one of a class with an entry."""
    module = sys.modules["fused_remat.convert"]
    monkeypatch.setattr(module, "converted_class", lambda layer: traced_class(type(layer)))
    KNOWN.clear()


def differences(layer: nn.Module, calls: list[Call]) -> dict[str, str]:
    """Return how a layer's block differs from the graphs that are recorded of its first call."""
    other: Any = convert(nn.ModuleList([copy.deepcopy(layer)]))[0]
    args, kwargs = calls[0]

    def run(forward: Any, call: Call) -> list[Any]:
        torch.manual_seed(0)
        args, kwargs = call
        return leaves(forward(*args, **kwargs))

    given = other._named(args, kwargs) or {}
    inputs = {n: v for n, v in given.items() if v is None or n not in CACHES}
    results = [run(other, call) for call in calls[:1]]
    trace = other.last_trace
    if not hasattr(trace, "block"):
        return {"not traced": trace.text}
    block, names = trace.block, dict[int, Flow]()
    for name, value in inputs.items():
        for i, leaf in enumerate(leaves(value)):
            names.setdefault(id(leaf), Flow({f"{name}.{i}" if i else name}))
    opaque = [op.path for p in block.programs.values() for op in p.ops if op.path]
    tensors = {name: attrgetter(name)(layer) for name in block.sources.values()}
    tensors |= {**dict(layer.named_buffers()), **dict(layer.named_parameters())}
    own = dict[str, Flow]()
    for name in tensors:
        inside = [path for path in opaque if name.startswith(f"{path}.")]
        own[name] = Flow(() if name in block.fixed else inside or (name,))
    mine = BlockFlows(block, own, [names[id(leaf)] for leaf in leaves(inputs)])
    known = {id(t): (t, names[id(t)]) for t in leaves(inputs) if isinstance(t, Tensor)}
    known |= {id(t): (t, own[name]) for name, t in tensors.items()}
    theirs, graphs = Flows(own), list[torch.fx.GraphModule]()

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run_graph(*args: Any) -> Any:
            if graph in graphs:
                return graph(*args)
            graphs.append(graph)
            return Recorded(graph, theirs, known, opaque).run(*args)

        return run_graph

    torch._dynamo.reset()
    compiled = torch.compile(type(layer).forward.__get__(layer), backend=record, dynamic=True)
    expected = [run(compiled, call) for call in calls[:1]]
    refs = [leaf.index if isinstance(leaf, Ref) else -1 for leaf in leaves(block.result)]
    out = refs.index(block.out[0])
    mine.products["result", mine.of("output")] = None
    theirs.products["result", known.get(id(expected[0][out]), (0, Flow("?")))[1]] = None

    found, count = different_flows(mine, theirs), len(graphs)
    for call in calls[1:]:
        results.append(run(other, call))
        expected.append(run(compiled, call))
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        y = b[out].detach()
        distance = float((a[out].detach() - y).norm() / y.norm())
        if not distance <= (1e-6 if y.dtype == torch.float64 else 2e-5):
            found[f"numbers of call {i}"] = f"{distance:.1e}"
    again = other.last_trace is not trace, len(graphs) > count
    if again[0] != again[1]:
        found["traced again" if again[0] else "compiled again"] = "for the other size"
    return found


def different_flows(mine: BlockFlows, theirs: Flows) -> dict[str, str]:
    """Return how products, dropouts and attention of two readings differ."""
    found, texts = dict[str, str](), {**mine.texts, **theirs.texts}
    for label in dict.fromkeys(label for label, _ in (*mine.products, *theirs.products)):
        a, b = ({flow for name, flow in each.products if name == label} for each in (mine, theirs))
        rests = [[flow.difference(*y) for flow in x - y] for x, y in ((a, b), (b, a))]
        if a != b:
            texts_of = [[sorted(texts.get(n, n) for n in flow) for flow in rest] for rest in rests]
            found[f"flow into {label}"] = "{} in the block, {} compiled".format(*texts_of)
    for path, flow in theirs.opaque.items():  # which need not read all of its arguments
        if more := flow - mine.opaque[path] - {path}:
            found[f"flow into {path}"] = f"{sorted(texts.get(n, n) for n in more)} compiled"
    if mine.dropouts != theirs.dropouts:
        found["dropouts"] = f"{mine.dropouts} in the block, {theirs.dropouts} compiled"
    heads = mine.attentions, theirs.attentions
    if len(heads[0]) == len(heads[1]) and heads[0] != heads[1]:
        found["attention"] = "{} in the block, {} compiled".format(*heads)
    return found


def check(name: str, model: nn.Module, calls: Mapping[str, list[Call]]) -> None:
    found = dict[str, str]()
    for path, each in calls.items():
        for what, text in differences(model.get_submodule(path), each).items():
            found.setdefault(f"{name} {what}", f"{path}: {text}")
    entries = [p for p in EXPLAINED if re.fullmatch(p.partition(" ")[0], name)]
    new = [f"{k} at {v}" for k, v in found.items() if not any(re.fullmatch(p, k) for p in entries)]
    assert not new, "\n".join(new)
    stale = [p for p in entries if not any(re.fullmatch(p, what) for what in found)]
    assert not stale, f"remove {stale}"


def drop(model: nn.Module) -> None:
    """Give each dropout of a model a probability of its own, so small that nothing is dropped."""
    count = 0
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            is_p = "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
            if is_p and "layer" not in name and type(value) in (int, float):
                setattr(module, name, (count := count + 1) * 1e-9)


def calls_of(model: nn.Module, names: Iterable[str], *batches: Any) -> dict[str, list[Call]]:
    """Return a call of each submodule of these names for each batch, without caches."""
    model = copy.deepcopy(model)  # which may hold results after a call
    calls: dict[str, dict[int, Call]] = {name: {} for name in names}

    def note(name: str, i: int, args: Any, kwargs: Any) -> None:
        kwargs = {n: None if hasattr(v, LENGTH) else v for n, v in kwargs.items()}
        calls[name].setdefault(i, (args, kwargs))

    for i, batch in enumerate(batches):
        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, kwargs, name=name, i=i: note(name, i, args, kwargs),
                with_kwargs=True,
            )
            for name in calls
        ]
        model(**batch)
        for handle in handles:
            handle.remove()
    return {name: [*each.values()] for name, each in calls.items() if each}


QUICK = ("llama", "bert", "t5", "dit", "FilledScores", "KindScores", "UnreadMemory")


@pytest.mark.parametrize("name", [n if n in QUICK else exhaustive(n) for n in models.MODELS])
def test_layers_of_models(name):
    model, batch = built(name)
    with torch.no_grad():
        model(**batch)  # which may set attributes
    drop(model)
    dtype, other = next(model.parameters()).dtype, models.MODELS[name].batch(17)
    for key, value in other.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            other[key] = value.to(dtype)
    kinds = models.MODELS[name].layers
    names = [n for n, m in model.named_modules() if type(m).__name__ in kinds]
    check(name, model, calls_of(model, names, batch, {**batch, **other}))


@pytest.mark.parametrize("name", [exhaustive(n) for n in architectures.ARCHITECTURES])
def test_layers_of_architectures(name):
    try:
        model, batch = architectures.build(name, 24)
        with torch.no_grad():
            model(**batch)
    except Exception as reason:
        pytest.skip(f"it cannot run in generic sizes: {reason!r}")
    drop(model)
    other = {**batch, **architectures.ARCHITECTURES[name].batch(model, 33)}
    converted = convert(copy.deepcopy(model))
    names = [n for n, m in converted.named_modules() if isinstance(m, TracedLayer)]
    name = f"wide_{name}" if name in models.MODELS else name
    check(name, model, calls_of(model, names, batch, other))


def _with(layer: nn.Module, name: str, value: Any) -> nn.Module:
    module, _, name = name.rpartition(".")
    setattr(layer.get_submodule(module), name, value)
    return layer


#: Hard layers that need more than their class: how they are made, and their sizes.
MADE = {
    "Scaled": lambda: hard.Scaled(0.5, float),
    "Skipped": lambda: hard.Skipped(random.Random(0), random.Random.random),
    "Results": lambda: hard.Results(lambda x, y: {"x": x, "y": y}),
    "GivenGate": lambda: _with(hard.GivenGate(), "gate.given", torch.ones(hard.WIDTH)),
    "Written": lambda: _with(hard.Written(), "seen", torch.zeros(64, hard.WIDTH)),
}
SIZES = {"OfOneSize": (2, 16), "LongBranch": (5, 310), "Division": (2, 20)}
#: Arguments after x, by the batch size and the length.
ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("Multiplied", "FilledScores", "KindScores"), torch.ones),
    **dict.fromkeys(("Segments", "Chosen"), lambda b, s: torch.ones(b, s, dtype=torch.long)),
    **dict.fromkeys(("Scores", "CausalScores"), lambda b, s: torch.zeros(b, 1, 1, s)),
    **dict.fromkeys(("SameArgument", "UnreadMemory"), lambda b, s: torch.ones(b, s, hard.WIDTH)),
    "Function": lambda *_: F.silu, "Factor": lambda *_: 0.5, "Called": lambda *_: str,
    "SubmoduleWithObject": lambda *_: hard.Slots(0.5),
    "ScaledByPosition": lambda b, s: (
        torch.arange(s).expand(b, s), (torch.rand(s, 2).repeat(1, 2), torch.rand(s, 2).repeat(1, 2))
    ),
}  # fmt: skip
HARD = [n for n, c in vars(hard).items() if isinstance(c, type) and issubclass(c, hard.Layer)]


@pytest.mark.parametrize("name", [n if n in QUICK else exhaustive(n) for n in HARD])
def test_hard_layers(name):
    torch.manual_seed(0)
    layer, calls = MADE.get(name, getattr(hard, name))(), []
    for size in (SIZES.get(name, (2, 12)), SIZES.get(name, (5, 15))):
        x = torch.randn(*size, hard.WIDTH, requires_grad=True)
        more = ARGUMENTS.get(name, lambda *_: ())(*size)
        calls.append(((x, *(more if isinstance(more, tuple) else (more,))), {}))
    model = nn.ModuleList([layer])
    drop(model)
    check(name, model, {"0": calls})
