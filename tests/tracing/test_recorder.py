"""Layers with one thing that a reader may get wrong: what it reads is right, or it reads nothing.

Every test trains one step of a converted model, and of a copy that is not converted, in float64.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
import weakref

import altered_layers as altered
import pytest
import torch
import torch.nn.functional as F
from altered_layers import HEADS, LONGEST, WIDTH
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_remat import conversion, convert, revert
from fused_remat.execution import observe
from fused_remat.graph.graph import Graph
from fused_remat.report.allocations import AllocationTrace
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.attention import Attention
from fused_remat.steps.replay import Replay
from fused_remat.steps.residual import Add
from fused_remat.tracing import layer as layer_module
from fused_remat.tracing.call import Trace
from fused_remat.tracing.layer import KNOWN
from fused_remat.tracing.recording import record
from fused_remat.tracing.values import Sample

pytestmark = pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
B, S = 2, 6
#: Of float64, where the layer and the block add in another order.
TOLERANCE = 1e-9


class Model(nn.Module):
    """Two layers of a class, and a head."""

    def __init__(self, layer: type[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layer(index) for index in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        for layer in self.layers:
            made = layer(x, *args, **kwargs)
            x = made[0] if isinstance(made, tuple) else made
        return self.head(x)


def pair(layer: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A model, and a converted copy; every parameter random."""
    torch.manual_seed(0)
    stock = Model(layer).double()
    with torch.no_grad():
        for p in stock.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return stock, convert(copy.deepcopy(stock))


def normal(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def step(model: nn.Module, x: Tensor, *args, seed: int = 3, **kwargs) -> dict[str, Tensor | None]:
    """The result and all gradients of a training step."""
    x = x.clone().requires_grad_()
    tensors = {"x": x}
    for i, a in enumerate(args):
        if isinstance(a, Tensor) and a.requires_grad:
            tensors[f"argument {i}"] = a
    for t in (*tensors.values(), *model.parameters()):
        t.grad = None
    torch.manual_seed(seed)
    random.seed(seed)
    y = model(x, *args, **kwargs)
    (y * normal(*y.shape, seed=2)).sum().backward()
    grads = {name: t.grad for name, t in (*tensors.items(), *model.named_parameters())}
    found = {"the result": y.detach(), **{f"d {name}": g for name, g in grads.items()}}
    return {name: None if t is None else t.clone() for name, t in found.items()}


def assert_same(found: dict, expected: dict, tolerance: float, call: str = "", strict=True) -> None:
    """What is tiny is compared to the largest; if `strict`, a gradient is None in both or none."""
    largest = max(float(t.norm()) for t in expected.values() if t is not None)
    for name, theirs in expected.items():
        mine = found[name]
        same = (mine is None) == (theirs is None)
        assert same or not strict, f"{call}{name} is {mine} for {theirs}"
        mine, theirs = (torch.zeros(()) if t is None else t for t in (mine, theirs))
        distance, norm = float((mine - theirs).norm()), float(theirs.norm())
        wrong = f"{call}{name}, of norm {norm:.1e}, differs by {distance:.1e}"
        assert distance <= tolerance * (norm + 0.01 * largest), wrong


def same_step(stock: nn.Module, model: nn.Module, *args, tolerance: float = TOLERANCE, **kw):
    """Assert that a step of both gives the same; returns what it gives."""
    expected = step(stock, *args, **kw)
    assert_same(step(model, *args, **kw), expected, tolerance, strict=False)
    return expected


@pytest.fixture(autouse=True)
def _nothing_known():
    """Every test reads its layers itself."""
    KNOWN.clear()


class Told(list):
    """The layers that were left as they are, and why."""

    def observe(self, layer: nn.Module, reason: str) -> None:
        self.append((layer, reason))

    def reasons(self) -> set[str]:
        return {reason for _, reason in self}


@pytest.fixture
def told():
    found = Told()
    observe.DECISIONS.append(found.observe)
    yield found
    observe.DECISIONS.remove(found.observe)


def graphs(model: nn.Module) -> list[Graph]:
    """The blocks of the layers' last calls."""
    last = [layer.last_trace for layer in model.layers]
    return [known.graph for known in last if isinstance(known, Trace)]


def steps(model: nn.Module, kind: type) -> list[str]:
    """The names of the steps of a kind in the first layer's block."""
    return [node.name for node in graphs(model)[0].nodes if isinstance(node, kind)]


# Layers whose block is read: what they are, and whether attention is a step of it.
READ = {
    "Block": True,
    "TrainFactor": True,
    "LearnedGate": True,
    "InPlace": True,
    "InPlaceView": True,
    "WeightNormed": True,
    "WrongSoftmax": False,
    "PlainTensor": True,
    "IndexScale": True,
    "MergedHeads": True,
}


@pytest.mark.parametrize("name", READ)
def test_read(name, told):
    stock, model = pair(getattr(altered, name))
    for x in (normal(B, S, WIDTH), normal(3, 9, WIDTH), normal(1, 4, WIDTH)):
        same_step(stock, model, x)
    assert not told.reasons()
    assert len(graphs(model)) == 2
    assert bool(steps(model, Attention)) == READ[name]
    stock.eval(), model.eval()
    same_step(stock, model, normal(B, S, WIDTH))
    with torch.no_grad():
        x = normal(B, S, WIDTH)
        assert torch.equal(stock(x), model(x))


# Layers that are left as they are, and a part of the reason.
LEFT = {
    "Noise": "random numbers",
    "RunningMean": "its forward changes mean",
    "BranchOnSum": "(bool)",
    "WithoutGradient": "differs",
    "OwnFunction": "it runs an autograd.Function, whose backward is its own",
    "TwoResults": "results",
    "ClippedByHook": "it registers a hook on a tensor",
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name, told):
    stock, model = pair(getattr(altered, name))
    step(copy.deepcopy(model), normal(B, S, WIDTH))  # it is read
    told.clear()
    for seed in range(3):
        same_step(stock, model, normal(B, S, WIDTH, seed=seed), seed=seed)
    assert dict(model.named_buffers()).keys() == dict(stock.named_buffers()).keys()
    for mine, theirs in zip(model.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0.0)
    assert {layer for layer, _ in told} == {*model.layers}
    assert all(LEFT[name] in reason for reason in told.reasons()), told.reasons()


def test_reading_changes_no_random_state():
    model = pair(altered.Dropping)[1]
    x = normal(B, S, WIDTH)
    first, second = step(model, x), step(model, x)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["BranchPiece", "OwnFunctionPiece", "NoisePiece"])
