"""Offload, with a mover for the CPU: what leaves, when it comes back, and that no bit changes."""

import contextlib
import functools
import gc

import pytest
import torch
from offload_mover import moving
from reference import EXACT_PRESETS
from same_bits import assert_same_bits, step
from segment_models import stack as stack_of
from small_layers import KINDS, B, D, S, layers_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fused_remat import Policy, check_replay, explain, memory_report, ops
from fused_remat.autograd.replay_check import ReplayError
from fused_remat.policies import kept_names
from fused_remat.report.allocations import SavedBytes

BOTH = Policy(save={"attn", "qkv"}, offload={"qkv", "input"})
INPUT = Policy(offload={"input"})


def stack(policy, layers=4, **options):
    return stack_of((policy,) * layers, **options)


def data():
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1)).requires_grad_()


def policies(layer):
    """Return every preset's names, all of them offloaded, as well as the input."""
    graph = layer._example()
    for preset in EXACT_PRESETS:
        names = kept_names(preset, graph)
        yield Policy(save=names, offload={"input", *names})


@pytest.mark.parametrize(("kind", "tokens"), [*((kind, 512) for kind in KINDS), ("pre-norm", 7)])
def test_every_layer_and_preset_bit_for_bit(kind, tokens, monkeypatch):
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: tokens)
    (layer,), x, kwargs, more = layers_of(kind)
    for policy in policies(layer):
        layer.policy = Policy(save=policy.save)
        expected = step(layer, layer, x, more=more, **kwargs)
        layer.policy = policy
        with moving() as mover:
            assert_same_bits(step(layer, layer, x, more=more, **kwargs), expected)
        assert mover.events
    assert_same_bits(step(layer, layer, x, more=more, **kwargs), expected)  # on a CPU


