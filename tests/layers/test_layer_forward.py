"""The layer's forward against PyTorch's: items 9 to 16 of the drop-in contract."""

import functools
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from accuracy import check_error
from reference import EXACT_PRESETS, pair, run
from tiers import exhaustive, pairwise
from torch import nn

from fused_remat import FusedRematLayer, FusedRematWarning

TOLERANCE = dict(rtol=1e-9, atol=1e-11)  # float64, other order of summation


@pytest.fixture(autouse=True)
def no_fallback():
    """These calls are served by the fused path: a fallback would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        yield


def assert_same(stock, fused, x, **kwargs):
    dy = torch.randn(stock(x, **kwargs).shape, dtype=x.dtype)
    for got, expected in zip(run(fused, x, dy, **kwargs), run(stock, x, dy, **kwargs), strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def causal(size):
    return torch.ones(size, size, dtype=torch.bool).triu(1)


def masks(batch, nhead, seq_len, kind, dtype):
    """Every form of (src_mask, src_key_padding_mask) by name."""
    generator = torch.Generator().manual_seed(0)

    def boolean(*shape):
        return torch.rand(shape, generator=generator) < 0.3

    def make(*shape):
        mask = boolean(*shape)
        if kind == "bool":
            return mask
        random_part = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return random_part.masked_fill(mask, -torch.inf)

    square, per_head = (seq_len, seq_len), (batch * nhead, seq_len, seq_len)
    return {
        "none": (None, None),
        "square": (make(*square), None),
        "per_head": (make(*per_head), None),
        "padding": (None, make(batch, seq_len)),
        "square_padding": (make(*square), make(batch, seq_len)),
        "per_head_padding": (make(*per_head), make(batch, seq_len)),
    }


@pytest.mark.parametrize(
    "norm_first, batch_first, kind, form",
    pairwise(
        [True, False], [True, False], ["bool", "float"],
        list(masks(1, 1, 1, "bool", torch.float64)),
    ),
)  # fmt: skip
def test_every_mask_form(norm_first, batch_first, kind, form):
    stock, fused = pair(
        12, 3, 20, dropout=0.0, norm_first=norm_first, batch_first=batch_first, dtype=torch.float64
    )
    mask, padding = masks(4, 3, 7, kind, torch.float64)[form]
    x = torch.randn(4, 7, 12, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    assert_same(stock, fused, x, src_mask=mask, src_key_padding_mask=padding)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(("rows", "limit"), [(9, 4), (9, 9), (5, 2), (3, 100)])
def test_masks_in_groups_and_tiles(norm_first, rows, limit, monkeypatch):
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", limit)
    monkeypatch.setattr("fused_remat.steps.attention_rows._BLOCK", 1)
    stock, fused = pair(
        12, 3, 20, dropout=0.0, norm_first=norm_first, batch_first=True, dtype=torch.float64
    )
    for mask, padding in masks(4, 3, rows, "float", torch.float64).values():
        grads = [None if m is None else m.requires_grad_() for m in (mask, padding)]
        x = torch.randn(4, rows, 12, dtype=torch.float64)
        assert_same(stock, fused, x, src_mask=grads[0], src_key_padding_mask=grads[1])


@pytest.mark.parametrize("form", ["square", "per_head", "padding", "per_head_padding"])
def test_float_masks_get_gradients(form):
    stock, fused = pair(12, 3, 20, dropout=0.0, dtype=torch.float64)
    mask, padding = masks(4, 3, 7, "float", torch.float64)[form]
    chosen = {
        k: v.requires_grad_()
        for k, v in (("src_mask", mask), ("src_key_padding_mask", padding))
        if v is not None
    }
    assert_same(stock, fused, torch.randn(7, 4, 12, dtype=torch.float64), **chosen)


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_float32_mask_on_a_float64_layer(dropout):
    """The same as the mask in float64, which the stock layer's flash kernel is not (torch 2.13)."""
    stock, fused = pair(12, 3, 20, dropout=0.0, dtype=torch.float64)
    fused.self_attn.dropout = dropout  # 1e-9: the block route, dropping nothing
    x = torch.randn(64, 4, 12, dtype=torch.float64)
    mask = torch.randn(64, 64)
    got, expected = run(fused, x, src_mask=mask), run(stock, x, src_mask=mask.double())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)  # a scale of 1 + 1e-9 is applied


