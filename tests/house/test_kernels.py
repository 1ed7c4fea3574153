"""What holds for every jit function of `kernels/`."""

import importlib
import pkgutil

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.runtime.interpreter import InterpretedFunction

import fused_remat.kernels

#: `STYLE`: more are groups, which are `NamedTuple`s.
MOST_PARAMETERS = 24


def test_no_function_takes_more_than_24_parameters():
    found = {}
    for module in pkgutil.iter_modules(fused_remat.kernels.__path__):
        functions = vars(importlib.import_module(f"fused_remat.kernels.{module.name}"))
        for name, value in functions.items():
            if isinstance(value, (triton.JITFunction, InterpretedFunction)):
                found[name] = len(value.arg_names)
    assert sum(name.endswith("_kernel") for name in found) > 20
    assert {name: n for name, n in found.items() if n > MOST_PARAMETERS} == {}