def test_order():
    """They leave one by one; the device waits for a copy out at the end of the next layer; each
    comes back during the backward of the layer behind it; the last has not left."""
    model = stack(BOTH)
    with moving() as mover:
        step(model, model, data())
    assert mover.events == [
        ("out", 0, 2),
        ("out", 1, 2), ("wait", "out", 0),
        ("out", 2, 2), ("wait", "out", 1),
        ("out", 3, 2), ("wait", "out", 2),
        ("back", 2, 2), ("wait", "out", 3),
        ("back", 1, 2), ("wait", "back", 2),
        ("back", 0, 2), ("wait", "back", 1),
        ("wait", "back", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("policy", [INPUT, BOTH])
def test_what_leaves_the_device_is_free(policy):
    """Of all layers but the last; counted by what lives, and by what autograd saves."""
    model, x, alive = stack(policy, dropout=0.0), data(), []
    with moving() as mover:
        start = mover.out

        def noting(tensors):
            alive.append([StorageWeakRef(t.untyped_storage()) for t in tensors])
            return start(tensors)

        mover.out = noting
        with SavedBytes(exclude=model.parameters()) as saved:
            y = model(x)
        gc.collect()
        first = "input" in policy.offload  # which the caller holds
        gone = [all(s.expired() for s in layer) for layer in alive]
        assert gone == [not first, True, True, False]
        y.sum().backward()
        assert all(s.expired() for layer in alive[first:] for s in layer)
    assert saved.total > 0


@pytest.mark.parametrize("backward", [True, False])
def test_host_copies_go_with_the_graph(backward):
    with moving() as mover:
        y = stack(BOTH)(data())
        hosts = [StorageWeakRef(t.untyped_storage()) for t in _hosts(y, mover)]
        assert len(hosts) == 8 and not any(h.expired() for h in hosts)
        loss = y.sum()
        if backward:
            loss.backward()  # the loss is there still
        else:
            del y, loss
            gc.collect()
        assert all(h.expired() for h in hosts)


def _hosts(y, mover):
    found, node = [], y.grad_fn
    while node is not None:
        if getattr(node, "extras", None) is not None:
            saved = node.saved_tensors
            found += [saved[index] for index in node.extras.offloaded.indices]
        node = node.next_functions[0][0] if node.next_functions else None
    return found


@pytest.mark.composes("Concurrency and faults", "offload: `retain_graph=True`, gradients of parts")
def test_retained_graphs_and_parts():
    """The bits: `test_same_bits_as_without.py`."""
    model, x = stack(BOTH), data()
    with moving() as mover:
        loss = model(x).sin().sum()
        for _ in range(2):
            torch.autograd.grad(loss, x, retain_graph=True)
        assert mover.backs() == [2, 1, 0, 3, 2, 1, 0]
        mover.events.clear()
        torch.autograd.grad(loss, [*model[2:].parameters()])
        assert mover.backs() == [3, 2]  # not of a layer that this pass does not run


def test_in_place_changes_raise():
    for policy in (INPUT, Policy()):
        layer, x = stack(policy, layers=1), data() * 1
        with moving():
            y = layer(x)
            with torch.no_grad():
                x.detach().add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@pytest.mark.composes(
    "Outer checkpointing", "offload, with torch.utils.checkpoint around some layers or all",
    limits="nothing of a layer inside moves: its replay's is read at once",
)  # fmt: skip
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint(reentrant):
    model, way = stack(BOTH), functools.partial(checkpoint, use_reentrant=reentrant)
    with moving() as mover:
        step(lambda x: model[2:](way(model[1], model[0](x))), model, data())
        assert sorted(mover.backs()) == [0, 1]
        mover.events.clear()
        step(functools.partial(way, model), model, data())
        assert not mover.events


@pytest.mark.composes("Replay check", "offload: what comes back is compared")
def test_replay_check():
    model = stack(BOTH, layers=2)
    with moving() as mover, check_replay():
        y = model(data())
        _hosts(y, mover)[-1].data.add_(1)
        with pytest.raises(ReplayError, match="differs"):
            y.sum().backward()


@pytest.mark.parametrize("x", ["sliced", "fake", "while a graph is captured"])
def test_what_does_not_move(x):
    with moving() as mover, FakeTensorMode() if x == "fake" else contextlib.nullcontext():
        mover.able = x != "while a graph is captured"
        given = torch.randn(B, S, 2 * D, requires_grad=True)
        given = given[..., ::2] if x == "sliced" else given[..., :D] * 1  # a copy is not sliced
        ops.layer_norm(given, torch.ones(D), policy=INPUT).sum().backward()
    assert not mover.events


def test_segments():
    """The first layer's input moves, and the replay takes it from the host: of all segments but
    the last. The bits: `test_same_bits_as_without.py`."""
    first, inner = Policy({"attn"}, "first", {"input"}), Policy({"attn"}, "inner")
    model = stack_of((first, inner, first, inner))
    with moving() as mover:
        step(model, model, data())
    assert mover.backs() == [0]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"offload": "input"}, TypeError, "must be a set of names, got 'input'"),
        ({"offload": 3}, TypeError, "must be a set of names, got 3"),
        ({"offload": {3}}, TypeError, "must contain names .str., got 3"),
        ({"offload": {"qkv"}}, ValueError, "names 'qkv', which the policy does not keep"),
        ({"save": {"qkv:int8"}}, ValueError, '\'qkv:int8\' .*8 bits.*"balanced" or "fast"'),
        ({"save": {"qkv": "int8"}}, ValueError, "8 bits.*names alone"),
        ({"offload": {"memory"}}, ValueError, "names 'memory'.*it keeps: 'input'"),
        ({"segment": "x"}, ValueError, "segment=.* must be 'first', 'inner' or None, got 'x'"),
        ({"segment": "inner", "offload": {"input"}}, ValueError, "segment='inner'.*nothing"),
        ({"save": {"attn"}, "segment": "first", "offload": {"attn"}}, ValueError, "names 'attn'"),
    ],
)
def test_bad_policies(given, error, message):
    with pytest.raises(error, match=message):
        Policy(**given)


# Compiled, operators return what moves on the host, and take it from there in backward.


@pytest.mark.composes(
    "torch.compile", "offload, `fullgraph=True`: what moves is an output on the host",
    limits="brought back at the beginning of the layer's own backward, not one layer ahead",
)  # fmt: skip
def test_compiled():
    model = stack(BOTH, layers=2)
    expected = step(model, model, data())
    with moving() as events:
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        assert_same_bits(step(compiled, model, data()), expected)
    assert {e[0] for e in events.events} == {"out", "back", "wait"}


def test_report_explanation_and_prediction():
    model = stack(BOTH, layers=3, dropout=0.0)
    here = memory_report(model, data())
    assert "offloaded to host: nothing; on the CPU nothing moves" in here.table()
    assert here.offloaded_bytes == 0 and here.kept_bytes == here.predicted_bytes
    assert not explain(model, data())[0].offloaded
    with moving():
        report, told = memory_report(model, data()), explain(model, data())[0]
    assert 0 < report.kept_bytes == report.predicted_bytes < here.kept_bytes
    assert report.kept_bytes + report.offloaded_bytes == here.kept_bytes
    assert "not counted as kept" in report.table() and " on the host" in report.table()
    assert "offload {" in report.table() and "  offloads to the host: " in str(told)
    assert type(report).from_json(report.to_json()) == report
