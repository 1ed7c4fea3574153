"""On a GPU every test of kernels is one of `-m gpu`; fixtures of tests that look at launches."""

import contextlib
from pathlib import Path

import pytest
from places import EXECUTED, ON_GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if ON_GPU else ():
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def launches(monkeypatch):
    """Kernels are compiled and run here, and frozen at once; nothing is remembered of others."""
    from ptx.driver import installed

    from fused_remat.execution import choose
    from fused_remat.triton import launch

    choose.forget()
    launch.forget()
    monkeypatch.setattr(launch, "AT_ONCE", True)
    with contextlib.nullcontext() if ON_GPU or EXECUTED else installed(90) as found:
        yield found
    choose.forget()
    launch.forget()


@pytest.fixture
def described(monkeypatch):
    """The kernels that are launched in the ordinary way, through `JITFunction.run`."""
    from fused_remat.triton.launch import Launch

    ran, real = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (ran.append(self.kernel.__name__), real(self)))
    return ran
