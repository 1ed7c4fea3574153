"""What a kernel is for, by its name: what a step's device time is divided into.

Our own kernels are known by the module of `kernels/` that they are from; those of ATen, cuBLAS and
cuDNN by what their names have in common.
"""

from __future__ import annotations

import functools
import importlib
import re

#: In the order of the tables; what no row below names is "other".
KINDS = (
    "products", "attention", "norms", "pointwise", "reductions", "copies and fills", "other",
)  # fmt: skip
#: Module of our kernels -> what its kernels are for.
OURS = {
    "attention": "attention",
    "attention_bwd": "attention",
    "attention_masks": "attention",
    "cross_entropy": "products",
    "dropout": "pointwise",
    "linear": "products",
    "mlp": "products",
    "norms": "norms",
    "packing": "pointwise",
    "pointwise": "pointwise",
    "rotary": "pointwise",
}
#: Kind -> what is found in names of others' kernels; the first that fits is theirs: FlashAttention
#: is made with CUTLASS, cuBLAS has reductions, and copies are elementwise kernels of ATen's.
THEIRS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "copies and fills": r"^Mem(cpy|set)\b|copy_kernel|CopyFunctor|FillFunctor"
        r"|CatArrayBatchedCopy",
        "attention": r"flash|Flash|fmha|sdpa|cudnn::fusion|dot_do_o|convert_dq",
        "norms": r"layer_?norm|LayerNorm|rms_?norm|RMSNorm|GammaBeta|RowwiseMoments"
        r"|ComputeGradientFusedParams",
        "products": r"nvjet|gemm|gemv|cutlass|cublas|splitK|xmma|dot_kernel|Cijk_",
        "reductions": r"reduce_kernel|reduce_1Block|triton_(red|per)_",
        "pointwise": r"elementwise|dropout|triton_poi_",
    }.items()
}
#: Of kernels that compute attention's output, once for each forward.
FORWARD = re.compile(
    r"flash_fwd(?!.*combine)|FlashAttnFwd(?!.*[Cc]ombine)|fprop|fmha_cutlassF|^attention_fwd_kernel"
)


@functools.cache
def ours() -> dict[str, str]:
    found = {}
    for module, kind in OURS.items():
        known = vars(importlib.import_module(f"fused_remat.kernels.{module}"))
        found |= {name: kind for name in known if name.endswith("_kernel")}
    return found


def kind_of(name: str) -> str:
    """What a kernel, a copy or a fill of that name is for.

    >>> kind_of("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>")
    'attention'
    >>> kind_of("norm_bwd_kernel"), kind_of("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT")
    ('norms', 'products')
    """
    own = re.fullmatch(r"(?:[\w.]+\.)?(\w+_kernel)(?:_\d\w*)?", name)
    if own is not None and own[1] in ours():
        return ours()[own[1]]
    return next((kind for kind, pattern in THEIRS.items() if pattern.search(name)), "other")