def test_submodule_is_a_piece(name, told):
    stock, model = pair(getattr(altered, name))
    step(copy.deepcopy(model), normal(B, S, WIDTH))  # it is read
    for seed in range(4):
        same_step(stock, model, normal(B, S, WIDTH, seed=seed), seed=seed)
    if graphs(model):
        assert "mlp" in steps(model, Replay)
        assert steps(model, Attention)
    else:
        assert told.reasons()


@pytest.mark.parametrize("name", ["DrawnDepth", "DrawnDepthByPython"])
def test_a_drawn_number_decides(name):
    """Whatever was drawn while the layer was read."""
    for first in range(6):
        KNOWN.clear()
        stock, model = pair(getattr(altered, name))
        step(copy.deepcopy(model), normal(B, S, WIDTH), seed=first)  # it is read
        for seed in range(25):
            same_step(stock, model, normal(B, S, WIDTH), seed=seed)


def test_the_values_of_a_mask_decide():
    stock, model = pair(altered.BranchOnMask)
    mask = torch.ones(B, S, dtype=torch.bool)
    same_step(stock, model, normal(B, S, WIDTH), mask)
    padded = mask.clone()
    padded[0, 3:] = False
    same_step(stock, model, normal(B, S, WIDTH), padded)


def test_whole_number_argument():
    stock, model = pair(altered.ShiftArgument)
    for value in (0, 1, 2, 5, S):
        for length in (S, 9):
            same_step(stock, model, normal(B, length, WIDTH), shift=value)


# Two layers of one class are not the same, and a layer is not what it was.


