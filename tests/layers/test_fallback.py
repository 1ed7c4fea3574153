"""What the fused path cannot serve: the stock layer's forward, the same numbers, one warning.

The encoder layer's changes are rows of `changes.py`.
"""

import contextlib
import re
import warnings

import pytest
import torch
from accuracy import assert_bits
from layer_kinds import KINDS, D, F, run
from reference import X, make
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fused_remat import (
    FusedRematWarning,
)
from fused_remat.layers import fallback
from fused_remat.report.allocations import SavedBytes

DOUBLE = torch.float64
IGNORED = pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def set_to(name, make):
    return lambda layer: setattr(layer, name, make(layer))


def hook(name, action=lambda module, args, out: None):
    return lambda layer: layer.get_submodule(name).register_forward_hook(action)


def doubled_block(layer):
    return lambda x, *args: 2 * type(layer)._mha_block(layer, x, *args)


def two_heads(layer):
    return nn.MultiheadAttention(D, 2, batch_first=True, dtype=DOUBLE)


def a_bias_for_q(layer):
    layer.q.register_parameter("bias", nn.Parameter(torch.ones(1, dtype=DOUBLE)))


#: A kind, the change, and its reason.
DECODER = "decoder, post-norm"
FALLBACKS = [
    (DECODER, hook("multihead_attn"), "multihead_attn has hooks"),
    (DECODER, set_to("norm3", lambda _: nn.RMSNorm(D, dtype=DOUBLE)),
     "norm3 is torch.nn.RMSNorm; the fused path supports torch.nn.LayerNorm"),
    (DECODER, set_to("_mha_block", doubled_block),
     "FusedRematDecoderLayer._mha_block is overridden"),
    (DECODER, set_to("multihead_attn", two_heads),
     "multihead_attn differs from self_attn in num_heads"),
    ("llama", hook("down", lambda module, args, out: 2 * out), "down has hooks"),
    ("llama", set_to("down", lambda _: Doubled(F, D, False, dtype=DOUBLE)),
     "down is test_fallback.Doubled; the fused path supports torch.nn.Linear"),
    ("llama", set_to("norm2", lambda _: nn.LayerNorm(D, dtype=DOUBLE)),
     "norm1 is torch.nn.RMSNorm and norm2 is torch.nn.LayerNorm; the fused path supports norms "
     "of one class"),
    ("llama", a_bias_for_q, "q.bias has shape (1,), expected (24,)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "reason"), FALLBACKS)
@pytest.mark.parametrize("policy", ["full", "none"])
def test_what_the_fused_path_cannot_serve_runs_under_checkpoint_with_one_warning(
    name, change, reason, policy
):
    kind, found = KINDS[name], []
    stock, fused = kind.pair(policy, dtype=DOUBLE)
    for layer in (stock, fused):
        change(layer)
    fused.load_state_dict(stock.state_dict())
    inputs = [t.requires_grad_() for t in kind.data()[:-1]]
    assert fused.why_not_fused(*inputs) == reason
    own = "its unfused" if kind.is_causal else "PyTorch's own"
    under = "" if policy == "none" else " under torch.utils.checkpoint"
    text = re.escape(f"{type(fused).__name__} runs {own} forward{under}: {reason}")
    torch.manual_seed(1)
    with pytest.warns(FusedRematWarning, match=text) as seen:
        fused(*inputs)
    assert [w.filename for w in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layer in (fused, stock):  # told once
            torch.manual_seed(1)
            found.append(run(layer, *kind.data()))
        with SavedBytes(exclude=fused.parameters()) as saved:
            fused(*inputs)
    assert_bits(*found)
    assert policy == "none" or saved.total <= len(inputs) * sum(t.nbytes for t in inputs)


def test_weights_of_another_dtype_raise_what_the_stock_layer_raises():
    _, layer = KINDS["llama"].pair(dtype=DOUBLE)
    layer.k.float()
    x, _ = KINDS["llama"].data()
    assert "x is torch.float64 on cpu but k.weight is torch.float32" in layer.why_not_fused(x)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(x)


def pair_with_hook(**options):
    layers = make(**options)
    for layer in layers:
        hook("linear1")(layer)
    return layers


@IGNORED
def test_the_bytes_of_a_plain_forward_are_counted_twice_at_most(monkeypatch):
    """Counting takes time; the layer's first call may be unlike the others."""
    _, fused = pair_with_hook(policy="none")
    counted, counts = fallback.counted, []
    monkeypatch.setattr(fallback, "counted", lambda layer: counts.append(1) or counted(layer))
    for _ in range(4):
        fused(X).sum().backward()
    assert len(counts) == 2


@IGNORED
def test_the_fallback_replays_what_the_first_run_read():
    """Parameters passed by functional_call, and training flags."""
    layers = pair_with_hook()
    params = {n: (2 * p).detach().requires_grad_() for n, p in layers[1].named_parameters()}
    found = [torch.func.functional_call(layer, params, (X,)).square().sum() for layer in layers]
    assert_bits(*(torch.autograd.grad(y, list(params.values())) for y in found))
    grads = []
    for layer in pair_with_hook(dropout=0.3):
        torch.manual_seed(0)
        y = layer(X).sum()
        layer.eval()
        grads.append(torch.autograd.grad(y, list(layer.parameters())))
        assert not any(m.training for m in layer.modules())
    assert_bits(*grads)


def multiplied(name):
    @torch.no_grad()
    def change(layer, x):
        (x if name == "x" else layer.get_parameter(name)).mul_(3.0)

    return change


def another(name, make):
    """Cast or resized through `.data`, which has no version."""

    def change(layer, x):
        t = x if name == "x" else layer.get_parameter(name)
        t.data = make(t.data)

    return change


@IGNORED
@pytest.mark.parametrize(
    "change, message",
    [
        *((multiplied(name), "inplace") for name in ("linear2.weight", "norm1.bias", "x")),
        (another("norm1.weight", torch.Tensor.float), r"'norm1\.weight' again"),
        (another("norm1.weight", lambda p: p[:1].clone()), r"'norm1\.weight' again"),
        (another("x", torch.Tensor.float), "'src' again"),
    ],
)
def test_the_fallback_raises_when_a_parameter_or_the_input_changed(change, message):
    _, fused = pair_with_hook()
    x = X.clone()
    y = fused(x).sum()
    change(fused, x)
    with pytest.raises(RuntimeError, match=message):
        y.backward()


def test_patched_classes_and_function_modes_are_noticed(monkeypatch):
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.nn.functional.linear else out

    stock, fused = make()
    with Doubled(), pytest.warns(FusedRematWarning, match="Doubled"):
        got = fused(X)
    with Doubled():
        assert torch.equal(got, stock(X))
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: original(self, x) * 2)
    with pytest.warns(FusedRematWarning, match="forward was replaced"):
        got = fused(X)
    assert torch.equal(got, stock(X))


@pytest.mark.parametrize(
    ("src", "reason"),
    [
        ("text", "src is str; the fused path supports torch.Tensor"),
        (X[0, 0], "src has shape (8,); the fused path supports tensors of 2 or 3 dimensions"),
        (X.long(), "src is torch.int64; the fused path supports floating-point dtypes"),
        (X[..., :6], "self_attn has embed_dim 8 and the input width 6"),
        (
            X.float(),
            "src is torch.float32 on cpu but self_attn.in_proj_weight is torch.float64 on cpu",
        ),
    ],
)
def test_reasons_name_the_input(src, reason):
    assert make()[1].why_not_fused(src) == reason


def test_a_mask_warning_of_pytorchs_points_at_the_users_line():
    _, layer = make()
    mask, padding = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool)
    with pytest.warns(UserWarning, match="mismatched src_key_padding_mask") as caught:
        layer(X, mask, padding)
    assert [w.filename for w in caught] == [__file__]


class Counting(nn.Linear):
    """Updates a buffer in forward."""

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x)


