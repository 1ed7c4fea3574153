"""A call takes the trace of an earlier one only if neither the layer nor the arguments changed."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from collections import OrderedDict, deque
from types import SimpleNamespace

import altered_layers as altered
import hard_layers as hard
import hf_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from altered_layers import WIDTH
from test_hard_layers import B, S, compare, x_of
from test_recorder import normal, pair, step
from torch import Tensor, nn

from fused_remat import convert
from fused_remat.layers.eligibility import Unsupported
from fused_remat.tracing import layer as layer_module
from fused_remat.tracing.call import Trace
from fused_remat.tracing.guards import Watch, signed
from fused_remat.tracing.layer import _OWN, KNOWN, traced_class
from fused_remat.tracing.state import state_of


@pytest.fixture(autouse=True)
def _nothing_known():
    KNOWN.clear()


def held(value, **more):
    """Return a layer with an attribute that holds a value."""
    layer = hard.Layer()
    layer.held = value
    vars(layer).update(more)
    return layer


def scaled(scale):
    def run(x, *, factor=[1.0]):  # noqa: B006
        return scale * factor[0] * x

    return run


def set_cell(function):
    function.__closure__[0].cell_contents = 7.0


class Numbers:
    scale = 2.0


class Kind(hard.Layer):
    scale = 1.0

    def branch(self, x):
        return Numbers.scale * self.scale * self.mlp(x)


class OtherMLP(altered.MLP):
    pass


SHARED = nn.Linear(2, 2)
#: A layer, and a change of its state.
CHANGES = {
    "a number": (lambda: held(1.0), lambda m: setattr(m, "held", 2.0)),
    "a flag for a number": (lambda: held(1), lambda m: setattr(m, "held", True)),
    "a number of a submodule": (hard.Layer, lambda m: setattr(m.norm, "eps", 0.1)),
    "a new attribute": (hard.Layer, lambda m: setattr(m, "more", None)),
    "a deleted attribute": (lambda: held(1.0), lambda m: delattr(m, "held")),
    "another name": (
        lambda: held(None), lambda m: (delattr(m, "held"), setattr(m, "more", None)),
    ),
    "a list": (lambda: held([1, 2]), lambda m: m.held.__setitem__(0, 5)),
    "a longer list": (lambda: held([1, 2]), lambda m: m.held.append(2)),
    "an item moves": (
        lambda: held([[1, 2], [3]]), lambda m: m.held[1].insert(0, m.held[0].pop()),
    ),
    "a list in a tuple": (lambda: held(([1], 2)), lambda m: m.held[0].clear()),
    "a deque": (lambda: held(deque([1])), lambda m: m.held.appendleft(2)),
    "a set": (lambda: held({1}), lambda m: m.held.add(2)),
    "a dict's value": (lambda: held({"a": 1}), lambda m: m.held.update(a=2)),
    "a dict's key": (lambda: held({"a": 1}), lambda m: m.held.update(b=m.held.pop("a"))),
    "an order": (lambda: held(OrderedDict(a=1, b=1)), lambda m: m.held.move_to_end("a")),
    "a config": (
        lambda: held(SimpleNamespace(inner=SimpleNamespace(clip=1))),
        lambda m: setattr(m.held.inner, "clip", 2),
    ),
    "an object's class": (
        lambda: held(SimpleNamespace()), lambda m: setattr(m, "held", Numbers()),
    ),
    "an object gets an attribute": (
        lambda: held(Numbers()), lambda m: setattr(m.held, "scale", 3.0),
    ),
    "a method": (lambda: held(None), lambda m: setattr(m, "forward", m.branch)),
    "an object of a method": (
        lambda: held(deque([1.0]), act=hard.Scaled(1.0, abs).branch),
        lambda m: setattr(m.act.__self__, "value", 2.0),
    ),
    "a partial's argument": (
        lambda: held(functools.partial(F.leaky_relu, negative_slope=0.1)),
        lambda m: m.held.keywords.update(negative_slope=0.2),
    ),
    "a cell": (lambda: held(scaled(1.0)), lambda m: set_cell(m.held)),
    "a default": (lambda: held(scaled(1.0)), lambda m: m.held.__kwdefaults__.update(factor=2.0)),
    "a list in a default": (
        lambda: held(scaled(1.0)), lambda m: m.held.__kwdefaults__["factor"].append(1.0),
    ),
    "code": (
        lambda: held(scaled(1.0)),
        lambda m: setattr(m.held, "__code__", m.held.__code__.replace(co_name="other")),
    ),
    "another module's number": (
        lambda: held([nn.Dropout(0.1)]), lambda m: setattr(m.held[0], "p", 0.2),
    ),
    "aliases": (
        lambda: held(None, a=torch.zeros(2), b=torch.zeros(2)), lambda m: setattr(m, "a", m.b),
    ),
    "a tensor's gradient": (lambda: held(torch.zeros(2)), lambda m: m.held.requires_grad_()),
    "a tensor for None": (lambda: held(torch.zeros(2)), lambda m: setattr(m, "held", None)),
    "a buffer": (
        lambda: altered.BufferMask(0), lambda m: m.attn.register_buffer("seen", torch.ones(3)),
    ),
    "data": (hard.Layer, lambda m: setattr(m.mlp.up.weight, "data", torch.ones(9, WIDTH))),
    "half": (hard.Layer, lambda m: m.mlp.up.half()),
    "a parameter": (
        hard.Layer, lambda m: setattr(m.mlp.up, "weight", nn.Parameter(torch.ones(9, WIDTH))),
    ),
    "no bias": (hard.Layer, lambda m: setattr(m.mlp.up, "bias", None)),
    "a moved bias": (
        lambda: held(None, mlp=None),
        lambda m: (m.norm.register_parameter("bias", None), m.norm.register_buffer("bias_", None)),
    ),
    "a submodule": (hard.Layer, lambda m: setattr(m, "mlp", OtherMLP())),
    "a submodule's class": (hard.Layer, lambda m: setattr(m.mlp, "__class__", OtherMLP)),
    "a submodule's name": (
        lambda: nn.Sequential(OrderedDict(a=nn.ReLU(), b=nn.ReLU())),
        lambda m: m.add_module("c", m._modules.pop("b")),
    ),
    "an order of submodules": (
        lambda: nn.Sequential(nn.ReLU(), nn.Identity()),
        lambda m: m._modules.update({"0": m[1], "1": m[0]}),
    ),
    "a submodule is removed": (hard.Layer, lambda m: setattr(m, "norm", None)),
    "evaluation of a submodule": (hard.Layer, lambda m: m.mlp.up.eval()),
    "a number of the class": (Kind, lambda m: setattr(Kind, "scale", 5.0)),
    "a number of the module": (hard.GlobalScale, lambda m: setattr(hard, "SCALE", 5.0)),
    "a forward of the class": (OtherMLP, lambda m: setattr(OtherMLP, "forward", torch.relu)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_state_is_noticed(name, monkeypatch):
    for owner, attribute in ((Kind, "scale"), (hard, "SCALE"), (OtherMLP, "forward")):
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # restored afterwards
    make, change = CHANGES[name]
    layer = make()
    watch, before = Watch(layer), state_of(layer, _OWN)
    assert watch.is_current(layer) and state_of(layer, _OWN) == before
    with torch.no_grad():
        change(layer)
    assert state_of(layer, _OWN) != before
    assert not watch.is_current(layer)
    assert Watch(layer).is_current(layer)


def test_what_is_no_change():
    layer = hard.Layer()
    layer.__class__ = traced_class(hard.Layer)
    layer.cos = torch.ones(3)
    x = normal(B, S, WIDTH).float()
    layer(x)
    watch = Watch(layer)
    layer(x).sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    layer.cos.mul_(2.0)
    layer.mlp.up.weight = nn.Parameter(layer.mlp.up.weight.detach().clone(), requires_grad=False)
    assert watch.is_current(layer)
    assert not watch.is_current(copy.copy(layer))


def test_a_cell_is_emptied():
    layer = held(scaled(1.0))
    watch = Watch(layer)
    del layer.held.__closure__[0].cell_contents
    assert not watch.is_current(layer)


def test_a_hook_is_noticed():
    layer = hard.Layer()
    watch = Watch(layer)
    layer.register_forward_hook(lambda *_: None)  # which the layer's own call runs
    assert watch.is_current(layer)
    handle = layer.mlp.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="mlp has hooks"):
        watch.is_current(layer)
    handle.remove()
    assert watch.is_current(layer)


class Numbered(float):
    pass


def test_objects_that_are_not_watched():
    record = np.zeros(2, "i,i")[0]
    for value in (np.ones(2), hard.Slots(1.0), hard.Result(a=1), Numbered(1.0), record):
        with pytest.raises(TypeError):
            Watch(held([value]))


def test_nothing_is_kept_alive():
    layer = held(torch.zeros(3))
    layer.watch = None
    layer._trace_notes = Watch(layer)
    refs = [weakref.ref(t) for t in (layer, layer.held, layer.mlp, layer.norm.weight)]
    gc.disable()
    del layer
    assert [ref() for ref in refs] == [None] * 4
    gc.enable()


@pytest.fixture
def slow(monkeypatch):
    """Note when a state is computed."""
    calls = []
    monkeypatch.setattr(layer_module, "state_of", lambda *a: calls.append(1) or state_of(*a))
    return calls


#: A layer, and changes, each followed by a call that differs from the one before.
LATER = {
    "data": ("Layer", lambda m: setattr(m.mlp.up.weight, "data", 2 * m.mlp.up.weight)),
    "buffer": ("Switched", lambda m: m.on.fill_(1)),
    "buffer's data": ("Switched", lambda m: m.on.data.fill_(1)),
    "cell": ("Closure", lambda m: set_cell(m.act)),
    "hook": ("Layer", lambda m: m.mlp.up.register_forward_hook(lambda m, a, y: 2 * y)),
    "class": ("Layer", lambda m: setattr(m, "norm", nn.RMSNorm(WIDTH).double())),
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_a_layer_changes_after_two_calls(name, slow):
    kind, change = LATER[name]
    stock, model = pair(getattr(hard, kind))
    compare(stock, model, x_of(), x_of(seed=2))
    slow.clear()
    compare(stock, model, x_of(seed=3))
    assert not slow
    compare(stock, model, change, x_of(), x_of(seed=2))


def test_a_layer_without_a_block_is_watched_too(slow):
    stock, model = pair(hard.SignBranch)
    seen = []

    def change(layer):
        seen.append(len(slow))
        layer.branch = functools.partial(hard.Layer.branch, layer)

    later = x_of(seed=3), change, x_of(), x_of(seed=2)
    compare(stock, model, x_of(), x_of(seed=2), lambda layer: slow.clear(), *later)
    assert not any(seen) and slow
    assert isinstance(model.layers[0].last_trace, Trace)


class Placed(hard.Layer):
    """A layer of one length, whose trace takes more memory than a step of few sequences."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(1024, WIDTH))

    def branch(self, x):
        return self.mlp(x) + self.place


