"""Segments: runs of layers of which only the first keeps its input; the bits of policy "full".

On a CPU the eager backend runs the same routines in the same pieces when a layer is run again, so
every comparison is of bits.
"""

import contextlib
import functools
import weakref

import pytest
import torch
from block_inputs import normal
from same_bits import assert_same_bits, step
from segment_models import (
    ALL,
    PLACES,
    X,
    assert_as_full,
    full,
    grads_of,
    keeps_input,
    place,
    segments_of,
    stack,
    warned,
)
from small_layers import KINDS, D, F, layers_of
from test_same_bits_as_without import plain, reentrant
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fused_remat import FusedRematWarning, Policy, check_replay, memory_report, ops
from fused_remat.autograd.replay_check import ReplayError
from fused_remat.report.allocations import SavedBytes, measure_allocations

pytestmark = pytest.mark.usefixtures("one_thread", "served")


@pytest.mark.parametrize("tokens", [4, 512], ids=["in pieces", "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_full(kind, tokens, monkeypatch):
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: tokens)
    layers, x, kwargs, more = layers_of(kind, len(ALL), policy="full")

    def forward(x):
        return functools.reduce(lambda h, layer: layer(h, **kwargs), layers, x)

    expected = step(forward, layers, x, more=more)
    with SavedBytes() as saved_full:
        forward(x.detach().requires_grad_())
    names = [n for n in layers[0]._example().names if n != "output"]
    names = [n for n in names if all(n in layer._example().names for layer in layers)]
    for save in ((), ("attn",), names[::2], names):
        place(layers, save=save)
        assert_same_bits(step(forward, layers, x, more=more), expected)
    with SavedBytes() as saved:
        y = forward(x.detach().requires_grad_())
    assert keeps_input(y) == [True, False, False, False]
    assert saved.total < saved_full.total  # the memory input, tables and masks are kept once
    for places in ("pairs", "gaps", "without a first") if kind == "pre-norm" else ():
        place(layers, PLACES[places], ("attn", "up"))
        with warned() if places != "pairs" else contextlib.nullcontext():
            assert_same_bits(step(forward, layers, x, more=more), expected)


# --- what is kept, and for how long


@pytest.mark.parametrize("places", ["all", "pairs"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_kept_bytes(places, dropout):
    model = stack(PLACES[places], save=("attn", "qkv", "up"), dropout=dropout)
    x = torch.randn(2, 64, D, requires_grad=True)
    statistics, seed = 4 * 4 * 2 * 64, 8 * (dropout > 0)
    inputs = PLACES[places].count("first")
    total = inputs * x.nbytes + 4 * (statistics + seed)
    with SavedBytes(exclude=model.parameters()) as saved:
        y = model(x)
    del y
    # Of the live storages, the output is no kept one, and the first input is ours.
    assert measure_allocations(lambda: model(x)).net == total
    assert saved.total == total
    report = memory_report(model, x)
    assert report.predicted_bytes == report.kept_bytes == total
    assert "first of segment" in str(report) and "inner of segment" in str(report)


def test_inputs_are_gone_after_forward_and_all_else_after_backward():
    model = stack(save=("attn", "up"))
    made, storages = [], []

    def note(layer, args, out):
        made.append(weakref.ref(out))
        storages.append(StorageWeakRef(out.untyped_storage()))

    for layer in model:
        layer.register_forward_hook(note)
    x = X.clone().requires_grad_()
    y = model(x)
    assert [t() is None for t in made] == [s.expired() for s in storages] == [True] * 3 + [False]
    before = grads_of(y, [x])  # frees the graph
    assert before[0].shape == x.shape
    segments = segments_of(y)
    assert len(segments) == 4 and all(segment.replayed is None for segment in segments)
    del y, segments
    assert measure_allocations(lambda: step(model, model, X) and None).net <= 64 + sum(
        t.nbytes for t in (X, *model.parameters())
    )


def test_a_layer_called_more_than_once():
    shared = stack(("inner",))[0]
    thrice = nn.Sequential(shared, shared, shared)  # whose input is a leaf the first time
    with warned("is a leaf"):
        assert_as_full(thrice)


def test_after_a_backward_that_failed():
    """What it had run again is not used by the next one: a weight may have changed since."""
    model, x = stack(save=("attn",)), X.clone().requires_grad_()
    hidden = model[:2](x)

    def fail(grad):
        raise ValueError("of a hook")

    handle = hidden.register_hook(fail)
    y = model[2:](hidden)
    with pytest.raises(ValueError, match="of a hook"):
        torch.autograd.grad(y.sum(), [x], retain_graph=True)
    handle.remove()
    with torch.no_grad():
        model[1].linear1.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), [x], retain_graph=True)


def test_changes_after_use():
    model, x = stack(dropout=0.0), X.clone().requires_grad_()
    expected = grads_of(full(model)(x), [x])
    hidden = model[:2](x)
    y = model[2:](hidden)
    hidden.add_(1)  # which nobody kept
    assert_same_bits(grads_of(y, [x]), expected)
    for change in (model[1].norm1.bias, model[3].self_attn.in_proj_weight, x):
        y = model(x)
        with torch.no_grad():
            change.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = model(x)
    model[1].linear1.weight.data = model[1].linear1.weight.data.double()
    with pytest.raises(RuntimeError, match=r"reads 'fc1.weight' again, which was torch.float32"):
        y.sum().backward()


# --- other libraries' rebuilding, and hooks on saved tensors


def parts(way, first, last):
    """The layers from first to last in one checkpoint."""
    return lambda model: lambda x: model[last:](way(model[first:last], model[:first](x)))


@pytest.mark.composes(
    "Outer checkpointing",
    "segments, with torch.utils.checkpoint around one of its layers, some or all",
    limits="layers inside keep their input until its replay's backward; the one behind a reentrant "
    "checkpoint keeps its own, with a warning",
)
@pytest.mark.parametrize("first, last", [(0, 1), (1, 2), (3, 4), (1, 3), (0, 2), (2, 4), (0, 4)])
@pytest.mark.parametrize("way", [plain, reentrant], ids=["non-reentrant", "reentrant"])
def test_checkpoints(way, first, last):
    model = stack(save=("attn", "up"))
    tells = way is reentrant and last < 4
    with warned("CheckpointFunctionBackward") if tells else contextlib.nullcontext():
        assert_as_full(model, parts(way, first, last))


def test_hooks_on_saved_tensors():
    model, unpacked = stack(save=("attn",)), []

    def unpack(packed):
        unpacked.append(packed[0])
        return packed[1].clone()

    def counted(model):
        def forward(x):
            with counting():
                return model(x)

        return forward

    counting = functools.partial(
        torch.autograd.graph.saved_tensors_hooks, lambda t: (object(), t.clone()), unpack
    )
    assert_as_full(model, counted)
    assert len(unpacked) == len(set(unpacked))  # each once
    with counting():
        h = model[:2](X)
        sides = model[2](h) + model[3](h)  # two ask for the same layers' inputs
    sides.sum().backward()
    assert len(unpacked) == len(set(unpacked))


@pytest.mark.composes("Replay check", "segments: what differs is named where it is")
def test_replay_check():
    model = stack(save=("attn", "up"))
    with check_replay():
        assert_as_full(model)
        y = model(X.clone().requires_grad_())
    model[1].linear1.weight.data[0] += 1
    with pytest.raises(ReplayError, match=r"1 \(FusedRematLayer\): 'fc1.weight' differs"):
        y.sum().backward()
    with check_replay():
        hidden = model[:2](X)
        hidden.data.add_(1)  # which nothing sees
        y = model[2:](hidden)
    with pytest.raises(ReplayError, match=r"2 .*'input' differs"):
        y.sum().backward()


@pytest.mark.composes(
    "torch.compile", "segments", limits="each layer keeps its input, with a warning"
)
def test_compile():
    torch._dynamo.reset()
    model, other = stack(save=("attn",)), stack(("full",) * 4)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(FusedRematWarning, match="keeps its input: segments work in eager") as seen:
        found = step(call, model, X)
    assert len(seen) == 3
    assert_same_bits(found, step(other, other, X))
    assert_same_bits(step(call, model, X), found)
    torch._dynamo.reset()
    one = stack(save=("attn",))
    one[2].compile(backend="aot_eager")
    with pytest.warns(FusedRematWarning) as seen:
        assert_as_full(one)
    reasons = {str(w.message).partition(" keeps its input")[2] for w in seen}
    assert any("CompiledFunctionBackward" in reason for reason in reasons), reasons


def test_compiled_autograd_raises():
    model = stack()
    loss = model(X.clone().requires_grad_()).sum()
    compiler = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    message = pytest.raises(RuntimeError, match="segments do not run under compiled autograd")
    with compiler, message:
        loss.backward()


def test_ops():
    up, down = (normal(*size, dtype=torch.float32) for size in ((F, D), (D, F)))

    def forward(x, places):
        for where in places:
            policy = "full" if where is None else Policy({"up"}, where)
            x = ops.mlp(x, up, None, down, None, policy=policy, dropout_p=0.1, seed=3)
        return x

    x = X.clone().requires_grad_()
    y = forward(x, ALL)
    assert keeps_input(y) == [True, False, False, False]
    found = grads_of(y, [x, up, down])
    assert_same_bits(found, grads_of(forward(x, [None] * 4), [x, up, down]))
    with pytest.warns(FusedRematWarning, match="inside a segment keeps its input: the input is a"):
        forward(x, ["inner"])
