"""The machine, the code and the time of a measurement."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
_CODE = ("fused_remat", "kernels", "bench")
#: Packages that are compared, or that what is compared is made with.
PEERS = (
    "triton", "liger-kernel", "torch-remat", "transformers", "peft", "trl", "bitsandbytes",
)  # fmt: skip


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def checkout() -> tuple[str | None, bool]:
    """Return the commit, or None, and whether anything but results differs from it.

    New files count where there is code: results may be written to any folder of the checkout.
    """
    status = ("git", "status", "--porcelain")
    changed = _output(*status, "--untracked-files=no", "--", ".", ":!bench/results")
    new = _output(*status, "--", *_CODE, ":!bench/results")
    return _output("git", "rev-parse", "--short=12", "HEAD"), bool(changed or new)


def source() -> str:
    """Return a hash of the code that is measured and that measures, committed or not."""
    files = sorted(path for folder in _CODE for path in (ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(device: torch.device | str) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    on_gpu = torch.device(device).type == "cuda"
    commit, dirty = checkout()
    products = os.environ.get("FUSED_REMAT_CPU_PRODUCTS")
    return ({"products": products} if products else {}) | {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "native_bfloat16": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "dirty": dirty,
        "source": source(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def environment(device: torch.device | str) -> dict[str, Any]:
    """Return the machine, its GPU, and the versions of the packages that are compared."""
    found = machine(device) | {"versions": {name: version(name) for name in PEERS}}
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": driver.splitlines()[0] if driver else None,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return found
