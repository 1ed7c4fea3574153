"""`memory_report`: what it measures, of which models, and that all is as before afterwards."""

import dataclasses
import gc
import importlib
import json
import sys
from collections import OrderedDict

import pytest
import torch
from reference import RUNGS
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, MemoryReport, Policy, convert, memory_report
from fused_remat.autograd import OBSERVERS
from fused_remat.memory import AllocationTrace, SavedBytes, measure_allocations
from fused_remat.ops import encoder_block

B, S, D, H = 3, 40, 32, 4
TOKENS = B * S


def encoder(layers=2, dropout=0.0, norm_first=True, **kwargs):
    layer = nn.TransformerEncoderLayer(
        D, H, 4 * D, dropout, norm_first=norm_first, batch_first=True, **kwargs
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def data(dtype=torch.float32, requires_grad=False):
    return torch.randn(B, S, D, dtype=dtype, requires_grad=requires_grad)


def saved_bytes(model, *args, **kwargs):
    with SavedBytes(exclude=[*model.parameters(), *model.buffers()]) as saved:
        model(*args, **kwargs)
    return saved.total


class LanguageModel(nn.Module):
    """Ids to logits, as Hugging Face's: blocks in a ModuleList, a dict of outputs."""

    def __init__(self, layers=2, checkpointed=False, wrap="direct"):
        super().__init__()
        self.embed = nn.Embedding(50, D)
        self.layers = nn.ModuleList(encoder(1).layers[0] for _ in range(layers))
        self.head = nn.Linear(D, 50)
        self.checkpointed, self.wrap = checkpointed, wrap

    def forward(self, ids, scale=None):
        x = self.embed(ids)
        for layer in self.layers:
            if not self.checkpointed:
                x = layer(x)
            elif self.wrap == "direct":
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = checkpoint(lambda t, layer=layer: layer(t), x, use_reentrant=False)
        return {"logits": self.head(x if scale is None else x * scale), "ids": ids}


def ids():
    return torch.randint(0, 50, (B, S))


# What is measured


@pytest.mark.parametrize("policy", [*RUNGS, Policy(save={"qkv", "act"})])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_model_keeps_what_is_predicted(policy, norm_first, dropout, dtype):
    if not norm_first and isinstance(policy, Policy):
        policy = Policy(save={"sum1"})
    model = convert(encoder(3, dropout, norm_first).to(dtype), policy)
    x = data(dtype)
    report = memory_report(model, x)
    assert report.kept_bytes == report.predicted_bytes == saved_bytes(model, x) > 0
    assert [layer.name for layer in report.layers] == ["layers.0", "layers.1", "layers.2"]
    for layer in report.layers:
        assert layer.kept_bytes == layer.predicted_bytes == report.kept_bytes / 3
        assert layer.calls == 1 and layer.kind == "FusedRematLayer"
        names = [a.name for a in layer.activations]
        assert len(set(names)) == len(names) and names[0] == "input"
        assert all(a.bytes == a.predicted for a in layer.activations)
        assert sum(a.bytes for a in layer.activations) == layer.kept_bytes
        assert ("seed" in names) == (dropout > 0)
    assert [a.is_input for a in report.layers[0].activations if a.name == "input"] == [True]
    assert not any(a.is_input for a in report.layers[1].activations)


def test_activations_in_pieces(monkeypatch):
    monkeypatch.setattr("fused_remat.backends.eager._CPU_TOKENS", 16)
    report = memory_report(convert(encoder(1), "none"), data())
    (layer,) = report.layers
    assert layer.kept_bytes == layer.predicted_bytes
    up = next(a for a in layer.activations if a.name == "up")
    assert up.shape is None and up.count > B and up.bytes == up.predicted == TOKENS * 4 * D * 4
    assert "up in pieces float32" in str(report)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_stock_model_keeps_what_saved_bytes_counts(norm_first, dropout, requires_grad):
    model, x = encoder(2, dropout, norm_first), data(requires_grad=requires_grad)
    report = memory_report(model, x)
    assert report.kept_bytes == saved_bytes(model, x)
    assert report.predicted_bytes is None
    names = {a.name for a in report.layers[0].activations}
    assert {"NativeLayerNormBackward0.input", "ReluBackward0.result"} <= names
    assert "saved" not in names and "predicted" not in str(report)


def test_a_mixed_model():
    model = convert(encoder(4), "lean", every=2)
    report = memory_report(model, data())
    kinds = [layer.kind for layer in report.layers]
    assert kinds == ["FusedRematLayer", "TransformerEncoderLayer"] * 2
    fused, stock = report.layers[::2], report.layers[1::2]
    assert all(layer.kept_bytes == layer.predicted_bytes for layer in fused)
    assert all(layer.predicted_bytes is None and layer.policy is None for layer in stock)
    assert report.predicted_bytes == sum(layer.kept_bytes for layer in fused)
    assert stock[0].kept_bytes > 5 * fused[0].kept_bytes


@pytest.mark.parametrize("wrap", ["direct", "lambda"])
@pytest.mark.parametrize("fused", [True, False])
def test_under_checkpoint_a_layer_keeps_its_input(wrap, fused):
    model = LanguageModel(3, checkpointed=True, wrap=wrap)
    model = convert(model) if fused else model
    report = memory_report(model, ids())
    for layer in report.layers[:3]:
        (only,) = layer.activations
        assert (only.name, only.shape, only.bytes) == ("checkpoint", (B, S, D), TOKENS * D * 4)
        assert layer.calls == 1 and layer.predicted_bytes is None
        assert layer.backward_peak > 10 * only.bytes  # the layer, run again
    assert report.kept_bytes == saved_bytes(model, ids())


def test_nothing_is_unpacked_by_naming():
    class Counting(nn.Module):
        unpacked = 0

        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, self.unpack):
                return x.exp().sin()

        def unpack(self, t):
            self.unpacked += 1
            return t

    model = Counting()
    memory_report(model, data(requires_grad=True))
    assert model.unpacked == 2  # backward's own


