"""Layers that people changed compute what the stock layer does with the same changes."""

import copy
import warnings

import changes
import pytest
import torch
from accuracy import assert_bits
from changes import CHANGES, HOOKS, SUBCLASSES, SURGERY, Change, own_defaults
from layer_kinds import run
from reference import X, make, pair
from tiers import pairwise
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, FusedRematWarning
from fused_remat.report.allocations import SavedBytes

pytestmark = pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
MASKS = ({}, {"src_mask": CAUSAL}, {"src_mask": torch.zeros(5, 5).double().masked_fill(CAUSAL, -1)})
IS_2_13 = torch.__version__.startswith("2.13")
FALLEN_BACK = [name for name, change in CHANGES.items() if change.reason]


class Checkpointed(nn.Module):
    """A layer under PyTorch's checkpoint."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **kwargs):
        return checkpoint(self.layer, x, use_reentrant=False, **kwargs)


def like(change, stock, policy="full"):
    """What a fallback is compared with: the stock layer, as often as it updates buffers."""
    return Checkpointed(stock) if change.updates and policy == "full" else stock


def step(layer, x=X, **kwargs):
    torch.manual_seed(0)
    return run(layer, x, x.cos(), **kwargs)


def assert_same(got, expected):
    torch.testing.assert_close(list(got), list(expected))


@pytest.mark.parametrize(
    "name, policy, norm_first", pairwise(list(CHANGES), ["full", "none"], [True, False])
)
def test_in_training(name, policy, norm_first):
    dropout = 0.2 if CHANGES[name].reason else 0.0  # a block draws other bits
    stock, fused = CHANGES[name].layers(policy, norm_first=norm_first, dropout=dropout)
    for kwargs in MASKS:
        expected = step(like(CHANGES[name], stock, policy), **kwargs)
        assert_same(step(fused, **kwargs), expected)
    assert list(fused.state_dict()) == list(stock.state_dict())
    assert_same(fused.state_dict().values(), stock.state_dict().values())
    if name == "a subclass that keeps weights":
        torch.testing.assert_close(fused.weights, stock.weights)
        assert fused.weights.shape == (2, 5, 5)


@pytest.mark.parametrize("name", FALLEN_BACK)  # the others draw other bits
@pytest.mark.parametrize("policy", ["full", "none"])
def test_with_dropout_bit_for_bit(name, policy):
    stock, fused = CHANGES[name].layers(policy, dropout=0.3)
    for _ in range(2):
        assert_bits(step(fused), step(like(CHANGES[name], stock, policy)))
        assert_bits(fused.state_dict().values(), stock.state_dict().values())


# In evaluation dropout hands on what ReLU keeps for backward, which that hook overwrites.
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "hook: input_in_place"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_in_evaluation(name, batch_first):
    """With gradients and without, where PyTorch's own kernel does not see many a change.

    Such a defect is shown on the stock layer too, so that we notice when PyTorch mends it.
    """
    change = CHANGES[name]
    batch_first = batch_first and name in {**SURGERY, **HOOKS} and "norm of " not in name
    stock, fused = (m.eval() for m in change.layers(batch_first=batch_first, norm_first=False))
    x = X.transpose(0, 1) if batch_first else X
    for kwargs in MASKS:
        stock.training = True  # of the layer alone: no native kernel
        expected = step(stock, x, **kwargs)
        stock.training = False
        if change.breaks_eval and batch_first and kwargs == {} and IS_2_13:
            found = error_of(stock, x, expected[0])
            assert found > 1e-5, "mended in PyTorch: see layers/fallback.py"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert error_of(fused, x, expected[0], **kwargs) < 1e-12
        assert_same(step(fused, x, **kwargs), expected)
    assert torch.backends.mha.get_fastpath_enabled()


@torch.no_grad()
def error_of(layer, x, expected, **masks):
    """The largest error; infinite where PyTorch's kernel misses a part of the layer, or has NaN."""
    try:
        found = layer(x, **masks)
    except AttributeError:
        return float("inf")
    return (found - expected).abs().nan_to_num(nan=float("inf")).max().item()


