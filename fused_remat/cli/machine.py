"""This machine: devices, versions, compilers, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from fused_remat.report.units import device_memory

#: Packages, with their use and how to install them; None for those that are always installed.
PACKAGES: dict[str, tuple[str, str] | None] = {
    "torch": None,
    "triton": ("kernels for NVIDIA GPUs", "pip install triton (Linux)"),
    "transformers": ("converting Hugging Face models", 'pip install "fused-remat[hf]"'),
    "peft": ("LoRA adapters in Hugging Face models", 'pip install "fused-remat[hf]"'),
    "numpy": None,
    "matplotlib": ("plots", 'pip install "fused-remat[bench]"'),
}


def devices() -> list[dict[str, Any]]:
    """The CPU and all CUDA devices."""
    cpu = {
        "device": "cpu",
        "name": _cpu_name(),
        "threads": torch.get_num_threads(),
        "memory_bytes": device_memory("cpu"),
    }
    found: list[dict[str, Any]] = [cpu]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append({
            "device": f"cuda:{index}",
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
        })  # fmt: skip
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that can be used; None if not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    if package == "torch":
        return str(torch.__version__)  # including the CUDA version that it was built for
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def compilers() -> dict[str, str | None]:
    """For each device type, why `torch.compile` cannot generate code for it, or None if it can.

    Only looks for the requirements; compiles nothing.
    """
    found = {"cpu": _why_not_compiled("CXX", ("clang++" if sys.platform == "darwin" else "g++",))}
    if torch.cuda.is_available():
        no_triton = importlib.util.find_spec("triton") is None
        c = _why_not_compiled("CC", ("gcc", "clang", "cc"))
        found["cuda"] = "Triton is not installed" if no_triton else c
    return found


def _why_not_compiled(variable: str, names: tuple[str, ...]) -> str | None:
    given = os.environ.get(variable)
    wanted = (given,) if given else names
    if not any(shutil.which(name.split()[0]) for name in wanted):
        return f"no compiler: {', '.join(wanted)} not found; set {variable} to use another"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "no Python.h: Python's headers are not installed"
    return None


def missing(found: dict[str, str | None], compiled: dict[str, str | None]) -> list[dict[str, str]]:
    """What `versions()` and `compilers()` did not find, with its use and how to install it."""
    rows = [
        {"what": name, "for": row[0], "get": row[1]}
        for name, row in PACKAGES.items()
        if row is not None and found[name] is None
    ]
    for kind, reason in compiled.items():
        if reason is not None and reason.startswith("no "):
            compiler = f"a compiler for torch.compile on {kind}"
            get = "install a C++ compiler and Python's headers (on Debian: g++, python3-dev)"
            rows.append({"what": compiler, "for": f"torch.compile; {reason}", "get": get})
    if torch.version.cuda is None and torch.version.hip is None:
        get = "pytorch.org/get-started, if there is an NVIDIA GPU"
        rows.append({"what": "torch with CUDA", "for": "training on GPUs", "get": get})
    return rows