def test_a_fused_layer_that_falls_back():
    model = convert(encoder(2))
    model.layers[0].linear1.register_forward_hook(lambda *_: None)
    with pytest.warns(match="has hooks"):
        first, second = memory_report(model, data()).layers
    assert first.predicted_bytes is None and [a.name for a in first.activations] == ["checkpoint"]
    assert second.predicted_bytes == second.kept_bytes


def test_a_sequential_mlp():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    report = memory_report(model, x)
    found = [[(a.name, a.shape, a.bytes) for a in layer.activations] for layer in report.layers]
    assert found == [
        [("AddmmBackward0.mat1", (5, 8), 160)], [("ReluBackward0.result", (5, 16), 320)], []
    ]  # fmt: skip
    assert [layer.name for layer in report.layers] == ["0", "1", "2"]
    assert report.tokens == 5 and report.kept_bytes == saved_bytes(model, x)


def test_a_layer_applied_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = FusedRematLayer(D, H, 4 * D, batch_first=True)

        def forward(self, x):
            return self.layer(self.layer(x))

    model = Twice()
    report = memory_report(model, data())
    (layer,) = report.layers
    assert layer.calls == 2 and "called 2×" in str(report)
    assert layer.kept_bytes == layer.predicted_bytes
    once = memory_report(model.layer, data())
    assert report.kept_bytes == 2 * once.kept_bytes
    assert once.layers[0].name == "(model)"


def test_what_is_outside_the_layers():
    report = memory_report(convert(LanguageModel(), "balanced"), ids())
    *layers, other = report.layers
    assert all(layer.kept_bytes == layer.predicted_bytes for layer in layers)
    assert (other.name, other.kind, other.calls) == ("(other)", "", 0)
    assert [a.name for a in other.activations] == [
        "EmbeddingBackward0.indices", "AddmmBackward0.mat1"
    ]  # fmt: skip
    assert other.activations[0].is_input and report.tokens == TOKENS


def test_a_block_as_a_function():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            shapes = {"qkv": (3 * D, D), "proj": (D, D), "fc1": (D, D), "fc2": (D, D)}
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.randn(shape)))

        def forward(self, x, mask):
            weights = {f"{name}.weight": p for name, p in self.named_parameters()}
            return encoder_block(x, weights, H, mask, policy="lean", norm_first=True)

    mask = torch.ones(S, S, dtype=torch.bool).tril()
    (other,) = memory_report(Functional(), data(), mask).layers
    found = {a.name: a for a in other.activations}
    assert other.kept_bytes == other.predicted_bytes + mask.nbytes
    assert (found["mask"].bytes, found["mask"].predicted) == (mask.nbytes, 0)
    assert found["mask"].is_input and found["attn"].bytes == TOKENS * D * 4


