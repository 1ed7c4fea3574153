"""Passes that are repeated from a record (`execution.recording`) give what their steps give."""

import copy
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fused_remat import FusedRematCausalLayer, FusedRematDecoderLayer, FusedRematLayer, ops
from fused_remat.execution import executor, recording
from fused_remat.execution.prepare import pieces_of
from fused_remat.policies import EXACT_PRESETS
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps import linear

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


def test_what_a_repeated_pass_holds_is_what_its_steps_hold(monkeypatch):
    """Dropout's masks above all, which are views of a block's scratch memory."""
    monkeypatch.setattr(executor, "_is_observed", lambda: False)  # peaks are seen by a profiler
    layer, x = FusedRematLayer(WIDTH, 4, 64, 0.1, batch_first=True), torch.randn(4, 128, WIDTH)
    with pieces_of(200):
        monkeypatch.setattr(recording, "ON", False)
        expected = measure_allocations(lambda: step(layer, x)).peak
        monkeypatch.setattr(recording, "ON", True)
        for _ in range(2):
            step(layer, x)
        assert len(recordings(layer, x)) == 2
        assert measure_allocations(lambda: step(layer, x)).peak <= 1.01 * expected


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    linear.widens(torch.empty(0, dtype=dtype))  # asks the CPU, once
    check(encoder(norm_first=True).to(dtype), (batch(1, dtype),))


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


def test_calls_of_records_are_counted_until_they_are_gone():
    made, before = recording.Recordings(), recording.Recordings.all_calls
    x = torch.ones(3)
    made.find("f", (x,), lambda: [x + 1.0, x.exp()])((x,))
    assert made.calls == 2
    assert recording.Recordings.all_calls == before + 2
    made.find("g", (x,), lambda: [x * bool(x.sum())])((x,))
    assert made.off and not made.passes
    assert recording.Recordings.all_calls == before
    made = recording.Recordings()
    made.find("f", (x,), lambda: [x + 1.0])((x,))
    del made
    assert recording.Recordings.all_calls == before


@pytest.mark.parametrize("name", ["_create_function_from_graph", "_jit_pass_constant_pooling"])
def test_what_pytorch_refuses_is_not_recorded(name, monkeypatch):
    monkeypatch.setattr(torch._C, name, None)
    layer, x = FusedRematLayer(24, 2, 44, 0.0, batch_first=True), torch.randn(3, 5, 24)
    expected = step(layer, x)
    for _ in range(2):
        assert all(a.equal(b) for a, b in zip(step(layer, x), expected, strict=True))
    assert not recordings(layer, x)


def test_no_compiler_is_imported():
    """It takes seconds and a lot of memory, in the middle of a training."""
    code = """
import sys, torch
from fused_remat import FusedRematLayer
from fused_remat.execution import recording
recording.FEW = 0
layer, x = FusedRematLayer(8, 2, 16, batch_first=True), torch.ones(1, 2, 8)
for _ in range(2):
    y = layer(x)
    y.sum().backward()
assert len(y.grad_fn.execution.recordings.passes) == 2
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Doubled(TorchFunctionMode):
    """Twice every product."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 2.0 if func in (F.linear, torch.mm, torch.addmm) else made


def test_a_function_mode_sees_the_steps():
    x, weight = batch(1)[0], torch.randn(WIDTH, WIDTH)

    def doubled():
        with Doubled():
            return ops.mlp(x, weight, None, weight, None, "relu")

    expected = doubled()
    plain = [ops.mlp(x, weight, None, weight, None, "relu") for _ in range(3)]
    assert doubled().equal(expected)
    assert not plain[-1].equal(expected)


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


def test_groups_and_tiles():
    layer = encoder(policy="lean", norm_first=True)
    with pieces_of(7):
        check(layer, (batch(1),))


def test_two_inputs_that_were_one_when_recorded():
    layer = FusedRematDecoderLayer(WIDTH, 4, 64, 0.0, batch_first=True)
    x, memory = batch(1), batch(2)
    expected = step(layer, x, memory)
    layer(x, x).sum().backward()
    for _ in range(3):
        assert all(a.equal(b) for a, b in zip(step(layer, x, memory), expected, strict=True))


