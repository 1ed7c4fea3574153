"""Layers and ops inside checkpoints of other makers: the same bits, dropout and random state.

Every comparison is of bits: on a CPU the eager backend runs the same routines in the same pieces
when a checkpoint calls it again, on the seed that it draws again.
"""

import contextlib
import functools

import pytest
import torch
from reference import EXACT_PRESETS, PARAM_NAMES, X, pair
from same_bits import assert_same_bits, step
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from bench.subjects.layer_ways import RandomState
from fused_remat import FusedRematLayer, FusedRematWarning, ops
from fused_remat.report.allocations import SavedBytes, measure_allocations

PRESET = pytest.mark.parametrize("policy", EXACT_PRESETS)
#: Of the three layers of a stack: every preset.
POLICIES = {"frugal": ("full", "lean", "balanced"), "fast": ("fast", "none", "full")}
STACKS = pytest.mark.parametrize("policies", POLICIES)
REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reent"])
plain = functools.partial(checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoint, use_reentrant=True)


def stack(policies="frugal", dropout=0.1):
    """Pre-norm, post-norm, and an activation without a row that has a parameter of its own."""
    how = {"dropout": dropout, "batch_first": True}
    kinds = ({"norm_first": True}, {}, {"norm_first": True, "activation": nn.PReLU(init=0.2)})
    layers = [
        pair(8, 2, 12, **how, **kind, policy=policy, seed=seed)[1]
        for seed, (kind, policy) in enumerate(zip(kinds, POLICIES[policies], strict=True))
    ]
    return nn.Sequential(*layers)


def assert_alike(way, forward, module):
    """A step of `way` has the bits of one of `forward`."""
    x = X.transpose(0, 1).float()
    assert_same_bits(step(way, module, x), step(forward, module, x))


def each(way):
    """Every layer in a checkpoint of its own."""

    def of(model):
        return lambda x: functools.reduce(lambda h, layer: way(layer, h), model, x)

    return of


def remat(model):
    """As torch_remat's documentation says for dropout: with a hook for torch's generator."""
    torch_remat = pytest.importorskip("torch_remat")
    hooks = (RandomState(torch.device("cpu")),)
    return torch_remat.checkpoint(region_name="stack", recompute_state_hooks=hooks)(model)


WAYS = {
    "non-reentrant": each(plain),
    "reentrant": each(reentrant),
    "the stack": lambda model: functools.partial(plain, model),
    "no determinism check": each(functools.partial(plain, determinism_check="none")),
    "sequential": lambda m: lambda x: checkpoint_sequential(m, 2, x, use_reentrant=False),
    "sequential, reentrant": lambda m: lambda x: checkpoint_sequential(m, 2, x, use_reentrant=True),
    "nested": lambda model: functools.partial(plain, each(plain)(model)),
    "nested, reentrant": lambda model: functools.partial(reentrant, each(reentrant)(model)),
    "non-reentrant in reentrant": lambda model: functools.partial(reentrant, each(plain)(model)),
}


@pytest.mark.composes("Outer checkpointing", "torch.utils.checkpoint, both kinds, nested or not")
@pytest.mark.composes("Outer checkpointing", "checkpoint_sequential")
@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")  # the inner, reentrant
@STACKS
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_as_without(way, policies):
    model = stack(policies)
    assert_alike(WAYS[way](model), model, model)


def test_without_early_stop():
    model = stack()
    with set_checkpoint_early_stop(False):
        assert_alike(each(plain)(model), model, model)


@pytest.mark.composes(
    "Outer checkpointing",
    "preserve_rng_state=False",
    limits="without dropout, or with ops that are given a seed: as everywhere in PyTorch, the "
    "second run draws anew",
)
@REENTRANT
def test_without_the_random_state(use_reentrant):
    way = functools.partial(checkpoint, use_reentrant=use_reentrant, preserve_rng_state=False)
    model = stack(dropout=0.0)
    assert_alike(each(way)(model), model, model)

    weights = nn.ParameterList(torch.randn(size) for size in ((12, 8), (8, 12)))

    def mlp(x):
        up, down = weights
        return ops.mlp(x, up, None, down, None, dropout_p=0.5, seed=3)

    assert_alike(functools.partial(way, mlp), mlp, weights)


def test_without_the_random_state_dropout_is_drawn_again():
    """What the limit above says: the gradients are then those of other masks."""
    model = stack()
    way = functools.partial(plain, preserve_rng_state=False)
    x = X.transpose(0, 1).float()
    found, expected = step(each(way)(model), model, x), step(model, model, x)
    assert torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])


@pytest.mark.composes("Outer checkpointing", "the functional ops")
@PRESET
@REENTRANT
def test_ops(use_reentrant, policy):
    torch.manual_seed(0)
    how = {"policy": policy, "dropout_p": 0.2}
    sizes = {"norm": (8,), "qkv": (24, 8), "proj": (8, 8), "gate": (12, 8), "up": (12, 8),
             "down": (8, 12)}  # fmt: skip
    w = nn.ParameterDict({name: torch.randn(size) for name, size in sizes.items()})

    def half(x):
        q, k, v = (x @ w["qkv"].T).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        heads = ops.attention(q, k, v, is_causal=True, **how)
        mid = ops.dropout_add(heads.transpose(1, 2).flatten(2) @ w["proj"].T, x, 0.2)
        return ops.gated_mlp(ops.rms_norm(mid, w["norm"]), w["gate"], w["up"], w["down"], **how)

    assert_alike(functools.partial(checkpoint, half, use_reentrant=use_reentrant), half, w)


