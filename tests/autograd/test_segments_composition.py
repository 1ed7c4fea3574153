"""Segments beside other libraries' rebuilding, compilers, checks and threads."""

import contextlib
import functools
import random

import pytest
import torch
from block_inputs import normal
from same_bits import assert_same_bits, step
from segment_models import (
    ALL,
    D,
    F,
    H,
    X,
    assert_as_full,
    full,
    grads_of,
    keeps_input,
    quiet,
    stack,
    unheeded,
    warned,
)
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fused_remat import FusedRematWarning, Policy, check_replay, convert, ops
from fused_remat.autograd.replay_check import ReplayError
from fused_remat.convert import set_policy

plain = functools.partial(checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoint, use_reentrant=True)


@pytest.fixture(autouse=True)
def without_warnings():
    with quiet():
        yield


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


def test_selective_checkpoint():
    def chosen(ctx, op, *args, **kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, chosen)
    way = functools.partial(plain, context_fn=contexts)
    model = stack(save=("attn",))
    assert_as_full(model, parts(way, 0, 4))
    with warned("fused_remat_encoder_prenorm"):
        assert_as_full(model, parts(way, 1, 3))


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


def random_graph(seed):
    """A model with random policies, and a forward through its layers in any order and company."""
    rng = random.Random(seed)
    model = stack(tuple(rng.choices(("first", "inner", "lean"), (2, 6, 1), k=4)), ("attn", "up"))
    for p in model.parameters():
        p.requires_grad_(rng.random() < 0.8)
    steps = [
        (
            i if rng.random() < 0.8 else rng.randrange(4),  # the layer
            -1 if rng.random() < 0.8 else rng.randrange(i + 1),  # of which result
            rng.choice(("", "", "", "", "checkpoint", "twice", "offload", "scale")),
            rng.choice((0, 0, 0, 1)),
        )
        for i in range(4)
    ]

    def forward(model):
        def run(x):
            made = [x]
            for i, of, way, more in steps:
                h, layer = made[of], model[i]
                if way == "checkpoint":
                    h = plain(layer, h)
                elif way == "twice":
                    h = plain(lambda t, layer=layer: layer(layer(t)), h)
                elif way == "offload":
                    with torch.autograd.graph.save_on_cpu():
                        h = layer(h)
                else:
                    h = layer(h * 1.5 if way else h)
                made.append(h + made[-1] if more else h)
            return made[-1] + made[-2].sin()

        return run

    return model, forward


@pytest.mark.parametrize("seeds", [range(20), range(20, 40)], ids=str)
def test_random_graphs(seeds):
    for seed in seeds:
        model, forward = random_graph(seed)
        other = full(model)
        with unheeded():
            assert_same_bits(step(forward(model), model, X), step(forward(other), other, X))


# --- everything else around


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


def test_accumulation():
    model = stack(save=("attn", "up"))
    other = full(model)
    for layer in model:
        layer.accumulate_into = "grad"
    assert_same_bits(step(model, model, X), step(other, other, X))


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


def test_convert_and_set_policy():
    stock = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, H, F, 0.0, batch_first=True), 4, enable_nested_tensor=False
    )
    model = convert(stock, policy=Policy({"attn"}, "inner"))
    y = model(X)  # of X no gradient is wanted: the first of the layers is the first
    assert keeps_input(y) == [True, False, False, False]
    set_policy(model, "layers.2", Policy(segment="first"))
    assert keeps_input(model(X)) == [True, False, True, False]
    other = full(model)
    assert_same_bits(*(grads_of(m(X), [*m.parameters()]) for m in (model, other)))


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
