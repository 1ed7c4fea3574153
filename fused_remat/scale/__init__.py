"""Estimates memory and time of a training step on a mesh of devices, without running it."""

from fused_remat.scale.costs import HARDWARE, Costs, Figure
from fused_remat.scale.estimate import Estimate, estimate
from fused_remat.scale.layout import Layout, Mesh
from fused_remat.scale.memory import Setup

__all__ = ["HARDWARE", "Costs", "Estimate", "Figure", "Layout", "Mesh", "Setup", "estimate"]