def test_a_later_trace_of_another_layer_applies():
    one, other = [convert(nn.ModuleList([Placed()])) for _ in range(2)]

    def traced(model, batch):
        model[0](torch.randn(batch, 1024, WIDTH)).sum().backward()
        return isinstance(model[0].last_trace, Trace)

    assert [traced(one, 1) for _ in range(4)] == [False] * 4
    assert traced(other, 4)
    assert traced(one, 1)


def test_arguments_change(slow):
    stock, model = pair(altered.ShiftArgument)
    for i in range(3):
        for shift, sizes in ((0, (B, S)), (1, (B, S)), (1, (3, 8)), (5, (B, S))):
            x = normal(*sizes, WIDTH, seed=i)
            expected, found = (step(each, x, shift=shift) for each in (stock, model))
            assert all(torch.allclose(found[n], t) for n, t in expected.items())
        assert bool(slow) == (i < 2)
        slow.clear()


def test_tied_weights():
    """A trace of a layer whose two matrices are one tensor is no trace of a layer of two."""

    class Two(nn.Module):
        def __init__(self, ties: bool):
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight if ties else self.b.weight

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + torch.sigmoid(self.a(y)) * self.b(y)

    stock = nn.Sequential(*[Two(ties) for ties in (True, False, True)]).double()
    model, x = convert(copy.deepcopy(stock)), normal(B, S, 8)
    for _ in range(2):
        expected, found = (step(each, x) for each in (stock, model))
        assert all(torch.allclose(found[n], t) for n, t in expected.items())
        for each in (stock, model):
            each[2].b.weight = nn.Parameter(0.5 * each[2].a.weight.detach())
    assert all(isinstance(layer.last_trace, Trace) for layer in model)


