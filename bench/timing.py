"""Measuring side by side: interleaved rounds, percentiles, the machine, and the results file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).resolve().parents[1]
WARMUP_ROUNDS = 2
FEWEST_ROUNDS = 5  # whatever the time limit says, if as many are asked for

T = TypeVar("T")


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The 20th, 50th and 80th percentile."""
    levels = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    found = torch.tensor(values, dtype=torch.float64).quantile(levels).tolist()
    return dict(zip(("p20", "p50", "p80"), found, strict=True))


def rotated(names: Sequence[str], index: int) -> list[str]:
    """The order of round `index`: who goes first rotates; every other round runs backwards.

    Without the latter every name but the first would always follow the same other one, and find
    the caches as that one leaves them.
    """
    first = index // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if index % 2 else order


def interleave(
    steps: Mapping[str, Callable[[], T]], rounds: int, seconds: float
) -> dict[str, list[T]]:
    """What every step returned in every round; in a round each runs once, after warm-up rounds.

    Ends after `rounds` rounds; once `FEWEST_ROUNDS` are done, also after `seconds`.
    """
    names = list(steps)
    found: dict[str, list[T]] = {name: [] for name in names}
    if not names:
        return found
    for index in range(WARMUP_ROUNDS):
        for name in rotated(names, index):
            steps[name]()
    end = time.perf_counter() + seconds
    for index in range(rounds):
        for name in rotated(names, index):
            found[name].append(steps[name]())
        if index + 1 >= FEWEST_ROUNDS and time.perf_counter() >= end:
            break
    return found


def synchronize(device: str) -> None:
    """Wait for what the device still computes."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _git(*arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def checkout() -> tuple[str | None, bool]:
    """The commit, None outside a checkout, and whether anything but results differs from it."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit, bool(_git("status", "--porcelain", "--", ".", ":!bench/results"))


def source() -> str:
    """A hash of the code that is measured and that measures, committed or not."""
    folders = (ROOT / "fused_remat", ROOT / "kernels", ROOT / "bench")
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def machine(device: str) -> dict[str, Any]:
    """What the numbers are measured on, of which code, and when."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    on_gpu = torch.device(device).type == "cuda"
    commit, dirty = checkout()
    return {
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


class ResultsFile:
    """A JSON file with the machine and the config of the last run, and a row per measured case.

    A row holds its `case`, the `machine` it was measured on, its `config`, and `ways`. It is
    written after every case, so that a run that was cut short is taken up where it ended.
    """

    def __init__(self, path: Path, machine: dict[str, Any], config: dict[str, Any]) -> None:
        self.path, self.machine, self.config = path, machine, config
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = json.loads(path.read_text())["results"]

    @property
    def data(self) -> dict[str, Any]:
        """What the file holds."""
        return {"machine": self.machine, "config": self.config, "results": self.rows}

    def find(self, case: dict[str, Any], ways: Iterable[str]) -> dict[str, Any] | None:
        """The case's row, if these ways were measured on this machine, commit, code and config."""
        for row in self.rows:
            same = row["case"] == case and set(ways) <= set(row["ways"])
            same = same and {**row["machine"], "date": None} == {**self.machine, "date": None}
            if same and {**row["config"], "ways": None} == {**self.config, "ways": None}:
                return row
        return None

    def put(self, row: dict[str, Any]) -> None:
        """Add the row of a case, in place of the one that is there, and write the file."""
        new = row | {"machine": self.machine, "config": self.config}
        for index, old in enumerate(self.rows):
            if old["case"] == row["case"]:
                self.rows[index] = new
                break
        else:
            self.rows.append(new)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(self.data, indent=1) + "\n")
        unfinished.replace(self.path)
