"""Drop-in `nn.Module`s: parameters, state, argument checks, and when to fall back."""

from fused_remat.layers.causal import FusedRematCausalLayer
from fused_remat.layers.decoder_layer import FusedRematDecoderLayer
from fused_remat.layers.encoder_layer import FusedRematLayer
from fused_remat.layers.fused_layer import FusedLayer
from fused_remat.steps.operations import FusedRematWarning

__all__ = [
    "FusedLayer",
    "FusedRematCausalLayer",
    "FusedRematDecoderLayer",
    "FusedRematLayer",
    "FusedRematWarning",
]
