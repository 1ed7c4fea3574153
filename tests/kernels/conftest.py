"""On a GPU every test of kernels is one of `-m gpu`."""

from pathlib import Path

import pytest
from places import ON_GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if ON_GPU else ():
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.gpu)
