"""What each layer of a model keeps for backward, by name, and what a step takes at its peak."""

from fused_remat.report.report import Activation, LayerMemory, MemoryReport, memory_report

__all__ = ["Activation", "LayerMemory", "MemoryReport", "memory_report"]
