"""Drop-in modules whose forward is a block, or PyTorch's own forward if a block does not apply."""

from fused_remat.layers.causal import FusedRematCausalLayer
from fused_remat.layers.fused_layer import FusedLayer
from fused_remat.layers.torch_nn import FusedRematDecoderLayer, FusedRematLayer
from fused_remat.steps.operations import FusedRematWarning

__all__ = [
    "FusedLayer",
    "FusedRematCausalLayer",
    "FusedRematDecoderLayer",
    "FusedRematLayer",
    "FusedRematWarning",
]
