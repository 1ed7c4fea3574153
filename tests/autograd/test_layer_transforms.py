"""torch.func on the layer (item 29): what the stock layer does, in train and eval, unannounced.

`functional_call` without a transform is served: tests/layers/test_composition.py.
"""

import copy
import functools

import pytest
import torch
from reference import X, make
from torch.func import functional_call, grad, grad_and_value, jacrev, stack_module_state, vjp, vmap
from torch.testing import assert_close

from fused_remat.report.allocations import SavedBytes

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
pytestmark = [
    pytest.mark.usefixtures("served"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # PyTorch, under vmap
]


def differentiated(layer, params, **masks):
    def loss(params, x):
        return functional_call(layer, params, (x,), masks).square().sum()

    return [grad(loss)(params, X), *grad_and_value(loss, argnums=1)(params, X)]


def with_tied_parameters(layer, params):
    layer.norm2.weight = layer.norm1.weight
    weight = torch.full((8,), 0.5, dtype=torch.float64, requires_grad=True)
    y = functional_call(layer, {"norm1.weight": weight}, (X,))  # both names
    return [y, *torch.autograd.grad(y.square().sum(), weight)]


def with_vjp_and_jacrev(layer, params):
    y, pull = vjp(lambda p, x: functional_call(layer, p, (x,)), params, X)
    jacobian = jacrev(lambda x: functional_call(layer, params, (x,)))(X[:2, :1])
    return [y, pull(y.cos()), jacobian]


def by_sample(layer, params):
    def loss(params, x):
        return functional_call(layer, params, (x.unsqueeze(1),)).square().sum()

    return vmap(grad(loss), in_dims=(None, 1))(params, X)


def in_an_ensemble(original, _):
    """Stacked parameters of several layers, as in PyTorch's tutorial on model ensembling."""
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


def without_gradients(layer, _):
    with torch.no_grad():
        return vmap(lambda x: layer(x.unsqueeze(1)), in_dims=1)(X)


TRANSFORMS = {
    "grad, mask": functools.partial(differentiated, src_mask=CAUSAL),
    "grad, hint": functools.partial(differentiated, src_mask=CAUSAL, is_causal=True),
    "tied parameters": with_tied_parameters,
    "vjp and jacrev": with_vjp_and_jacrev,
    "per-sample gradients": by_sample,
    "ensemble": in_an_ensemble,
    "vmap without gradients": without_gradients,
}


def parameters(layer):
    return {name: p.detach() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_same_as_of_the_stock_layer(name, norm_first, training):
    stock, fused = (m.train(training) for m in make(norm_first=norm_first))
    assert_close(*(TRANSFORMS[name](m, parameters(m)) for m in (fused, stock)))


def test_vmap_over_a_layer_with_dropout_follows_the_randomness_flag():
    def call(layer):
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(lambda x: layer(x.unsqueeze(1)), in_dims=1)(X)
        torch.manual_seed(0)
        return vmap(lambda x: layer(x.unsqueeze(1)), in_dims=1, randomness="different")(X)

    assert_close(*map(call, make(dropout=0.5)))


@pytest.mark.parametrize("how", ["grad", "export"])
def test_afterwards_the_fused_path_is_back(how):
    _, fused = make()
    if how == "grad":
        grad(lambda x: fused(x).sum())(X)
    else:
        torch.export.export(fused, (X,))
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
