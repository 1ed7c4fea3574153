"""Submodules and parameters that were changed (items 25 and 32), against the stock layer's same."""

import warnings

import pytest
import torch
from reference import X, make, pair, run
from tiers import pairwise
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematWarning

pytestmark = pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


class Squashed(nn.Module):
    def forward(self, weight):
        return weight.tanh()


class Wrapped(nn.Module):
    """As adapters, loggers and wrappers do: attributes of the inner module show through."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        return (out[0] * 1.5, out[1]) if isinstance(out, tuple) else out * 1.5


def replace(name, new):
    def surgery(layer):
        setattr(layer, name, new(getattr(layer, name)))

    return surgery


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer.linear1)


def pruned_for_good(layer):
    prune.l1_unstructured(layer.linear1, "weight", 0.5)
    prune.remove(layer.linear1, "weight")


def hidden_attention(layer):
    attention = layer.self_attn
    del layer.self_attn
    layer.__dict__["self_attn"] = attention


def own_attention(layer):
    original = layer.self_attn.forward

    def forward(query, key, value, **kwargs):
        out, weights = original(query, key, value, **kwargs)
        return out.sin(), weights

    layer.self_attn.forward = forward


def own_blocks(layer):
    sa_block, ff_block = layer._sa_block, layer._ff_block

    def own_sa_block(x, attn_mask, key_padding_mask, is_causal=False):
        return sa_block(x, attn_mask, key_padding_mask, is_causal=is_causal).sin()

    layer._sa_block = own_sa_block
    layer._ff_block = lambda x: ff_block(x).sin()


def tied_in_the_layer(layer):
    layer.norm2.weight = layer.norm1.weight
    layer.linear2.bias = layer.norm1.bias


SURGERY = {
    "weight_norm": lambda m: parametrizations.weight_norm(m.linear1),
    "weight_norm, old": old_weight_norm,
    "spectral_norm": lambda m: parametrizations.spectral_norm(m.linear2),
    "spectral_norm, old": lambda m: nn.utils.spectral_norm(m.linear2),
    "orthogonal": lambda m: parametrizations.orthogonal(m.self_attn.out_proj),
    "pruned": lambda m: prune.l1_unstructured(m.linear1, "weight", 0.5),
    "pruned rows": lambda m: prune.ln_structured(m.linear2, "weight", 0.5, n=2, dim=0),
    "pruned for good": pruned_for_good,
    "parametrized in_proj_weight": lambda m: parametrize.register_parametrization(
        m.self_attn, "in_proj_weight", Squashed()
    ),
    "parametrized norm": lambda m: parametrize.register_parametrization(
        m.norm1, "weight", Squashed()
    ),
    "linear in a Sequential": replace("linear1", lambda m: nn.Sequential(m, nn.Tanh())),
    "norm in a Sequential": replace("norm1", lambda m: nn.Sequential(m, nn.Tanh())),
    "RMSNorm": replace("norm1", lambda m: nn.RMSNorm(8, 1e-5, dtype=torch.float64)),
    "Identity for a norm": replace("norm2", lambda m: nn.Identity()),
    "another linear": replace("linear1", lambda m: nn.Linear(8, 12).double()),
    "Identity for a dropout": replace("dropout2", lambda m: nn.Identity()),
    "wrapped linear": replace("linear2", Wrapped),
    "wrapped attention": replace("self_attn", Wrapped),
    "attention that is no submodule": hidden_attention,
    "self_attn.forward": own_attention,
    "blocks": own_blocks,
    "tied": tied_in_the_layer,
}
SERVED = {"pruned for good", "another linear", "Identity for a dropout", "tied"}
#: Buffers that forward updates: under checkpoint they are updated again in backward.
UPDATES = {"spectral_norm", "spectral_norm, old"}


def operated(name, **kwargs):
    """A stock and a fused layer under the same surgery, in which `new` modules are equal too."""
    stock, fused = make(**kwargs)
    for layer in (stock, fused):
        torch.manual_seed(3)
        SURGERY[name](layer)
    return stock, fused


class Checkpointed(nn.Module):
    """A layer under PyTorch's checkpoint."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **kwargs):
        return checkpoint(self.layer, x, use_reentrant=False, **kwargs)


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "name, policy, norm_first", pairwise(list(SURGERY), ["full", "none"], [True, False])
)
def test_surgery_in_training(name, policy, norm_first):
    stock, fused = operated(name, policy=policy, norm_first=norm_first)
    like = Checkpointed(stock) if name in UPDATES and policy == "full" else stock
    for kwargs in ({}, {"src_mask": CAUSAL}):
        assert_same(run(fused, X, X.cos(), **kwargs), run(like, X, X.cos(), **kwargs))
    assert list(fused.state_dict()) == list(stock.state_dict())
    assert_same(fused.state_dict().values(), stock.state_dict().values())


