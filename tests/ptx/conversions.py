"""Conversions between types: PTX ISA 9.7.9.21 (cvt)."""

from __future__ import annotations

import numpy as np

from .decode import Instruction
from .lanes import Array, Registers, Step, dtype_of, instruction, pure
from .numbers import HALF, f4, f8, flushed, u2, u4

_WHOLE = {"rzi": np.trunc, "rmi": np.floor}


@instruction("cvt")
def _convert(i: Instruction, k: Registers) -> Step:
    *how, into, given = i.parts[1:]
    if not set(how) <= {"rn", "ftz", *_WHOLE}:
        raise i.unknown()
    if into.endswith("x2"):  # the first operand is the upper half
        narrow = HALF[into.removesuffix("x2")][1]
        packed = lambda high, low: narrow(low) | (narrow(high).astype(u4) << u4(16))  # noqa: E731
        return pure(i, k, packed, u4, f4, f4)
    whole = next((_WHOLE[name] for name in how if name in _WHOLE), None)
    if into in HALF and given == "f32" and whole is None:
        return pure(i, k, HALF[into][1], u2, f4)
    if given in HALF and into == "f32" and whole is None:
        return pure(i, k, HALF[given][0], f4, u2)
    target, source = dtype_of(into), dtype_of(given)
    floats = np.dtype(target).kind == "f", np.dtype(source).kind == "f"
    if source is f8:
        raise i.unknown()

    def converted(x: Array) -> Array:
        if "ftz" in how and source is f4:
            x = flushed(x)
        if whole is not None:
            x = whole(x)
        if floats == (False, True):  # clamped to the type's range
            limits = np.iinfo(target)
            nan = target(1) << target(63) if limits.bits == 64 else target(0)
            wide = x.astype(f8)
            inside = np.where(wide < limits.max, wide.clip(float(limits.min)), 0).astype(target)
            return np.where(np.isnan(wide), nan, np.where(wide < limits.max, inside, limits.max))
        return x.astype(target)

    if floats == (False, True) and whole is None:
        raise i.unknown("without a rounding to integers")
    return pure(i, k, converted, target, source)
