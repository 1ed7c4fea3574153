"""Problems of `python -m bench kernels`, tiny: name -> its op, and a rig -> the problem."""

from bench.kernels import attention, dropout, linear, loss, mlp, norm, rope
from bench.kernels.attention_problem import FORMS, Attention

_LINEARS = {"linear": (None,), "linear + gelu": ("gelu",), "linear + gelu_tanh": ("gelu_tanh",),
            "linear, no bias": (None, False), "linear + gelu, no bias": ("gelu", False),
            "linear + gelu_tanh, no bias": ("gelu_tanh", False)}  # fmt: skip
_MLPS = {"gelu": (False, "gelu"), "gelu_tanh": (False, "gelu_tanh"), "gated silu": (True, "silu")}


def _row(op, make, *sizes):
    return op, lambda rig: make(rig, *sizes)


PROBLEMS = {
    "layer_norm": _row(norm.OP, norm.Norm, "layer_norm", 5, 48),
    "rms_norm": _row(norm.OP, norm.Norm, "rms_norm", 5, 48),
    "rope": _row(rope.OP, rope.Rope, "rope", 2, 4, 2, 9, 16),
    rope.NORMED: _row(rope.OP, rope.Rope, rope.NORMED, 2, 4, 2, 9, 16),
    "loss": _row(loss.OP, loss.Loss, 21, 16, 75),
    "dropout + residual": _row(dropout.OP, dropout.Dropout, 65, 48),
    "shared heads": _row(attention.OP, Attention, "causal", 1, 2, 1, 24, 16),
    **{form: _row(attention.OP, Attention, form, 1, 4, 4, 48, 16) for form in FORMS},
    **{name: _row(linear.OP, linear.Linear, 40, 24, 33, *rest) for name, rest in _LINEARS.items()},
    **{name: _row(mlp.OP, mlp.Mlp, *kind, 2, 20, 24, 40) for name, kind in _MLPS.items()},
}
