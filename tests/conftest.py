"""What every test shares: two threads, skipped GPU tests, one Hypothesis profile."""

import os

import hypothesis
import pytest
import torch

torch.set_num_threads(2)

# Run by test_interpreted.py in processes of their own.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("ci")


@pytest.fixture(scope="session")
def two_processes():
    """Two other processes in one group, started when first used (`distributed.Processes`)."""
    yield from _processes(2)


@pytest.fixture(scope="module")
def four_processes():
    """Four of them; gone after the file, for the memory that they take."""
    yield from _processes(4)


def _processes(world: int):
    from distributed import Processes

    these = Processes(world)
    yield these
    these.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