@pytest.mark.parametrize("name", SURGERY)
@pytest.mark.parametrize("batch_first", [True, False])
def test_surgery_in_eval(name, batch_first):
    """With and without gradients. The reference is the stock layer's own submodules."""
    stock, fused = (m.eval() for m in operated(name, batch_first=batch_first))
    stock.training = True  # of the layer alone: no native kernel
    x = X.transpose(0, 1) if batch_first else X
    for kwargs in ({}, {"src_mask": CAUSAL}):
        expected = run(stock, x, x.cos(), **kwargs)
        assert_same(run(fused, x, x.cos(), **kwargs), expected)
        with torch.no_grad():
            assert_same([fused(x, **kwargs)], expected[:1])


@pytest.mark.parametrize("name", SURGERY)
def test_which_surgery_the_fused_path_serves(name):
    _, fused = operated(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fused(X)
    expected = [] if name in SERVED else [FusedRematWarning] * (2 if name in UPDATES else 1)
    assert [w.category for w in caught] == expected


@pytest.mark.parametrize("name", SURGERY)
def test_the_layer_twice_after_surgery(name):
    grads = []
    stock, fused = operated(name)
    for layer in (Checkpointed(stock) if name in UPDATES else stock, fused):
        x = X.clone().requires_grad_()
        y = layer(layer(x)).square().sum()
        grads.append(torch.autograd.grad(y, [x, *layer.parameters()]))
    assert_same(*grads)


def test_removing_a_parametrization_brings_the_fused_path_back():
    stock, fused = make()
    for layer in (stock, fused):
        parametrizations.weight_norm(layer.linear1)
        layer(X)
        parametrize.remove_parametrizations(layer.linear1, "weight")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(run(fused, X), run(stock, X))


@pytest.mark.parametrize("policy", ["full", "none"])
def test_weights_tied_between_two_layers(policy):
    grads = []
    for layers in zip(make(policy), make(policy), strict=True):
        first, second = layers
        second.linear1.weight = first.linear1.weight
        second.self_attn.in_proj_weight = first.self_attn.in_proj_weight
        second.norm1 = first.norm1  # a whole module in two places
        model = nn.Sequential(first, second)
        grads.append(run(model, X, X.cos()))
    assert_same(grads[1], grads[0])


@pytest.fixture
def mesh():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("names", [("linear1",), ("self_attn", "norm1", "linear1", "linear2")])
@pytest.mark.parametrize("policy", ["full", "none"])
def test_fsdp_of_single_submodules(mesh, names, policy):
    """Their parameters are gathered by hooks, in forward and again for the replay."""
    results = []
    for layer in make(policy, dropout=0.2):
        fired = []
        layer.dropout1.register_forward_hook(lambda m, args, y, fired=fired: fired.append(1))
        for name in names:
            fully_shard(layer.get_submodule(name), mesh=mesh)
        for _ in range(2):
            layer.zero_grad()
            torch.manual_seed(0)
            x = X.clone().requires_grad_()
            y = layer(x)
            y.square().sum().backward()
        is_checkpointed = bool(results) and policy == "full"  # the second one is the fused layer
        assert len(fired) == (4 if is_checkpointed else 2)
        grads = [getattr(p.grad, "to_local", lambda g=p.grad: g)() for p in layer.parameters()]
        results.append([y.detach(), x.grad, *grads])
    assert_same(*results)


def test_pruning_while_training_keeps_pruned_weights_at_zero():
    losses = []
    for layer in make():
        prune.l1_unstructured(layer.linear1, "weight", 0.5)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = layer(X).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
        prune.remove(layer.linear1, "weight")
        assert (layer.linear1.weight == 0).double().mean() == 0.5
    torch.testing.assert_close(losses[1], losses[0])


def test_a_submodule_taken_away_raises_what_pytorch_raises():
    for name in ("linear1", "norm2", "self_attn"):
        for layer in make():
            setattr(layer, name, None)
            with pytest.raises(TypeError, match="not callable"):
                layer(X)


def test_swapped_parameters_of_the_same_shape_are_read_at_every_call():
    stock, fused = pair(8, 2, 12, dropout=0.0, dtype=torch.float64)
    for layer in (stock, fused):
        layer.linear1.weight = nn.Parameter(layer.linear1.weight.detach() * 2)
        layer.self_attn.in_proj_weight.data = layer.self_attn.in_proj_weight.data * 2
    assert_same(run(fused, X), run(stock, X))