@pytest.mark.composes(
    "Outer checkpointing",
    "torch_remat, whole layers and regions",
    limits="dropout needs a RecomputeStateHook, as torch_remat says of any dropout",
)
@STACKS
def test_torch_remat(policies):
    model = stack(policies)
    assert_alike(remat(model), model, model)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_torch_remat_regions(kept):
    """One layer's activations stay, the others' are computed again."""
    torch_remat = pytest.importorskip("torch_remat")
    model = stack()

    def forward(x):
        for i, layer in enumerate(model):
            x = torch_remat.region(layer, f"layer {i}", recompute=i != kept)(x)
            torch_remat.recompute_needs_tensor(x)
        return x

    assert_alike(remat(forward), model, model)


# --- where the layer runs PyTorch's own forward, in a checkpoint of its own


@pytest.mark.composes("Outer checkpointing", "a layer on its fallback path, itself a checkpoint")
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
@pytest.mark.parametrize("way", [*WAYS, "torch_remat"])
def test_the_fallback(way):
    model = stack("fast")
    for layer in model:
        layer.linear1.register_forward_hook(lambda module, args, y: y * 1.5)
    assert_alike(WAYS.get(way, remat)(model), model, model)


# --- what is kept


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
        # Besides the output, the state of torch's generator for the replay (5056 bytes), and that
        # of the fallback's own checkpoint; a few bytes for device indices.
        states = (1 + fallback) * torch.get_rng_state().nbytes
        kept = measure_allocations(lambda way=way: way(layer, x)).net - x.nbytes
        assert 0 <= kept <= states + 64 < x.nbytes


@PRESET
def test_backward_of_a_checkpoint_keeps_as_the_policy_says(policy):
    """Between the replay and the backward inside, which a reentrant one runs at once."""
    layer = pair(8, 2, 12, batch_first=True, policy=policy)[1]
    x = X.transpose(0, 1).float().clone().requires_grad_()
    with SavedBytes(exclude=layer.parameters()) as alone:
        layer(x)
    replays = []

    def forward(x):
        context = contextlib.nullcontext()
        if torch.is_grad_enabled():
            context = SavedBytes(exclude=layer.parameters())
            replays.append(context)
        with context:
            return layer(x)

    reentrant(forward, x).sum().backward()
    (again,) = replays
    assert again.total == alone.total


# --- Hugging Face


@pytest.fixture(scope="module")
def hf_model():
    """Makes a small model, whose layers hold a `FusedRematLayer` each."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Config(transformers.PreTrainedConfig):
        model_type = "fused_remat_test"

    class Layer(GradientCheckpointingLayer):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, hidden_states, attention_mask=None):
            return self.block(hidden_states, src_key_padding_mask=attention_mask)

    class Model(transformers.PreTrainedModel):
        config_class = Config
        supports_gradient_checkpointing = True

        def __init__(self, config, blocks):
            super().__init__(config)
            self.layers = nn.ModuleList(map(Layer, blocks))
            self.post_init()

        def get_input_embeddings(self):
            return None

        def forward(self, hidden_states, attention_mask=None):
            for layer in self.layers:
                hidden_states = layer(hidden_states, attention_mask=attention_mask)
            return hidden_states

    return lambda policies="frugal": Model(Config(), stack(policies)).train()


@pytest.mark.composes(
    "Outer checkpointing",
    "Hugging Face's gradient checkpointing, around layers that hold a FusedRematLayer",
    limits="architectures are not converted yet",
)
@STACKS
@REENTRANT
def test_gradient_checkpointing_of_hugging_face(hf_model, use_reentrant, policies):
    model = hf_model(policies)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    forward, x = functools.partial(model, attention_mask=padding), X.transpose(0, 1).float()
    expected = step(forward, model, x)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    assert all(layer.gradient_checkpointing for layer in model.layers)
    replays = []
    model.layers[0].block.register_forward_pre_hook(lambda *_: replays.append(1))
    assert_same_bits(step(forward, model, x), expected)
    assert len(replays) == 2  # it did checkpoint


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_the_older_name_of_hugging_faces_gradient_checkpointing(hf_model):
    model, x = hf_model(), X.transpose(0, 1).float()
    expected = step(model, model, x)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_bits(step(model, model, x), expected)


# --- partly frozen models


@REENTRANT
@STACKS
def test_frozen_weights(use_reentrant, policies):
    """Within the checkpoint nothing wants a gradient but the last norms and x."""
    model = stack(policies)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith(PARAM_NAMES[-2:]))
    assert_alike(
        each(functools.partial(checkpoint, use_reentrant=use_reentrant))(model), model, model
    )


def test_a_warning_of_the_fallback_inside_a_checkpoint_comes_once():
    layer = stack()[0]
    layer.linear1.register_forward_hook(lambda module, args, y: None)
    with pytest.warns(FusedRematWarning, match="linear1 has hooks") as seen:
        for _ in range(2):
            step(functools.partial(plain, layer), layer, X.transpose(0, 1).float())
    assert sum(w.category is FusedRematWarning for w in seen) == 1
