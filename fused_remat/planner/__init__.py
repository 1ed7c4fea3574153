"""Plans: the fastest policy for every layer within a memory budget, and the predicted peak."""

from fused_remat.planner.build import plan
from fused_remat.planner.calibration import Calibration, calibrate
from fused_remat.planner.fit import Fit, fit
from fused_remat.planner.plan import LayerPlan, Plan, Point
from fused_remat.planner.solve import BudgetError

__all__ = [
    "BudgetError",
    "Calibration",
    "Fit",
    "LayerPlan",
    "Plan",
    "Point",
    "calibrate",
    "fit",
    "plan",
]
