"""Reports what each layer of a model keeps for backward, and the peak memory of a step."""

from fused_remat.report.report import Activation, LayerMemory, MemoryReport, memory_report

__all__ = ["Activation", "LayerMemory", "MemoryReport", "memory_report"]
