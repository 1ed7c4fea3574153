"""torch.export, torch.func and forward mode: what PyTorch's own layer does, in train and eval.

An exported program outlives the policy and the library: nothing in it may be ours.
`functional_call` without a transform runs as a block: tests/layers/test_composition.py.
"""

import collections
import functools
import io

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from reference import X, make, pair, randomize
from same_bits import assert_same_bits, step
from tiers import exhaustive
from torch import nn
from torch.export import Dim, export
from torch.func import functional_call, grad, grad_and_value, jacrev, vjp, vmap
from torch.testing import assert_close

from fused_remat import convert

pytestmark = [
    pytest.mark.usefixtures("served"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # export on itself
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # PyTorch, under vmap
]


def x_of(batch=3, seq_len=7):
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, seq_len, 8, generator=generator).requires_grad_()


def operators(program):
    return collections.Counter(str(n.target) for n in program.graph.nodes if n.op != "placeholder")


def assert_only_atens(program):
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert node.target.namespace == "aten", node.target


def assert_same(ours, theirs, *args):
    """Programs of the same operators, and so of the same bits."""
    assert operators(ours) == operators(theirs)
    assert_only_atens(ours)
    modules = ours.module(), theirs.module()
    assert_same_bits(*(step(module, module, *args) for module in modules))


def programs(models, args, strict=False, dynamic=None):
    dims = None if dynamic is None else tuple(dynamic for _ in args)
    return [export(model, args, dynamic_shapes=dims, strict=strict) for model in models]


def masked():
    """Return a mask and padding."""
    padding = torch.zeros(3, 7)
    padding[1, 4:] = -torch.inf
    return torch.full((7, 7), -torch.inf).triu(1), padding


#: Options of the layer, and masks; the second has an activation without a row.
PLAIN = {"norm_first": True}, ()
MASKED = {"activation": nn.functional.softsign}, masked()


@pytest.mark.composes(
    "torch.export",
    "a layer in train and eval, strict or not, static or dynamic batch and sequence",
    limits="the program is PyTorch's own forward: policies do not reach into it",
)
@pytest.mark.parametrize(
    "training, strict, dynamic, given",
    [(True, True, True, PLAIN), (False, False, False, PLAIN), (True, False, False, MASKED),
     exhaustive(True, False, False, PLAIN), exhaustive(False, True, True, PLAIN)],
)  # fmt: skip
def test_the_program_is_pytorchs(training, strict, dynamic, given):
    options, masks = given
    models = [m.train(training) for m in pair(8, 2, 12, 0.2, batch_first=True, **options)]
    shapes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if dynamic else None
    theirs, ours = programs(models, (x_of(), *masks), strict, shapes)
    assert_same(ours, theirs, x_of(), *masks)
    if dynamic:
        assert_same(ours, theirs, x_of(5, 11))


@pytest.mark.composes("torch.export", "run_decompositions")
def test_decompositions():
    stock, fused = pair(8, 2, 12, 0.0, batch_first=True)
    program = export(fused, (x_of(),)).run_decompositions()
    assert_only_atens(program)
    # Attention is decomposed as well: float32 sums in another order.
    found, expected = (step(module, module, x_of()) for module in (program.module(), stock))
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.composes("torch.export", "a converted model, saved and loaded")
def test_a_converted_model_saved_and_loaded():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.2, batch_first=True)
    stock = randomize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).train()
    expected = step(stock, stock, x_of())
    model = convert(stock, policy="lean")
    file = io.BytesIO()
    torch.export.save(export(model, (x_of(),)), file)
    file.seek(0)
    program = torch.export.load(file)
    assert_only_atens(program)
    module = program.module()
    assert_same_bits(step(module, module, x_of()), expected)


@pytest.mark.composes(
    "torch.export", "eval under no_grad, with masks", limits="strict=False, the default"
)
def test_without_gradients():
    """Without PyTorch's inference kernel, which takes a float mask's numbers for exclusions."""
    models = [m.eval() for m in pair(8, 2, 12, batch_first=True)]
    args = (x_of().detach(), torch.full((7, 7), 0.5).triu(1))
    with torch.no_grad():
        theirs, ours = programs(models, args)
        assert operators(ours) == operators(theirs)
        assert not any("transformer_encoder_layer" in name for name in operators(ours))
        assert torch.equal(ours.module()(*args), theirs.module()(*args))
        assert_close(ours.module()(*args), models[1](*args))


# --- torch.func and forward mode

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


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