def test_masks_that_are_buffers_do_not_count():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = FusedRematLayer(D, H, 4 * D, batch_first=True)
            self.register_buffer("mask", torch.randn(S, S))

        def forward(self, x):
            return self.layer(x, src_mask=self.mask)

    report = memory_report(Causal(), data())
    assert report.kept_bytes == report.predicted_bytes


def test_frozen_parameters():
    model = convert(encoder(2), "none")
    full = memory_report(model, data())
    model.requires_grad_(False)
    nothing = memory_report(model, data())
    assert nothing.kept_bytes == 0 and nothing.predicted_bytes is None
    assert nothing.layers[0].forward_peak > 0 == nothing.layers[0].backward_peak
    assert "total" in str(nothing)
    frozen = memory_report(model, data(requires_grad=True))
    assert 0 < frozen.kept_bytes == frozen.predicted_bytes <= full.kept_bytes
    model.layers[1].requires_grad_(True)
    half = memory_report(model, data())
    assert half.layers[0].kept_bytes == 0 < half.layers[1].kept_bytes == half.predicted_bytes


@pytest.mark.parametrize("fused", [True, False])
def test_inside_no_grad(fused):
    model, x = encoder(1), data()
    model = convert(model) if fused else model
    expected = memory_report(model, x)
    with torch.no_grad():
        assert memory_report(model, x) == expected
    with torch.inference_mode():
        assert memory_report(model, x) == expected
    assert expected.kept_bytes > 0


def test_sparse_and_subclass_tensors():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 3))

        def forward(self, x):
            return torch.sparse.mm(x, self.weight)

    x = torch.eye(6).to_sparse()
    report = memory_report(Sparse(), x)
    assert report.kept_bytes == x._indices().nbytes + x._values().nbytes
    assert all(a.is_input for a in report.layers[0].activations)


# Peaks


def test_spans_of_a_trace():
    with AllocationTrace() as trace:
        x = torch.zeros(1000)
        trace.mark("a")
        y = x + torch.zeros(1000)
        trace.mark("b")
        del x
    assert [(s.label, s.start, s.peak, s.end) for s in trace.spans] == [
        (None, 0, 4000, 4000), ("a", 4000, 12000, 8000), ("b", 8000, 8000, 4000)
    ]  # fmt: skip
    del y
    with pytest.raises(NotImplementedError, match="not meta"):
        AllocationTrace("meta")


@pytest.mark.parametrize("fused", [True, False])
def test_the_peak_of_the_step_is_that_of_a_step(fused):
    model, x = encoder(3), data()
    model = convert(model) if fused else model
    report = memory_report(model, x)
    params = list(model.parameters())
    step = measure_allocations(lambda: torch.autograd.grad(model(x).sum(), params))
    assert abs(report.peak_bytes - step.peak) <= 64  # the sum that backward starts from


def test_peaks_are_those_of_the_layers():
    class Wide(nn.Module):
        def forward(self, x):
            return x.repeat(1, 64).exp().sum(1, keepdim=True) * x

    x = torch.randn(256, 1)
    model = nn.Sequential(nn.Linear(1, 1), Wide(), nn.Linear(1, 1))
    first, wide, last = memory_report(model, x).layers
    wide_bytes = 64 * x.nbytes
    assert 2 * wide_bytes <= wide.forward_peak <= 2 * wide_bytes + 4 * x.nbytes
    assert 0.9 * wide_bytes <= wide.backward_peak <= 3 * wide_bytes
    assert max(first.forward_peak, first.backward_peak, last.forward_peak, last.backward_peak) < (
        wide_bytes / 4
    )


def test_what_comes_before_the_first_layer_is_none_of_its_peak():
    model = LanguageModel(3)
    model.embed = nn.Embedding(20_000, D)  # whose gradient is larger than all else
    report = memory_report(model, ids())
    *layers, other = report.layers
    assert other.backward_peak >= model.embed.weight.nbytes
    assert max(layer.backward_peak for layer in layers) < model.embed.weight.nbytes
    assert len({layer.backward_peak for layer in layers}) == 1


