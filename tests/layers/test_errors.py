"""What raises: PyTorch's own errors in layers of torch.nn, and messages that name the value."""

import pytest
import torch
from layer_kinds import KINDS, B, D, M, S
from torch import nn

from fused_remat import FusedRematCausalLayer, FusedRematDecoderLayer, FusedRematLayer, Policy

STOCK = nn.TransformerEncoderLayer


def raised(call, *args, **kwargs):
    with pytest.raises(Exception) as info:
        call(*args, **kwargs)
    return info.type, str(info.value)


@pytest.mark.parametrize(
    "args, kwargs", [((8, 3), {}), ((8, 2), {"dropout": 1.5}), ((8, 2), {"activation": "silu"})]
)
def test_bad_constructor_arguments_raise_what_pytorch_raises(args, kwargs):
    assert raised(FusedRematLayer, *args, **kwargs) == raised(STOCK, *args, **kwargs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "got 4 and 3"),
        ({"head_dim": None, "nhead": 5, "kv_heads": 5}, "got 5 and 12"),
        ({"placement": "both"}, "'both'"),
        ({"activation": "sigmoid"}, "unknown activation 'sigmoid'; valid: relu"),
        ({"activation": torch.sin}, "unknown activation"),
        ({"window": (3, 0)}, r"got \(3, 0\)"),
        ({"softcap": -2.0}, r"got -2\.0"),
        ({"dropout": 1.5}, r"dropout must be between 0 and 1, got 1\.5"),
        ({"attention_dropout": -1.0}, r"attention_dropout .* got -1\.0"),
        ({"accumulate_into": "buffer"}, "'buffer'"),
    ],
)
def test_bad_arguments_of_the_causal_layer(options, message):
    sizes = {"d_model": 12, "nhead": 4, "dim_feedforward": 20, "kv_heads": 2, "head_dim": 6}
    with pytest.raises(ValueError, match=message):
        FusedRematCausalLayer(**sizes | options)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"policy": "ful"}, ValueError, "'ful'.*full"),
        ({"policy": Policy(save={"sum2"})}, ValueError, "'sum2'.*norm1"),
        ({"backend": "cuda"}, ValueError, "'cuda'.*eager"),
        ({"policy": 3}, TypeError, "Policy"),
        ({"policy": None}, TypeError, "Policy"),
        ({"policy": {"attn"}}, TypeError, "Policy"),
    ],
)
def test_a_bad_policy_or_backend_raises_and_lists_the_valid_ones(kwargs, error, message):
    with pytest.raises(error, match=message):
        FusedRematLayer(8, 2, norm_first=True, **kwargs)


def test_policy_takes_names_not_a_string():
    with pytest.raises(TypeError, match="attn"):
        Policy(save="attn")
    with pytest.raises(TypeError, match="3"):
        Policy(save=[3])
    assert Policy(save=["attn", "attn"]) == Policy(save={"attn"})


def test_policies_name_the_activations_of_the_layer():
    _, decoder = KINDS["decoder, pre-norm"].pair("fast")
    with pytest.raises(ValueError, match="valid names: norm1, qkv, attn, mid1"):
        decoder.policy = Policy(save={"sum1"})
    with pytest.raises(ValueError, match="numpy"):
        decoder.backend = "numpy"
    assert decoder.policy == "fast" and "policy='fast', backend='auto'" in repr(decoder)
    _, causal = KINDS["vit"].pair()
    with pytest.raises(ValueError, match="unknown activation 'post1' in Policy"):
        causal.policy = Policy(save={"post1"})
    causal.policy = Policy(save={"rotated"})
    with pytest.raises(ValueError, match="unknown activation 'rotated'"):
        causal(torch.zeros(B, S, D))  # nothing is rotated


def test_from_layer_takes_the_stock_class_alone():
    class Mine(STOCK):
        pass

    with pytest.raises(TypeError, match="Mine"):
        FusedRematLayer.from_layer(Mine(8, 2))
    with pytest.raises(TypeError, match=r"nn\.TransformerDecoderLayer, got Linear"):
        FusedRematDecoderLayer.from_layer(nn.Linear(2, 2))


SRC, TGT, MEMORY = torch.randn(B, S, D), torch.randn(B, S, D), torch.randn(B, M, D)
BAD = {
    "encoder": [
        ((SRC[0, 0],), {}),
        ((SRC[..., :7],), {}),
        ((SRC.long(),), {}),
        (([1.0],), {}),
        ((SRC,), {"src_mask": torch.zeros(S, S, dtype=torch.int32)}),
        ((SRC,), {"src_mask": 3}),
        ((SRC,), {"src_mask": torch.zeros(M, M)}),
        ((SRC,), {"src_mask": torch.zeros(S, S, dtype=torch.float64)}),
        ((SRC,), {"src_key_padding_mask": torch.zeros(S, B)}),
        ((SRC[0],), {"src_key_padding_mask": torch.zeros(1, S)}),
    ],
    "decoder": [
        ((TGT, torch.randn(B + 1, M, D)), {}),
        ((TGT, torch.randn(B, M, D + 1)), {}),
        ((TGT, MEMORY), {"memory_mask": torch.zeros(S, S)}),
        ((TGT, MEMORY), {"memory_key_padding_mask": torch.zeros(B, S)}),
        ((TGT, MEMORY), {"memory_is_causal": True}),
        ((TGT, MEMORY), {"tgt_mask": torch.zeros(M, S)}),
    ],
}


@pytest.mark.parametrize("norms", ["pre-norm", "post-norm"])
@pytest.mark.parametrize(
    "kind, inputs, kwargs", [(kind, *row) for kind, rows in BAD.items() for row in rows]
)
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_bad_inputs_raise_what_pytorch_raises(kind, norms, inputs, kwargs):
    stock, fused = KINDS[f"{kind}, {norms}"].pair()
    assert raised(fused, *inputs, **kwargs) == raised(stock, *inputs, **kwargs)


@pytest.mark.parametrize(
    ("x", "given", "error", "message"),
    [
        (torch.zeros(S, D), {}, ValueError, r"\(7, 12\), expected floating \(B, S, 12\)"),
        (torch.zeros(2, S, D).long(), {}, ValueError, "torch.int64"),
        ([[1.0]], {}, TypeError, "got list"),
        (None, {"rope": torch.ones(S, 3)}, TypeError, "rope takes two Tensors"),
        (None, {"attn_mask": torch.ones(3, S) > 0}, ValueError, r"\(3, 7\), expected"),
        (None, {"key_lengths": torch.tensor([9, 1])}, ValueError, r"key_lengths\[0\] is 9"),
        (None, {"cu_seqlens": torch.tensor([0, S])}, ValueError, "batch of 1"),
    ],
)
def test_bad_inputs_of_the_causal_layer(x, given, error, message):
    _, layer = KINDS["llama"].pair()
    with pytest.raises(error, match=message):
        layer(torch.zeros(2, S, D) if x is None else x, **given)
