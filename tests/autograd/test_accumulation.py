"""Weight gradients added straight into `main_grad` or `.grad`; and when that is refused."""

import copy
import pickle

import pytest
import torch
from reference import EXACT_PRESETS, pair
from torch import nn
from torch.testing import assert_close

from fused_remat import FusedRematLayer, FusedRematWarning, convert
from fused_remat.convert import revert
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps import linear

TARGETS = pytest.mark.parametrize("target", ["grad", "main_grad"])
WIDE = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32}


pytestmark = pytest.mark.usefixtures("one_thread")


def make(target="main_grad", dtype=torch.float32, policy="full", **kwargs):
    """A fused layer that accumulates into zeroed buffers."""
    kwargs = {"dropout": 0.0, "batch_first": True, "norm_first": True, **kwargs}
    _, fused = pair(16, 2, 32, policy=policy, dtype=dtype, **kwargs)
    fused.accumulate_into = target
    return zeroed(fused)


def zeroed(layer):
    for p in layer.parameters():
        if layer.accumulate_into == "main_grad":
            p.main_grad = torch.zeros_like(p, dtype=WIDE[p.dtype])
        elif layer.accumulate_into == "grad":
            p.grad, p.grad_dtype = None, WIDE[p.dtype]
    return layer


def micro_batches(dtype=torch.float32, count=16, shape=(2, 6, 16)):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [x.to(dtype) for x in made]


X = micro_batches(count=1)[0]


def backward(layer, xs):
    for x in xs:
        y = layer(x)
        y.backward(torch.linspace(0.5, 1.5, 16, dtype=y.dtype).expand_as(y))
    return layer


def sums(layer):
    """What the layer's gradients were added to, by name; None before anything is in `.grad`."""
    target = layer.accumulate_into or "grad"
    return {name: getattr(p, target) for name, p in layer.named_parameters()}


def steps(layer):
    xs = [x.requires_grad_() for x in micro_batches(torch.float64, 3)]
    backward(layer, xs)
    return [x.grad for x in xs]


def frozen(layer):
    for p in (layer.linear1.weight, layer.norm2.bias, layer.self_attn.in_proj_weight):
        p.requires_grad_(False)
        p.grad = p.main_grad = None
    return steps(layer)


def twice(layer):
    y = layer(X.double()).sin().sum()
    y.backward(retain_graph=True)
    y.backward()
    return []


def of_one_weight(layer):
    layer(X.double()).sin().sum().backward(inputs=[layer.linear2.weight])
    return []


#: What trains a layer and returns gradients of inputs, and the layer's options.
WAYS = {
    **{policy: (steps, {"policy": policy}) for policy in EXACT_PRESETS},
    "post-norm": (steps, {"norm_first": False}),
    "post-norm, fast": (steps, {"norm_first": False, "policy": "fast"}),
    "frozen parameters": (frozen, {}),
    "what an activation captures": (steps, {"activation": nn.PReLU(init=0.3, dtype=torch.float64)}),
    "a second backward": (twice, {}),
    "backward for one weight": (of_one_weight, {}),
}


@TARGETS
@pytest.mark.parametrize("way", WAYS)
def test_sums_are_autograds_and_the_inputs_gradient_is_as_ever(target, way):
    (train, options), found, inputs = WAYS[way], [], []
    for where in (target, None):
        layer = make(where, torch.float64, **copy.deepcopy(options))
        inputs.append(train(layer))
        found.append({n: t for n, t in sums(layer).items() if t is not None and t.any()})
        assert where != "main_grad" or all(p.grad is None for p in layer.parameters())
    assert_close(*found)  # float64, summed in another order
    assert all(map(torch.equal, *inputs))


