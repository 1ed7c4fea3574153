"""Problems of `python -m bench kernels`, tiny: name -> its op, and a rig -> the problem."""

from bench.kernels.attention import ATTENTION, FORMS, Attention
from bench.kernels.experts import EXPERTS, GROUPED, Experts, Grouped
from bench.kernels.ops import LOSS, MLP, NORM, Loss, Mlp, Norm

_MLPS = {"gelu": (False, "gelu"), "gelu_tanh": (False, "gelu_tanh"), "gated silu": (True, "silu")}


def _entry(op, make, *sizes):
    return op, lambda rig: make(rig, *sizes)


PROBLEMS = {
    "layer_norm": _entry(NORM, Norm, "layer_norm", 5, 48),
    "rms_norm": _entry(NORM, Norm, "rms_norm", 5, 48),
    "loss": _entry(LOSS, Loss, 21, 16, 75),
    "shared heads": _entry(ATTENTION, Attention, "causal", 1, 2, 1, 24, 16),
    "up": _entry(GROUPED, Grouped, "up", 21, 32, 48, 5, 2),
    "swiglu": _entry(EXPERTS, Experts, "swiglu", 21, 32, 24, 5, 2),
    "clamped": _entry(EXPERTS, Experts, "clamped", 21, 32, 24, 5, 2),
    **{form: _entry(ATTENTION, Attention, form, 1, 4, 4, 48, 16) for form in FORMS},
    **{name: _entry(MLP, Mlp, *kind, 2, 20, 24, 40) for name, kind in _MLPS.items()},
}
