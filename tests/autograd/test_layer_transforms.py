"""torch.func on the layer (item 29): what the stock layer does, in train and eval, unannounced."""

import copy
import warnings

import pytest
import torch
from reference import X, make
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacrev, stack_module_state, vjp, vmap
from torch.testing import assert_close

from fused_remat import FusedRematWarning
from fused_remat.report.allocations import SavedBytes

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
MASKS = {
    "no mask": {},
    "mask": {"src_mask": CAUSAL},
    "hint": {"src_mask": CAUSAL, "is_causal": True},
}
MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@pytest.fixture(autouse=True)
def no_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        # PyTorch on its own kernels under vmap
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


def parameters(layer):
    return {name: p.detach() for name, p in layer.named_parameters()}


def assert_alike(transformed, training=True, **kwargs):
    """`transformed(layer, parameters)` is the same for the fused and for the stock layer."""
    stock, fused = (m.train(training) for m in make(**kwargs))
    assert_close(*(transformed(m, parameters(m)) for m in (fused, stock)))


@MODES
@pytest.mark.parametrize("masks", MASKS)
def test_functional_call(training, masks):
    def call(layer, params):
        doubled = {name: (2 * p).requires_grad_() for name, p in params.items()}
        y = functional_call(layer, doubled, (X,), MASKS[masks])
        return [y, *torch.autograd.grad(y.square().sum(), list(doubled.values()))]

    assert_alike(call, training)


def test_functional_call_of_some_and_of_tied_parameters():
    def call(layer, params):
        layer.norm2.weight = layer.norm1.weight
        weight = torch.full((8,), 0.5, dtype=torch.float64, requires_grad=True)
        y = functional_call(layer, {"norm1.weight": weight}, (X,))  # both names
        return [y, *torch.autograd.grad(y.square().sum(), weight)]

    assert_alike(call)


@MODES
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_grad(training, masks, norm_first):
    def call(layer, params):
        def loss(params, x):
            return functional_call(layer, params, (x,), MASKS[masks]).square().sum()

        return [grad(loss)(params, X), *grad_and_value(loss, argnums=1)(params, X)]

    assert_alike(call, training, norm_first=norm_first)


@MODES
def test_vjp_and_jacrev(training):
    def call(layer, params):
        y, pull = vjp(lambda p, x: functional_call(layer, p, (x,)), params, X)
        jacobian = jacrev(lambda x: functional_call(layer, params, (x,)))(X[:2, :1])
        return [y, pull(y.cos()), jacobian]

    assert_alike(call, training)


@MODES
@pytest.mark.parametrize("norm_first", [True, False])
def test_per_sample_gradients(training, norm_first):
    def call(layer, params):
        def loss(params, x):
            return functional_call(layer, params, (x.unsqueeze(1),)).square().sum()

        return vmap(grad(loss), in_dims=(None, 1))(params, X)

    assert_alike(call, training, norm_first=norm_first)


@MODES
def test_ensembles(training):
    """Stacked parameters of several layers, as in PyTorch's tutorial on model ensembling."""

    def call(original, _):
        layers = [copy.deepcopy(original) for _ in range(3)]
        with torch.no_grad():
            for scale, layer in enumerate(layers, start=1):
                layer.linear1.weight.mul_(scale)
        params, buffers = stack_module_state(layers)
        skeleton = copy.deepcopy(original).to("meta")

        def one(params, buffers, x):
            return functional_call(skeleton, (params, buffers), (x,))

        y = vmap(one, in_dims=(0, 0, None))(params, buffers, X)
        assert_close(y, torch.stack([layer(X) for layer in layers]))
        return [y, *torch.autograd.grad(y.square().sum(), list(params.values()))]

    assert_alike(call, training)


@MODES
def test_vmap_without_gradients(training):
    def call(layer, params):
        with torch.no_grad():
            return vmap(lambda x: layer(x.unsqueeze(1)), in_dims=1)(X)

    assert_alike(call, training)


def test_vmap_over_a_layer_with_dropout_follows_the_randomness_flag():
    def call(layer, _):
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(lambda x: layer(x.unsqueeze(1)), in_dims=1)(X)
        torch.manual_seed(0)
        return vmap(lambda x: layer(x.unsqueeze(1)), in_dims=1, randomness="different")(X)

    assert_alike(call, dropout=0.5)


def test_grad_of_a_model_around_the_layer():
    """The layer among others, in `nn.TransformerEncoder`, as a model is differentiated."""

    def call(layer, _):
        torch.manual_seed(0)
        head = nn.Linear(8, 1, dtype=torch.float64)
        model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), head)

        def loss(params):
            return functional_call(model, params, (X,)).square().mean()

        return grad(loss)(parameters(model))

    assert_alike(call)


def test_after_a_transform_the_fused_path_is_back():
    _, fused = make()
    grad(lambda x: fused(x).sum())(X)
    with SavedBytes(exclude=fused.parameters()) as saved:
        fused(X.clone().requires_grad_())
    assert saved.total < 2 * X.nbytes


def test_tensors_that_outlived_a_transform_are_as_any_other():
    _, layer = make()
    given, left = X.clone().requires_grad_(), []

    def loss(x, params):
        left.extend([x, x * 2, params])
        return (x * x).sum() + sum(p.sum() for p in params.values())

    grad(loss, (0, 1))(given, dict(layer.named_parameters()))
    x, twice, params = left
    dy = torch.randn_like(X)
    for wrapped, plain in ((x, given), (twice, given * 2)):
        wanted = (given, *layer.parameters())
        expected = torch.autograd.grad(layer(plain), wanted, dy)
        for call in (layer, lambda x: functional_call(layer, params, x)):
            assert torch.equal(call(wrapped), layer(plain))
            got = torch.autograd.grad(call(wrapped), wanted, dy, retain_graph=True)
            assert all(map(torch.equal, got, expected))
