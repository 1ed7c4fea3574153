"""Threads: models trained side by side, one model in several, backward in another than forward."""

import copy
import functools
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from reference import EXACT_PRESETS, randomize
from same_bits import assert_same_bits
from torch import nn

from fused_remat import FusedRematLayer, FusedRematWarning, check_replay, explain, memory_report
from fused_remat.layers import fallback

D, H, FF = 16, 2, 24


pytestmark = pytest.mark.usefixtures("one_thread")  # of its own, for each


def together(*functions):
    """What each function returns, called at once in threads that change places often."""
    barrier, interval = threading.Barrier(len(functions)), sys.getswitchinterval()

    def call(function):
        barrier.wait()
        return function()

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(functions)) as pool:
            return [run.result() for run in [pool.submit(call, f) for f in functions]]
    finally:
        sys.setswitchinterval(interval)


def with_hooks(layer):
    """PyTorch's own forward; one hook acts, and one after it looks, which no replay calls again."""
    layer.seen = []
    layer.linear1.register_forward_hook(lambda m, args, y: y * 2.0)
    layer.linear2.register_forward_hook(lambda m, args, y: layer.seen.append(len(y)))


def with_child(layer):
    layer.linear1 = nn.Sequential(layer.linear1, nn.Identity())


KINDS = {
    "fused": lambda layer: None,
    "own activation": lambda layer: setattr(layer, "activation", F.leaky_relu),
    "hooks": with_hooks,
    "another child": with_child,
}


def model_of(kind, policy, dtype=torch.float32, dropout=0.0):
    how = {"batch_first": True, "norm_first": policy != "balanced", "dtype": dtype}
    layers = [FusedRematLayer(D, H, FF, dropout, policy=policy, **how) for _ in range(2)]
    model = nn.Sequential(*layers)
    randomize(model)
    for layer in layers:
        KINDS[kind](layer)
    return model


def train(model, steps=6):
    """The losses, the layer's evaluation after every step included."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        like = next(model.parameters())
        x = torch.randn(3, 7, D, generator=generator).to(like.dtype)
        loss = (model.train()(x) - x.roll(1, 1)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        # Masked: PyTorch's inference kernel, which other threads switch off, rounds differently.
        mask = torch.zeros(7, 7, dtype=x.dtype)
        with torch.no_grad():
            for layer in model.eval():
                losses.append(layer(x, mask).double().sum().item())
    return losses


@pytest.mark.composes(
    "Concurrency and faults",
    "threads that train models of their own at once: every policy, dtype and fallback",
    limits="the fallback's replay resets torch's global generator, as torch.utils.checkpoint does: "
    "dropout there, and other threads' random numbers meanwhile, are not reproducible",
)
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_models_in_threads_train_as_alone():
    rows = [("fused", preset, torch.float32) for preset in EXACT_PRESETS]
    rows += [("fused", "full", torch.float64), ("fused", "lean", torch.bfloat16)]
    rows += [("own activation", "full", torch.float32), ("hooks", "full", torch.float32)]
    rows += [("hooks", "lean", torch.float32), ("another child", "full", torch.float64)]
    models = [model_of(*row) for row in rows]
    with_check = copy.deepcopy(models[0])

    def checked():
        with check_replay():
            return train(with_check)

    for model in models:  # hooks hold their layer: they cannot be copied
        model.initial = copy.deepcopy(model.state_dict())
    expected = [train(model) for model in models]
    for model in models:
        model.load_state_dict(model.initial)
    *got, of_checked = together(*(lambda m=m: train(m) for m in models), checked)
    assert got == expected
    assert of_checked == expected[0]
    assert torch.backends.mha.get_fastpath_enabled() and fallback._count == 0
    for layer in models[rows.index(("hooks", "full", torch.float32))]:
        assert len(layer.seen) == 2 * 6 * 2  # training and evaluation, alone and in a thread


def until_then(stop, function):
    """What `function` returns; others stop then."""
    try:
        return function()
    finally:
        stop.set()


@pytest.mark.composes("Concurrency and faults", "backward in another thread than forward")
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
@pytest.mark.parametrize("kind", ["fused", "own activation", "hooks"])
def test_backward_in_another_thread(kind):
    model = model_of(kind, "full", dropout=0.0 if kind == "hooks" else 0.3)
    leaves, x = list(model.parameters()), torch.randn(3, 7, D)
    torch.manual_seed(0)
    expected = torch.autograd.grad(model(x).square().sum(), leaves)
    torch.manual_seed(0)
    loss = model(x).square().sum()

    def backward():
        # Of this thread, and not of forward; PyTorch's own backward would follow it.
        with torch.autocast("cpu", torch.bfloat16, enabled=kind != "hooks"):
            return torch.autograd.grad(loss, leaves)

    (got,) = together(backward)
    assert_same_bits(got, expected)


@pytest.mark.composes("Concurrency and faults", "explain and memory_report while others train")
def test_reports_see_their_own_thread_only():
    model, *others = (model_of("fused", policy) for policy in ("full", "fast", "lean"))
    x = torch.randn(3, 7, D)

    def report():
        lines = memory_report(model, x).to_json().splitlines()
        # Peaks are measured of the whole process.
        return str(explain(model, x)), [line for line in lines if "peak" not in line]

    stop, expected = threading.Event(), report()
    reports = functools.partial(until_then, stop, lambda: [report() for _ in range(3)])

    def train_until_then(other):
        while not stop.is_set():
            train(other, 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        got, _, _ = together(reports, *(functools.partial(train_until_then, m) for m in others))
    assert got == 3 * [expected]
