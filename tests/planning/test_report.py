"""`memory_report`: what is kept, against the prediction and saving hooks, and peaks."""

import pytest
import torch
from reference import EXACT_PRESETS
from report_models import (
    TOKENS,
    B,
    D,
    H,
    LanguageModel,
    Model,
    S,
    data,
    encoder,
    ids,
    saved_bytes,
    traced,
)
from tiers import pairwise
from torch import nn

from fused_remat import FusedRematLayer, MemoryReport, Policy, convert, memory_report
from fused_remat.ops import encoder_block
from fused_remat.report.allocations import AllocationTrace, measure_allocations

# What is measured


@pytest.mark.parametrize(
    "policy, norm_first, dropout, dtype, fixture",
    pairwise(
        [*EXACT_PRESETS, Policy(save={"qkv", "act"})], [True, False], [0.0, 0.1],
        [torch.float32, torch.bfloat16], ["served", "pieces"],
    ),
)  # fmt: skip
def test_a_fused_model_keeps_what_is_predicted(
    policy, norm_first, dropout, dtype, fixture, request
):
    request.getfixturevalue(fixture)
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


@pytest.mark.parametrize(
    "dropout, norm_first, requires_grad", [(0.0, True, False), (0.1, False, True)]
)
def test_a_stock_model_keeps_what_saved_bytes_counts(dropout, norm_first, requires_grad):
    model, x = encoder(2, dropout, norm_first), data(requires_grad=requires_grad)
    report = memory_report(model, x)
    assert report.kept_bytes == saved_bytes(model, x)
    assert report.predicted_bytes is None
    names = {a.name for a in report.layers[0].activations}
    assert {"NativeLayerNormBackward0.input", "ReluBackward0.result"} <= names
    assert "saved" not in names and "predicted" not in str(report)


LAYER = FusedRematLayer(D, H, 4 * D, batch_first=True)
FUSED, STOCK = "FusedRematLayer", "TransformerEncoderLayer"
MIXED = [(f"layers.{i}", (FUSED, STOCK)[i % 2], 1, None) for i in range(4)]
INSIDE = [(f"layers.{i}", FUSED, 1, None) for i in range(2)]
OTHER = ("(other)", "", 0, ["EmbeddingBackward0.indices", "AddmmBackward0.mat1"])
MLP = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
PLAIN = [
    ("0", "Linear", 1, ["AddmmBackward0.mat1"]), ("1", "ReLU", 1, ["ReluBackward0.result"]),
    ("2", "Linear", 1, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        (convert(encoder(4), "lean", every=2), data(), MIXED),
        (convert(LanguageModel(), "balanced"), ids(), [*INSIDE, OTHER]),
        (LAYER, data(), [("(model)", FUSED, 1, None)]),
        (Model(lambda self, x: self.layer(self.layer(x)), layer=LAYER), data(),
         [("layer", FUSED, 2, None)]),
        (MLP, torch.randn(TOKENS, 8), PLAIN),
    ],
)  # fmt: skip
def test_rows(model, x, expected):
    """What is listed, how often it is called, and by name what is kept but by fused layers."""
    report = memory_report(model, x)
    assert [(row.name, row.kind, row.calls) for row in report.layers] == [e[:3] for e in expected]
    for row, (*_, names) in zip(report.layers, expected, strict=True):
        assert row.predicted_bytes == (row.kept_bytes if row.kind == FUSED else None)
        assert (row.policy is not None) == (row.kind == FUSED)
        assert (f"called {row.calls}×" in str(report)) == (row.calls > 1)
        assert names in (None, [a.name for a in row.activations])
    assert report.kept_bytes == saved_bytes(model, x)
    predicted = [row.predicted_bytes for row in report.layers if row.kind == FUSED]
    assert report.predicted_bytes == (sum(predicted) if predicted else None)


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


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
@pytest.mark.parametrize("policy", ["lean", "none"])
def test_layers_that_are_no_blocks(policy):
    """Before the first step as after it, with what checkpointing keeps, or a plain forward."""
    model = convert(traced([1]), policy)
    reports = [memory_report(model, data()) for _ in range(2)]
    model(data()).sum().backward()
    reports.append(memory_report(model, data()))
    assert reports[0] == reports[1] == reports[2]
    first, other, _ = reports[0].layers
    assert (first.ran, first.reason, other.reason) == ("block", "", "up has hooks")
    assert first.kept_bytes == first.predicted_bytes and other.predicted_bytes is None
    assert reports[0].kept_bytes == saved_bytes(model, data())
    state = "plain" if policy == "none" else "checkpointed"
    assert other.ran == ("plain" if policy == "none" else "checkpoint")
    assert f"1 TracedLayer {state} " in str(reports[0])
    assert f"1 {state}: up has hooks" in str(reports[0])
    if policy == "lean":
        assert other.kept_bytes == data().nbytes == sum(a.bytes for a in other.activations)
    assert MemoryReport.from_json(reports[0].to_json()) == reports[0]


def test_a_block_as_a_function():
    def forward(self, x, mask):
        weights = {f"{name}.weight": p for name, p in self.named_parameters()}
        return encoder_block(x, weights, H, mask, policy="lean", norm_first=True)

    rows = {"qkv": 3 * D, "proj": D, "fc1": D, "fc2": D}
    params = {name: nn.Parameter(torch.randn(n, D)) for name, n in rows.items()}
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    model = Model(forward, **params)
    (other,) = memory_report(model, data(), mask).layers
    found = {a.name: a for a in other.activations}
    assert other.kept_bytes == other.predicted_bytes + mask.nbytes
    assert (found["mask"].bytes, found["mask"].predicted) == (mask.nbytes, 0)
    assert found["mask"].is_input and found["attn"].bytes == TOKENS * D * 4
    model.register_buffer("mask", mask)  # which does not count
    (same,) = memory_report(model, data(), mask).layers
    assert same.kept_bytes == same.predicted_bytes == other.predicted_bytes


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
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert memory_report(model, x) == expected
    assert expected.kept_bytes > 0


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
    with pytest.raises(NotImplementedError, match="not on meta"):
        AllocationTrace("meta")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("fused", [True, False])
def test_the_peak_of_the_step_is_that_of_a_step(fused):
    model, x = encoder(3), data()
    model = convert(model) if fused else model
    report = memory_report(model, x)
    params = list(model.parameters())
    step = measure_allocations(lambda: torch.autograd.grad(model(x).sum(), params))
    assert abs(report.peak_bytes - step.peak) <= 64  # the sum that backward starts from


@pytest.mark.usefixtures("one_thread")
def test_peaks_are_those_of_the_layers():
    wide = Model(lambda self, x: x.repeat(1, 64).exp().sum(1, keepdim=True) * x)
    x = torch.randn(256, 1)
    first, wide, last = memory_report(
        nn.Sequential(nn.Linear(1, 1), wide, nn.Linear(1, 1)), x
    ).layers
    wide_bytes = 64 * x.nbytes
    assert 2 * wide_bytes <= wide.forward_peak <= 2 * wide_bytes + 4 * x.nbytes
    assert 0.9 * wide_bytes <= wide.backward_peak <= 3 * wide_bytes
    for narrow in (first, last):
        assert max(narrow.forward_peak, narrow.backward_peak) < wide_bytes / 4
