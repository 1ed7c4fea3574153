"""Every layer gives its stock twin's results: the output, and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_bits, assert_close
from block_inputs import in_pieces
from layer_kinds import (
    DECODERS,
    FORMS,
    KINDS,
    TORCH_NN,
    B,
    D,
    H,
    M,
    S,
    check_errors,
    run,
)  # fmt: skip
from reference import EXACT_PRESETS
from tiers import pairwise
from torch import nn

from fused_remat import Policy
from fused_remat.spec import NormSpec
from fused_remat.steps.norm import norm_bwd, norm_fwd

pytestmark = pytest.mark.usefixtures("served")

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    "name, form, lengths", pairwise(list(KINDS), list(FORMS), [(S, M), (3, 6), (1, 4), (6, 1)])
)
def test_masks_and_hints_of_every_form(name, form, lengths):
    kind = KINDS[name]
    stock, fused = kind.pair(dtype=FP64)
    tensors, given = kind.data(FP64, *lengths), kind.given(form, FP64, *lengths)
    assert fused.why_not_fused(*tensors[:-1], **given) is None
    expected = run(stock, *tensors, **given)
    assert_close(run(fused, *tensors, **given), expected)
    with in_pieces(4):
        assert_close(run(fused, *tensors, **given), expected)


@pytest.mark.parametrize("name", TORCH_NN)
@pytest.mark.parametrize("layout", ["batch first", "sequence first", "unbatched"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["nothing", "bool padding", "float", "bool per head"])
def test_layouts(name, layout, bias, form):
    kind, first = KINDS[name], layout == "batch first"
    tensors, given = kind.data(), kind.given(form)
    for batch_first in [first] if layout != "unbatched" else [True, False]:
        stock, fused = kind.pair(batch_first=batch_first, bias=bias, dtype=FP64)
        if layout == "unbatched":
            shown = [t[0] for t in tensors]
            alone = {n: m[:H] if "head" in form else m for n, m in given.items()}
            alone = {n: m[0] if "padding" in n else m for n, m in alone.items()}
        else:
            shown = tensors if first else [t.transpose(0, 1).contiguous() for t in tensors]
            alone = given
        assert_close(run(fused, *shown, **alone), run(stock, *shown, **alone))
        assert fused(*shown[:-1]).stride() == stock(*shown[:-1]).stride()


@pytest.mark.parametrize("name", KINDS)
def test_strides_of_inputs_outputs_and_gradients(name):
    """Views of every kind, and gradients that are expanded or permuted; in chunks or not.

    Of parameters with a gap after every element.
    """
    kind = KINDS[name]
    stock, fused = kind.pair(dtype=FP64)
    for p in fused.parameters():
        p.data = torch.stack([p.data, p.data], -1)[..., 0]
    base, *more = kind.data()[:-1]
    wide = torch.randn(B, S, 2 * D, dtype=FP64)
    dense = (base, base.transpose(0, 1).contiguous().transpose(0, 1), wide[..., ::2])
    for x in (*dense, wide[:1, :, :D].expand(B, S, D)):
        if any(x is t for t in dense) and not kind.is_causal:  # as PyTorch makes them in torch.nn
            assert fused(x, *more).stride() == stock(x, *more).stride()
        for dy in (
            torch.randn(D, B, S, dtype=FP64).permute(1, 2, 0),
            torch.randn(D, dtype=FP64).expand(B, S, D),
        ):
            expected = run(stock, x, *more, dy)
            assert_close(run(fused, x, *more, dy), expected)
            with in_pieces(3):
                assert_close(run(fused, x, *more, dy), expected)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("tokens", [4, 512], ids=["in pieces", "whole"])
def test_error_is_at_most_one_and_a_half_times_pytorchs(name, dtype, tokens, monkeypatch):
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: tokens)
    kind = KINDS[name]
    seq = 37 if kind.is_causal else S
    stock, fused = kind.pair(dtype=dtype)
    tensors = kind.data(dtype, seq)
    given = kind.given("tables" if kind.is_causal else "bool padding", dtype, seq)
    check_errors(kind, stock, fused, *tensors, **given)


@pytest.mark.parametrize(
    "name, tokens, low", pairwise(list(KINDS), [4, 7, 512], [None, BF16, FP16])
)
def test_every_policy_gives_the_same_bits(name, tokens, low, monkeypatch):
    """Under autocast too (`low`)."""
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: tokens)
    kind = KINDS[name]
    _, fused = kind.pair(dropout=0.2)
    found = []
    for fused.policy in (*EXACT_PRESETS, *(Policy(save=names) for names in kind.saves)):
        torch.manual_seed(1)
        found.append(run(fused, *kind.data(FP32), low=low, **kind.given("a hint", FP32)))
        assert_bits(found[-1], found[0])


@pytest.mark.parametrize(("batch", "seq"), [(0, 3), (2, 0)])
@pytest.mark.parametrize("name", TORCH_NN)
def test_empty_inputs_work_with_backward(name, batch, seq):
    kind = KINDS[name]
    for batch_first in (True, False):
        # A decoder's memory has tokens, on which dropout acts.
        p = 0.0 if kind.has_memory else 0.1
        stock, fused = kind.pair(dropout=p, batch_first=batch_first, dtype=FP64)
        tensors = kind.data(FP64, seq, batch=batch)
        if not batch_first:
            tensors = [t.transpose(0, 1) for t in tensors]
        assert_close(run(fused, *tensors), run(stock, *tensors))
        if batch:
            alone = [t[0] for t in kind.data(FP64, seq)]
            assert_close(run(fused, *alone), run(stock, *alone))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", TORCH_NN)
def test_without_biases_and_without_affine_norms(bias, name):
    kind = KINDS[name]
    stock, fused = kind.pair(bias=bias, dtype=FP64)
    assert_close(run(fused, *kind.data()), run(stock, *kind.data()))
    for layer in (stock, fused):
        layer.norm1 = nn.LayerNorm(D, elementwise_affine=False, eps=1e-3)
    assert_close(run(fused, *kind.data()), run(stock, *kind.data()))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_norm_weights_gradients_are_summed_in_float32(dtype, threads):
    """ATen's kernel for CPUs sums them in the dtype of x, thread by thread."""
    x, dy = torch.randn(2, 300, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight, bias = torch.ones(16, dtype=dtype), torch.zeros(16, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _, *stats = norm_fwd(NormSpec(), x, weight, bias)
        _, dweight, dbias = norm_bwd(NormSpec(), dy, x, tuple(stats), weight, (True, True, True))
    finally:
        torch.set_num_threads(before)
    normed = F.layer_norm(x.double(), (16,))
    for found, exact in ((dweight, (normed * dy.double()).sum(0)), (dbias, dy.double().sum(0))):
        assert found.dtype is FP32
        # 300 float32 sums, and float32 statistics.
        assert (found - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("name", DECODERS)
def test_gradients_of_parts_of_a_packed_weight_are_summed_in_float32(name, monkeypatch):
    """Of cross attention, over 512 groups; in bfloat16 every sum would be rounded."""
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: 4)
    stock, fused = KINDS[name].pair(dtype=BF16)
    check_errors(KINDS[name], stock, fused, *KINDS[name].data(BF16, 2, 3, 1024))
