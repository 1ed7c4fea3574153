"""Plain functions on tensors, for research code and for the layers.

All of them keep for backward their inputs and what `policy` names, and rebuild the rest on demand
(`linear_cross_entropy` and `token_log_probs`, which take no policy, keep two or three numbers a
token). They take `seed=` (of dropout; None draws one from torch's generator) and `backend=`. They
apply dropout whenever its probability is not 0: pass 0.0 in evaluation. They compute in the dtype
of their inputs, also under autocast, which only the two losses follow. They support neither double
backward nor torch.func transforms. An input that is not three-dimensional, and that no view makes a
matrix of tokens (a transposed one), is copied, and the copy is what is kept.
"""

from fused_remat.ops.attention import attention
from fused_remat.ops.blocks import attention_block, causal_block, encoder_block
from fused_remat.ops.cross_entropy import linear_cross_entropy
from fused_remat.ops.moe import load_balancing_loss, moe, router_z_loss
from fused_remat.ops.parts import (
    dropout_add,
    gated_mlp,
    layer_norm,
    mlp,
    mlp_block,
    rms_norm,
    rotary,
)
from fused_remat.ops.token_log_probs import token_log_probs

__all__ = [
    "attention",
    "attention_block",
    "causal_block",
    "dropout_add",
    "encoder_block",
    "gated_mlp",
    "layer_norm",
    "linear_cross_entropy",
    "load_balancing_loss",
    "mlp",
    "mlp_block",
    "moe",
    "rms_norm",
    "rotary",
    "router_z_loss",
    "token_log_probs",
]
