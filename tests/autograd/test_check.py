"""The replay check: silent on sound calls, and exact about planted faults."""

import functools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from block_inputs import in_pieces, normal, results
from op_cases import CASES
from reference import EXACT_PRESETS, pair
from same_bits import assert_same_bits, step
from small_layers import KINDS, layers_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, ReplayError, check_replay, convert, ops
from fused_remat.execution import choose
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps.attention import attention_fwd
from fused_remat.steps.linear import linear_fwd
from fused_remat.steps.norm import norm_fwd
from fused_remat.steps.operations import OPERATIONS, Faster

D, H, FF = 8, 2, 12


def layer_of(policy="full", dropout=0.0):
    options = {"norm_first": True, "batch_first": True, "activation": "gelu"}
    return pair(D, H, FF, dropout, policy=policy, **options)[1]


def inputs(batch=3, seq=5):
    torch.manual_seed(0)
    return torch.randn(batch, seq, D, requires_grad=True)


def fails(y, message):
    """Backward raises this and no more; "#" stands for a number."""
    number = r"-?[\d.]+(?:e-?\d+)?"
    pattern = re.escape(f"replay check: {message}").replace(r"\#", number)
    with pytest.raises(ReplayError, match=f"^{pattern}$"):
        y.sum().backward()


@pytest.mark.composes("Replay check", "every functional op, preset and dropout: the same gradients")
@pytest.mark.parametrize("name", CASES)
def test_sound_ops_pass_with_the_same_gradients(name):
    case, tensors = CASES[name], CASES[name].tensors(batch=2, seq=5)
    leaves, seed = list(tensors.values()), {"seed": 7} if case.dropout else {}
    for p in (0.0, 0.3) if case.dropout else (0.0,):
        call = functools.partial(case.op, tensors, p, **seed)
        with in_pieces(4):
            expected = results(call, leaves)
            for policy in EXACT_PRESETS if p or not case.dropout else ("full",):
                with check_replay():
                    got = results(functools.partial(call, policy=policy), leaves)
                assert_same_bits(got, expected)


@pytest.mark.composes("Replay check", "layers of every dtype, with masks and activation functions")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_sound_layers_pass_with_the_same_gradients(dtype, kind):
    (layer,), x, given, more = layers_of(kind, dtype=dtype)
    with in_pieces(4):
        expected = step(layer, layer, x, more=more, **given)
        for layer.policy in EXACT_PRESETS:
            with check_replay():
                assert_same_bits(step(layer, layer, x, more=more, **given), expected)


class Model(nn.Module):
    """Two layers at `encoder.layers`, and an op with a layer norm's weight after them."""

    def __init__(self, **kwargs):
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, H, FF, batch_first=True, dropout=0.0, **kwargs)
        self.encoder = convert(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return ops.layer_norm(self.encoder(x), self.weight)


@pytest.mark.composes(
    "Replay check",
    "impure activations, changes through `.data`, numpy and saved-tensor hooks, seeds, kernels",
    limits="not calls that PyTorch's own forward serves, and not blocks that run as operators "
    "(torch.compile, selective checkpointing; with a warning)",
)
@pytest.mark.parametrize("outer", [False, True])
def test_an_impure_activation_is_named(outer):
    scale = [1.0]
    model = Model(activation=lambda t: torch.sin(t) * scale[0])
    layer = model.encoder.layers[1]
    with check_replay():
        y = checkpoint(layer, inputs(), use_reentrant=False) if outer else model(inputs())
    scale[0] = 2.0
    name = "FusedRematLayer" if outer else "encoder.layers.1 (FusedRematLayer)"
    fails(y, f"{name}: 'act' differs at (sequence 0, token 0, channel 0): forward #, rebuilt #")


def test_changes_behind_autograds_back_are_named():
    model, array = Model(), np.zeros((1, 2, D), dtype=np.float32)
    weight, x = model.encoder.layers[0].linear1.weight, torch.from_numpy(array)
    line, name = Model.forward.__code__.co_firstlineno + 1, "encoder.layers.0 (FusedRematLayer)"
    for change, what, read in (
        (lambda: weight.data[3, 2].fill_(7.0), f"{name}: 'fc1.weight' differs at (index 3, 2)",
         "#, backward 7"),
        (lambda: array[0, 1].put(5, -0.0), f"{name}: 'input' differs at (index 0, 1, 5)",
         "0, backward -0"),
        (lambda: model.weight.data[6].fill_(3.0),
         f"norm, called at {__file__}:{line} in Model: 'norm.weight' differs at (index 6)",
         "1, backward 3"),
    ):  # fmt: skip
        with check_replay():
            y = model(x)
        change()
        fails(y, f"{what}: forward read {read}")


def test_what_hooks_and_callers_do_to_what_is_kept_is_named():
    def pack(t):
        return t.bfloat16() if t.shape[-1] == FF and t.requires_grad is False else t

    layer = layer_of("none")
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float())
    with check_replay(), hooks, in_pieces(4):
        y = layer(inputs(batch=2))
    fails(y, "FusedRematLayer: 'up' differs at (sequence 0, token 0, channel 0): forward #, kept #")
    q = normal(2, H, 5, 4)
    with check_replay():
        y = ops.attention(q, q, q)
    y.data[1, 1, 3, 2] = 9.0  # (B, H, S, E), of a matrix of heads side by side
    with pytest.raises(ReplayError, match=r"'output' differs at \(index 1, 3, 6\): .* kept 9$"):
        y.sum().backward()


