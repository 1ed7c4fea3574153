"""Measurements in processes of their own: settings that a process reads once, and profiles.

The first numbers of a session are here: what an empty launch and a call of ATen cost the host.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton

from bench.commands import model
from bench.commands.gpu import SECTIONS
from bench.gpu import profile
from bench.gpu.layers import encoder, model_case
from bench.measure.case import DTYPES
from bench.measure.clock import quantiles
from bench.measure.contest import Entry, Rig
from bench.measure.machine import ROOT, synchronize
from bench.subjects import layers, models
from bench.tables import Row
from fused_remat.triton.launch import target_of

#: As the Makefile's `HUGE`.
HUGE = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
PROGRAMS = "FUSED_REMAT_PROGRAMS"
WAYS = ("eager", "checkpoint", "full", "lean")
_CALLS, _SAMPLES = 100, 20
CASES = {"layer": layers.Case, "model": models.Case}


def row_apart(
    kind: str, case: Any, ways: Sequence[str], settings: Mapping[str, str], needs: float, rig: Rig
) -> Row:
    """Return the row of a layer or model, profiled in another process with these settings.

    Raises: RuntimeError with the end of its messages if it fails, subprocess.TimeoutExpired.
    """
    given = {"kind": kind, "case": dataclasses.asdict(case), "ways": ways, "dry": rig.dry}
    command = (sys.executable, "-m", "bench.gpu.apart", json.dumps(given))
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True,
        timeout=None if rig.dry else 3.0 * needs, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row | {"settings": dict(settings)}


def measured(kind: str, case: Mapping[str, Any], ways: Sequence[str], dry: bool) -> Row:
    """Return the row of a layer or model: every way checked, timed and then profiled."""
    device = torch.device("cpu" if dry else "cuda")
    made = CASES[kind](**case)
    rig = Rig(device, DTYPES[made.dtype], dry, target_of(device), seconds=2.5)
    if kind == "layer":
        return profile.measure(made, rig, ways)
    find = functools.partial(profile.profiled, steps=1 if dry else profile.STEPS)
    row = model.measure(made, rig, ways, "triton" if dry else "auto", find)
    return {"model": dict(case), "profiled": dict(case), **row}


def launches(rig: Rig) -> Row:
    """Return the host's microseconds of an empty launch, and of a call of ATen."""

    @triton.jit
    def _empty_kernel(x_ptr):
        pass

    x = torch.zeros(16, device=rig.device)
    calls = {"launch": lambda: _empty_kernel[(1,)](x), "ATen call": lambda: x.add_(1.0)}
    found = {}
    for name, call in calls.items():
        samples = []
        for _ in range(1 if rig.dry else _SAMPLES):
            call()
            synchronize(rig.device)
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            samples.append(1e6 * (time.perf_counter() - start) / _CALLS)
        found[f"{name} µs"] = round(quantiles(samples)["p50"], 2)
    return {"found": found}


# --- what is measured


def _layer(rig: Rig, section: str, name: str, case: layers.Case, **settings: str) -> Entry:
    sizes = {"width": case.d_model, "seq_len": case.seq_len, "batch": case.batch}
    needs = SECTIONS[section].needs
    run = functools.partial(row_apart, "layer", case, WAYS, settings, needs)
    return {"name": name, **sizes}, run


def host_entries(rig: Rig) -> Iterator[Entry]:
    """Yield the costs of calls, then a layer that the host bounds, without and with huge pages."""
    yield {"name": "calls"}, launches
    case = encoder(rig, "pre", rig.size(1024, 32))
    yield _layer(rig, "host", "pre-norm", case)
    yield _layer(rig, "host", "pre-norm, huge pages", case, **HUGE)


def program_entries(rig: Rig) -> Iterator[Entry]:
    """Yield a small and a usual layer, with pass programs and without."""
    usual = encoder(rig, "pre", rig.size(1024, 32))
    small = dataclasses.replace(usual, batch=rig.size(2, 1), seq_len=rig.size(512, 7))
    for case in (small,) if rig.dry else (small, usual):
        for value, name in (("0", "without"), ("1", "with")):
            name = f"pre-norm, {name} programs"
            yield _layer(rig, "programs", name, case, **{PROGRAMS: value})


def model_entries(rig: Rig) -> Iterator[Entry]:
    """Yield a small model's step by kind of kernel: the host's and the device's time apart."""
    case = model_case(rig, "smollm-135m", 0, 8)
    ways = ("eager", "full_loss") if rig.dry else ("eager", "full_loss", "fast_loss", "liger")
    run = functools.partial(row_apart, "model", case, ways, {}, SECTIONS["loss profile"].needs)
    yield {"name": f"{case.model}, profiled", "batch": case.batch}, run


if __name__ == "__main__":
    print(json.dumps(measured(**json.loads(sys.argv[1]))))
