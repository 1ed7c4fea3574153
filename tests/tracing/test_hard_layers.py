"""Layers that compute in a later call what they did not in the first, or that cannot be read.

Whether they are converted or left: each call gives what the stock layer gives, and all its
gradients; one that is left is told once.
"""

from __future__ import annotations

import copy
import gc
import random
import re
import threading
import warnings
import weakref
from collections import deque
from types import SimpleNamespace

import hard_layers as hard
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from altered_layers import WIDTH, Block
from test_recorder import Model, assert_same, normal, pair, step, steps
from test_sweep import built
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fused_remat import FusedRematWarning, conversion, convert, explain
from fused_remat.execution.prepare import chunks_of
from fused_remat.steps.attention import Attention
from fused_remat.tracing import call as call_module
from fused_remat.tracing import layer as layer_module
from fused_remat.tracing.isolation import in_float64
from fused_remat.tracing.layer import KNOWN

B, S = 2, 20
FLOAT64, FLOAT32, AUTOCAST = 1e-5, 1e-4, 3e-2  # tolerances; the last of bfloat16


@pytest.fixture(autouse=True)
def _nothing_known():
    """Every test reads its layers itself."""
    KNOWN.clear()


def compare(stock: nn.Module, model: nn.Module, *calls, step=step, tolerance=FLOAT64) -> None:
    """Each call, a tuple of arguments, gives the same in both; a function changes the layers."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FusedRematWarning)
        for i, call in enumerate(calls):
            if callable(call):
                for layer in (*stock.layers, *model.layers):
                    with torch.no_grad():
                        call(layer)
            else:
                expected, found = step(stock, *call), step(model, *call)
                assert_same(found, expected, tolerance, f"call {i}: ")
    left = [kind for kind in conversion(model) if kind.state in ("checkpointed", "plain")]
    told = [str(w.message) for w in told if issubclass(w.category, FusedRematWarning)]
    effects = any("forward changes" in kind.reason or "it draws" in kind.reason for kind in left)
    quiet = len(calls) == 1 and effects  # the first call may fill a table, and others find it
    assert len(told) == len({*told}) <= 2 and (told or not left or quiet), told


def x_of(b: int = B, s: int = S, seed: int = 1) -> tuple[Tensor]:
    return (normal(b, s, WIDTH, seed=seed),)


def as_float32(x: Tensor) -> Tensor:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def float32_step(model: nn.Module, *args) -> dict[str, Tensor | None]:
    return step(model, *map(as_float32, args))


class UnderAutocast(nn.Module):
    def __init__(self, model: nn.Module, is_enabled: bool):
        super().__init__()
        self.model, self.is_enabled = model, is_enabled

    def forward(self, *args) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_enabled):
            return self.model(*args)


def autocast_step(model: nn.Module, *args, is_enabled: bool = True) -> dict[str, Tensor | None]:
    return float32_step(UnderAutocast(model, is_enabled), *args)


def whole_autocast_step(model: nn.Module, *args) -> dict[str, Tensor | None]:
    """Backward too, whose products are then in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return float32_step(model, *args)


def single_pair(name: str) -> tuple[nn.Module, nn.Module]:
    """Models in float32 that end with their last layer."""
    stock, model = (each.float() for each in pair(getattr(hard, name)))
    stock.head, model.head = nn.Identity(), nn.Identity()
    return stock, model


def kinds(seen: Tensor) -> Tensor:
    return 2 - seen.long()


def added(seen: Tensor) -> Tensor:
    return (1.0 - seen[:, None, None, :].double()) * -1e9


MASKS = [
    ("Multiplied", Tensor.long), ("Multiplied", Tensor.bool), ("Multiplied", Tensor.double),
    ("Scores", added), ("FilledScores", Tensor.long), ("CausalScores", added),
    ("FilledScores", Tensor.double), ("KindScores", kinds),
]  # fmt: skip


