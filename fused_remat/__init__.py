"""FusedRemat: train transformers in a fraction of the activation memory."""

import sys as _sys

from fused_remat.autograd.replay_check import ReplayError, check_replay
from fused_remat.conversion import Conversion, conversion
from fused_remat.convert import convert, revert, set_policy
from fused_remat.layers import (
    FusedRematCausalLayer,
    FusedRematDecoderLayer,
    FusedRematLayer,
    FusedRematWarning,
)
from fused_remat.planner import BudgetError, Plan, calibrate, fit, plan
from fused_remat.policies import Policy
from fused_remat.report import MemoryReport, memory_report
from fused_remat.report.explain import explain
from fused_remat.version import __version__ as __version__

__all__ = [
    "BudgetError",
    "Conversion",
    "FusedRematCausalLayer",
    "FusedRematDecoderLayer",
    "FusedRematLayer",
    "FusedRematWarning",
    "MemoryReport",
    "Plan",
    "Policy",
    "ReplayError",
    "calibrate",
    "check_replay",
    "conversion",
    "convert",
    "explain",
    "fit",
    "memory_report",
    "plan",
    "revert",
    "set_policy",
]


#: Removed public names, and what to do instead.
_REMOVED = {
    "defer_weight_gradients": "call schedule.step() without it; zero-bubble schedules then compute "
    "each block's inside again for its weight gradients, and 1F1B computes everything once",
}


def __getattr__(name: str) -> object:
    """Raise AttributeError that says what replaces a removed name."""
    instead = f"; it was removed: {_REMOVED[name]}" if name in _REMOVED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")


#: Modules of an earlier version: their public names, and where those are now.
_MOVED: dict[str, dict[str, str]] = {
    "backends": {},
    "backends.activations": {
        "ACTIVATIONS": "steps.activation.ACTIVATIONS",
        "Activation": "steps.activation.Activation",
        "activation_name": "steps.activation.activation_name",
    },
    "blocks": {},
    "blocks.attention": {"Attention": "steps.attention.Attention"},
    "blocks.program": {
        "Graph": "graph.graph.Graph",
        "kept_bytes": "graph.schedule.kept_bytes",
        "programs": "graph.schedule.schedule",
    },
    "blocks.recipe": {"builder": "graph.text.block", "part": "graph.text.register_dataclass"},
    "blocks.sketch": {
        "Sketch": "graph.build.BlockBuilder",
        "linear_params": "spec.linear_params",
    },
    "layers.causal_layer": {"FusedRematCausalLayer": "layers.FusedRematCausalLayer"},
    "layers.decoder_layer": {"FusedRematDecoderLayer": "layers.FusedRematDecoderLayer"},
    "layers.encoder_layer": {"FusedRematLayer": "layers.FusedRematLayer"},
    "memory": {
        "measure_allocations": "report.allocations.measure_allocations",
        "predict_kept_bytes": "report.allocations.predict_kept_bytes",
    },
}


def _with_old_keywords(found: object) -> object:
    """A function that also takes `wants`, which is `needs_grad` now; anything else as it is."""
    from functools import wraps
    from inspect import signature
    from types import FunctionType

    function = getattr(found, "__wrapped__", found)  # of a cached one
    if not isinstance(function, FunctionType) or "needs_grad" not in signature(function).parameters:
        return found

    @wraps(function)
    def renamed(*args: object, **given: object) -> object:
        given = {"needs_grad" if name == "wants" else name: v for name, v in given.items()}
        return found(*args, **given)  # type: ignore[operator]

    return renamed


class _MovedFinder:
    """Finds the modules of `_MOVED`, whose names warn of their new place; for one more version."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        from importlib.machinery import ModuleSpec

        old = name.removeprefix("fused_remat.")
        if old == name or old not in _MOVED:
            return None
        return ModuleSpec(name, self, is_package=not _MOVED[old])  # type: ignore[arg-type]

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return None

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        def moved(name: str) -> object:
            from pkgutil import resolve_name
            from warnings import warn

            if name not in known:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            text = f"{module.__name__}.{name} is now fused_remat.{known[name]}"
            warn(text, DeprecationWarning, stacklevel=2)
            return _with_old_keywords(resolve_name(f"fused_remat.{known[name]}"))

        known = _MOVED[module.__name__.removeprefix("fused_remat.")]
        module.__getattr__ = moved


_sys.meta_path.append(_MovedFinder())
