"""What no feature changes: the bits of a stack of layers, in whatever way forward or backward run.

Each feature (other presets, segments, offload, accumulation, the replay check) in each
way, compared with policy "full" without any of them. Its other effects are in its own file.
"""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from offload_mover import LateMover, moving
from reference import EXACT_PRESETS
from same_bits import assert_same_bits, step
from segment_models import X, full, grads_of, place, segments_of, stack, unheeded
from test_concurrency import together
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from bench.subjects.layers import RandomState
from fused_remat import FusedRematLayer, Policy, check_replay, ops
from fused_remat.report.allocations import measure_allocations

plain = functools.partial(checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoint, use_reentrant=True)


pytestmark = pytest.mark.usefixtures("one_thread")


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


SEGMENT = placed("first", "inner", "inner", "inner")


def all_at_once(model):
    """The first's input moves; the replay takes it from the host."""
    SEGMENT(model), accumulation(model)
    model[0].policy = Policy(save={"attn"}, segment="first", offload={"input"})
    return moving(LateMover())


FEATURES = {
    "presets": placed("lean", "balanced", "fast", "none"),
    "segments": SEGMENT,
    "offload": offload,
    "accumulation": accumulation,
    "segments, offload, accumulation": all_at_once,
    "replay check": lambda model: check_replay(),
}


def made(feature, **kwargs):
    """A model with policy "full", one like it for the feature, and the context of the feature."""
    model = full(stack(mixed=True, **kwargs))
    other = copy.deepcopy(model)
    return model, other, FEATURES[feature](other)


# --- forward: in checkpoints of other makers, and under hooks on saved tensors


def each(way):
    """Every layer in a checkpoint of its own."""
    return lambda model: lambda x: functools.reduce(lambda h, layer: way(layer, h), model, x)


def remat(model, regions=False):
    """As in torch_remat's documentation for dropout: with a hook for torch's generator.

    With regions, one layer's activations stay, and the others' are computed again.
    """
    torch_remat = pytest.importorskip("torch_remat")
    hooks = (RandomState(torch.device("cpu")),)

    def by_region(x):
        for i, layer in enumerate(model):
            x = torch_remat.region(layer, f"layer {i}", recompute=i != 1)(x)
            torch_remat.recompute_needs_tensor(x)
        return x

    whole = torch_remat.checkpoint(region_name="stack", recompute_state_hooks=hooks)
    return whole(by_region if regions else model)


