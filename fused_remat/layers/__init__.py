"""Drop-in `nn.Module`s: parameters, state, argument checks, and when to fall back."""

from fused_remat.backends.base import FusedRematWarning
from fused_remat.layers.encoder_layer import FusedRematLayer

__all__ = ["FusedRematLayer", "FusedRematWarning"]
