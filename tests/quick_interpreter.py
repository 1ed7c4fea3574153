"""Triton's interpreter in half the time: without work whose results nobody uses."""

import dataclasses
import functools


@functools.cache  # once a process
def quicken():
    """Leave out what the interpreter does and nobody uses."""
    from triton.runtime import interpreter

    _patch_the_language_once(interpreter)
    # Sums and products of integers are made again in 64 bits, for an assertion that only
    # TRITON_DEBUG makes.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # A table of all types is made at every look-up.
    table, of_scalar = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (
        table(dtype) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    )


def _patch_the_language_once(interpreter):
    """Patch Triton's language once for a launch.

    Every call of a device function would look through all of it again, for what the launch has left
    nothing of.
    """
    import triton.language as tl

    patch_lang, patched, kinds = interpreter._patch_lang, {}, {}

    def once(fn):
        scope, found = kinds.get(id(fn.__globals__), (None, None))
        if scope is not fn.__globals__:
            seen = {id(value) for value in fn.__globals__.values()}
            found = id(tl) in seen, id(tl.core) in seen
            kinds[id(fn.__globals__)] = fn.__globals__, found
        if found in patched:
            return patched[found]
        scope = patched[found] = patch_lang(fn)
        if len(patched) == 1:  # the launch's own, which is restored
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = once
