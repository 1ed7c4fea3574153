"""A layer's one door: what lies between forward and block, and what is said where none serves."""

import sys
import warnings

import pytest
import torch
from reference import X, make
from torch import nn

from fused_remat import (
    FusedRematCausalLayer,
    FusedRematDecoderLayer,
    FusedRematLayer,
    FusedRematWarning,
    convert,
)
from fused_remat.autograd import run_block
from fused_remat.layers import fused_layer
from fused_remat.layers.eligibility import qualified


def test_forward_calls_the_block_through_one_door(monkeypatch):
    """The user-visible forward, `_call`, `run_block`: nothing between them."""
    stacks = []

    def spy(*args, **kwargs):
        frame, names = sys._getframe(1), []
        while frame is not None and frame.f_globals["__name__"].startswith("fused_remat"):
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        stacks.append(names)
        return run_block(*args, **kwargs)

    monkeypatch.setattr(fused_layer, "run_block", spy)
    x = torch.randn(3, 2, 8, requires_grad=True)
    FusedRematLayer(8, 2, 12)(x)
    FusedRematDecoderLayer(8, 2, 12)(x, x)
    FusedRematCausalLayer(8, 2, 12)(x)
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=12)
    layer = transformers.models.bert.modeling_bert.BertLayer(config)
    layer.attention.self.config._attn_implementation = "sdpa"
    convert(nn.ModuleList([layer]))[0](x)
    assert stacks == [["_call", "forward"]] * 4


def hooked(layer):
    layer.linear2.register_forward_hook(lambda *_: None)


def replaced(layer):
    layer.norm1 = nn.Identity()


def missing(layer):
    layer.dropout1 = None


def own_forward(layer):
    layer.self_attn.forward = layer.self_attn.forward


def overridden(layer):
    layer._ff_block = layer._ff_block


def another_width(layer):
    layer.norm2 = nn.LayerNorm((2, 8))


REASONS = {
    hooked: "linear2 has hooks",
    replaced: "norm1 is torch.nn.Identity; the fused path supports torch.nn.LayerNorm",
    missing: "dropout1 is missing",
    own_forward: "self_attn.forward was replaced",
    overridden: "FusedRematLayer._ff_block is overridden",
    another_width: "norm2 is over (2, 8); the fused path supports (8,)",
}


@pytest.mark.parametrize("change", REASONS)
def test_reasons_name_the_part_and_what_is_supported(change):
    _, layer = make()
    change(layer)
    assert layer.why_not_fused(X) == REASONS[change]


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


def test_qualified_names_are_the_shortest_public_ones():
    kinds = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear, torch.Tensor, list)
    assert [qualified(kind) for kind in kinds] == [
        "torch.nn.Linear",
        "torch.nn.modules.linear.NonDynamicallyQuantizableLinear",
        "torch.Tensor",
        "list",
    ]


@pytest.mark.parametrize("policy", ["full", "none"])
def test_a_warning_points_at_the_users_line_however_deep_the_layer_is(policy):
    _, layer = make(policy)
    replaced(layer)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(X)
    under = "" if policy == "none" else " under torch.utils.checkpoint"
    (found,) = caught
    assert found.category is FusedRematWarning and found.filename == __file__
    text = f"fused_remat: FusedRematLayer runs PyTorch's own forward{under}: {REASONS[replaced]}"
    assert str(found.message) == text


def test_a_mask_warning_of_pytorchs_points_at_the_users_line():
    _, layer = make()
    mask, padding = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool)
    with pytest.warns(UserWarning, match="mismatched src_key_padding_mask") as caught:
        layer(X, mask, padding)
    assert [w.filename for w in caught] == [__file__]
