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
from fused_remat.ops.encoder import encoder_block
from fused_remat.ops.linear_cross_entropy import linear_cross_entropy
from fused_remat.ops.mlp import gated_mlp, mlp, mlp_block
from fused_remat.ops.norms import dropout_add, layer_norm, rms_norm
from fused_remat.ops.rotary import rotary
from fused_remat.ops.transformer import causal_block

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
