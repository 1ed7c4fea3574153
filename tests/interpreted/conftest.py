"""What the interpreted tests share."""

import pytest
from quick_interpreter import quicken

from fused_remat.execution import choose


@pytest.fixture(autouse=True)
def _choices_are_forgotten():
    """Tests replace the tables by which an implementation is chosen."""
    choose.forget()
    yield
    choose.forget()


@pytest.fixture
def floats_are_tensors(monkeypatch):
    """The interpreter passes a kernel Python's floats; compiled, it gets float32 scalars."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(arg):
        if not isinstance(arg, float):
            return convert(arg)
        handle = interpreter.TensorHandle(np.array([arg], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)


def pytest_configure():
    quicken()