@pytest.mark.parametrize(
    "name", ["IndexScale", "ListAttribute", "Config", "BufferMask", "PlainTensor", "Patched"]
)
def test_layers_of_one_class_differ(name):
    stock, model = pair(getattr(altered, name))
    same_step(stock, model, normal(B, S, WIDTH))
    same_step(stock, model, normal(3, 8, WIDTH))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("IndexScale", lambda layer: setattr(layer, "layer_idx", 4)),
        ("ListAttribute", lambda layer: layer.scales.__setitem__(0, 5.0)),
        ("Config", lambda layer: setattr(layer.config, "clip", 0.1)),
        ("BufferMask", lambda layer: layer.attn.seen.logical_or_(layer.attn.seen.roll(3, 1))),
        ("PlainTensor", lambda layer: setattr(layer, "scale", 2 * layer.scale)),
        ("Block", lambda layer: setattr(layer.mlp, "forward", altered.patched(layer.mlp))),
        ("Block", lambda layer: setattr(layer.norm1, "eps", 0.1)),
        ("Block", lambda layer: setattr(layer, "mlp", altered.with_relu(layer.mlp))),
        ("LearnedGate", lambda layer: layer.gate.requires_grad_(False)),
    ],
)  # fmt: skip
def test_a_layer_changes(name, change):
    stock, model = pair(getattr(altered, name))
    same_step(stock, model, normal(B, S, WIDTH))
    for each in (stock, model):
        for layer in each.layers:
            change(layer)
    same_step(stock, model, normal(B, S, WIDTH))


def test_hook_on_a_submodule(told):
    stock, model = pair(altered.Block)
    same_step(stock, model, normal(B, S, WIDTH))
    assert not told
    for each in (stock, model):
        each.layers[0].mlp.up.register_forward_hook(lambda module, args, out: 2.0 * out)
    same_step(stock, model, normal(B, S, WIDTH))
    assert {layer for layer, _ in told} == {model.layers[0]}
    assert told.reasons() == {"mlp.up has hooks"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_argument_changed_in_place(reentrant):
    """The model reads the tensor that it has called its first layer with.

    `reentrant`: converted layers run it under a checkpoint of the model's.
    """
    made = []
    for model in pair(altered.InPlaceArgument):
        model.layers[0].gradient_checkpointing = reentrant
        model.layers[0]._gradient_checkpointing_func = functools.partial(
            checkpoint, use_reentrant=True
        )
        x = normal(B, S, WIDTH).requires_grad_()
        y = x * 1.0
        out = model.layers[0](y)
        (out + 3.0 * y).square().sum().backward()
        made.append({"the result": y.detach(), "d x": x.grad})
    assert_same(made[1], made[0], TOLERANCE)


def test_multihead_attention():
    stock, model = pair(altered.Multihead)
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, 4:] = True
    added = normal(S, S, seed=5)
    each = normal(B * HEADS, S, S, seed=6)
    for given in (
        {}, {"mask": later}, {"padding": padding}, {"mask": later, "padding": padding},
        {"mask": added}, {"mask": each}, {"mask": each, "padding": padding},
    ):  # fmt: skip
        same_step(stock, model, normal(B, S, WIDTH), **given)
    names = [node.name for node in graphs(model)[0].nodes]
    assert names.index("attn.in_proj") < names.index("attn")  # "attn" is attention's output


ACTIVATIONS = {
    "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / 2.0**0.5)),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu2": lambda x: torch.relu(x) ** 2,
    "relu2 by square": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions_that_are_an_activation(name, monkeypatch, told):
    monkeypatch.setattr(altered.Activated, "function", staticmethod(ACTIVATIONS[name]))
    stock, model = pair(altered.Activated)
    same_step(stock, model, normal(B, S, WIDTH))
    (act,) = [n for n in graphs(model)[0].nodes if isinstance(n, MLPActivation)]
    assert act.act == name.partition(" ")[0] and not told


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.gelu(x).clamp(max=10.0),  # which no small number shows
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: torch.where(x > 0, 0.8 * x * x + 0.5 * x, (torch.expm1(x) - x) * 0.8 + 0.5 * x),
        lambda x: x.clamp(min=0.0).detach() + x - x.detach(),
        lambda x: x.clamp(min=0.0),  # whose derivative at 0 is 1
    ],
    ids=["clamped", "another number", "sums within", "straight through", "another derivative"],
)
def test_functions_that_are_nearly_an_activation(function, monkeypatch, told):
    """One replay, with the sums within it."""
    monkeypatch.setattr(altered.Activated, "function", staticmethod(function))
    stock, model = pair(altered.Activated)
    same_step(stock, model, normal(B, S, WIDTH))
    assert len(steps(model, Replay)) == 1 and not steps(model, Add) and not told


