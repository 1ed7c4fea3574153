"""A block that raises what nobody expected is replaced by the layer's own forward."""

import contextlib
import gc
import warnings
import weakref

import pytest
import torch
from accuracy import assert_close
from hf_models import build, close, inputs_of, step
from reference import X, make
from torch import nn

from fused_remat import FusedRematWarning, convert
from fused_remat.execution import executor
from fused_remat.layers.record import record_of


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch):
    monkeypatch.setenv("FUSED_REMAT_STRICT", "0")


def broken(monkeypatch, where, error, times=1):
    """Make the forward or the backward of blocks raise `error`, so many times."""
    inner, left = getattr(executor, where), [times]

    def run(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise error
        return inner(*args, **kwargs)

    monkeypatch.setattr(executor, where, run)


class Olmo2Like(nn.Module):
    """A layer that is traced; its norms come after its branches."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.norm(self.down(nn.functional.gelu(self.up(x))))


def traced():
    torch.manual_seed(0)
    return nn.Sequential(Olmo2Like(), Olmo2Like()).double()


def step_of(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_layers_of_transformers(monkeypatch, name, where):
    model = build(name)
    expected = step(model, inputs_of(name))
    convert(model, policy="lean")
    broken(monkeypatch, where, KeyError("up"))
    with pytest.warns(FusedRematWarning, match=r"\d.*its block raised KeyError: 'up'") as shown:
        found = step(model, inputs_of(name))
    assert sum("its block raised" in str(w.message) for w in shown) == 1
    close(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(step(model, inputs_of(name)), expected)
    layers = [m for m in model.modules() if record_of(m).calls]
    assert sorted(record_of(layer).last for layer in layers) == ["block", "checkpoint"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_traced_layers(monkeypatch, where):
    model, x = traced(), torch.randn(2, 6, 32).double()
    expected = step_of(model, x)
    convert(model)
    step_of(model, x)  # it is traced
    broken(monkeypatch, where, KeyError("up"))
    with pytest.warns(FusedRematWarning, match="its block raised KeyError"):
        assert_close(step_of(model, x), expected)
    assert_close(step_of(model, x), expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(2, 5, 8), (5, 8)])
def test_drop_in_layers(monkeypatch, where, shape):
    """Also where the block has a batch that the input has not."""
    stock, fused = make(dropout=0.0)
    x = torch.randn(shape, dtype=X.dtype)
    expected = step_of(stock, x)
    broken(monkeypatch, where, IndexError("list index out of range"))
    with pytest.warns(FusedRematWarning, match="its block raised IndexError"):
        assert_close(step_of(fused, x), expected)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("fused_remat: backward reads 'up' again, which was changed"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_is_always_raised(monkeypatch, error, where):
    _, fused = make(dropout=0.0)
    broken(monkeypatch, where, error)
    with pytest.raises(type(error)) as raised:
        step_of(fused, X)
    assert raised.value is error


@pytest.mark.parametrize(
    "options",
    [{"dropout": 0.1}, {"accumulate_into": "grad"}, {"strict": True}],
    ids=["dropout was drawn", "gradients were added to", "strict"],
)
def test_when_the_error_is_raised(monkeypatch, options):
    options = dict(options)
    if options.pop("strict", False):
        monkeypatch.setenv("FUSED_REMAT_STRICT", "1")
    accumulate_into = options.pop("accumulate_into", None)
    _, fused = make(**{"dropout": 0.0, **options})
    fused.accumulate_into = accumulate_into
    broken(monkeypatch, "backward", KeyError("up"))
    with pytest.raises(KeyError, match="up"):
        step_of(fused, X)


def test_an_error_of_the_users_activation_is_raised():
    def activation(x):
        if torch.is_grad_enabled():
            raise ValueError("own")
        return x.sin()

    _, fused = make(dropout=0.0)
    fused.activation = activation
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="own"):
            step_of(fused, X)
    assert not record_of(fused).failure


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_the_device_leaves_nothing_behind(monkeypatch, where):
    """A step that is skipped for lack of memory has freed it, without a garbage collection."""
    inner, made = getattr(executor, where), []

    def run(*args, **kwargs):
        activation = torch.empty(64)
        made.append(weakref.ref(activation))
        inner(*args, **kwargs)
        raise torch.OutOfMemoryError("CUDA out of memory")

    _, fused = make(dropout=0.0)
    monkeypatch.setattr(executor, where, run)
    gc.disable()
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            step_of(fused, X)
        assert made and not any(ref() is not None for ref in made)
    finally:
        gc.enable()
