"""Evaluation: PyTorch's inference kernel where it is exact, the truth where it is not.

Each defect is shown on the stock layer too, so that we notice when PyTorch mends it.
"""

import copy
import threading
import warnings

import pytest
import torch
from changes import LoRA, error_of
from reference import pair
from torch import nn
from torch.profiler import profile

from fused_remat import FusedRematLayer
from fused_remat.layers import fallback

IS_2_13 = torch.__version__.startswith("2.13")
X = torch.randn(3, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
PADDING = torch.zeros(3, 6, dtype=torch.bool)
PADDING[1, 4:] = True
ALL_PADDED = PADDING.clone()
ALL_PADDED[2] = True
NO_KEYS = CAUSAL.clone()
NO_KEYS[0, 0] = True


def make(**kwargs):
    kwargs = {"dropout": 0.0, "batch_first": True, **kwargs}
    return [m.eval() for m in pair(16, 4, 32, dtype=torch.float64, **kwargs)]


def oracle(stock, x=X, **masks):
    """What the layer means: PyTorch's own submodules, run as in training, without dropout."""
    layer = copy.deepcopy(stock).train()
    for module in layer.modules():
        if isinstance(module, (nn.Dropout, nn.MultiheadAttention)):
            module.eval()
    return layer(x, **masks).detach()


DEFECTS = {
    "float mask": ({}, {"src_mask": NOISE}),
    "float padding": ({}, {"src_key_padding_mask": NOISE[:3]}),
    "float mask, pre-norm": ({"norm_first": True}, {"src_mask": NOISE}),
    "a sequence without keys": ({}, {"src_key_padding_mask": ALL_PADDED}),
    "a query without keys": ({}, {"src_mask": NO_KEYS}),
    "GELU(tanh)": ({"activation": nn.GELU(approximate="tanh")}, {}),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_eval_is_right_where_the_stock_layer_is_not(name):
    """Of layers that were changed: `test_changes.py`."""
    kwargs, masks = DEFECTS[name]
    stock, fused = make(**kwargs)
    expected = oracle(stock, **masks)
    if IS_2_13:
        assert error_of(stock, X, expected, **masks) > 1e-5, (
            "mended in PyTorch: see layers/fallback.py"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert error_of(fused, X, expected, **masks) < 1e-12
        fused.linear1 = nn.Sequential(fused.linear1)  # PyTorch's own forward
        assert error_of(fused, X, expected, **masks) < 1e-12
    assert torch.backends.mha.get_fastpath_enabled()


EXACT = {
    "boolean mask": {"src_mask": CAUSAL},
    "causal hint": {"src_mask": CAUSAL, "is_causal": True},
    "boolean padding": {"src_key_padding_mask": PADDING},
    "both masks": {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@torch.no_grad()
def test_eval_where_the_stock_layer_is_right(batch_first, activation):
    stock, fused = make(batch_first=batch_first, activation=activation)
    x = X if batch_first else X.transpose(0, 1)
    for masks in EXACT.values():
        torch.testing.assert_close(fused(x, **masks), stock(x, **masks))
        torch.testing.assert_close(fused(x, **masks), oracle(stock, x, **masks))
    with profile() as run:
        got = fused(x)
    assert torch.equal(got, stock(x))
    assert any("_transformer_encoder_layer_fwd" in e.key for e in run.key_averages()) == batch_first


def test_inference_mode():
    _, fused = make(dropout=0.3)
    with torch.no_grad():
        out = fused(X, NOISE)
        assert "evaluation" in fused.why_not_fused(X)
    with torch.inference_mode():
        assert torch.equal(fused(X, NOISE), out)


def test_dropout_left_in_training_drops_in_eval():
    """Monte Carlo dropout; the native kernel skips it."""
    stock, fused = make(dropout=0.5)
    for layer in (stock, fused):
        layer.dropout1.train()
    with torch.no_grad():
        assert torch.equal(stock(X), stock(X)) or not IS_2_13
        assert not torch.equal(fused(X), fused(X))


@pytest.mark.parametrize("how", ["plain", "another activation", "LoRA"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_in_an_encoder(how):
    """Left-aligned padding, eval, no gradients: the layer gets a NestedTensor."""
    activation = nn.GELU(approximate="tanh") if how == "another activation" else "relu"
    stock, fused = (nn.TransformerEncoder(m, 2).eval() for m in make(activation=activation))
    kinds = []
    fused.layers[1].register_forward_pre_hook(lambda m, args: kinds.append(args[0].is_nested))
    for model in (stock, fused) if how == "LoRA" else ():
        model.layers[1].linear1 = LoRA(model.layers[1].linear1)
    with torch.no_grad():
        got = fused(X, src_key_padding_mask=PADDING)
        theirs = stock(X, src_key_padding_mask=PADDING)
    expected = oracle(stock, src_key_padding_mask=PADDING)
    assert kinds == [True] and got.shape == X.shape
    assert not got[PADDING].any()  # padded rows come back 0
    torch.testing.assert_close(got[~PADDING], expected[~PADDING])
    if how == "plain":
        assert torch.equal(got, theirs)
    elif IS_2_13:
        assert (theirs - expected)[~PADDING].abs().max() > 1e-5


def outcome(layer, *args, **masks):
    """The type of the error that a call raises, or the dtypes and shapes of its result."""
    try:
        out = layer(*args, **masks)
    except Exception as error:
        return type(error)
    return [(t.dtype, t.shape) for t in (out.unbind() if out.is_nested else [out])]


@torch.no_grad()
def test_empty_inputs_in_eval():
    for x in (X[:0], X[:, :0]):
        for mask in (None, CAUSAL[: x.shape[1], : x.shape[1]]):
            assert make()[1](x, mask).shape == x.shape


@pytest.mark.parametrize("enabled", [True, False])
def test_the_switch_comes_back_after_an_exception(enabled):
    _, fused = make()
    fused.linear1.forward = lambda x: 1 / torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with torch.no_grad(), pytest.raises(ZeroDivisionError):  # it is off inside
            fused(X)
        assert torch.backends.mha.get_fastpath_enabled() is enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_the_switch_and_threads():
    """One thread leaves while another is inside: off until both are out, then as before."""
    inside, leave = threading.Event(), threading.Event()

    def other():
        with fallback.without_inference_kernels():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with fallback.without_inference_kernels():
        thread.start()
        assert inside.wait(10)
    assert not torch.backends.mha.get_fastpath_enabled()
    leave.set()
    thread.join()
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", ["plain", "GELU(tanh)", "seq-first", "odd heads", "hook"])
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_dtypes_under_autocast(how, grad, low):
    """Those of the stock layer, masks or not: autocast's where it would run its kernel."""
    options = {
        "GELU(tanh)": {"activation": nn.GELU(approximate="tanh")},
        "seq-first": {"batch_first": False},
    }.get(how, {})
    heads = 1 if how == "odd heads" else 4
    for norm_first in (False, True):
        layer = nn.TransformerEncoderLayer(
            16, heads, 32, norm_first=norm_first, **{"batch_first": True, **options}
        ).eval()
        if how == "hook":
            layer.linear1.register_forward_hook(lambda *args: None)
        layers = [layer, FusedRematLayer.from_layer(layer)]
        x = X.float() if layer.self_attn.batch_first else X.float().transpose(0, 1)
        for masks in ({}, *EXACT.values()):
            with torch.set_grad_enabled(grad), torch.autocast("cpu", low):
                stock, fused = (outcome(m, x, **masks) for m in layers)
            assert fused == stock