# Models, inputs and outputs


class ModelOutput(OrderedDict):
    """As Hugging Face's: a dataclass that is a mapping, too."""

    def __post_init__(self):
        for entry in dataclasses.fields(self):
            if getattr(self, entry.name) is not None:
                self[entry.name] = getattr(self, entry.name)


@dataclasses.dataclass
class Hidden(ModelOutput):
    last: torch.Tensor = None
    hidden: tuple = None
    loss: torch.Tensor = None


@dataclasses.dataclass
class Plain:
    last: torch.Tensor
    count: int = 3


OUTPUTS = {
    "tuple": lambda y: (y, None, "text"),
    "nested": lambda y: [{"a": (y, 3)}],
    "model output": lambda y: Hidden(last=y, hidden=(y, y)),
    "dataclass": Plain,
    "named tuple": lambda y: torch.return_types.max((y, y.long())),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(kind):
    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = encoder(1).layers

        def forward(self, x, *, flag):
            assert flag
            return OUTPUTS[kind](self.layers[0](x))

    report = memory_report(Returning(), data(), flag=True)
    assert report.layers[0].backward_peak > 0
    assert report.kept_bytes > 0
    assert "saved" not in {a.name for a in report.layers[0].activations}


def test_outputs_without_numbers():
    class Argmax(nn.Module):
        def forward(self, x):
            return {"class": x.argmax(-1)}

    with pytest.raises(TypeError, match="returned dict without a floating-point tensor"):
        memory_report(Argmax(), data())
    with pytest.raises(TypeError, match=r"takes an nn\.Module, got function"):
        memory_report(lambda x: x, data())


def test_keyword_inputs():
    model, x = LanguageModel(1), ids()
    scale = torch.full((D,), 2.0, requires_grad=True)
    report = memory_report(model, ids=x, scale=scale)
    other = report.layers[-1]
    assert report.tokens == TOKENS and scale.grad is None
    assert [a.is_input for a in other.activations if a.bytes == scale.nbytes] == [True]


def test_intermediate_results_as_inputs():
    leaf = data(requires_grad=True)
    x = leaf.exp()
    x.register_hook(lambda g: calls.append(g))
    calls = []
    model = encoder(1)
    report = memory_report(model, x)
    assert report.kept_bytes > 0 and not calls
    x.sum().backward()  # its graph is still there
    assert leaf.grad is not None and len(calls) == 1


def test_lazy_parameters():
    with pytest.raises(ValueError, match="lazy parameters"):
        memory_report(nn.LazyLinear(3), data())


# Which layers


def test_default_layers():
    names = lambda model, *args: [x.name for x in memory_report(model, *args).layers]  # noqa: E731
    decoder = nn.TransformerDecoderLayer(D, H, 4 * D, batch_first=True)
    transformer = nn.Transformer(
        D, H, 1, 0, 4 * D, batch_first=True,
        custom_decoder=nn.TransformerDecoder(decoder, 2),
    )  # fmt: skip
    assert names(transformer, data(), data()) == [
        "encoder.layers.0", "decoder.layers.0", "decoder.layers.1", "(other)"
    ]  # fmt: skip
    nested = nn.Sequential(nn.Sequential(nn.Linear(D, D), nn.Tanh()), nn.Linear(D, 1))
    assert names(nested, data()) == ["0", "1"]
    assert names(nn.Bilinear(D, D, 2), data(), data()) == ["(model)"]
    attention = nn.MultiheadAttention(D, H, batch_first=True)
    assert names(attention, data(), data(), data())[0] == "out_proj"  # its only child, not called


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, D), nn.Tanh())

    def forward(self, x):
        return self[1](self[0](x))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["wrapped", "inner", "in place"])
