"""Problems of `python -m bench kernels`, tiny: name -> its op, and a rig -> the problem."""

from bench.kernels.attention import ATTENTION
from bench.kernels.attention_problem import FORMS, Attention
from bench.kernels.passes import DROPOUT, NORM, NORMED, ROPE, Dropout, Norm, Rope
from bench.kernels.products import LINEAR, LOSS, MLP, Linear, Loss, Mlp

_LINEARS = {"linear": (None,), "linear + gelu": ("gelu",), "linear + gelu_tanh": ("gelu_tanh",),
            "linear, no bias": (None, False), "linear + gelu, no bias": ("gelu", False),
            "linear + gelu_tanh, no bias": ("gelu_tanh", False)}  # fmt: skip
_MLPS = {"gelu": (False, "gelu"), "gelu_tanh": (False, "gelu_tanh"), "gated silu": (True, "silu")}


def _row(op, make, *sizes):
    return op, lambda rig: make(rig, *sizes)


PROBLEMS = {
    "layer_norm": _row(NORM, Norm, "layer_norm", 5, 48),
    "rms_norm": _row(NORM, Norm, "rms_norm", 5, 48),
    "rope": _row(ROPE, Rope, "rope", 2, 4, 2, 9, 16),
    NORMED: _row(ROPE, Rope, NORMED, 2, 4, 2, 9, 16),
    "loss": _row(LOSS, Loss, 21, 16, 75),
    "dropout + residual": _row(DROPOUT, Dropout, 65, 48),
    "shared heads": _row(ATTENTION, Attention, "causal", 1, 2, 1, 24, 16),
    **{form: _row(ATTENTION, Attention, form, 1, 4, 4, 48, 16) for form in FORMS},
    **{name: _row(LINEAR, Linear, 40, 24, 33, *rest) for name, rest in _LINEARS.items()},
    **{name: _row(MLP, Mlp, *kind, 2, 20, 24, 40) for name, kind in _MLPS.items()},
}
