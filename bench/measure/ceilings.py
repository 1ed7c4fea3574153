"""What the machine can do at most, measured: a large copy, a large product of random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from bench.measure.clock import quantiles
from bench.measure.contest import SETS, Rig, Work


def copy(rig: Rig) -> tuple[Callable[[int], Any], Work]:
    """Bytes read and written; far more than any cache holds."""
    count = rig.size(1 << 30 if rig.device.type == "cuda" else 1 << 26, 1 << 10)
    x, y = rig.normal(count), rig.poisoned(count)
    return lambda index: y.copy_(x), Work(bytes=2.0 * x.nbytes)


def product(rig: Rig) -> tuple[Callable[[int], Any], Work]:
    n = rig.size(8192 if rig.device.type == "cuda" else 2048, 64)
    x, w = rig.normal(n, n), rig.normal(n, n)
    return lambda index: torch.mm(x, w), Work(flops=2.0 * n**3)


#: Unit -> what is run to find the most of it.
CEILINGS = {"GB/s": copy, "TFLOP/s": product}


def measure(rig: Rig, unit: str) -> dict[str, Any]:
    """A row; the rig knows the ceiling from then on, at the fastest fifth of the rounds."""
    run, work = CEILINGS[unit](rig)
    run(0)
    sampler = rig.clock.sampler(run, lambda index: index, SETS)
    us = quantiles([1e6 * seconds for seconds in rig.longer(3.0).in_turns({"": sampler})[""]])
    rig.ceilings[unit] = work.rates(1e-6 * us["p20"])[unit]
    way = {"us": us, "ratio": {}, unit: rig.ceilings[unit]}
    return {"unit": unit, "work": dataclasses.asdict(work), "ways": {"torch": way}}