def test_what_is_compiled_is_one_layer(how):
    mlp = Mlp()
    if how == "in place":
        mlp.compile(backend="aot_eager")
        model, name = nn.Sequential(mlp, nn.ReLU()), "0"
    else:
        compiled = torch.compile(mlp, backend="aot_eager")
        model, name = {
            "wrapped": (compiled, "(model)"), "inner": (nn.Sequential(compiled, nn.ReLU()), "0")
        }[how]  # fmt: skip
    call = mlp._compiled_call_impl
    for _ in range(2):  # compiling, and compiled
        report = memory_report(model, data())
        assert report.kept_bytes == saved_bytes(model, data())
        first = report.layers[0]
        assert (first.name, first.calls) == (name, 1)
        assert first.kept_bytes >= 2 * TOKENS * D * 4 and first.backward_peak > 0
    assert mlp._compiled_call_impl is call
    with pytest.raises(ValueError, match="a compiled module, whose submodules"):
        memory_report(model, data(), layers=["0.1" if how == "in place" else "*_orig_mod.1"])


def test_checkpoint_is_named_while_the_compiler_is_loaded():
    importlib.import_module("torch._dynamo")
    layer = memory_report(LanguageModel(1, checkpointed=True), ids()).layers[0]
    assert [a.name for a in layer.activations] == ["checkpoint"]


def test_jagged_tensors():
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh()), data()
    jagged = torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged)
    report = memory_report(model, jagged)
    assert MemoryReport.from_json(report.to_json()) == report
    assert report.kept_bytes > memory_report(model, x).kept_bytes  # its offsets, too


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_layers_take_no_hooks():
    model = nn.Sequential(nn.Linear(D, D), torch.jit.script(nn.Sequential(nn.Tanh())))
    with pytest.raises(RuntimeError, match="hook is not supported on ScriptModules"):
        memory_report(model, data())
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    first, other = memory_report(model, data(), layers=["0"]).layers
    assert first.kept_bytes == other.kept_bytes == TOKENS * D * 4


def test_patterns():
    model, x = encoder(3), data()
    names = lambda layers: [r.name for r in memory_report(model, x, layers=layers).layers]  # noqa: E731
    assert names(["layers.[02]"]) == ["layers.0", "layers.2", "(other)"]
    assert names(["layers.*"]) == ["layers.0", "layers.1", "layers.2"]
    assert names("layers.1") == ["layers.1", "(other)"]
    assert names(["layers.0.linear1", "layers.0.norm2"])[:2] == [
        "layers.0.linear1", "layers.0.norm2"
    ]  # fmt: skip
    assert names([""]) == ["(model)"]
    assert names([]) == ["(other)"]
    with pytest.raises(ValueError, match=r"no module matches 'blocks\.\*'; modules: 'layers', "):
        names(["blocks.*"])
    convert(model)
    with pytest.raises(ValueError, match=r"inside 'layers\.0', a fused layer"):
        names(["layers.0.linear1"])


def test_every_choice_of_layers_keeps_the_same():
    model, x = LanguageModel(2), ids()
    totals = {memory_report(model, x, layers=c).kept_bytes for c in (None, ["*"], ["head"], [""])}
    assert totals == {saved_bytes(model, x)}


# Everything as before


class Stateful(nn.Module):
    """Draws random numbers, updates buffers, changes modes; fails where it is told to."""

    def __init__(self, fail=None):
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.layer = FusedRematLayer(D, H, 4 * D, 0.1)
        self.register_buffer("steps", torch.zeros(()))
        self.fail = fail

    def forward(self, x):
        self.steps = self.steps + 1
        self.norm.eval()
        self.norm.train()
        self.layer.linear1.training = False
        y = self.layer(self.norm(x.flatten(0, 1)).view(x.shape))
        if self.fail == "forward":
            raise RuntimeError("forward failed")
        if self.fail == "backward":
            y.register_hook(self.raise_)
        return y

    def raise_(self, grad):
        raise RuntimeError("backward failed")