def test_signatures():
    x, y = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    calls = [
        {"x": x}, {"y": x}, {"x": x[1:]}, {"x": x.double()}, {"x": x.to("meta")}, {"x": [x]},
        {"x": (x,)}, {"x": nn.Parameter(x)}, {"x": x, "y": x}, {"x": x, "y": y},
        {"x": x, "y": 1}, {"x": x, "y": True}, {"x": x, "y": 1.0}, {"x": x, "y": None},
        {"x": x, "y": (1, 2)}, {"x": x, "y": ((1,), 2)}, {"x": x, "y": (1, (2,))},
        {"x": x, "y": {"a": 1}}, {"x": x, "y": {"b": 1}}, {"x": x, "y": slice(1, 2)},
        {"x": x, "y": SimpleNamespace(a=1)}, {"x": x, "y": SimpleNamespace(a=2)},
    ]  # fmt: skip
    assert len({signed(call)[0] for call in calls}) == len(calls)
    assert signed(calls[9])[0] == signed({"x": y, "y": x})[0]
    _, leaves, first = signed({"x": [1, (x, {"a": y, "b": slice(2)})]})
    assert first is x and leaves[0] == 1 and leaves[1] is x and leaves[2] is y


def test_a_layer_that_changes_at_each_call_is_watched_no_more(slow):
    layer = hard.Layer().double()
    layer.__class__ = traced_class(hard.Layer)
    for i in range(12):
        layer.held = torch.ones(1)
        slow.clear()
        layer(*x_of(seed=i)).sum().backward()
        assert slow
    assert layer._notes_of().watch is None


def test_adapters_are_switched(slow):
    peft = pytest.importorskip("peft")
    stock = hf_models.build("llama")
    options = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    torch.manual_seed(0)
    stock = peft.get_peft_model(stock, peft.LoraConfig(r=2, **options))
    stock.add_adapter("other", peft.LoraConfig(r=3, **options))
    stock, model = stock.double(), copy.deepcopy(stock).double()
    for layer in model.base_model.model.model.layers:
        layer.__class__ = traced_class(type(layer))
    batch = hf_models.inputs_of("llama")
    for change in (None, "other", "disabled", "default", None):
        slow.clear()
        found = []
        for each in (stock, model):
            each.zero_grad()
            if change not in (None, "disabled"):
                each.set_adapter(change)
            context = each.disable_adapter() if change == "disabled" else contextlib.nullcontext()
            with context:
                y = each(**batch, use_cache=False).logits
            y.square().mean().backward() if y.requires_grad else None
            found.append([y, *[p.grad for p in each.parameters()]])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)  # norms are in float32
    assert not slow
