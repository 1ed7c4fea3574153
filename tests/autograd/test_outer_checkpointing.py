"""Inside checkpoints of other makers: ops, fallbacks, what is kept, and Hugging Face's checkpoints.

That a stack has the same bits in every kind of checkpoint is in test_same_bits_as_without.py.
"""

import functools

import pytest
import torch
from reference import EXACT_PRESETS, PARAM_NAMES
from same_bits import assert_same_bits, step
from segment_models import X, stack
from test_same_bits_as_without import FORWARDS, each, plain, reentrant, remat
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, FusedRematWarning, ops
from fused_remat.report.allocations import SavedBytes, measure_allocations

PRESET = pytest.mark.parametrize("policy", EXACT_PRESETS)
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


def test_torch_remat_regions():
    """One layer's activations stay, the others' are computed again."""
    torch_remat = pytest.importorskip("torch_remat")
    model = mixed()

    def forward(x):
        for i, layer in enumerate(model):
            x = torch_remat.region(layer, f"layer {i}", recompute=i != 1)(x)
            torch_remat.recompute_needs_tensor(x)
        return x

    assert_alike(remat(forward), model, model)


@pytest.mark.composes("Outer checkpointing", "a layer on its fallback path, itself a checkpoint")
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
@pytest.mark.parametrize("way", [way for way in FORWARDS if way != "no determinism check"])
def test_the_fallback(way):
    model = stack(("fast", "none", "full"), mixed=True)
    for layer in model:
        layer.linear1.register_forward_hook(lambda module, args, y: y * 1.5)
    assert_alike(FORWARDS[way](model), model, model)


def test_a_warning_of_the_fallback_inside_a_checkpoint_comes_once():
    layer = mixed()[0]
    layer.linear1.register_forward_hook(lambda module, args, y: None)
    with pytest.warns(FusedRematWarning, match="linear1 has hooks") as seen:
        for _ in range(2):
            step(functools.partial(plain, layer), layer, X)
    assert sum(w.category is FusedRematWarning for w in seen) == 1


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
    (layer,), kept = stack((policy,)), []

    def forward(x):
        with SavedBytes(exclude=layer.parameters()) as saved:
            y = layer(x)
        kept.append(saved.total)
        return y

    x = X.clone().requires_grad_()
    forward(x)
    reentrant(forward, x).sum().backward()
    assert kept == [kept[0], 0, kept[0]]  # alone; without gradients; the replay


@pytest.mark.composes(
    "Outer checkpointing",
    "Hugging Face's gradient checkpointing, around layers that hold a FusedRematLayer",
)
@REENTRANT
def test_gradient_checkpointing_of_hugging_face(use_reentrant):
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, hidden_states, attention_mask=None):
            return self.block(hidden_states, src_key_padding_mask=attention_mask)

    model, replays = nn.ModuleList(map(Layer, mixed())), []
    padding = torch.zeros(X.shape[:2], dtype=torch.bool)
    padding[1, 3:] = True

    def forward(x):
        return functools.reduce(lambda h, layer: layer(h, attention_mask=padding), model, x)

    expected = step(forward, model, X)
    for layer in model:  # as PreTrainedModel.gradient_checkpointing_enable does
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(
            checkpoint, use_reentrant=use_reentrant
        )
    model[0].block.register_forward_pre_hook(lambda *_: replays.append(1))
    assert_same_bits(step(forward, model, X), expected)
    assert len(replays) == 2  # it did checkpoint


@REENTRANT
def test_frozen_weights(use_reentrant):
    """Within the checkpoint nothing wants a gradient but the last norms and x."""
    model = mixed()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith(PARAM_NAMES[-2:]))
    way = each(functools.partial(checkpoint, use_reentrant=use_reentrant))
    assert_alike(way(model), model, model)
