"""FusedRemat: train transformers in a fraction of the activation memory."""

from typing import NoReturn

from fused_remat.autograd.replay_check import ReplayError, check_replay
from fused_remat.convert import Conversion, conversion, convert, revert, set_policy
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


def defer_weight_gradients(*args: object, **kwargs: object) -> NoReturn:
    """Raise RuntimeError: removed, since zero-bubble schedules run without it."""
    raise RuntimeError(
        "defer_weight_gradients was removed: call schedule.step() without it; zero-bubble schedules"
        " then recompute a block for its weight gradients too, and 1F1B recomputes it once"
    )