@pytest.mark.parametrize(
    ("target", "native", "tokens"),
    # 300: in two pieces.
    [*(("main_grad", native, n) for native in (False, True) for n in (6, 300)), ("grad", False, 6)],
)
def test_bfloat16_gradients_go_in_unrounded(target, native, tokens, monkeypatch):
    """`native`: as on a CPU with bfloat16 products of its own, whose results are bfloat16."""
    monkeypatch.setattr(linear, "widens", lambda x: not native)
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: 512)
    xs = micro_batches(torch.bfloat16, 4, (2, tokens, 16))
    found = sums(backward(make(target, torch.bfloat16), xs))
    single = [sums(backward(make("main_grad", torch.bfloat16), [x])) for x in xs]
    rounded = sums(backward(make(None, torch.bfloat16), xs))
    for name, total in found.items():
        assert total.dtype is torch.float32
        assert not torch.equal(single[0][name], single[0][name].bfloat16().float()), name
        exact = sum(one[name].double() for one in single)
        # Float32 sums of four float32 terms; each of a bfloat16 sum's roundings is up to 2**-9.
        assert (total - exact).norm() < 1e-6 * exact.norm(), name
        assert (rounded[name] - exact).norm() > 1e-4 * exact.norm(), name


@TARGETS
def test_autograd_grad_returns_gradients_and_adds_none(target):
    found = []
    for layer in (make(target), make(None)):
        leaf = X.clone().requires_grad_()
        asked = [leaf, layer.linear1.weight, layer.norm1.bias]
        found.append(torch.autograd.grad(layer(leaf).sum(), asked))
        assert not any(t is not None and t.any() for t in sums(layer).values())
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("policy", ["full", "fast"])
def test_it_keeps_nothing_more_and_makes_no_gradients_besides(policy):
    """The same bytes are kept; backward's peak is lower by the weight gradients not held."""
    width, hidden = 64, 256
    weights = 4 * (4 * width**2 + 2 * width * hidden)
    found = {}
    x = torch.randn(2, 8, width, requires_grad=True)
    for target in (None, "main_grad"):
        layer = FusedRematLayer(
            width, 2, hidden, dropout=0.0, batch_first=True, policy=policy, accumulate_into=target
        )
        zeroed(layer)
        out = layer(x)
        found[target] = (
            measure_allocations(lambda layer=layer: layer(x)).net,
            measure_allocations(lambda out=out: out.sum().backward()).peak,
        )
    assert found[None][0] == found["main_grad"][0]
    # Not all of them are there at the peak.
    assert found["main_grad"][1] <= found[None][1] - 0.7 * weights


def test_it_is_set_like_a_policy():
    stock = nn.TransformerEncoderLayer(16, 2, 32)
    layer = FusedRematLayer.from_layer(stock, accumulate_into="grad")
    assert layer.accumulate_into == "grad" and "accumulate_into='grad'" in repr(layer)
    assert "accumulate_into" not in repr(FusedRematLayer(16, 2, 32))
    assert pickle.loads(pickle.dumps(layer)).accumulate_into == "grad"
    model = convert(nn.Sequential(stock), accumulate_into="main_grad")
    assert model[0].accumulate_into == "main_grad"
    assert "_accumulate_into" not in revert(model)[0].__dict__
    for wrong in ("maingrad", True, "cuda"):
        with pytest.raises(ValueError, match="accumulate_into must be one of None, 'grad', 'main"):
            layer.accumulate_into = wrong
        with pytest.raises(ValueError, match="accumulate_into must be one of"):
            convert(model, accumulate_into=wrong)
    assert type(model[0]) is nn.TransformerEncoderLayer


# --- what is refused


def main_grad_of(make, found):
    """The `main_grad` of linear2's weight is another, made from the one that was."""

    def change(layer):
        layer.linear2.weight.main_grad = make(layer.linear2.weight.main_grad)

    expected = r"torch.float32 of shape \(16, 32\)"
    return change, f"fc2.weight has a main_grad that is {found}; expected {expected}"


def hook_of_node(register):
    def change(layer):
        layer.held = torch.autograd.graph.get_gradient_edge(layer.linear1.bias).node
        getattr(layer.held, register)(lambda *grads: None)  # who registers one has to hold it

    return change, "fc1.bias has hooks on its AccumulateGrad node"


