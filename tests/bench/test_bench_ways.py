"""The ways of `bench.layers` and their checks: what is right, wrong, absent, or compiled."""

from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F

from bench.measure.checks import Checks
from bench.measure.contest import Rig
from bench.measure.registry import WrongResultError
from bench.measure.steps import Steps
from bench.subjects.layers import WAYS, Case
from fused_remat.policies import EXACT_PRESETS


def subject(dropout=0.0, dtype="float32", norm="pre", **rest):
    return Case(dtype, norm, dropout, 3, 33, 32, 4, **rest).subject("cpu")


def admit(name, checks):
    """A way's row and its forward, which is None where it was not found right."""
    steps = Steps(Rig(checks.subject.device, torch.float32))
    steps.admit_way(WAYS[name], checks)
    return steps.rows[name], steps.forwards.get(name)


def detached_weight(layer, x):
    weight = {"linear2.weight": layer.linear2.weight.detach()}
    return torch.func.functional_call(layer, weight, (x,))


def unreplayed(layer, x):
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.utils.checkpoint.checkpoint(layer, x, **options)


def more_dropout(layer, x):
    """As if p were larger: right gradients of the wrong function."""
    y = layer(x)
    return y + 3 * (y - F.dropout(y, 0.5))


def unseeded(layer, x):
    torch.seed()
    return layer(x)


# name -> dropout, whose dropout it claims to draw, the forward, what is found
WRONG: dict[str, tuple[float, str, Any, str]] = {
    "output": (0.0, "stock", lambda layer, x: 1.001 * layer(x), "relative error of"),
    "nan": (0.0, "stock", lambda layer, x: layer(x) + torch.empty_like(x) * 0.0,
            "output is not finite"),
    "gradient": (0.0, "stock", detached_weight, "gradient of linear2.weight is 1, allowed"),
    "replay": (0.1, "stock", unreplayed, "gradient of .* is not, bit for bit, that of eager"),
    "own gradient": (0.1, "own", detached_weight, "gradient of linear2.weight is zero"),
    "own dropout": (0.1, "own", more_dropout, "dropout moves the output .* times as far"),
    "other bits": (0.1, "ours", lambda layer, x: layer(x), "relative error of"),
    "unseeded": (0.1, "stock", unseeded, "the same seed gives another output"),
    "no dropout": (0.1, "stock", lambda layer, x: layer.eval()(x) + 0 * layer.train()(x).detach(),
                   "no dropout"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_are_found(name):
    dropout, draws, forward, message = WRONG[name]
    given = subject(dropout)
    layer = given.module
    with pytest.raises(WrongResultError, match=message):
        Checks(given).check(lambda x: forward(layer, x), draws)


def test_nobody_is_judged_by_a_layer_that_is_grossly_wrong():
    """Not eager either: what is off by a fifth where it is not exact is no yardstick."""
    given = subject()
    scale = {torch.float32: 1.2, torch.float64: 1.0}
    given.stock = lambda module: lambda x: scale[x.dtype] * module(x)
    row, forward = admit("eager", Checks(given))
    assert forward is None and "relative error of" in row["error"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(("dropout", "causal"), [(0.0, False), (0.0, True), (0.1, True)])
def test_every_way_is_right(dtype, norm, dropout, causal):
    given = subject(dropout, dtype, norm, causal=causal)
    checks = Checks(given)
    for name in WAYS.select(["stock", *EXACT_PRESETS]):
        row, _ = admit(name, checks)
        assert "check" in row or (name == "torch_remat" and "absent" in row), (name, row)
