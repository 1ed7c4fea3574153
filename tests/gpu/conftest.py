"""Set before CUDA starts: cuBLAS is deterministic only with workspaces of a fixed size."""

import os

import pytest
import torch

from fused_remat.execution import choose

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _fresh():
    """Every test from one seed, and nothing of it left: choices, the allocator's cache."""
    torch.manual_seed(0)
    choose.forget()  # tests replace the tables that are chosen by
    yield
    choose.forget()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
