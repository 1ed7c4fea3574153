"""Plain functions on tensors for research code and for the layers: thin calls of the graphs.

All of them keep for backward what `policy` names besides their inputs (`linear_cross_entropy`,
which has no choice, two numbers a token), and rebuild the rest on demand; take `seed=` (dropout;
drawn from torch's generator if None) and `backend=`; apply dropout whenever its probability is not
0 (pass 0.0 in evaluation); compute in the dtype of their inputs, also under autocast (except for
`linear_cross_entropy`, a product that follows it); cannot be differentiated twice, nor inside
torch.func transforms. An input that is not three-dimensional and cannot be viewed as a matrix of
tokens (a transposed one) is copied, and the copy is what is kept.
"""

from fused_remat.ops.attention import attention, attention_block
from fused_remat.ops.blocks import causal_block, encoder_block
from fused_remat.ops.cross_entropy import linear_cross_entropy
from fused_remat.ops.pieces import (
    dropout_add,
    gated_mlp,
    layer_norm,
    mlp,
    mlp_block,
    rms_norm,
    rotary,
)

__all__ = [
    "attention",
    "attention_block",
    "causal_block",
    "dropout_add",
    "encoder_block",
    "gated_mlp",
    "layer_norm",
    "linear_cross_entropy",
    "mlp",
    "mlp_block",
    "rms_norm",
    "rotary",
]
