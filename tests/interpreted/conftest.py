"""What the interpreted tests share."""

import pytest


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
    """A launch patches Triton's language once: a quarter of the time is saved.

    Every call of a device function would look through all of it again, for what the launch has left
    nothing of.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang, patched = interpreter._patch_lang, {}

    def once(fn):
        seen = {id(value) for value in fn.__globals__.values()}
        found = id(tl) in seen, id(tl.core) in seen
        if found in patched:
            return patched[found]
        scope = patched[found] = patch_lang(fn)
        if len(patched) == 1:  # the launch's own, which is restored
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = once
