"""Drop-in `nn.Module`s: parameters, state, argument checks, and when to fall back."""

from fused_remat.layers.encoder_layer import FusedRematLayer
from fused_remat.layers.eligibility import FusedRematWarning

__all__ = ["FusedRematLayer", "FusedRematWarning"]
