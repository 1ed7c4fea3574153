"""Items 24 to 29 of the drop-in contract: hooks, forward mode, changes in place, torch.func.

What else gradients promise is tested of every operation, in tests/ops/test_every_op.py.
`functional_call` without a transform runs as a block: tests/layers/test_composition.py.
"""

import functools

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from reference import X, make
from torch.func import functional_call, grad, grad_and_value, jacrev, vjp, vmap
from torch.testing import assert_close

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
pytestmark = [
    pytest.mark.usefixtures("served"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # PyTorch, under vmap
]


def differentiated(layer, params, **masks):
    def loss(params, x):
        return functional_call(layer, params, (x,), masks).square().sum()

    return [grad(loss)(params, X), *grad_and_value(loss, argnums=1)(params, X)]


def with_vjp_and_jacrev(layer, params):
    y, pull = vjp(lambda p, x: functional_call(layer, p, (x,)), params, X)
    jacobian = jacrev(lambda x: functional_call(layer, params, (x,)))(X[:2, :1])
    return [y, pull(y.cos()), jacobian]


def by_sample(layer, params):
    def loss(params, x):
        return functional_call(layer, params, (x.unsqueeze(1),)).square().sum()

    return vmap(grad(loss), in_dims=(None, 1))(params, X)


TRANSFORMS = {
    "grad, mask": functools.partial(differentiated, src_mask=CAUSAL),
    "grad, hint": functools.partial(differentiated, src_mask=CAUSAL, is_causal=True),
    "vjp and jacrev": with_vjp_and_jacrev,
    "per-sample gradients": by_sample,
}


def parameters(layer):
    return {name: p.detach() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_same_as_of_the_stock_layer(name, norm_first, training):
    stock, fused = (m.train(training) for m in make(norm_first=norm_first))
    assert_close(*(TRANSFORMS[name](m, parameters(m)) for m in (fused, stock)))


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


def test_forward_mode_raises():
    _, fused = make()
    with fwAD.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        fused(fwAD.make_dual(X, torch.ones_like(X)))
