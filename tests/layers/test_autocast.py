"""Under `torch.autocast`: the fused path, in the dtypes of the stock layer and as exact."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_bits, check_error
from layer_kinds import KINDS, TORCH_NN, D, S, check_errors, run
from reference import masked_layer
from tiers import pairwise
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_remat import random
from fused_remat.layers.eligibility import Unsupported, check_autocast, precision_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])
ENCODERS = {"pre": TORCH_NN["encoder, pre-norm"], "post": TORCH_NN["encoder, post-norm"]}
NORMS = pytest.mark.parametrize("norms", ENCODERS)
FLOOR = {low: 4 * torch.finfo(low).eps for low in (BF16, FP16)}  # four roundings

pytestmark = pytest.mark.usefixtures("served")


def autocast(low, enabled=True):
    return torch.autocast("cpu", low, enabled=enabled)


def encoder(norms="post", **options):
    return ENCODERS[norms].pair(**options)


def data(dtype=FP32):
    return ENCODERS["pre"].data(dtype)


# --- results


@pytest.mark.composes("Autocast", "forward and backward of the layer, bfloat16 and float16, CPU")
@pytest.mark.composes("Autocast", "the decoder layer, bfloat16 and float16, CPU")
@pytest.mark.composes("Autocast", "`FusedRematCausalLayer`, norms before, after, and both")
@pytest.mark.parametrize(
    "name, low, tokens, form, given_in",
    pairwise(
        list(KINDS), [BF16, FP16], [7, 512],
        ["tables", "float and padding, with gradients", "a mask, padding and a hint"],
        ["float32", "autocast's dtype", "the other one"],
    ),
)  # fmt: skip
def test_errors_are_those_of_the_stock_layer(name, low, tokens, form, given_in, monkeypatch):
    """On an input, or of the decoder the memory, that is float32 or in 16 bits."""
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: tokens)
    kind = KINDS[name]
    stock, fused = kind.pair()
    seq = 37 if kind.is_causal else S
    *inputs, dy = kind.data(FP32, seq)
    other = {BF16: FP16, FP16: BF16}[low]
    dtypes = {"float32": FP32, "autocast's dtype": low, "the other one": other}
    inputs[-1] = inputs[-1].to(dtypes[given_in])
    given = kind.given(form, FP32, seq)
    with autocast(low):
        assert fused.why_not_fused(*inputs, **given) is None
    found = check_errors(kind, stock, fused, *inputs, dy, low=low, **given)
    if name == "encoder, post-norm":  # in autocast's own dtype it stays, in another it is widened
        assert found[0].dtype == (low if given_in == "autocast's dtype" else FP32)


@LOW
@NORMS
def test_dropout_is_that_of_the_seed(low, norms):
    """The mask's bits are not PyTorch's: the yardstick is the block with these masks."""
    _, fused = encoder(norms, dropout=0.2)
    x, dy = data()
    torch.manual_seed(5)
    found = run(fused, x, dy, low=low)
    torch.manual_seed(5)
    seed, expected = random.draw_seed(x.device), []
    for dtype in (FP32, FP64):
        leaves = [x.to(dtype).requires_grad_(), *fused.to(dtype).parameters()]
        with autocast(low, enabled=dtype is FP32):
            y = masked_layer(fused, seed, leaves[0])
        expected.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))])
    check_error(found, *expected, computed=low)


# --- dtypes


def dtypes_of(layer, x, low):
    with autocast(low):
        y = layer(x.clone().requires_grad_())
    return [y.dtype, *(g.dtype for g in torch.autograd.grad(y.sum(), list(layer.parameters())))]


@pytest.mark.parametrize(
    "low, norms, src, weights",
    pairwise(
        [BF16, FP16], list(ENCODERS), [FP32, BF16, FP16, FP64], [FP32, BF16, FP64, "low products"]
    ),
)
def test_dtypes_and_refusals_are_those_of_the_stock_layer(low, norms, src, weights):
    stock, fused = encoder(norms)
    for layer in (stock, fused):
        for module in layer.modules():
            if weights != "low products":
                module.to(weights)
            elif isinstance(module, nn.Linear):
                module.to(FP16)
    x = data(src)[0]
    try:
        expected = dtypes_of(stock, x, low)
    except RuntimeError as error:
        with autocast(low), pytest.raises(RuntimeError) as raised:
            fused(x)
        assert str(raised.value)[:30] == str(error)[:30]
        return
    assert dtypes_of(fused, x, low) == expected
    with autocast(low):
        assert fused.why_not_fused(x) is None


@pytest.mark.parametrize("weights", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("src", "low", "norm_first", "stream"),
    [
        (FP32, BF16, True, FP32), (FP32, FP16, False, FP32), (BF16, BF16, True, BF16),
        (BF16, BF16, False, FP32), (FP16, BF16, True, FP32), (BF16, FP16, False, FP32),
    ],
    ids=str,
)  # fmt: skip
def test_dtypes_on_cuda(src, low, norm_first, stream, weights):
    """Norms give float32 there; `tests/backend/test_layers.py` asks the stock layer itself."""
    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(2, 5, 24, dtype=src)
        params = {"norm1.weight": torch.empty(24, dtype=weights), "norm1.bias": None}
        check_autocast(x, "src", params, low)
        assert precision_of(x, params, low, norm_first).stream == stream


# --- backward


@pytest.mark.composes("Autocast", "backward inside autocast, outside, or under another dtype's")
@NORMS
@pytest.mark.parametrize("low", [BF16, None], ids=["autocast", "plain"])
@pytest.mark.parametrize("activation", ["gelu", nn.Linear(20, 20)], ids=["gelu", "a linear layer"])
def test_backward_is_forwards_whatever_autocast_is_on(norms, low, activation):
    _, fused = encoder(norms, dropout=0.1, activation=activation)
    x, dy = data()
    found = []
    for context in (
        contextlib.nullcontext(), autocast(BF16), autocast(FP16), autocast(BF16, enabled=False)
    ):  # fmt: skip
        torch.manual_seed(2)
        with autocast(low or BF16, enabled=low is not None):
            y = fused(x)
        with context:
            found.append(torch.autograd.grad(y, list(fused.parameters()), dy))
        assert_bits(found[-1], found[0])


# --- the caller's own activation


class Learned(nn.Module):
    """Has a product (autocast's dtype), and a sum with a float32 parameter (which promotes).

    Smooth: at a kink, a rounding decides between two gradients.
    """

    exact = False

    def __init__(self):
        super().__init__()
        self.linear, self.shift = nn.Linear(20, 20), nn.Parameter(torch.randn(20))

    def forward(self, x):
        low = torch.is_autocast_enabled("cpu") and x.dtype == torch.get_autocast_dtype("cpu")
        assert low or self.exact
        return self.linear(x).tanh() + self.shift


@pytest.mark.composes("Autocast", "an activation function or module of the caller's own")
@LOW
@pytest.mark.parametrize("policy", ["full", "none"])
def test_an_unknown_activation_sees_autocast_in_forward_and_rebuild(low, policy):
    own = Learned()
    stock, fused = encoder(policy=policy, activation=own)
    stock.activation = fused.activation = own
    found, theirs = (run(layer, *data(), low=low) for layer in (fused, stock))
    exact = copy.deepcopy(stock).double()
    exact.activation.exact = True
    check_error(found, theirs, run(exact, *(t.double() for t in data())), computed=low)


# --- what surrounds a layer


def losses(model, low, scaler=None, spoil=1.0, steps=20):
    """Of fitting fixed targets with SGD; the sixth loss is multiplied by `spoil`."""
    torch.manual_seed(1)
    x, target = torch.randn(2, 2, 6, D)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    found = []
    for i in range(steps):
        optimizer.zero_grad()
        with autocast(low):
            loss = F.mse_loss(model(x).float(), target)
        scaler.scale(loss * spoil if i == 5 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach())
    return torch.stack(found)


def stacks(norms):
    return [nn.TransformerEncoder(x, 2, enable_nested_tensor=False) for x in encoder(norms)]


def assert_same_path(fused, stock, low):
    # Roundings of two orders of summation, in 20 steps of the same path.
    torch.testing.assert_close(fused, stock, rtol=4 * torch.finfo(low).eps, atol=0.0)
    assert fused[-1] < 0.9 * fused[0]


@pytest.mark.composes("Autocast", "training of `nn.TransformerEncoder` follows the stock layers")
@pytest.mark.parametrize(("low", "norms"), [(BF16, "pre"), (FP16, "post")], ids=str)
def test_training_follows_the_stock_layers(low, norms):
    stock, fused = (losses(model, low) for model in stacks(norms))
    assert_same_path(fused, stock, low)


@pytest.mark.composes("Autocast", "`torch.amp.GradScaler`: steps with inf or nan are skipped")
@NORMS
def test_grad_scaler_skips_and_recovers_as_with_the_stock_layers(norms):
    found = []
    for model in stacks(norms):
        before = [p.detach().clone() for p in model.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        losses(model, FP16, scaler, steps=1)  # gradients overflow
        assert_bits(before, model.parameters())
        assert scaler.get_scale() == 2.0**39
        scaler.update(2.0**8)
        found.append(losses(model, FP16, scaler, spoil=torch.nan))
        assert scaler.get_scale() == 2.0**7
    stock, fused = found
    assert_same_path(fused, stock, FP16)
    assert fused[5] == fused[6]


def test_what_autocast_does_not_convert_falls_back_with_a_reason():
    _, fused = encoder()
    x = data()[0]
    with autocast(BF16):
        fused.norm1.to(BF16)
        assert "norms' parameters are torch.bfloat16" in fused.why_not_fused(x)
        fused.norm1.float()
        fused.linear1.double()
        assert "linear1.weight is torch.float64, and autocast" in fused.why_not_fused(x)
        assert "src is torch.float64 and self_attn" in fused.why_not_fused(x.double())
    with pytest.raises(Unsupported, match="on meta is on"):
        check_autocast(torch.empty(1, device="meta"), "src", {}, BF16)