def test_strides_of_another_kind():
    layer = FusedRematLayer(WIDTH, 4, 64, 0.0, batch_first=True, norm_first=True)
    x = batch(1)
    other = x.transpose(0, 1).contiguous().transpose(0, 1)
    check(layer, (x,), (other,))
    check(layer, (x,), dy=torch.ones(()).expand(BATCH, SEQ, WIDTH))
    check(layer, (x,), dy=torch.ones(WIDTH, SEQ, BATCH).permute(2, 1, 0))


def test_a_layout_without_strides():
    layer, x = encoder(policy="none"), batch(1)
    expected = layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's, of a beta state
        sparse = layer.linear1.weight.detach().to_sparse_csr()
    layer.linear1.weight = nn.Parameter(sparse, requires_grad=False)
    for _ in range(3):
        torch.testing.assert_close(step(layer, x)[0], expected)


def test_masks_and_their_values():
    """Values decide what serves a float mask, so such a call is not recorded."""
    layer, x = encoder(), batch(1)
    excluded, added = torch.zeros(SEQ, SEQ, dtype=torch.bool), torch.zeros(SEQ, SEQ)
    excluded[:, 3] = True
    far = added.clone()
    far[2] = -1e4
    for masks in ([excluded, ~excluded.roll(1)], [added, far]):
        expected = [copy.deepcopy(layer)(x, mask) for mask in masks]
        for _ in range(3):
            for mask, first in zip(masks, expected, strict=True):
                assert layer(x, mask).equal(first)
    assert recordings(layer, x, excluded)
    assert not recordings(layer, x, added)


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


def test_users_function_runs():
    seen = []

    def act(x):
        seen.append(x.shape)
        return x.sin()

    layer = FusedRematLayer(WIDTH, 4, 64, 0.0, act, batch_first=True)
    for _ in range(3):
        seen.clear()
        step(layer, batch(1))
        assert seen


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    layer, x = encoder(), batch(1)
    mask = torch.zeros(SEQ, SEQ, dtype=torch.bool)
    with mode():
        expected = layer(x, mask)
        assert all(layer(x, mask).equal(expected) for _ in range(3))


def through_numpy(x):
    return torch.from_numpy(x.numpy() + 1.0)


def by_value(x):
    return x * 2.0 if bool(x.sum() > 0) else x


def of_another(x):
    return x + CONSTANT


def in_another_mode(x):
    with torch.enable_grad():
        return torch.autograd.grad(x.requires_grad_().square().sum(), x)[0]


CONSTANT = torch.ones(())


def up_to_a_value(x):
    return x[: (x > 0).sum()] + 0.0


FUNCTIONS = [through_numpy, by_value, of_another, up_to_a_value, in_another_mode]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_calls_do_not_show_is_not_recorded(function):
    passes = recording.Recordings()
    for sign in (1.0, -1.0, 1.0):
        x = torch.full((3,), sign)
        with torch.no_grad():
            found = passes.find("f", (x,), lambda x=x: [function(x)])
            assert found((x,))[0].equal(function(x))
    assert passes.off and not passes.passes


def test_rows_of_others_are_not_recorded(monkeypatch):
    """They may read what changes: here a number."""
    from fused_remat.steps import activation

    scale = 1.0
    row = activation.Activation(lambda x: x * scale, lambda dy, x, out: dy * scale)
    monkeypatch.setitem(activation.ACTIVATIONS, "scaled", row)
    x, eye = torch.ones(1, 2, 8), torch.eye(8)
    for _ in range(3):
        scale += 1.0
        assert ops.mlp(x, eye, None, eye, None, "scaled").equal(x * scale)


def test_a_record_holds_no_tensor():
    layer, x = encoder(), batch(1)
    step(layer, x)
    for found in recordings(layer, x).values():
        assert not re.search(r"Tensor = prim::Constant", str(found.args[0].graph))
