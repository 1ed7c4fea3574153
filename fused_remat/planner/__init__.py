"""Plans: from a memory budget to the fastest policy for every layer, with a peak that holds."""

from fused_remat.planner.build import plan
from fused_remat.planner.calibration import Calibration, StepCost, calibrate
from fused_remat.planner.fit import Fit, fit
from fused_remat.planner.options import BudgetError
from fused_remat.planner.plan import LayerPlan, Plan, Point

__all__ = [
    "BudgetError",
    "Calibration",
    "Fit",
    "LayerPlan",
    "Plan",
    "Point",
    "StepCost",
    "calibrate",
    "fit",
    "plan",
]