@pytest.mark.parametrize("name", CHANGES)
def test_the_reason_is_told_once_at_the_users_line(name):
    change = CHANGES[name]
    _, fused = change.layers(dropout=0.2)
    own_forward = name == "conditional norms"  # it is this one's line
    if name != "a forward of its own":
        assert fused.why_not_fused(X) == (change.reason or None)
    x, caught = X.clone().requires_grad_(), []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as new:
            warnings.simplefilter("always")
            fused(x)
        caught.append([(w.category, str(w.message)) for w in new])
        assert {w.filename for w in new} <= {changes.__file__ if own_forward else __file__}
    under = "runs PyTorch's own forward under torch.utils.checkpoint: "
    text = f"fused_remat: {type(fused).__name__} {under}{change.reason}"
    told = [entry for entry in caught[0] if "updates buffers in forward" not in entry[1]]
    assert told == ([(FusedRematWarning, text)] if change.reason else [])
    assert len(caught[0]) - len(told) == change.updates and caught[1] == []


# Of that, the second call sets the condition anew.
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "conditional norms"])
def test_a_second_application_does_not_mix_with_the_first(name):
    """The first one's backward comes last, when hooks have seen the second."""
    change, grads = CHANGES[name], []
    stock, fused = change.layers(dropout=0.2 if change.reason else 0.0)
    for layer in (like(change, stock), fused):
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        y = layer(layer(x)).square().sum()
        params = [p for p in layer.parameters() if p.requires_grad]
        grads.append(torch.autograd.grad(y, [x, *params]))
    assert_same(*grads)


@pytest.mark.parametrize("name", [n for n in HOOKS if "weights" not in n and "kwargs" not in n])
@pytest.mark.parametrize("policy", ["full", "none"])
def test_what_hooks_change_is_honoured(name, policy):
    _, changed = CHANGES[name].layers(policy, dropout=0.2)
    _, plain = Change("").layers("none", dropout=0.2)
    assert not torch.allclose(step(changed)[0], step(plain)[0])


@pytest.mark.parametrize("name", SUBCLASSES)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API")
def test_stacks_of_copies(name, norm_first):
    """nn.TransformerEncoder deep-copies the layer; so do models of their own."""
    for kind in ("encoder", "copies"):
        results = []
        for layer in CHANGES[name].layers(norm_first=norm_first):
            with torch.no_grad():
                layer(X)
            if kind == "encoder":
                model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            else:
                model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(2)))
            assert len(list(model.parameters())) == 2 * len(list(layer.parameters()))
            results.append(step(model))
        assert_same(*results)


def test_a_subclass_with_other_defaults_saves_memory():
    layer = own_defaults(FusedRematLayer)(dtype=torch.float64)
    assert repr(layer).startswith("OwnDefaults(") and layer.policy == "full"
    with SavedBytes(exclude=layer.parameters()) as saved:
        layer(X.clone().requires_grad_())
    assert saved.total < 2 * X.nbytes


# --- parameters and modules that are shared, sharded, swapped


def test_removing_a_parametrization_brings_the_fused_path_back():
    stock, fused = make()
    for layer in (stock, fused):
        parametrizations.weight_norm(layer.linear1)
        layer(X)
        parametrize.remove_parametrizations(layer.linear1, "weight")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(step(fused), step(stock))


@pytest.mark.parametrize("policy", ["full", "none"])
def test_weights_tied_between_two_layers(policy):
    grads = []
    for first, second in zip(make(policy), make(policy), strict=True):
        second.linear1.weight = first.linear1.weight
        second.self_attn.in_proj_weight = first.self_attn.in_proj_weight
        second.norm1 = first.norm1  # a whole module in two places
        grads.append(step(nn.Sequential(first, second)))
    assert_same(grads[1], grads[0])


def test_swapped_parameters_of_the_same_shape_are_read_at_every_call():
    stock, fused = pair(8, 2, 12, dropout=0.0, dtype=torch.float64)
    for layer in (stock, fused):
        layer.linear1.weight = nn.Parameter(layer.linear1.weight.detach() * 2)
        layer.self_attn.in_proj_weight.data = layer.self_attn.in_proj_weight.data * 2
    assert_same(step(fused), step(stock))


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