def made_in_inference(buffer):
    with torch.inference_mode():
        return torch.zeros_like(buffer)


#: What makes a layer unable to accumulate, and how that is said. Those of the first six may also
#: happen between forward and backward.
REFUSED = {
    "a hook of a tensor": (
        lambda layer: layer.linear1.weight.register_hook(lambda g: None),
        "fc1.weight has tensor hooks",
    ),
    "a hook after accumulation": (
        lambda layer: layer.norm2.bias.register_post_accumulate_grad_hook(lambda p: None),
        "norm2.bias has post-accumulate-grad hooks",
    ),
    "a hook of a node": hook_of_node("register_hook"),
    "a hook before a node": hook_of_node("register_prehook"),
    "no main_grad": (
        lambda layer: delattr(layer.linear2.weight, "main_grad"), "fc2.weight has no main_grad",
    ),
    "a wrong dtype": main_grad_of(torch.Tensor.bfloat16, "torch.bfloat16 of .* cpu"),
    "a wrong shape": main_grad_of(torch.Tensor.t, r".* \(32, 16\) on cpu"),
    "a wrong device": main_grad_of(lambda t: t.to("meta"), ".* on meta"),
    "no tensor": main_grad_of(lambda t: 0.0, "float"),
    "one of inference": main_grad_of(made_in_inference, ".*, an inference tensor"),
    "an expanded one": main_grad_of(lambda t: t[:, :1].expand(16, 32), ".*, expanded"),
    "with a gradient": main_grad_of(torch.Tensor.requires_grad_, ".*, with requires_grad"),
    "a parametrization": (
        lambda layer: nn.utils.parametrizations.weight_norm(layer.linear1),
        "linear1 is .*ParametrizedLinear",
    ),
}  # fmt: skip


def refuses(name, target="main_grad"):
    return pytest.raises(RuntimeError, match=f"accumulate_into='{target}' .*{REFUSED[name][1]}")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    layer = make()
    REFUSED[name][0](layer)
    with refuses(name):
        layer(X).sum().backward()
    assert all(p.grad is None for p in layer.parameters())
    with torch.no_grad():
        assert layer(X).isfinite().all()  # where no gradient is wanted, nothing is refused


@pytest.mark.parametrize(
    "name, target",
    [*((name, "main_grad") for name in list(REFUSED)[:6]), ("a hook after accumulation", "grad")],
)
def test_refused_between_forward_and_backward(name, target):
    layer = make(target)
    loss = layer(X).sum()
    REFUSED[name][0](layer)
    with refuses(name, target):
        loss.backward()
    assert all(p.grad is None for p in layer.parameters())
    buffers = (getattr(p, "main_grad", None) for p in layer.parameters())
    assert not any(b is not None and b.any() for b in buffers)  # before anything is added


def test_refused_with_create_graph():
    layer, leaf = make(), X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True cannot differentiate"):
        layer(leaf).sum().backward(create_graph=True)
    (grad,) = torch.autograd.grad(layer(leaf).sum(), leaf, create_graph=True)  # asks for no weight
    assert grad.requires_grad and not layer.linear1.weight.main_grad.any()


def test_refused_where_the_call_is_not_fused():
    layer = make()
    with pytest.raises(RuntimeError, match="exported, transformed or traced"):
        torch.func.vmap(layer)(X.unsqueeze(0))
    with pytest.raises(Exception, match="the call is compiled"):
        torch.compile(layer, backend="eager", fullgraph=True)(X)
    torch.compile(layer, backend="eager")(X).sum().backward()  # breaks the graph, in eager mode
    assert layer.linear1.weight.main_grad.any()
    layer.linear1.register_forward_hook(lambda module, args, y: y)
    with pytest.raises(RuntimeError, match="linear1 has hooks"):
        layer(X)
    layer.requires_grad_(False)
    with pytest.warns(FusedRematWarning, match="linear1 has hooks"):
        assert layer(X.clone().requires_grad_()).requires_grad  # nothing to accumulate