@pytest.mark.parametrize("value", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("mask_grad", [True, False])
def test_large_finite_masks(value, mask_grad):
    """Rows whose every key is at -1e9 are uniform, in backward too (ATen's flash kernel, which the
    stock layer takes when the mask wants no gradient, is off there by the number of keys)."""
    stock, fused = pair(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 64, 16)
    padding = torch.zeros(2, 64)
    padding[1] = value
    padding[0, 5:9] = value
    got = run(fused, x, src_key_padding_mask=padding.clone().requires_grad_(mask_grad))
    peer = run(stock, x, src_key_padding_mask=padding.clone().requires_grad_())
    for a, b in zip(got, peer, strict=False):
        # Beside -1e4, float32 holds a score to 2**-11; two paths, forward and backward, twice.
        assert (a - b).norm() <= 4 * 2**-10 * b.norm() + 1e-5


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="as docs/behaviour.md measured"
)
def test_the_stock_layers_defects_are_as_documented():
    """If this fails, PyTorch has mended them: docs/behaviour.md wants its paragraph removed."""
    stock, _ = pair(16, 4, 32, dropout=0.0, batch_first=True)
    x, padding = torch.randn(2, 64, 16), torch.zeros(2, 64)
    padding[1] = -1e9
    flash, exact = (
        run(stock, x, src_key_padding_mask=padding.clone().requires_grad_(g)) for g in (False, True)
    )
    assert torch.allclose(flash[0], exact[0], rtol=1e-4, atol=1e-5)  # two float32 routes
    assert (flash[1] - exact[1]).norm() > 0.1 * exact[1].norm()
    stock, _ = pair(12, 3, 20, dropout=0.0, dtype=torch.float64)
    x, mask = torch.randn(64, 4, 12, dtype=torch.float64), torch.randn(64, 64)
    with torch.no_grad():
        a, b = stock(x, mask), stock(x, mask.double())
    assert (a - b).norm() > 0.01 * b.norm()


def test_large_finite_masks_under_dropout():
    _, fused = pair(16, 4, 32, dropout=0.0, batch_first=True)
    fused.self_attn.dropout = 1e-9  # the route with dropout, which drops nothing
    x = torch.randn(2, 64, 16)
    padding = torch.zeros(2, 64)
    padding[1] = torch.finfo(torch.float32).min
    got = run(fused, x, src_key_padding_mask=padding)
    fused.self_attn.dropout = 0.0
    for a, b in zip(got, run(fused, x, src_key_padding_mask=padding), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # two float32 routes


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [True, False])
def test_another_default_dtype(default, dtype, affine):
    torch.set_default_dtype(default)
    try:
        stock, fused = pair(16, 4, 32, dropout=0.0, bias=False, dtype=dtype)
        for layer in (stock, fused):
            layer.norm1 = nn.LayerNorm(16, elementwise_affine=affine, bias=False, dtype=dtype)
        x, dy = torch.randn(2, 5, 2, 16, dtype=dtype)
        found, peer = run(fused, x, dy), run(stock, x, dy)
        check_error(found, peer, run(stock.double(), x.double(), dy.double()))
    finally:
        torch.set_default_dtype(torch.float32)


def test_float32_mask_on_a_bfloat16_layer():
    stock, fused = pair(16, 2, 32, dropout=0.0, dtype=torch.bfloat16)
    mask = torch.randn(9, 9)
    x, dy = torch.randn(2, 9, 2, 16, dtype=torch.bfloat16)
    found, peer = run(fused, x, dy, src_mask=mask), run(stock, x, dy, src_mask=mask)
    exact = run(stock.double(), x.double(), dy.double(), src_mask=mask.double())
    check_error(found, peer, exact)


