"""`explain`: what runs each step, and why."""

import pytest
import torch
from report_models import Model, data, traced
from torch import nn

from fused_remat import FusedRematLayer, convert, explain, ops
from fused_remat.autograd.function import OBSERVERS
from fused_remat.execution.observe import TRACERS

X = torch.randn(3, 16, 64)


def layer(dropout=0.0, **kwargs):
    return FusedRematLayer(64, 4, 256, dropout, batch_first=True, norm_first=True, **kwargs)


def routine(found, name):
    return dict(found[0].forward)[name]


def test_it_says_what_is_kept_and_what_is_rebuilt():
    (found,) = explain(layer(policy="lean"), X)
    assert found.name == "FusedRematLayer" and "encoder_prenorm" in found.title
    assert {"attn", "attn.lse", "norm1.rstd"} <= set(found.kept)
    steps = found.backward
    assert "compute up" in steps and "compute attn" not in steps
    assert steps.index("compute up") < steps.index("backward act") < steps.index("backward up")
    text = str(found)
    assert "attn    kept  ATen's flash kernel" in text and "rebuild up" in text


@pytest.mark.parametrize(
    ("kwargs", "call", "reason"),
    [
        ({"dropout": 0.1}, {}, "dropout draws"),
        ({}, {"src_mask": torch.zeros(16, 16, requires_grad=True)}, "a mask requires a gradient"),
        ({}, {"src_mask": torch.full((16, 16), -1e9)}, "finite and below"),
    ],
)
def test_it_says_why_the_flash_kernel_does_not_run(kwargs, call, reason):
    assert reason in routine(explain(layer(**kwargs), X, **call), "attn")


def test_dtypes_of_autocast_are_said():
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = explain(layer(), X)
    assert "products in bfloat16, stream in float32" in found.title
    steps = dict(found.forward)
    assert "rounded to bfloat16" in steps["norm1"]
    assert "added to the residual in the stream's dtype" in steps["mid"]


def test_pieces_are_said(monkeypatch):
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: 8)
    (found,) = explain(layer(), X)
    assert "3 × 1 sequences, then tiles of 8 tokens" in found.title
    assert [name for name, _ in found.forward].count("up") == 1  # one chunk stands for all


def test_a_fallback_gives_its_reason():
    odd = layer()
    odd.norm1 = nn.RMSNorm(64)
    with pytest.warns(UserWarning, match="RMSNorm"):
        (found,) = explain(odd, X)
    assert found.reason == "norm1 is torch.nn.RMSNorm; the fused path supports torch.nn.LayerNorm"
    assert not found.forward and "not fused: norm1 is" in str(found)
    own = "FusedRematLayer, PyTorch's own forward"
    assert found.title == f"{own} under checkpointing, which keeps its arguments"
    odd.policy = "none"
    with pytest.warns(UserWarning, match="RMSNorm"):
        assert explain(odd, X)[0].title == f"{own}, which keeps all its activations"
    with torch.no_grad():
        (found,) = explain(convert(traced())[0], data())
    assert (found.title, found.reason) == (
        "TracedLayer, its own forward",
        "no gradients are required",
    )


def test_every_layer_of_a_model_in_order():
    model = nn.TransformerEncoder(layer(), 3)
    found = explain(model, X)
    assert [block.name for block in found] == ["layers.0", "layers.1", "layers.2"]
    assert not explain(model, X[:, :0])  # nothing runs
    assert not explain(model.eval().requires_grad_(False), X)[0].backward


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_layers_before_their_first_step():
    stock, fused = explain(traced([1]), data()), explain(convert(traced([1])), data())
    assert [block.name for block in fused] == ["0", "1", "2"]
    for i, (before, after) in enumerate(zip(stock, fused, strict=True)):
        if i == 1:
            assert before.reason == "convert runs it under checkpointing: up has hooks"
            assert after.reason == "up has hooks" and "under checkpointing" in after.title
        else:
            names = ", ".join(name for name, _ in after.forward)
            assert before.reason == f"convert makes it a block: {names}"


def test_a_model_without_blocks():
    assert str(explain(nn.Linear(2, 2), torch.zeros(1, 2))) == (
        "no layer ran as a block: convert the model first"
    )


def test_layers_that_are_not_called_come_last():
    model = convert(Model(lambda self, x: self.layers[1](x), layers=traced()))
    called, *others = explain(model, data())
    assert called.name == "layers.1" and called.forward
    assert [str(block) for block in others] == [
        f"layers.{i}: TracedLayer, not called" for i in (0, 2)
    ]


def test_ops_outside_a_layer():
    weight = torch.ones(64, requires_grad=True)
    (found,) = explain(Model(lambda self, x: ops.rms_norm(x, weight)), X)
    assert found.name == "(op)" and found.kept == ("input", "output.rstd")


def test_nothing_is_left_behind():
    """No hooks, no draws, no statistics; nor after an error."""
    fused = layer(0.1)
    model = nn.Sequential(fused, nn.BatchNorm1d(16))
    torch.manual_seed(0)
    explain(model, X)
    after = torch.rand(2)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(2))
    assert model[1].num_batches_tracked == 0
    assert not fused._forward_pre_hooks and not fused._forward_hooks
    with pytest.raises(RuntimeError, match="normalized_shape"):
        explain(model, X[..., :5])
    assert not fused._forward_pre_hooks
    assert not OBSERVERS and not TRACERS
