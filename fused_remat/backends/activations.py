"""Moved to `fused_remat.steps.activation`; importable from here for one more version."""

import warnings

from fused_remat.steps.activation import ACTIVATIONS, Activation, activation_name

__all__ = ["ACTIVATIONS", "Activation", "activation_name"]
warnings.warn(
    "fused_remat.backends.activations is now fused_remat.steps.activation",
    DeprecationWarning,
    stacklevel=2,
)