@pytest.mark.parametrize("is_padded_first", [False, True])
@pytest.mark.parametrize(("name", "mask"), MASKS)
def test_padding_comes_later_or_first(name, mask, is_padded_first):
    seen = [torch.ones(B, S), torch.ones(B, S)]
    seen[1][:, 12:], seen[1][0, 5:] = 0, 0
    calls = [(*x_of(seed=i), mask(seen[(i + is_padded_first) % 2])) for i in range(3)]
    compare(*pair(getattr(hard, name)), *calls)


def test_positions_are_larger_later():
    angles = torch.outer(torch.arange(200.0), torch.tensor([1.0, 0.1, 1.0, 0.1])).double()
    starts = (0, 100, 0)
    calls = [
        (*x_of(), torch.arange(n, n + S).expand(B, S), (at.cos()[n : n + S], at.sin()[n : n + S]))
        for n, at in zip(starts, [angles] * 3, strict=True)
    ]
    compare(*pair(hard.ScaledByPosition), *calls)


def test_weights_grow_until_a_clamp_is_reached():
    stock, model = pair(hard.Clamped)
    compare(stock, model, x_of(), lambda layer: layer.mlp.up.weight.mul_(60), x_of())


#: An attribute by a layer's index, and the number in it.
ATTRIBUTES = {
    "numpy": (lambda i: np.float64(1 + i), float),
    "named tuple": (lambda i: hard.Options(1 + i), lambda v: v.scale),
    "config in a config": (
        lambda i: SimpleNamespace(text=SimpleNamespace(scale=1 + i)),
        lambda v: v.text.scale,
    ),
    "enum": (hard.Half, lambda v: 0.5 if v is hard.Half.YES else 1.0),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_two_layers_differ_in_an_attribute(name):
    make, read = ATTRIBUTES[name]
    compare(*pair(lambda i: hard.Scaled(make(i), read)), x_of(), x_of(3, 8))


@pytest.mark.parametrize("name", ["Partial", "BoundMethod", "Closure"])
def test_two_layers_of_a_class_differ(name):
    compare(*pair(getattr(hard, name)), x_of(), x_of(3, 8))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Function", (F.relu, F.silu)),
        ("Factor", (np.int64(2), np.int64(5))),
        ("Factor", (np.float64(0.5), np.float64(3.0))),
    ],
)
def test_an_argument_is_another(name, values):
    compare(*pair(getattr(hard, name)), *[(*x_of(), value) for value in values])


@pytest.mark.parametrize("name", ["Cached", "Written"])
def test_a_layer_holds_what_the_stock_layer_holds(name):
    stock, model = pair(getattr(hard, name))
    compare(stock, model, *[x_of(s=s) for s in (20, 13, 7, 10, 13, 20)])
    for mine, theirs in zip(model.layers, stock.layers, strict=True):
        if name == "Cached":
            torch.testing.assert_close(mine.cache, theirs.cache)
        else:
            torch.testing.assert_close(mine.seen, theirs.seen)


