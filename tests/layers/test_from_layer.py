"""What `from_layer` and the fused path take of a stock layer."""

import torch
from torch import nn

from fused_remat import FusedRematLayer


def test_a_layer_without_biases_is_fused():
    layer = FusedRematLayer(8, 2, 12, bias=False)
    assert layer.why_not_fused(torch.zeros(3, 2, 8, requires_grad=True)) is None


def test_from_layer_makes_a_module_of_its_own():
    stock = nn.TransformerEncoderLayer(8, 2, 12)
    fused = FusedRematLayer.from_layer(stock)
    fused.norm1 = nn.Identity()
    fused.register_forward_hook(lambda *_: None)
    assert type(stock.norm1) is nn.LayerNorm and not stock._forward_hooks
