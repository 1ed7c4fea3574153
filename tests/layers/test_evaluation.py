"""Evaluation: PyTorch's inference kernel where it is exact, the truth where it is not.

Each defect is shown on the stock layer too, so that we notice when PyTorch mends it.
"""

import copy
import threading
import warnings

import pytest
import torch
from changes import LoRA, error_of
from layer_kinds import TORCH_NN
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
    """Run PyTorch's own submodules as in training, without dropout: what the layer means."""
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quant")
def test_quantized_layers():
    quantize = torch.ao.quantization.quantize_dynamic
    stock, fused = (quantize(m.float(), {nn.Linear}, dtype=torch.qint8) for m in make())
    with torch.no_grad(), fallback.without_inference_kernels():
        assert torch.equal(fused(X.float()), stock(X.float()))


ILL_FORMED = {
    "of different widths": [X[0, :, :15], X[1]],
    "of nothing": [],
    "of vectors": [X[0, 0], X[0, 1]],
}


@pytest.mark.parametrize("name", [*ILL_FORMED, "to the decoder"])
@pytest.mark.parametrize("training, grad", [(True, True), (False, True), (False, False)])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_nested_tensors_raise_what_the_stock_layer_raises(name, training, grad):
    args = [torch.nested.nested_tensor(ILL_FORMED.get(name, [X[0], X[1, :3], X[2]]))]
    layers, raised = make(), []
    if name == "to the decoder":
        args.insert(0, X)
        layers = TORCH_NN["decoder, post-norm"].pair(d_model=16, nhead=4, dtype=torch.float64)
    for layer in layers:
        with torch.set_grad_enabled(grad), pytest.raises(Exception) as info:
            layer.train(training)(*args)
        raised.append(info.type)
    assert raised[0] is raised[1]


def test_a_mask_of_another_dtype_raises_as_in_training():
    mask, layer = torch.zeros(6, 6, dtype=torch.float64), make()[1].float()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="attn_mask dtype"):
            layer(X.float(), src_mask=mask)


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
    """Without a mask autocast's, where the stock layer would run its kernel."""
    options = {
        "GELU(tanh)": {"activation": nn.GELU(approximate="tanh")},
        "seq-first": {"batch_first": False},
    }.get(how, {})
    heads = 1 if how == "odd heads" else 4
    layer = nn.TransformerEncoderLayer(16, heads, 32, **{"batch_first": True, **options}).eval()
    if how == "hook":
        layer.linear1.register_forward_hook(lambda *args: None)
    layers = [layer, FusedRematLayer.from_layer(layer)]
    x = X.float() if layer.self_attn.batch_first else X.float().transpose(0, 1)
    for masks in ({}, *EXACT.values()):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", low):
            stock, fused = (m(x, **masks) for m in layers)
        assert (fused.dtype, fused.shape) == (stock.dtype, stock.shape)