@pytest.mark.parametrize(
    ("name", "aux"),
    [
        ("AuxiliaryInObject", ()), ("AuxiliaryInArgument", ()),
        ("AuxiliaryInArgument", ({"loss": None},)), ("AuxiliaryInArgument", ([],)),
    ],
)  # fmt: skip
def test_a_loss_that_a_layer_leaves_behind(name, aux):
    def step_with_losses(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
        given, x = copy.deepcopy(aux), x.clone().requires_grad_()
        model.zero_grad()
        y = model(x, *given)
        held = [layer.aux for layer in model.layers if hasattr(layer, "aux")]
        held = [vars(h) if hasattr(h, "__dict__") else h for h in (*held, *given)]
        losses = [t for h in held for t in (h.values() if isinstance(h, dict) else h)]
        assert all(isinstance(t, Tensor) and t.grad_fn is not None for t in losses), losses
        (y.square().mean() + sum(losses)).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        left = {f"loss {i}": t.detach() for i, t in enumerate(losses)}
        return {"y": y.detach(), "losses": torch.tensor(len(losses)).double(), **left, **grads}

    compare(*pair(getattr(hard, name)), x_of(), x_of(seed=2), step=step_with_losses)


def assert_gradient_is_that_of_the_drawn(model: nn.Module) -> None:
    """The gradient in one direction, by differences under the same seed."""
    (x,), (direction,), e = x_of(), x_of(seed=5), 1e-6

    def of(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        y = model(x.requires_grad_())
        return (y * normal(*y.shape, seed=2)).sum()

    of(x.clone())  # it is read
    x.requires_grad_()
    (grad,) = torch.autograd.grad(of(x), x)
    x = x.detach()
    numeric = (of(x + e * direction) - of(x - e * direction)).item() / (2 * e)
    assert float((grad * direction).sum()) == pytest.approx(numeric, rel=1e-5, abs=1e-5)


def test_backward_drops_what_forward_has_dropped():
    assert_gradient_is_that_of_the_drawn(pair(hard.DroppedPlanes)[1])


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("FirstTokens", [(B, 12), (B, 24)]),
        ("LongBranch", [(1, 200), (1, 400), (1, 900)]),
        ("BatchBranch", [(2, 6), (6, 6)]),
        ("SignBranch", [(B, S)]),
    ],
)
def test_branches_on_sizes_and_parameters(name, sizes, is_autocast):
    stock, model = pair(getattr(hard, name))
    calls = [x_of(*size) for size in sizes]
    if name == "SignBranch":
        calls += [lambda layer: layer.alpha.fill_(0.5), x_of()]
    if is_autocast:
        stock, model = stock.float(), model.float()
        compare(stock, model, *calls, step=autocast_step, tolerance=AUTOCAST)
    else:
        compare(stock, model, *calls)


@pytest.mark.parametrize("step", [autocast_step, whole_autocast_step])
def test_a_mask_that_is_made_again_under_autocast(step, monkeypatch):
    """Its 80 × 80 elements are more than what is kept."""
    stock, _ = single_pair("MadeMask")
    found = []
    for policy, large in (("none", 1 << 30), ("none", call_module._LARGE), ("full", None)):
        if large is not None:
            monkeypatch.setattr(call_module, "_LARGE", large)
        model = convert(copy.deepcopy(stock), policy=policy)
        compare(stock, model, x_of(s=80), step=step, tolerance=AUTOCAST)
        found.append(step(model, *x_of(s=80)))
    for each in found[1:]:
        assert_same(each, found[0], 1e-5)


@pytest.mark.parametrize("name", ["Float32", "GuardedInside"])
def test_autocast_is_off_inside(name):
    """One rounding to bfloat16 is 100 times the tolerance; there is none in the stock layers."""
    stock, model = single_pair(name)
    expected = autocast_step(stock, *x_of(), is_enabled=False)
    assert_same(autocast_step(stock, *x_of()), expected, 3e-5)
    compare(stock, model, x_of(), x_of(seed=2), step=autocast_step, tolerance=3e-5)
    compare(*single_pair(name), x_of(), step=float32_step, tolerance=FLOAT32)


