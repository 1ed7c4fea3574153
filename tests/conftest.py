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
    """Two other processes in one group, started when first used (`distributed.TwoProcesses`)."""
    from distributed import TwoProcesses

    both = TwoProcesses()
    yield both
    both.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