def counting_layer():
    _, fused = make()
    fused.linear1 = Counting(*fused.linear1.weight.shape[::-1], dtype=DOUBLE)
    fused.linear1.register_buffer("calls", torch.zeros(()))
    return fused


@IGNORED
def test_what_is_around_a_layer_that_updates_a_buffer():
    """Hooks that move what is saved change nothing; a checkpoint around it repeats the update."""
    grads = []
    for around in (contextlib.nullcontext, save_on_cpu):
        layer = counting_layer()
        for step in (1, 2):
            x = X.clone().requires_grad_()
            with around():
                y = layer(x)
            y.square().sum().backward()
            assert layer.linear1.calls == step
        grads.append(x.grad)
    assert all(torch.isfinite(grad).all() for grad in grads)
    layer, x = counting_layer(), X.clone().requires_grad_()
    for _ in range(2):
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert layer.linear1.calls >= 2 and x.grad is not None


@IGNORED
def test_a_tensor_that_is_saved_plainly_may_not_change():
    """Also in the calls whose bytes are counted for the warning."""
    _, fused = make("none")
    hook("linear1")(fused)
    for _ in range(3):
        seen = []
        handle = fused.norm2.register_forward_hook(lambda m, a, y: seen.append(y))  # noqa: B023
        y = fused(X.clone().requires_grad_())
        handle.remove()
        with torch.no_grad():
            seen[0].mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