@pytest.mark.parametrize("make", [float, torch.tensor])
def test_an_attribute_of_a_piece_changes_before_backward(make):
    def step_of_two(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
        x, loss = x.clone().requires_grad_(), 0.0
        model.zero_grad()
        for temperature in (1.0, 5.0):
            for layer in model.layers:
                layer.router.temperature = make(temperature)
            loss = loss + model(x).square().sum()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        return {"the loss": loss.detach(), "d x": x.grad, **grads}

    compare(*pair(hard.Routed), x_of(), x_of(seed=2), step=step_of_two)


def test_parameters_that_a_piece_does_not_use_have_no_gradient():
    def other(layer: nn.Module) -> None:
        layer.router.first = not layer.router.first

    compare(*pair(hard.RoutedEither), x_of(), other, x_of(), other, x_of())


class NoMemory(TorchDispatchMode):
    """As a device does that has no memory for a cumulative sum."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.cumsum.default:
            raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


def test_out_of_memory_in_a_piece_keeps_its_type():
    _, model = pair(hard.Cumulated)
    step(model, *x_of())  # it is read
    with NoMemory(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        model(x_of()[0].requires_grad_())


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("Division", (20, 40)), ("TableOf16", (16, 7)), ("PositionalOnly", (20, 7)),
        ("AnyArguments", (20, 7)), ("InplaceReLU", (20, 7)),
    ],
)  # fmt: skip
def test_what_runs_in_the_stock_layer_runs(name, lengths):
    stock, model = pair(getattr(hard, name))
    compare(stock, model, *[x_of(s=s) for s in lengths])
    if name == "InplaceReLU":
        assert [kind.state for kind in conversion(model)] == ["converted"]


def test_what_raises_in_the_stock_layer_raises():
    stock, model = pair(hard.Division)
    for before in (False, True):
        if before:
            compare(stock, model, x_of(s=20))
        for each in (stock, model):
            with pytest.raises(ZeroDivisionError):
                step(each, *x_of(s=15))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("OfOneSize", "its forward cannot run at another batch size or length (RuntimeError)"),
        ("Counting", "it was traced 24 times"),
    ],
)
def test_a_reason_is_one_sentence_without_the_sizes_of_trials(name, reason):
    """Of several trials with reasons of their own, one is told."""
    model = pair(getattr(hard, name))[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)
        for _ in range(30):
            step(model, *x_of(s=16))
    found = model.layers[0].last_trace.text
    assert found.startswith(reason) and found.count(reason) == 1, found
    assert not any(f"'{size}'" in found for size in "BSM"), found


@pytest.fixture
def traces(monkeypatch):
    """A list with an item for each trace."""
    traces, trace_call = [], layer_module.trace_call

    def counted(*args, **kwargs):
        traces.append(1)
        return trace_call(*args, **kwargs)

    monkeypatch.setattr(layer_module, "trace_call", counted)
    return traces


@pytest.mark.parametrize("name", ["UnusedArguments", "AnyArguments"])
def test_further_arguments(name):
    stock, model = pair(getattr(hard, name))
    compare(stock, model, (*x_of(), None), (*x_of(s=7), None, None))
    state = "converted" if name == "UnusedArguments" else "checkpointed"
    assert [kind.state for kind in conversion(model)] == [state]


def test_layers_with_an_object_each_share_a_trace(traces):
    compare(*pair(hard.Processed), x_of())
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["Factor", "Counting", "ItemOfBuffer"])
def test_traces_are_bounded(name, traces):
    """Of 30 steps, between which a number is another."""
    calls: list = []
    for i in range(30):
        calls.append((*x_of(), 0.1 * i + 0.01) if name == "Factor" else x_of())
        if name.startswith("Item"):
            calls.append(lambda layer: layer.scale.add_(0.1))
    compare(*pair(getattr(hard, name)), *calls)
    assert len(traces) <= 60
    assert len(KNOWN) <= 60


@pytest.mark.parametrize("name", ["Layer", "HeldByForward"])
def test_a_layer_is_not_kept_alive(name):
    model = convert(Model(getattr(hard, name)).double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)
        step(model, *x_of())
    alive = [weakref.ref(layer) for layer in model.layers]
    alive += [weakref.ref(layer.mlp.up) for layer in model.layers]
    del model
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_another_thread_computes_while_a_layer_is_read(monkeypatch):
    """It comes whenever the layer's own code runs in the thread that trains for the first time."""
    stock, model = pair(hard.Met)
    others = {"eval": copy.deepcopy(model).eval(), "train": copy.deepcopy(stock)}
    (x,), mine, threads, found = x_of(), threading.current_thread(), [], []
    with torch.no_grad():
        expected = copy.deepcopy(stock).eval()(x)

    def other() -> None:
        try:
            with torch.no_grad():
                assert torch.equal(others["eval"](x), expected)
            layer = others["train"].layers[0]
            y = layer.drop(torch.ones(1000))
            found.append(None if 300 < int((y == 0).sum()) < 700 else "dropout does not drop")
        except Exception as error:
            found.append(error)

    def meet() -> None:
        if threading.current_thread() is mine and not (threads and threads[-1].is_alive()):
            threads.append(threading.Thread(target=other))
            threads[-1].start()
            threads[-1].join(0.5)  # it may wait until the layer is read

    monkeypatch.setattr(hard.Meeting, "run", meet)
    step(model, x)
    for thread in threads:
        thread.join()
    assert found and found == [None] * len(found)


# Numbers that are all one in the first batch.

ONES = torch.ones(B, S, dtype=torch.long)
SEGMENTS = torch.arange(S).div(7, rounding_mode="floor").expand(B, S)
WHOLE = {
    "Segments": (ONES, SEGMENTS), "Chosen": (0 * ONES, SEGMENTS),
}  # fmt: skip


@pytest.mark.parametrize("is_plain_first", [True, False])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_differ_later_or_at_first(name, is_plain_first):
    calls = [(*x_of(seed=i), WHOLE[name][(i + is_plain_first + 1) % 2]) for i in range(3)]
    compare(*pair(getattr(hard, name)), *calls)


@pytest.mark.parametrize("name", ["Switched", "MixedByAttribute"])
def test_a_buffer_of_zeros_is_filled_later(name):
    compare(*pair(getattr(hard, name)), x_of(), lambda layer: layer.on.fill_(1), x_of())


def test_a_limit_that_hides_other_tokens_is_reached_later():
    stock, model = pair(hard.LimitedByOthers)
    with chunks_of(16):
        compare(stock, model, x_of(8), lambda layer: layer.mlp.down.weight.mul_(100), x_of(8))


#: With what it may be taken for a norm, some scales of x and values of the weight.
NORMS = {
    "eps of the dtype": (lambda x, w: F.rms_norm(x, (WIDTH,), w), (1.0, 1e-4, 1e-7), (1.0,)),
    "eps outside": (
        lambda x, w: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-4) * w,
        (1.0, 1e-4), (1.0,),
    ),
    "least variance": (
        lambda x, w: x * x.square().mean(-1, keepdim=True).clamp(min=1e-8).rsqrt() * w,
        (1.0, 1e-3, 1e-5), (1.0,),
    ),
    "normalize": (lambda x, w: F.normalize(x, dim=-1) * 4.0 * w, (1.0, 1e-5), (1.0,)),
    "abs": (lambda x, w: F.layer_norm(x, (WIDTH,)) * w.abs(), (1.0,), (1.0, -1.0)),
    "least weight": (lambda x, w: F.layer_norm(x, (WIDTH,)) * w.clamp(max=2), (1.0,), (1.0, 3.0)),
    "clamped": (
        lambda x, w: F.layer_norm(x, (WIDTH,)).clamp(-3, 3) * w,
        (1.0, torch.cat([torch.tensor([1e4]), torch.ones(WIDTH - 1)])), (1.0,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NORMS)
def test_what_is_nearly_a_norm(name, dtype):
    run, scales, weights = NORMS[name]
    stock, model = pair(hard.Layer)
    for each in (stock, model):
        for layer in each.layers:
            layer.norm = hard.NormBy(run)
        each.to(dtype)
    calls = []
    for weight in weights:
        calls.append(lambda layer, weight=weight: layer.norm.weight.fill_(weight))
        calls += [((scale * x_of()[0]).to(dtype),) for scale in scales]
    compare(stock, model, *calls, tolerance=FLOAT64 if dtype == torch.float64 else FLOAT32)


def test_a_query_sees_no_key():
    seen = [ONES.clone(), ONES.clone(), ONES.clone()]
    seen[0][1, 12:], seen[1][1] = 0, 0
    stock, model = pair(hard.FilledScores)
    compare(stock, model, *[(*x_of(seed=i), mask) for i, mask in enumerate(seen)])
    assert steps(model, Attention)


def test_a_piece_has_a_tensor_with_a_gradient():
    stock = hard.MadeGates().double()
    compare(stock, convert(copy.deepcopy(stock)), x_of(), x_of(seed=2))


class Packed(nn.Module):
    """A linear layer whose weight is stored as integers, as quantized ones have it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        weight, self.bias = base.weight.detach(), base.bias
        self.scale = float(weight.abs().max()) / 127
        self.weight = nn.Parameter((weight / self.scale).round().char().view(-1, 1), False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(-1, x.shape[-1]).to(x.dtype) * self.scale
        return F.linear(x, weight, self.bias)


class Own(nn.Parameter):
    """A parameter with operations of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def pack(layer: Block) -> None:
    layer.mlp.up = Packed(layer.mlp.up)


def of_a_class(layer: Block) -> None:
    layer.mlp.down.weight = Own(layer.mlp.down.weight.detach(), requires_grad=False)


def with_state(layer: Block) -> None:
    layer.mlp.down.weight.requires_grad_(False)
    layer.mlp.down.quant_state = object()


@pytest.mark.parametrize(
    "change, reason",
    [
        (pack, r"mlp\.up is \S*Packed with a packed weight \(torch\.int8\)"),
        (of_a_class, r"mlp\.down is torch\.nn\.Linear with a packed weight \(\S*Own\)"),
        (with_state, r"mlp\.down is torch\.nn\.Linear with a packed weight \(torch\.float64\)"),
    ],
)
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_packed_weights_are_not_read(change, reason, monkeypatch):
    """Not even tried: a copy of a quantized layer, without its state, would complain."""
    monkeypatch.setattr(layer_module, "trace_call", None)
    stock = Model(Block).double()
    for layer in stock.layers:
        change(layer)
    model = convert(copy.deepcopy(stock))
    assert_same(step(model, *x_of()), step(stock, *x_of()), FLOAT64)
    (kind,) = conversion(model)
    assert kind.state == "checkpointed" and re.search(reason, kind.reason), kind
    assert re.search(reason, str(explain(stock, *x_of())))


class Cache(list):
    def get_seq_length(self, index: int = 0) -> int:
        return len(self)


class Caching(Block):
    """It fills a cache, whatever its name."""

    def forward(self, x: Tensor, memory: Cache) -> Tensor:
        memory.append(x.detach())
        assert len(memory) == 1, "it was filled again"
        return super().forward(x)


@pytest.mark.parametrize("change", [pack, lambda layer: None])
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_a_cache_is_filled_once(change):
    """Also by a layer that cannot be traced: checkpointing would fill it again."""
    stock = Caching().double()
    change(stock)
    layer, (x,) = convert(copy.deepcopy(stock)), x_of()
    for each in (stock, layer):
        for _ in range(2):
            each(x.requires_grad_(), Cache()).sum().backward()
    for mine, theirs in zip(layer.parameters(), stock.parameters(), strict=True):
        assert theirs.grad is None or torch.equal(mine.grad, theirs.grad)
    assert [kind.state for kind in conversion(layer)] == ["plain"]


def test_tensors_of_an_object():
    given = [SimpleNamespace(scale=normal(WIDTH, seed=i)) for i in range(3)]
    compare(*pair(hard.SubmoduleWithObject), *[(*x_of(), each) for each in given])


def test_a_layer_in_16_bits():
    """A layer that is checkpointed gives the stock layer's bits."""
    torch.manual_seed(0)
    stock = Model(hard.HalfBranch).bfloat16()
    stock.head = nn.Identity()
    model = convert(copy.deepcopy(stock))
    compare(
        stock, model, *[(scale * x_of()[0].bfloat16(),) for scale in (0.1, 30.0)],
        step=lambda model, x: {"y": model(x.requires_grad_()).detach()}, tolerance=0.0,
    )  # fmt: skip


# Numbers of the layer's module and class, of arrays, slots and other objects.

HOLDERS = {
    "array": (np.ones(1), lambda v: float(v[0]), lambda v: v.__setitem__(0, 3.0)),
    "deque": (deque([1.0]), lambda v: v[0], lambda v: v.appendleft(3.0)),
    "slots": (hard.Slots(1.0), lambda v: v.scale, lambda v: setattr(v, "scale", 3.0)),
    "another module": (
        nn.Dropout(1.0), lambda v: v.p, lambda v: setattr(v, "p", 3.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDERS)
def test_an_object_that_a_layer_reads_changes(name):
    value, read, change = HOLDERS[name]
    held = [copy.deepcopy(value)]  # not as a submodule
    stock, model = pair(lambda i: hard.Scaled(held, lambda v: read(v[0])))
    for layer in (*stock.layers, *model.layers):
        layer.value = held
    compare(stock, model, x_of(), lambda layer: change(held[0]), x_of())


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [(hard, "SCALE", "GlobalScale"), (hard.ClassScale, "scale", "ClassScale")],
)
def test_a_number_outside_of_a_layer_changes(owner, attribute, name, monkeypatch):
    stock, model = pair(getattr(hard, name))
    compare(stock, model, x_of())
    monkeypatch.setattr(owner, attribute, 3.0)
    compare(stock, model, x_of())


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_a_callback_and_an_iterator():
    found = []
    for model in pair(hard.Called):
        losses: list = []
        for _ in range(2):
            y = model(*x_of(), losses.append)
            z = model(*x_of(), lambda loss, to=losses: to.append(loss))
            w = model(*x_of(), iter(range(2)))
        found.append([t.detach() for t in (y, z, w, *losses)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["Detached", "NormedHeads", "NamedDropout"])
def test_layers_give_the_same(name):
    compare(*pair(getattr(hard, name)), x_of(), x_of(3, 8))


GENERATORS = {
    "random": (random.Random, random.Random.random),
    "numpy": (np.random.default_rng, np.random.Generator.random),
    "numpy's old one": (np.random.RandomState, np.random.RandomState.rand),
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda g: torch.rand((), generator=g),
    ),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_layer_draws_from_a_generator_of_its_own(name):
    make, draw = GENERATORS[name]
    stock, model = pair(lambda i: hard.Skipped(None, draw))
    for each in (stock, model):
        for layer in each.layers:
            layer.generator = make(1)
    compare(stock, model, *[x_of(seed=i) for i in range(6)])


def test_dropout_in_place_drops():
    model = pair(hard.DroppedInPlace)[1]
    (x,) = x_of(8)
    y = model.layers[0](x.requires_grad_()) - x
    assert 0.4 < float((y.abs() < 1e-12).double().mean()) < 0.6
    assert_gradient_is_that_of_the_drawn(model)


RESULTS = {
    "size": lambda x, y: (y, x.shape[1]),
    "dtype": lambda x, y: (y, x.dtype),
    "none": lambda x, y: [y, None],
    "dict of its own": lambda x, y: hard.Result(y=y),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_layer_returns_what_the_stock_layer_returns(name):
    stock = nn.ModuleList([hard.Results(RESULTS[name])]).double()
    layer = convert(copy.deepcopy(stock))[0]
    for s in (S, 8):
        (x,) = x_of(s=s)
        found, expected = layer(x.requires_grad_()), stock[0](x)
        assert type(found) is type(expected)
        torch.testing.assert_close(dict(enumerate_result(found)), dict(enumerate_result(expected)))


def enumerate_result(result):
    for name, part in result.items() if isinstance(result, dict) else enumerate(result):
        yield name, part if isinstance(part, Tensor) else torch.tensor(hash(str(part)))


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_weights_of_attention_are_returned():
    stock = nn.ModuleList([hard.Weights()]).double()
    layer = convert(copy.deepcopy(stock))[0]
    (x,) = x_of()
    torch.testing.assert_close(layer(x.requires_grad_()), stock[0](x))


def test_an_object_next_to_the_result():
    stock, model = pair(hard.Noted)
    compare(stock, model, x_of(), x_of(s=7))
    assert [kind.state for kind in conversion(model)] == ["converted"]
    notes = model.layers[0](*x_of())[1]
    notes.hidden = None
    assert isinstance(notes, hard.Notes) and notes == hard.Notes(2.0, None, notes.pair)


class Reading(Model):
    """Its second layer reads what the first one returns next to its result."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        y, notes = first(x)
        more = notes.pair[1] * notes.hidden.mean(-1, keepdim=True) * notes.scale
        return self.head(second(y, more)[0])


def test_an_object_that_the_model_reads():
    """The layer's own forward computes it, and runs from then on."""
    stock = Reading(hard.Noted).double()
    model = convert(copy.deepcopy(stock))
    compare(stock, model, x_of(), x_of())
    states = {kind.state: kind.reason for kind in conversion(model)}
    assert states.keys() == {"converted", "checkpointed"}
    assert "reads Notes.pair" in states["checkpointed"]
    assert [call.ran for call in conversion(model)[0].calls] == ["block", "checkpoint"]


def test_an_object_that_is_read_after_a_change():
    layer = pair(hard.Noted)[1].layers[0]
    notes = layer(*x_of())[1]
    with torch.no_grad():
        layer.norm.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"Notes\.hidden is read after"):
        print(notes.hidden)


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_an_object_that_the_layer_holds():
    layer = pair(hard.NotedInItself)[1].layers[0]
    assert layer(*x_of())[1] is layer.notes


def test_an_argument_is_the_input_itself():
    stock = nn.ModuleList([hard.SameArgument()]).double()
    layer = convert(copy.deepcopy(stock))[0]
    (x,), (other,) = x_of(), x_of(seed=2)
    x.requires_grad_()
    for second in (other, x, other):
        torch.testing.assert_close(layer(x, second), stock[0](x, second))


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
@pytest.mark.parametrize("compiled", [torch.compile, torch.jit.script])
def test_a_submodule_is_compiled(compiled):
    stock = nn.ModuleList([hard.Layer()]).double()
    stock[0].norm = compiled(stock[0].norm)
    layer = convert(nn.ModuleList([copy.copy(stock[0])]))[0]
    (x,) = x_of()
    torch.testing.assert_close(layer(x.requires_grad_()), stock[0](x))


@pytest.mark.parametrize("size", [(0, S), (B, 0)])
def test_an_empty_batch(size):
    compare(*pair(hard.Layer), x_of(*size), x_of(), x_of(*size))


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
@pytest.mark.parametrize(
    ("name", "asked"), [("mixtral", "output_router_logits"), ("olmo2", "output_attentions")]
)
def test_a_model_is_asked_for_what_its_layers_make(name, asked):
    """The loss of routers reaches their parameters; no small call of a reading is seen."""
    stock, batch = built(name)
    stock.float().config._attn_implementation = "eager"  # in which its own norms compute
    model, found = convert(copy.deepcopy(stock)), []
    for each in (stock, model):
        for _ in range(2):
            each.zero_grad()
            out = each(**batch, **{asked: True}, labels=batch["input_ids"])
            out.loss.backward()
            more = out.router_logits if asked == "output_router_logits" else out.attentions
        found.append([out.loss, *more, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("ends", [(2, 2, 5, 7), (0, 0, 0, 6)])
def test_grouped_products_in_float64(ends):
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return in_float64(F.grouped_mm)(x, weight.mT, offs=torch.tensor(ends, dtype=torch.int32))

    x, weight = (torch.randn(s).double().requires_grad_() for s in ((7, 5), (4, 3, 5)))
    y = product(x, weight)
    for first, last, matrix in zip((0, *ends), ends, weight, strict=False):
        torch.testing.assert_close(y[first:last], x[first:last] @ matrix.T)
    assert torch.autograd.gradcheck(product, (x, weight)) and not y[ends[-1] :].any()
    assert torch.autograd.grad(y.sum(), weight)[0].is_contiguous()
