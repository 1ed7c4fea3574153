"""Moved: see `fused_remat.steps` and `fused_remat.triton`."""
