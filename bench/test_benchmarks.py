"""`pytest bench --benchmark-only`: ops and a layer at one small size, for comparing commits.

Ids and groups stay as they are from commit to commit. What is timed has been found right first.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench.kernels.problem import DIRECTIONS, Problem, contests
from bench.kernels.shapes import MODELS, Size
from bench.kernels.table import OPS
from bench.measure import options
from bench.measure.case import DTYPES
from bench.measure.checks import Checks
from bench.measure.contest import SETS, Rig, admit
from bench.measure.machine import environment, synchronize
from bench.measure.steps import Steps
from bench.subjects.layer_ways import BASELINE, WAYS
from bench.subjects.layers import Case
from fused_remat.policies import EXACT_PRESETS
from fused_remat.triton.launch import INTERPRETED, target_of

#: One with LayerNorm and GELU, one with RMSNorm, rotated and shared heads, and SwiGLU.
SIZES = {name: Size(MODELS[name], 1, 128) for name in ("gpt2", "smollm-135m")}
ROUNDS, WARMUP = 15, 2
DEVICE = torch.device(options.DEVICE)
#: In the dtype that is trained in there.
LAYER = Case("bfloat16" if DEVICE.type == "cuda" else "float32", "pre", 0.0, 1, 256, 256, 4)
#: The machine, the versions and the commit, as every benchmark's extra_info has them.
MEASURED_ON = environment(DEVICE)


def rig() -> Rig:
    known = DEVICE.type == "cuda" or INTERPRETED
    return Rig(DEVICE, DTYPES[LAYER.dtype], target=target_of(DEVICE) if known else None)


def problems(op: str, rig: Rig) -> dict[str, Problem]:
    """An op's problems by name, the first of each."""
    found: dict[str, Problem] = {}
    for model, size in SIZES.items():
        for problem in OPS[op].of_model(rig, size):
            found.setdefault(f"{problem.name}-{model}", problem)
    return found


def rows() -> Iterator[Any]:
    """Every op, problem, direction, and provider that is the baseline or ours."""
    for op, row in OPS.items():
        names = [n for n in row if row[n].traits.get("ours")]
        for problem in problems(op, rig()):  # no tensor is made of it
            for direction in DIRECTIONS:
                for name in [*row.baselines, *names]:
                    given = (op, problem, direction, name)
                    yield pytest.param(*given, id=re.sub(r"[^\w.-]+", "_", "-".join(given)))


def timed(benchmark: Any, prepare: Callable[[int], Any], run: Callable[[Any], Any]) -> None:
    """Rounds of `run(prepare(i))`, input sets in turn; only `run` is timed, to its end."""
    turns = itertools.cycle(range(SETS))

    def setup() -> tuple[tuple[Any], dict[str, Any]]:
        execution = prepare(next(turns))
        synchronize(DEVICE)  # a forward before the backward, say: not to be waited for in its time
        return (execution,), {}

    def timed_run(execution: Any) -> None:
        run(execution)
        synchronize(DEVICE)

    benchmark.pedantic(timed_run, setup=setup, rounds=ROUNDS, warmup_rounds=WARMUP)


@pytest.mark.parametrize(("op", "problem", "direction", "provider"), list(rows()))
def test_op(op: str, problem: str, direction: str, provider: str, benchmark: Any) -> None:
    """One op: forward as in training, or backward after a forward that is not timed."""
    torch.manual_seed(0)
    names = dict.fromkeys([*OPS[op].baselines, provider])  # by whose errors it is judged
    contest = dict(contests(OPS[op], problems(op, rig())[problem], names))[direction]
    found = admit(contest)[provider]
    if "absent" in found:
        pytest.skip(found["absent"])
    assert "check" in found, found["error"]
    benchmark.group = f"{op} {direction}"
    benchmark.extra_info.update(MEASURED_ON)
    timed(benchmark, contest.ways[provider].prepare, contest.ways[provider].run)


@pytest.mark.parametrize("way", [BASELINE, "checkpoint", *EXACT_PRESETS])
def test_layer(way: str, benchmark: Any) -> None:
    subject = LAYER.subject(DEVICE)
    steps = Steps(rig())
    steps.admit_way(WAYS[way], Checks(subject))
    assert way in steps.forwards, steps.rows
    forward = steps.forwards[way]
    benchmark.group = "layer"
    benchmark.extra_info.update(MEASURED_ON, case=dataclasses.asdict(LAYER))
    timed(benchmark, lambda index: subject.x, lambda x: forward(x).backward(subject.dy))
