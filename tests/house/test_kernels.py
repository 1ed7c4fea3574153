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


def jit_functions():
    """Every jit function of the package by its name, kernels and device functions."""
    found = {}
    for module in pkgutil.iter_modules(fused_remat.kernels.__path__):
        for name, value in vars(
            importlib.import_module(f"fused_remat.kernels.{module.name}")
        ).items():
            if isinstance(value, (triton.JITFunction, InterpretedFunction)):
                found[name] = value
    return found


def test_no_function_takes_more_than_24_parameters():
    functions = jit_functions()
    assert sum(name.endswith("_kernel") for name in functions) > 20
    many = {name: len(f.arg_names) for name, f in functions.items()}
    assert {name: n for name, n in many.items() if n > MOST_PARAMETERS} == {}
