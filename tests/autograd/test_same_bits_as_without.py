"""What no feature changes: the bits of a stack of layers, in whatever way its backward is run.

Each feature (other presets, segments, offload, accumulation, deferral, the replay check) in each
way, beside policy "full" without any of them. What a feature does besides is in its own file.
"""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from offload_mover import LateMover, moving
from same_bits import assert_same_bits, step
from segment_models import X, full, grads_of, place, quiet, stack, unheeded
from test_concurrency import together
from test_outer_checkpointing import WAYS, remat
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from fused_remat import Policy, check_replay, defer_weight_gradients


@pytest.fixture(autouse=True)
def without_warnings():
    with quiet():
        yield


def offload(model):
    """As by a stream, whose copies are made when somebody waits."""
    for layer in model:
        layer.policy = Policy(save={"attn", "qkv"}, offload={"qkv", "input"})
    return moving(LateMover())


def accumulation(model):
    for layer in model:
        layer.accumulate_into = "grad"
    return contextlib.nullcontext()


def placed(*places):
    def feature(model):
        place(model, places, save=("attn", "up"))
        return contextlib.nullcontext()

    return feature


FEATURES = {
    "presets": placed("lean", "balanced", "fast", "none"),
    "segments": placed("first", "inner", "inner", "inner"),
    "offload": offload,
    "accumulation": accumulation,
    "deferral": lambda model: defer_weight_gradients(),
    "replay check": lambda model: check_replay(),
}


def made(feature, **kwargs):
    """A model with policy "full", one like it for the feature, and the context of the feature."""
    model = full(stack(**kwargs))
    other = copy.deepcopy(model)
    return model, other, FEATURES[feature](other)


def inside(context, model):
    """A forward in a context."""

    def forward(x):
        with context():
            return model(x)

    return forward


FORWARDS = WAYS | {
    "torch_remat": remat,
    "save_on_cpu": functools.partial(inside, save_on_cpu),
    "hooks that copy": functools.partial(
        inside, functools.partial(saved_tensors_hooks, torch.clone, torch.clone)
    ),
}


@pytest.mark.composes("Outer checkpointing", "offload, with hooks on saved tensors (save_on_cpu)")
@pytest.mark.composes("Outer checkpointing", "segments, with hooks on saved tensors (save_on_cpu)")
@pytest.mark.parametrize("way", FORWARDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_forward(feature, way):
    model, other, context = made(feature)
    expected = step(model, model, X)
    with unheeded(), context:  # of a segment's layers behind a reentrant checkpoint
        assert_same_bits(step(FORWARDS[way](other), other, X), expected)


def retained(model, x, leaves):
    loss = model(x).sin().sum()
    runs = [torch.autograd.grad(loss, leaves, retain_graph=again) for again in (True, True, False)]
    for run in runs:
        assert_same_bits(run, runs[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)
    return runs[0]


def batched(model, x, leaves):
    y = model(x)
    dys = torch.stack([y.cos(), y, torch.ones_like(y)]).detach()
    found = torch.autograd.grad(y, leaves, dys, is_grads_batched=True, retain_graph=True)
    for i, dy in enumerate(dys):
        one = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        assert_same_bits([grad[i] for grad in found], one)
    return found


def after_an_exception(model, x, leaves):
    hidden = model[:2](x)
    handle = hidden.register_hook(lambda grad: 1 / 0)
    loss = model[2:](hidden).sin().sum()
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(loss, leaves, retain_graph=True)
    handle.remove()
    return torch.autograd.grad(loss, leaves)


def in_threads(model, x, leaves):
    """Three train, and three go through one graph."""
    loss = model(x).sin().sum()

    def differentiate():
        return [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(5)]

    def train():
        own = x.detach().clone().requires_grad_()
        return [grads_of(model(own), [own, *leaves[1:]]) for _ in range(5)]

    first, *others = [run for runs in together(*[train, differentiate] * 3) for run in runs]
    for other in others:
        assert_same_bits(other, first)
    return first


def within(context, model, x, leaves):
    with context():
        return grads_of(model(x), leaves)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


BACKWARDS = {
    "retain_graph": retained,
    "is_grads_batched": batched,
    "after an exception": after_an_exception,
    "in threads": in_threads,
    "autocast": functools.partial(within, functools.partial(torch.autocast, "cpu", torch.bfloat16)),
    "anomaly mode": functools.partial(within, torch.autograd.detect_anomaly),
    "deterministic algorithms": functools.partial(within, deterministic),
}


@pytest.mark.composes("Replay check", "outer checkpointing, `retain_graph`, `is_grads_batched`")
@pytest.mark.composes("Concurrency and faults", "one model in several threads, on the fused path")
@pytest.mark.composes("Concurrency and faults", "segments in threads, of models or of one graph")
@pytest.mark.composes("Concurrency and faults", "offload in threads, of models or of one graph")
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    "feature, way",
    # Under autocast accumulation rounds less than autograd does: test_accumulation.py.
    [
        pair
        for pair in itertools.product(FEATURES, BACKWARDS)
        if pair != ("accumulation", "autocast")
    ],
)
def test_backward(feature, dropout, way):
    # Threads share the generator.
    model, other, context = made(feature, dropout=dropout * (way != "in threads"))
    found = []
    for one, around in ((other, context), (model, contextlib.nullcontext())):
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        with around:
            found.append(BACKWARDS[way](one, x, [x, *one.parameters()]))
    assert_same_bits(*found)
