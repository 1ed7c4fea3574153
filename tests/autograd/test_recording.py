"""Passes that are repeated from a record (`execution.recording`) give what their steps give."""

import copy
import re

import pytest
import torch
from reference import EXACT_PRESETS
from torch import nn

from fused_remat import FusedRematCausalLayer, FusedRematLayer
from fused_remat.execution import recording

BATCH, SEQ, WIDTH = 2, 16, 32


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(recording, "FEW", 0)
    monkeypatch.setattr(recording.Recordings, "all_calls", 0)


def encoder(**options):
    return FusedRematLayer(WIDTH, 4, 64, 0.0, batch_first=True, **options)


def causal(**options):
    return FusedRematCausalLayer(
        WIDTH, 4, 64, 0.0, "silu", kv_heads=2, qk_norm=True, softcap=30.0, placement="sandwich",
        **options,
    )  # fmt: skip


def batch(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(BATCH, SEQ, WIDTH, dtype=dtype)


def step(layer, x, *given, dy=None):
    """The output and all gradients of a step."""
    inputs = [t.detach().requires_grad_() for t in (x, *given)]
    params = [p for p in layer.parameters() if p.requires_grad]
    y = layer(*inputs)
    dy = torch.ones_like(y).mul_(y.detach()) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, [*inputs, *params], dy)]


def recordings(layer, x, *given):
    execution = layer(x.detach().requires_grad_(), *given).grad_fn.execution
    found = execution.recordings
    return {} if found.off else {kind[0]: run for kind, run in found.passes.items()}


def check(layer, *calls, **options):
    """Each call is repeated twice from its record, and gives what the first one gives."""
    expected = [step(layer, *call, **options) for call in calls]
    for _ in range(2):
        for call, first in zip(calls, expected, strict=True):
            for a, b in zip(step(layer, *call, **options), first, strict=True):
                assert a.equal(b)
                assert a.stride() == b.stride()
            assert {*recordings(layer, *call)} == {"forward", "backward"}


@pytest.mark.parametrize("policy", EXACT_PRESETS)
@pytest.mark.parametrize("make", [encoder, causal], ids=["encoder", "causal"])
def test_every_policy(make, policy):
    layer = make(policy=policy)
    check(layer, (batch(1),), (batch(2),))


def test_both_passes_are_recorded_and_run_no_step(monkeypatch):
    layer, x = encoder(), batch(1)
    step(layer, x)
    found = recordings(layer, x)
    assert all(callable(found[name]) for name in ("forward", "backward"))
    monkeypatch.setattr("fused_remat.steps.linear.Linear.forward", None)
    step(layer, x)


@pytest.mark.parametrize(("name", "value"), [("ON", False), ("_MOST_CALLS", 0)])
def test_nothing_is_recorded_where_that_is_off_or_enough_is(name, value, monkeypatch):
    monkeypatch.setattr(recording, name, value)
    layer, x = FusedRematLayer(24, 2, 40, 0.0, batch_first=True), torch.randn(3, 5, 24)
    for _ in range(3):
        step(layer, x)
    assert not any(map(callable, recordings(layer, x).values()))


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_output_may_be_changed_in_place(norm_first):
    """It is no view, and of a last norm it is the norm's own result."""
    layer, x = encoder(norm_first=norm_first), batch(1)
    for _ in range(3):
        given = x.clone().requires_grad_()
        y = layer(given)
        assert not y._is_view()
        expected = torch.autograd.grad(y.sum() * 2.0, given, retain_graph=True)
        y.mul_(2.0)
        assert torch.autograd.grad(y.sum(), given)[0].equal(expected[0])
        with torch.no_grad():
            y = layer(x)
        y.add_(layer.linear2.bias)


def test_dropout_draws_anew():
    layer = FusedRematLayer(WIDTH, 4, 64, 0.5, batch_first=True)
    x = batch(1)
    torch.manual_seed(3)
    expected = [step(layer, x) for _ in range(3)]
    torch.manual_seed(3)
    for first in expected:
        assert all(a.equal(b) for a, b in zip(step(layer, x), first, strict=True))
    assert not expected[0][0].equal(expected[1][0])
    assert len(recordings(layer, x)) == 2


def test_parameters_of_other_dtype_memory_and_requirement():
    layer, x = encoder(policy="none"), batch(1)
    check(layer, (x,))
    for change in (
        lambda: layer.linear1.weight.data.copy_(torch.ones(64, WIDTH)),
        lambda: setattr(layer.linear1.weight, "data", torch.ones(WIDTH, 64).t() * 0.1),
        lambda: setattr(layer, "linear2", nn.Linear(64, WIDTH)),
        lambda: layer.linear1.weight.requires_grad_(False),
        lambda: layer.double(),
    ):
        change()
        x = x.to(layer.linear1.weight.dtype)
        check(layer, (x,))
        stock = copy.deepcopy(layer)
        stock.__class__ = nn.TransformerEncoderLayer
        torch.testing.assert_close(layer(x), stock(x))


def test_observers_see_every_step():
    layer, x = encoder(), batch(1)
    for _ in range(3):
        step(layer, x)
    with torch.profiler.profile() as profile:
        step(layer, x)
    assert "fused_remat::compute attn" in {event.name for event in profile.events()}


def test_a_record_holds_no_tensor():
    layer, x = encoder(), batch(1)
    step(layer, x)
    for found in recordings(layer, x).values():
        assert not re.search(r"Tensor = prim::Constant", str(found.args[0].graph))
