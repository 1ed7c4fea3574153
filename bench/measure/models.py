"""A model's training step in every way: checked, and where results are right, memory and time."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.measure.case import DTYPES
from bench.measure.checks import Checks
from bench.measure.contest import TOLERANCE, Rig
from bench.measure.registry import Absent, WrongResultError
from bench.measure.steps import Step, Steps, kept_bytes, peaks
from bench.subjects.configs import dropout_free
from bench.subjects.model_ways import BASELINE, DEFAULT, WAYS
from bench.subjects.models import Case, Forward, Loss, Subject, build, fixed_bytes
from fused_remat.report.allocations import measure_allocations

#: Layers, sequences and tokens of the model that is compared with float64: layers are equal, and
#: float64 takes two to four times the memory.
LAYERS, BATCH, TOKENS = 2, 2, 128
#: Bytes that the float64 copy of the parameters may take; a larger vocabulary is cut.
_LARGEST = 4 << 30
_FEW_WORDS = {"vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0}
#: Roundings accumulate in a model: a result may be off by so many single operations.
_FACTOR = 3.0


@dataclass(frozen=True)
class Options:
    """Settings of a measurement; backend and compiler as of `Subject`."""

    ways: Sequence[str] = DEFAULT  # names or groups; the baseline is always among them
    backend: str = "auto"
    compiler: str = "inductor"


def measure(case: Case, options: Options, rig: Rig) -> dict[str, Any]:
    """Return a row of the results file, without the case."""
    routes = {"backend": options.backend, "compiler": options.compiler}
    # What building such a model imports is frozen: every memory measurement collects garbage, and
    # would visit all of transformers each time.
    one = dataclasses.replace(case, layers=1, seq_len=1, tiny=True)
    build(one.published, 1, DTYPES[case.dtype], "meta", case.lora)
    gc.collect()
    gc.freeze()
    with Steps(rig) as steps:
        checks = checks_of(dataclasses.replace(checked_subject(case, rig.device), **routes))
        for name in WAYS.select(options.ways):
            steps.admit_way(WAYS[name], checks)
        steps.forwards.clear()  # no forward of the small model remains
        del checks
        subject = dataclasses.replace(case.subject(rig.device), **routes)
        _weigh(subject, steps)
        steps.time(Step, subject, WAYS.baselines)
        row = {"fixed_bytes": fixed_bytes(subject.module), "rounds": steps.rounds}
    return row | {"ways": steps.rows}


def checked_subject(case: Case, device: torch.device | str) -> Subject:
    """Return the case's model for comparing results: few layers and tokens, no dropout."""
    published = dropout_free(case.published)
    seq_len = min(TOKENS, case.seq_len)
    layers = min(LAYERS, case.layers)
    model = build(published, layers, torch.float32, "meta", 0)
    if 8 * sum(p.numel() for p in model.parameters()) > _LARGEST:
        published = dataclasses.replace(published, values=published.values | _FEW_WORDS)
    small = dataclasses.replace(case, layers=layers, batch=BATCH, seq_len=seq_len)
    return small.subject(device, published)


def checks_of(small: Subject) -> Checks:
    """Return the checks of a small model's ways."""
    return Checks(small, _FACTOR * TOLERANCE[small.dtype])


def memory(forward: Forward, subject: Subject, split: bool = True) -> dict[str, Any]:
    """Return a step's loss, and bytes by the allocator, above those before the step."""
    x, device, values = subject.x, subject.device, []
    kept = kept_bytes(lambda: forward(x).value, subject, "allocator")
    below = measure_allocations(lambda: forward.below_head(x), device).net if split else None

    def backward(loss: Loss) -> None:
        loss.backward()
        values.append(loss.value.item())

    step = peaks(lambda: forward(x), backward, device)
    return {
        "loss": values[0],
        "kept_bytes": kept,
        "kept_below_head_bytes": below,
        "kept_bytes_per_token": kept / (subject.case.batch * subject.case.seq_len),
        **step,
        "fixed_bytes": fixed_bytes(subject.module),
    }


def _weigh(subject: Subject, steps: Steps) -> None:
    """Measure the memory of the ways that are right, in the full model."""
    dropout = any(v for k, v in subject.published.values.items() if "dropout" in k)
    rows, allowed = steps.rows, 10 * TOLERANCE[subject.dtype]

    def weigh(forward: Forward, name: str) -> dict[str, Any]:
        try:
            row = memory(forward, subject, not WAYS[name].traits["compiled"])
        except torch.OutOfMemoryError as error:
            raise Absent("out of memory at this batch") from error
        if not dropout and BASELINE in steps.forwards and name != BASELINE:
            loss, theirs = row["loss"], rows[BASELINE]["loss"]
            error = abs(loss - theirs) / abs(theirs)
            if not error <= allowed:
                raise WrongResultError(
                    f"the loss at the measured size is {loss:.6g}, the unconverted model's "
                    f"{theirs:.6g}"
                )
            row["check"] = rows[name]["check"] | {"loss": error}
        return row

    for name in [name for name, row in rows.items() if "check" in row]:
        finds = [] if steps.rig.dry else [functools.partial(weigh, name=name)]
        steps.admit(name, functools.partial(WAYS[name].build, subject), *finds)