def test_a_product_whose_result_is_parted_runs_once(told):
    stock, model = pair(altered.Experts)
    same_step(stock, model, normal(B, S, WIDTH))
    programs = model.layers[0].last_trace.block.programs.values()
    assert [op.name for p in programs for op in p.ops].count("bmm") == 2 and not told


def test_two_updates_of_a_linear_layer_are_no_replays(told):
    """As those of two active adapters of PEFT's LoRA."""

    class Adapted(altered.Block):
        def set_up(self, index: int) -> None:
            self.low, self.high = (
                nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(2))
                for sizes in ((WIDTH, 2), (2, WIDTH))
            )

        def branch(self, x: Tensor) -> Tensor:
            y = self.attn.o(x)
            for low, high in zip(self.low, self.high, strict=True):
                y = y + high(low(x)) * 0.5
            return F.gelu(y)

    stock, model = pair(Adapted)
    same_step(stock, model, normal(B, S, WIDTH))
    updates = [len(getattr(node, "updates", ())) for node in graphs(model)[0].nodes]
    assert max(updates) == 2 and not steps(model, Replay) and not told


def test_what_is_added_comes_before_the_branch():
    """Backward is done with the branch before it goes on."""

    class Parallel(altered.Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm1(x)
            return x + self.attn(y) + self.mlp(y)

    model = pair(Parallel)[1]
    step(model, normal(B, S, WIDTH))
    names = [node.name for node in graphs(model)[0].nodes]
    assert names.index("attn") < names.index("mlp.up")


@pytest.mark.parametrize("of", ["activations", "parameters"])
def test_results_are_held_as_long_as_the_layer_holds_them(of):
    """A recording of a chain takes the memory of two of its results."""

    class Chain(altered.Block):
        def set_up(self, index: int) -> None:
            self.weight = nn.Parameter(torch.randn(WIDTH, 4096))

        def branch(self, x: Tensor) -> Tensor:
            w = self.weight
            for _ in range(50):
                x, w = (x.sin(), w) if of == "activations" else (x, w.sin())
            return x + w.mean(1)

    layer = Chain().double()
    named = {n: p.detach().requires_grad_() for n, p in layer.named_parameters()}
    x = normal(64, 64, WIDTH).requires_grad_()
    sample = Sample({}, x.dtype, named, {"x": x}, [True])
    with AllocationTrace() as trace:
        recorder = record(layer, layer.forward, sample)
    assert trace.spans[0].peak < 12 * x.nbytes and trace.spans[0].end < x.nbytes
    assert [tuple(recorder.values[n].shape) for n in recorder.live][-1] == (64, 64, WIDTH)


def test_a_long_sequence_of_one_length_is_not_traced(told):
    """Three sequences in float64 would take more memory than a step."""
    stock, model = pair(altered.OneLength)
    same_step(stock, model, normal(1, LONGEST, WIDTH))
    assert told.reasons().pop().startswith("a trace at its 160 tokens takes more memory")
    same_step(stock, model, normal(2, LONGEST, WIDTH))
    assert len(graphs(model)) == 2, "a step takes as much"
    same_step(stock, model, normal(1, LONGEST, WIDTH))
    assert len(graphs(model)) == 2, "it is known now"


def test_a_long_sequence_of_one_length_has_an_effect():
    """Which is found without a trace, so that forward runs once."""

    class Counting(altered.OneLength):
        calls = 0

        def branch(self, x: Tensor) -> Tensor:
            self.calls += torch.is_grad_enabled()  # as in training
            return super().branch(x) / self.calls

    stock, model = pair(Counting)
    for _ in range(3):
        same_step(stock, model, normal(1, LONGEST, WIDTH))
    assert [layer.calls for layer in model.layers] == [3, 3]
    assert [kind.state for kind in conversion(model)] == ["plain"]


@pytest.mark.parametrize("size", [5, 6, 12])
def test_sequences_of_one_length_are_mixed(size):
    """The proof has several pieces, whatever the length."""

    class Mixed(altered.Block):
        def set_up(self, index: int) -> None:
            self.positions = nn.Parameter(torch.randn(size, WIDTH))

        def branch(self, x: Tensor) -> Tensor:
            mean = x.mean(0, keepdim=True)
            return self.mlp(x - (mean - mean.detach()) + self.positions)

    stock, model = pair(Mixed)
    same_step(stock, model, normal(512, size, WIDTH), tolerance=1e-8)


@pytest.mark.parametrize("limit", [1e6, torch.finfo(torch.float32).max, None])
def test_limits_that_no_number_reaches_yet(limit):
    class Limited(altered.Block):
        def branch(self, x: Tensor) -> Tensor:
            h = self.mlp.up(x)
            h = h * torch.sigmoid(h)
            h = torch.nan_to_num(h) if limit is None else h.clamp(max=limit)
            return self.mlp.down(h)

    stock, model = pair(Limited)
    same_step(stock, model, normal(B, S, WIDTH))
    assert not steps(model, MLPActivation)


def test_a_trace_that_fails_leaves_no_frame():
    """Its reason would hold it, and by it the callers' activations."""
    layer, kept = convert(altered.OneLength().double()), []

    def train() -> None:
        x = normal(2, LONGEST, WIDTH).requires_grad_()
        kept.append(weakref.ref(x))
        layer(x).sum().backward()

    gc.collect()
    gc.disable()
    try:
        train()
        assert kept.pop()() is None
    finally:
        gc.enable()


def test_masks():
    """Of other values, shapes and dtypes, with gradients or without, in turn."""
    stock, model = pair(altered.MaskArgument)
    x = normal(B, S, WIDTH)
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    local = causal & torch.ones(S, S, dtype=torch.bool).triu(-2)
    masks = [None, causal, local, causal[None, None], local.expand(B, HEADS, S, S)]
    masks += [torch.zeros(S, S).double().masked_fill(~m, -torch.inf) for m in (causal, local)]
    masks += [normal(B, 1, S, S, seed=8), normal(1, HEADS, S, S, seed=9), normal(B, HEADS, 1, S)]
    for mask in (*masks, *masks[::-1]):
        same_step(stock, model, x, mask)


@pytest.mark.parametrize("policy", ["full", "lean", "balanced", "fast", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embeddings_as_complex_numbers(dtype, policy, told):
    """Backward rotates without the activations that were rotated: their gradients are linear."""
    stock, model = (each.to(dtype) for each in pair(altered.ComplexRotary))
    for layer in model.layers:
        layer.policy = policy
    for b, s in ((B, S), (1, 9), (3, 4)):
        x, turns = normal(b, s, WIDTH).to(dtype), altered.turns(s)
        same_step(stock, model, x, turns, tolerance=1e-5 if dtype == torch.float32 else 0.05)
    assert not told.reasons()
    assert steps(model, Attention)
    assert trace_counts(model) == [1, 0], "for all lengths"


def test_what_a_block_keeps_has_the_names_of_arguments_and_tensors():
    model = pair(altered.HeadsInBatch)[1]
    step(model, normal(B, S, WIDTH), normal(B, 1, S, S), normal(B * HEADS, 1, S))
    (graph, *_), names = graphs(model), {*dict(model.layers[0].named_parameters())}
    assert [name for name in graph.params if name not in names] == ["mask"]
    model = pair(altered.ComplexRotary)[1]
    step(model, normal(B, S, WIDTH), altered.turns(S))
    (graph, *_), names = graphs(model), {*dict(model.layers[0].named_parameters())}
    others = [name for name in graph.params if name not in names]
    assert len(others) == 2 and all(name.startswith("angles") for name in others)


def test_sizes_that_are_equal():
    """Batch, heads, length and width are told apart by nothing but their places."""
    stock, model = pair(altered.MaskArgument)
    for b, s in ((HEADS, HEADS), (WIDTH, WIDTH), (1, 1), (3, 7), (2, 10)):
        for mask in (normal(b, HEADS, s, s), normal(s, s), torch.ones(b, 1, 1, s).bool()):
            same_step(stock, model, normal(b, s, WIDTH), mask)


def trace_counts(model: nn.Module) -> list[int]:
    return [layer._notes_of().traces for layer in model.layers]


@pytest.mark.parametrize("first", [7, 5])
def test_source_and_target_are_equally_long(first, told):
    """A layer is traced once, whether its first call has equal lengths or not."""
    stock, model = pair(altered.CrossBias)
    for b, s, m in ((B, 7, first), (B, 7, 7), (3, 9, 9), (1, 4, 6), (5, 5, 5), (1, HEADS, HEADS)):
        x, memory, bias = normal(b, s, WIDTH), normal(b, m, 12), normal(1, HEADS, s, m)
        same_step(stock, model, x, memory, bias)
    assert not told.reasons()
    assert trace_counts(model) == [1, 0]


def test_an_index_that_cannot_be_set():
    stock, model = pair(altered.FixedIndex)
    same_step(stock, model, normal(B, S, WIDTH))
    assert trace_counts(model) == [1, 0]


@pytest.mark.parametrize("sizes", [((1, 7), (1, 9), (B, 7)), ((B, 7), (1, 7), (7, 7), (1, HEADS))])
def test_a_batch_of_one_sequence(sizes, told):
    stock, model = pair(altered.HeadsInBatch)
    for b, s in sizes:
        same_step(stock, model, normal(b, s, WIDTH), normal(b, 1, s, s), normal(b * HEADS, 1, s))
    assert not told.reasons()
    assert trace_counts(model) == [1, 0]


def test_drop_path():
    stock, model = pair(altered.Paths)
    step(copy.deepcopy(model), normal(5, S, WIDTH))  # it is read
    for seed in range(4):
        same_step(stock, model, normal(5, S, WIDTH), seed=seed)
    model.eval(), stock.eval()
    same_step(stock, model, normal(5, S, WIDTH))


def test_dropout(told):
    stock, full = pair(altered.Dropping)
    others = [convert(copy.deepcopy(stock), policy=policy) for policy in ("fast", "none")]
    x = normal(B, S, WIDTH)
    step(copy.deepcopy(full), x)  # it is read
    expected = step(full, x, seed=7)
    for model in others:
        found = step(model, x, seed=7)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    again = step(full, x, seed=8)
    assert not torch.equal(again["the result"], expected["the result"])
    assert not told
    for model in (stock, full, *others):
        model.eval()
    for model in (full, *others):
        same_step(stock, model, x)


def test_reverted():
    stock, model = pair(altered.LearnedGate)
    x = normal(B, S, WIDTH)
    same_step(stock, model, x)
    revert(model)
    assert all(type(layer) is altered.LearnedGate for layer in model.layers)
    assert all(
        vars(a).keys() == vars(b).keys() for a, b in zip(model.layers, stock.layers, strict=True)
    )
    expected, found = step(stock, x), step(model, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    same_step(stock, convert(model), x)


def test_masks_in_buffers_by_turns():
    """The layers of a kind share what was read; each change of a mask is another reading, once."""
    stock, model = pair(altered.BufferMask)
    read = []
    original = layer_module.trace_call
    layer_module.trace_call = lambda *a, **k: read.append(1) or original(*a, **k)
    try:
        for shift in (0, 1, 0, 1, 0, 1):
            for each in (stock, model):
                for one in each.layers:
                    seen = one.attn.seen
                    seen.copy_(torch.ones_like(seen).tril(shift))
            same_step(stock, model, normal(B, S, WIDTH))
    finally:
        layer_module.trace_call = original
    assert len(read) <= 8