@pytest.mark.parametrize("fail", [None, "forward", "backward"])
def test_everything_is_as_before(fail):
    model, x = Stateful(fail), data(requires_grad=True)
    steps, hooks = model.steps, []
    model.layer.eval()
    model.layer.register_forward_hook(lambda *_: hooks.append("forward"))
    grads = [torch.randn_like(p) for p in (x, *model.parameters())]
    for p, grad in zip((x, *model.parameters()), grads, strict=True):
        p.grad = grad
    values = [(b, b.clone()) for b in model.buffers()]
    modes = [m.training for m in model.modules()]
    tables = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    state, seen = torch.get_rng_state(), [g.clone() for g in grads]
    if fail is None:
        memory_report(model, x)
    else:
        with pytest.raises(RuntimeError, match=f"{fail} failed"):
            memory_report(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.steps is steps
    assert all(torch.equal(b, value) for b, value in values)
    assert [m.training for m in model.modules()] == modes
    assert tables == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    for p, grad, value in zip((x, *model.parameters()), grads, seen, strict=True):
        assert p.grad is grad and torch.equal(grad, value)
    assert not x._backward_hooks and not OBSERVERS
    assert hooks == ["forward"]
    assert measure_allocations(lambda: None).net == 0  # the profiler can start again


def test_optimizers_in_backward_do_not_step():
    model, x = convert(encoder(1)), data()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: pytest.fail("stepped"))
    memory_report(model, x)
    assert all(p.grad is None for p in model.parameters())


def test_buffers_in_a_graph_of_before_stay_valid():
    norm, x = nn.BatchNorm1d(D).eval(), torch.randn(5, D, requires_grad=True)
    y = norm(x)
    memory_report(norm, x)
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_nothing_stays_alive():
    tensors = lambda: sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())  # noqa: E731
    model, x = convert(LanguageModel(2)), ids()
    memory_report(model, x)
    gc.collect()
    before = tensors()
    report = memory_report(model, x)
    gc.collect()
    assert tensors() == before and report.kept_bytes


def test_kept_storages_are_freed_as_backward_goes():
    """Nobody but the graph holds them: backward of many layers needs little above what is kept."""
    report = memory_report(nn.Sequential(*(nn.Tanh() for _ in range(50))), data(requires_grad=True))
    assert report.peak_bytes <= report.kept_bytes + 5 * TOKENS * D * 4


def test_reentrant_checkpoint_raises_pytorchs_error():
    class Reentrant(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=True)

    with pytest.raises(RuntimeError, match="use_reentrant"):
        memory_report(Reentrant(), data(requires_grad=True))


# As text and picture


def test_table():
    text = str(memory_report(convert(encoder(12), "lean"), data()))
    lines = text.splitlines()
    assert lines[0] == "TransformerEncoder" and lines[1].split("  ")[-1] == "backward peak"
    assert "layers.1 … layers.11 (11×) FusedRematLayer lean" in text
    assert any(line.startswith("  attn 120×32 float32 ") for line in lines)
    assert "* passed to the model" in text
    assert max(map(len, lines)) <= 120
    assert len({line.rindex("B") for line in lines[2:5] if "input" in line}) == 1
    brief = memory_report(encoder(12), data()).table(activations=False)
    assert len(brief.splitlines()) <= 6 and "Backward0" not in brief


def test_equal_layers_are_listed_once():
    text = str(memory_report(convert(LanguageModel(4), every=2), ids()))
    assert text.count("ReluBackward0.result") == 1 == text.count("  norm1.mean")


def test_json_round_trip(tmp_path):
    report = memory_report(convert(LanguageModel(), Policy(save={"attn", "qkv"})), ids())
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == text + "\n"
    assert MemoryReport.from_json(text) == report
    given = json.loads(text)
    assert given["kept_bytes"] == report.kept_bytes
    assert given["layers"][0]["policy"] == "{attn, qkv}"
    assert given["layers"][0]["activations"][0]["name"] == "input"


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(tmp_path, suffix):
    matplotlib = pytest.importorskip("matplotlib")
    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend(auto_select=False)
    path = tmp_path / f"report{suffix}"
    memory_report(convert(LanguageModel(3), every=2), ids()).plot(path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert path.stat().st_size > 5000
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.get_backend(auto_select=False) == backend


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"fused-remat\[bench\]"):
        memory_report(nn.Linear(2, 2), torch.randn(3, 2)).plot(tmp_path / "report.png")


def test_disabled_hooks_leave_nothing_behind():
    from fused_remat.autograd import OBSERVERS

    layer = FusedRematLayer(16, 2, 32)
    with torch.autograd.graph.disable_saved_tensors_hooks("no"), pytest.raises(RuntimeError):
        memory_report(layer, torch.randn(3, 2, 16))
    assert not OBSERVERS
