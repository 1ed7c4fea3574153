"""What `pytest bench` takes besides, and says of every benchmark."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.measure.machine import environment


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bench-device", default="cpu", choices=("cpu", "cuda"))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--bench-device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--bench-device cuda: no CUDA device")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """What is measured on."""
    return torch.device(pytestconfig.getoption("--bench-device"))


@pytest.fixture(scope="session")
def measured_on(device: torch.device) -> dict[str, Any]:
    """The machine, the versions and the commit, as every benchmark's extra_info has them."""
    return environment(device)