class Flipping:
    """Operations of which the `at`-th product called `name` has one bit another."""

    def __init__(self, name, at):
        self.name, self.at, self.calls = name, at, 0

    def _count(self, name, y, element):
        if name == self.name:
            self.calls += 1
            if self.calls == self.at:
                y.view(torch.int32)[element] ^= 1
        return y

    def linear_fwd(self, x, weight, *rest):
        y = linear_fwd(x, weight, *rest)
        return self._count("up" if weight.shape == (FF, D) else "", y, (3, 5))

    def attention_fwd(self, *args):
        attn, lse = attention_fwd(*args)
        self._count("lse", lse.view(-1, H, 5), (0, 1, 4))
        return self._count("attn", attn, (1, 7)), lse

    def norm_fwd(self, *args):
        y, mean, rstd = norm_fwd(*args)
        return self._count("norm1", y, (2, 6)), mean, self._count("rstd", rstd, (4, 0))


#: The calls that have the other bit (of the forward run again, and of the policy's own rebuild
#: after), and the message.
PLACES = {
    "up": ((2, 3), "'up' differs at (sequence 0, token 3, channel 5)"),
    "attn": ((2, 3), "'attn' differs at (sequence 0, token 1, channel 7)"),
    "lse": ((2, 3), "'attn.lse' differs at (sequence 0, token 4, head 1)"),
    # There are two norms.
    "norm1": ((3, 5), "'norm1' differs at (sequence 0, token 2, channel 6)"),
    "rstd": ((3,), "'norm1.rstd' differs at (sequence 0, token 4, channel 0)"),
}


@pytest.mark.parametrize("name, at", [(name, at) for name in PLACES for at in PLACES[name][0]])
def test_one_bit_of_a_backends_rebuild_is_named(name, at, monkeypatch):
    where = PLACES[name][1]
    flipping = Flipping(name, at)
    for function in (linear_fwd, attention_fwd, norm_fwd):
        run = getattr(flipping, function.__name__)
        other = Faster(run, lambda key: None, "")
        monkeypatch.setitem(OPERATIONS[function].faster, "flipping", other)
    monkeypatch.setitem(choose.BACKENDS, "flipping", choose.Backend)
    choose.forget()
    layer = layer_of("full")
    layer.backend = "flipping"
    with check_replay():
        y = layer(inputs(batch=1))
    fails(y, f"FusedRematLayer: {where}: forward #, rebuilt #")


def test_nan_and_no_values_are_no_difference():
    with check_replay():
        layer_of()(inputs() * torch.nan).sum().backward()
        layer = FusedRematLayer(D, H, FF, device="meta")
        layer(torch.zeros(5, 1, D, device="meta")).sum().backward()


PROGRAM = """
import torch, fused_remat
layer = fused_remat.FusedRematLayer(8, 2, 12)
y = layer(torch.randn(5, 1, 8))
layer.norm1.weight.data[1] = 2.0
try:
    y.sum().backward()
    print("silent")
except fused_remat.ReplayError as error:
    print(error)
"""


@pytest.mark.composes("Replay check", "`FUSED_REMAT_CHECK=1` in the environment, read at import")
@pytest.mark.parametrize("value", ["1", "0"])
def test_the_environment_variable(value):
    env = {**os.environ, "FUSED_REMAT_CHECK": value}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    expected = "FusedRematLayer: 'norm1.weight' differs at (index 1)" if value == "1" else "silent"
    assert expected in done.stdout, done.stderr[-2000:]


def test_a_context_within_another():
    layer = layer_of()
    with check_replay():
        with check_replay():
            pass
        y = layer(inputs())
    layer.norm1.weight.data[1] = 2.0
    with pytest.raises(ReplayError, match=r"norm1\.weight"):
        y.sum().backward()


def test_the_copies_go_with_what_autograd_saved():
    x = inputs().requires_grad_()
    layer = Model().encoder.layers[0]

    def held(keep):
        with check_replay():
            loss = layer(x).sum()
        loss.backward(retain_graph=keep)
        x.grad = None
        layer.zero_grad()
        return loss

    kept, freed = (measure_allocations(lambda k=k: held(k)).net for k in (True, False))
    assert kept > 15 * x.nbytes and freed < x.nbytes