@pytest.mark.parametrize("batch_first", [True, False])
def test_mismatched_mask_kinds_warn_and_work(batch_first):
    stock, fused = pair(12, 3, 20, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    x = torch.randn(5, 5, 12, dtype=torch.float64)
    mask = torch.randn(5, 5, dtype=torch.float64)
    padding = torch.rand(5, 5) < 0.3
    with pytest.warns(UserWarning, match="mismatched"):
        got = fused(x, mask, padding)
    with pytest.warns(UserWarning, match="mismatched"):
        expected = stock(x, mask, padding)
    torch.testing.assert_close(got, expected, **TOLERANCE)


def test_causal_hint():
    stock, fused = pair(12, 3, 20, dropout=0.0, dtype=torch.float64)
    x = torch.randn(6, 4, 12, dtype=torch.float64)
    assert_same(stock, fused, x, src_mask=causal(6), is_causal=True)
    # with a mask and no padding the mask is discarded unchecked and causal used
    assert_same(stock, fused, x, src_mask=torch.zeros(6, 6, dtype=torch.bool), is_causal=True)
    torch.testing.assert_close(
        fused(x, torch.zeros(2, 3, dtype=torch.bool), is_causal=True), fused(x, causal(6))
    )
    # with padding the mask is used and the hint dropped
    padding = torch.rand(4, 6) < 0.3
    other = torch.rand(6, 6) < 0.3
    assert_same(stock, fused, x, src_mask=other, src_key_padding_mask=padding, is_causal=True)
    for layer in (stock, fused):
        with pytest.raises(RuntimeError, match="attn_mask"):
            layer(x, is_causal=True)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_unbatched(batch_first, norm_first):
    stock, fused = pair(
        12, 3, 20, dropout=0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    x = torch.randn(7, 12, dtype=torch.float64)
    assert_same(stock, fused, x)
    assert_same(stock, fused, x, src_key_padding_mask=torch.rand(7) < 0.3)
    assert_same(stock, fused, x, src_mask=torch.randn(3, 7, 7, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(0, 5, 12), (5, 0, 12), (0, 0, 12), (0, 12)])
@pytest.mark.parametrize("batch_first", [True, False])
def test_empty_batch_or_sequence_works_with_backward(shape, batch_first):
    stock, fused = pair(12, 3, 20, dropout=0.1, batch_first=batch_first, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    for got, expected in zip(run(fused, x), run(stock, x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("mask_grad", [True, False])
def test_fully_masked_rows_contribute_zero(mask_grad):
    stock, fused = pair(12, 3, 20, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    mask = torch.zeros(6, 6, dtype=torch.float64)
    mask[2] = -torch.inf
    padding = torch.zeros(2, 6, dtype=torch.float64)
    padding[1] = -torch.inf
    mask.requires_grad_(mask_grad)
    for got in run(fused, x, src_mask=mask, src_key_padding_mask=padding):
        assert got.isfinite().all()
    if not mask_grad:
        assert_same(stock, fused, x, src_mask=mask, src_key_padding_mask=padding)


@pytest.mark.parametrize("norm_first", [True, False])
def test_output_strides(norm_first):
    for batch_first in (True, False):
        stock, fused = pair(12, 3, 20, dropout=0.0, norm_first=norm_first, batch_first=batch_first)
        plain = torch.randn(4, 7, 12)
        wide = torch.randn(4, 7, 24)[..., ::2]
        for x in (plain, plain.transpose(0, 1), wide):
            assert fused(x).stride() == stock(x).stride(), (batch_first, x.stride())
            # float32, other order of summation
            torch.testing.assert_close(fused(x), stock(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
def test_non_contiguous_inputs_and_gradients(norm_first, monkeypatch):
    for limit in (3, 512):
        monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", limit)
        stock, fused = pair(12, 3, 20, dropout=0.0, norm_first=norm_first, dtype=torch.float64)
        base = torch.randn(7, 4, 24, dtype=torch.float64)
        for x in (
            base[..., ::2],
            base[..., :12].transpose(0, 1),
            base[:1, :, :12].expand(7, 4, 12),
        ):
            dys = (torch.randn(12, *x.shape[:2], dtype=torch.float64).permute(1, 2, 0),
                   torch.randn(12, dtype=torch.float64).expand(x.shape))  # fmt: skip
            for dy in dys:
                for a, b in zip(run(fused, x, dy), run(stock, x, dy), strict=True):
                    torch.testing.assert_close(a, b, **TOLERANCE)


ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "F.gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "F.silu": F.silu,
    "torch.tanh": torch.tanh,
    "F.tanh": F.tanh,
    "nn.ReLU": nn.ReLU(),
    "nn.GELU": nn.GELU(),
    "nn.GELU_tanh": nn.GELU(approximate="tanh"),
    "nn.SiLU": nn.SiLU(),
    "nn.Tanh": nn.Tanh(),
}


@pytest.mark.parametrize(
    "name, policy",
    [
        (name, policy)
        if policy == "full" or name in ("relu", "F.silu")
        else exhaustive(name, policy)
        for name in ACTIVATIONS
        for policy in EXACT_PRESETS
    ],
)
def test_activations(name, policy):
    stock, fused = pair(
        12, 3, 20, dropout=0.0, activation=ACTIVATIONS[name], policy=policy, dtype=torch.float64
    )
    assert_same(stock, fused, torch.randn(5, 2, 12, dtype=torch.float64))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_without_biases_and_without_affine_norms(bias, norm_first):
    stock, fused = pair(
        12, 3, 20, dropout=0.0, bias=bias, norm_first=norm_first, dtype=torch.float64
    )
    x = torch.randn(5, 2, 12, dtype=torch.float64)
    assert_same(stock, fused, x)
    for layer in (stock, fused):
        layer.norm1 = nn.LayerNorm(12, elementwise_affine=False, eps=1e-3)
    assert_same(stock, fused, x)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (63, 7, 1000, 2), (33, 3, 65, 9)])
@pytest.mark.parametrize("norm_first", [True, False])
def test_odd_sizes(sizes, norm_first):
    d_model, nhead, ff, batch = sizes
    stock, fused = pair(d_model, nhead, ff, dropout=0.0, norm_first=norm_first, dtype=torch.float64)
    assert_same(stock, fused, torch.randn(17, batch, d_model, dtype=torch.float64))


def test_inside_transformer_encoder_in_train_and_eval():
    stock_layer, fused_layer = pair(16, 4, 32, dropout=0.0, batch_first=True)
    stock = nn.TransformerEncoder(stock_layer, 3, norm=nn.LayerNorm(16))
    fused = nn.TransformerEncoder(fused_layer, 3, norm=nn.LayerNorm(16))
    fused.load_state_dict(stock.state_dict())
    x = torch.randn(3, 6, 16)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 1 + [True] * 5])
    for kwargs in (
        {},
        {"src_key_padding_mask": padding},
        {"mask": nn.Transformer.generate_square_subsequent_mask(6), "is_causal": True},
        {"mask": causal(6), "src_key_padding_mask": padding},
    ):
        # Of random gradients: of ones, the last norm leaves nothing but rounding.
        dy = torch.randn(3, 6, 16)
        for a, b in zip(run(fused, x, dy, **kwargs), run(stock, x, dy, **kwargs), strict=True):
            # float32 through three layers, other order of summation
            assert (a - b).norm() <= 1e-4 * b.norm()
    stock.eval(), fused.eval()
    with torch.no_grad():
        for kwargs in ({}, {"src_key_padding_mask": padding}):
            assert torch.equal(fused(x, **kwargs), stock(x, **kwargs))


@pytest.mark.parametrize(
    ("error", "x", "kwargs"),
    [
        (AssertionError, (8,), {}),
        (AssertionError, (2, 2, 2, 8), {}),
        (AssertionError, (5, 2, 7), {}),
        (AssertionError, (5, 2, 8), {"src_mask": torch.zeros(5, 5, dtype=torch.int32)}),
        (AssertionError, (5, 2, 8), {"src_mask": torch.zeros(5)}),
        (AssertionError, (5, 2, 8), {"src_mask": torch.zeros(1, 4, 5, 5)}),
        (RuntimeError, (5, 2, 8), {"src_mask": torch.zeros(4, 4)}),
        (RuntimeError, (5, 2, 8), {"src_mask": torch.zeros(2, 5, 5)}),
        (RuntimeError, (5, 2, 8), {"src_mask": torch.zeros(5, 5, dtype=torch.float64)}),
        (AssertionError, (5, 2, 8), {"src_key_padding_mask": torch.zeros(5, 2)}),
        (AssertionError, (5, 2, 8), {"src_key_padding_mask": torch.zeros(2, 5, 1)}),
        (AssertionError, (5, 8), {"src_key_padding_mask": torch.zeros(1, 5)}),
    ],
)
def test_bad_inputs_raise_what_pytorch_raises(error, x, kwargs):
    stock, fused = pair(8, 2, 16, dropout=0.0)
    messages = []
    for layer in (stock, fused):
        with pytest.raises(error) as info:
            layer(torch.randn(x), **kwargs)
        assert info.type is error
        messages.append(str(info.value))
    assert messages[0] == messages[1]


def test_bad_tensors_raise_what_pytorch_raises():
    for norm_first in (True, False):
        stock, fused = pair(8, 2, 16, dropout=0.0, norm_first=norm_first)
        bad = (torch.randn(5, 2, 8).double(), torch.randn(5, 2, 8, device="meta"),
               torch.zeros(5, 2, 8, dtype=torch.long), torch.randn(5, 2, 7), [1.0],
               None)  # fmt: skip
        for x in bad:
            caught = []
            for layer in (stock, fused):
                with pytest.raises(Exception) as info:
                    layer(x)
                caught.append((info.type, str(info.value)))
            assert caught[0] == caught[1]
    stock, fused = pair(8, 2, 16, dropout=0.0)
    for mask in ([[0.0] * 5] * 5, 3):
        for layer in (stock, fused):
            with pytest.raises((RuntimeError, AttributeError)):
                layer(torch.randn(5, 2, 8), mask)


def test_complex_is_not_implemented():
    for cls in (nn.TransformerEncoderLayer, FusedRematLayer):
        layer = cls(8, 2, 16, dtype=torch.complex64)
        with pytest.raises(NotImplementedError):
            layer(torch.randn(5, 2, 8, dtype=torch.complex64))


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)
        for dropout, policy in itertools.product((0.0, 0.1), ("full", "fast")):
            layer = FusedRematLayer(8, 2, 16, dropout=dropout, policy=policy)
            x = torch.randn(5, 2, 8, requires_grad=True)
            y = layer(x)
            y.sum().backward()
            assert y.shape == x.grad.shape == (5, 2, 8)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_new_activation_is_a_row(dropout, monkeypatch):
    """As docs/behaviour.md says; mish's ATen derivative has no overload that writes to `out`."""
    from fused_remat.steps import activation as activations

    row = activations.Activation(
        F.mish,
        lambda dy, x, out: activations._into(torch.ops.aten.mish_backward, dy, out, x),
        modules=(nn.Mish,),
    )
    monkeypatch.setitem(activations.ACTIVATIONS, "mish", row)
    results = []
    for activation in (nn.Mish(), nn.SiLU()):
        _, fused = pair(12, 3, 20, dropout=dropout, activation=activation, dtype=torch.float64)
        x = torch.randn(5, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(1)
        results.append(run(fused, x))
    assert not torch.equal(results[0][0], results[1][0])
    stock, fused = pair(12, 3, 20, dropout=0.0, activation=nn.Mish(), dtype=torch.float64)
    assert_same(stock, fused, x)
    leaf = x.clone().requires_grad_()
    _, fused = pair(12, 3, 20, dropout=dropout, activation=nn.Mish(), dtype=torch.float64)

    def f(x):
        torch.manual_seed(1)
        return fused(x)

    assert torch.autograd.gradcheck(f, (leaf,), fast_mode=True)