def hugging_face(model):
    """As PreTrainedModel.gradient_checkpointing_enable does with layers that hold these."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self, block):
            super().__init__()
            self.block, self.gradient_checkpointing = block, True
            self._gradient_checkpointing_func = plain

        def forward(self, hidden_states, attention_mask=None):
            return self.block(hidden_states, src_key_padding_mask=attention_mask)

    return lambda x: functools.reduce(
        lambda h, layer: layer(h, attention_mask=None), map(Layer, model), x
    )


def inside(context, way=lambda model: model):
    """`way`, in a context."""

    def of(model):
        def forward(x):
            with context():
                return way(model)(x)

        return forward

    return of


FORWARDS = {
    "non-reentrant": each(plain),
    "reentrant": each(reentrant),
    "the stack": lambda model: functools.partial(plain, model),
    "no determinism check": each(functools.partial(plain, determinism_check="none")),
    "no early stop": inside(functools.partial(set_checkpoint_early_stop, False), each(plain)),
    "sequential": lambda m: lambda x: checkpoint_sequential(m, 2, x, use_reentrant=False),
    "nested": lambda model: functools.partial(plain, each(plain)(model)),
    "non-reentrant in reentrant": lambda model: functools.partial(reentrant, each(plain)(model)),
    "torch_remat": remat,
    "torch_remat, regions": functools.partial(remat, regions=True),
    "Hugging Face's": hugging_face,
    "save_on_cpu": inside(save_on_cpu),
    "hooks that copy": inside(functools.partial(saved_tensors_hooks, torch.clone, torch.clone)),
}


@pytest.mark.composes("Outer checkpointing", "torch.utils.checkpoint, both kinds, nested or not")
@pytest.mark.composes("Outer checkpointing", "checkpoint_sequential")
@pytest.mark.composes(
    "Outer checkpointing", "accumulate_into: gradients are added once, reentrant or not"
)
@pytest.mark.composes(
    "Outer checkpointing",
    "torch_remat, whole layers and regions",
    limits="dropout needs a RecomputeStateHook, as torch_remat says of any dropout",
)
@pytest.mark.composes(
    "Outer checkpointing",
    "Hugging Face's gradient checkpointing, around layers that hold a FusedRematLayer",
)
@pytest.mark.composes("Outer checkpointing", "offload, with hooks on saved tensors (save_on_cpu)")
@pytest.mark.composes("Outer checkpointing", "segments, with hooks on saved tensors (save_on_cpu)")
@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")  # the inner, reentrant
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("way", FORWARDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_forward(feature, way):
    model, other, context = made(feature)
    expected = step(model, model, X)
    with unheeded(), context:  # of a segment's layers behind a reentrant checkpoint
        assert_same_bits(step(FORWARDS[way](other), other, X), expected)


REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reent"])


def mixed(**kwargs):
    return stack(("full", "lean", "balanced"), mixed=True, **kwargs)


def assert_alike(way, forward, module):
    """A step of `way` has the bits of one of `forward`."""
    assert_same_bits(step(way, module, X), step(forward, module, X))


@pytest.mark.composes(
    "Outer checkpointing",
    "preserve_rng_state=False",
    limits="without dropout, or with ops that are given a seed: as everywhere in PyTorch, the "
    "second run draws anew",
)
@REENTRANT
def test_without_the_random_state(use_reentrant):
    way = functools.partial(checkpoint, use_reentrant=use_reentrant, preserve_rng_state=False)
    model = mixed(dropout=0.0)
    assert_alike(each(way)(model), model, model)
    weights = nn.ParameterList(torch.randn(size) for size in ((12, 8), (8, 12)))

    def mlp(x):
        up, down = weights
        return ops.mlp(x, up, None, down, None, dropout_p=0.5, seed=3)

    assert_alike(functools.partial(way, mlp), mlp, weights)


@pytest.mark.composes("Outer checkpointing", "the functional ops")
@pytest.mark.parametrize("policy", EXACT_PRESETS)
@REENTRANT
def test_ops(use_reentrant, policy):
    how = {"policy": policy, "dropout_p": 0.2}
    sizes = (8,), (12, 8), (12, 8), (8, 12)
    weights = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(x):
        norm, *linears = weights
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        heads = ops.attention(q, q.sin(), q.cos(), is_causal=True, **how)
        mid = ops.dropout_add(heads.transpose(1, 2).flatten(2), x, 0.2)
        return ops.gated_mlp(ops.rms_norm(mid, norm), *linears, **how)

    way = functools.partial(checkpoint, forward, use_reentrant=use_reentrant)
    assert_alike(way, forward, weights)


@pytest.mark.composes("Outer checkpointing", "a layer on its fallback path, itself a checkpoint")
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
@pytest.mark.parametrize("way", [way for way in FORWARDS if way != "no determinism check"])
def test_the_fallback(way):
    model = stack(("fast", "none", "full"), mixed=True)
    for layer in model:
        layer.linear1.register_forward_hook(lambda module, args, y: y * 1.5)
    assert_alike(FORWARDS[way](model), model, model)


@pytest.mark.composes(
    "Outer checkpointing", "inside a checkpoint nothing is kept but what goes into it"
)
@pytest.mark.parametrize("policy, dropout", [("full", 0.0), ("full", 0.1), ("none", 0.1)])
@pytest.mark.parametrize("fallback", [False, True], ids=["fused", "fallback"])
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_kept_bytes(dropout, fallback, policy):
    torch.manual_seed(0)
    layer = FusedRematLayer(32, 2, 128, dropout, batch_first=True, policy=policy)
    if fallback:
        layer.linear1.register_forward_hook(lambda module, args, y: y * 1.5)
    x = torch.randn(2, 128, 32, requires_grad=True)
    for way in (plain, reentrant):
        way(layer, x)  # what is set up once
        # Next to the output, the state of torch's generator for the replay (5056 bytes), and that
        # of the fallback's own checkpoint; a few bytes for device indices.
        states = (1 + fallback) * torch.get_rng_state().nbytes
        kept = measure_allocations(lambda way=way: way(layer, x)).net - x.nbytes
        assert 0 <= kept <= states + 64 < x.nbytes


# --- backward


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


def part(of, model, x, leaves):
    """Of each layer's parameters, or of its input: no other layer's backward runs."""
    hidden, found = [x], []
    for layer in model:
        hidden.append(layer(hidden[-1]))
    loss = hidden[-1].sin().sum()
    for layer, h in zip(model, hidden, strict=False):
        asked = [h] if of == "input" else [*layer.parameters()]
        found += torch.autograd.grad(loss, asked, retain_graph=True)
        assert not any(segment.replayed for segment in segments_of(hidden[-1]))
    return [*found, *torch.autograd.grad(loss, leaves)]


def by_turns(model, x, leaves):
    """The last layers' first, which frees them, and then that of the others."""
    half = model[:2](x)
    late = grads_of(model[2:](half), [half, *model[2:].parameters()])
    return [*late, *torch.autograd.grad(half, [x, *model[:2].parameters()], late[0])]


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


def under_autocast(model, x, leaves):
    """Forward in bfloat16; backward where another dtype is on."""
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    with torch.autocast("cpu", torch.float16):
        return grads_of(y, leaves)


BACKWARDS = {
    "retain_graph": retained,
    "is_grads_batched": batched,
    "of each layer's input": functools.partial(part, "input"),
    "of each layer's parameters": functools.partial(part, "parameters"),
    "by turns": by_turns,
    "after an exception": after_an_exception,
    "in threads": in_threads,
    "autocast": under_autocast,
}


@pytest.mark.composes("Autocast", "segments: layers of which only the first keeps its input")
@pytest.mark.composes("Replay check", "outer checkpointing, `retain_graph`, `is_grads_batched`")
@pytest.mark.composes("Concurrency and faults", "one model in several threads, on the fused path")
@pytest.mark.composes("Concurrency and faults", "segments in threads, of models or of one graph")
@pytest.mark.composes("Concurrency and faults", "offload in threads, of models or of one graph")
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    "feature, way",
    # Under autocast accumulation rounds less than autograd does: test_accumulation.py.
    [
        (feature, way)
        for feature, way in itertools.product(FEATURES, BACKWARDS)
        if way != "autocast" or "accumulation" not in feature
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
