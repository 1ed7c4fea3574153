"""A model's step in every way: checked, and where results are right, memory, time and batch."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.measure.case import DTYPES
from bench.measure.checks import Checks
from bench.measure.clock import quantiles, rotated
from bench.measure.contest import TOLERANCE, Rig
from bench.measure.registry import Absent, WrongResultError
from bench.measure.steps import Step, Steps, kept_bytes, peaks
from bench.subjects.configs import dropout_free
from bench.subjects.model_ways import BASELINE, DEFAULT, WAYS
from bench.subjects.models import Case, Forward, Loss, Subject, build, fixed_bytes
from fused_remat.report.allocations import measure_allocations

#: Layers, sequences and tokens of the model that is compared with float64: layers are alike, and
#: float64 takes twice to four times the memory.
LAYERS, BATCH, TOKENS = 2, 2, 128
#: Bytes that the float64 copy of the parameters may take; a vocabulary beyond that is cut.
_LARGEST = 4 << 30
_FEW_WORDS = {"vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0}
#: Roundings follow one another in a model: of how many single operations a result may be off.
_FACTOR = 3.0
#: At the largest batch, where a step takes longest; those of the search have warmed it up.
_ROUNDS_THERE = 3

#: Bytes that a step takes at its peak at a batch, all included; None: more than there is.
Peak = Callable[[int], int | None]


@dataclass(frozen=True)
class Options:
    """How a case is measured; backend and compiler as of `Subject`."""

    ways: Sequence[str] = DEFAULT  # names or groups; the baseline is always among them
    memory: int | None = None  # bytes within which the largest batch is searched for, if it is
    most: int = 4096  # the largest batch that is tried
    backend: str = "auto"
    compiler: str = "inductor"


def measure(case: Case, options: Options, rig: Rig) -> dict[str, Any]:
    """A row of the results file, but for the case.

    {"fixed_bytes", "rounds", "ways": {name: row}} and, if requested, "memory_cap". The row of a way
    is that of `steps.measure`, with memory by `memory`, and of the search "largest_batch", "peaks"
    by batch, "step_seconds_there" and "tokens_per_second" of forward and backward. Memory is not
    measured in a dry run.

    Raises: ValueError for an unknown way; Absent where no model can be made.
    """
    routes = {"backend": options.backend, "compiler": options.compiler}
    # What making such a model imports, out of the garbage collector's way: every memory
    # measurement collects garbage, and would walk all of transformers each time.
    one = dataclasses.replace(case, layers=1, seq_len=1, tiny=True)
    build(one.published, 1, DTYPES[case.dtype], "meta", case.lora)
    gc.collect()
    gc.freeze()
    with Steps(rig) as steps:
        checks = checks_of(dataclasses.replace(checked_subject(case, rig.device), **routes))
        for name in WAYS.select(options.ways):
            steps.admit_way(WAYS[name], checks)
        steps.forwards.clear()  # no forward of the small model is left
        del checks
        subject = dataclasses.replace(case.subject(rig.device), **routes)
        _weigh(subject, steps)
        steps.time(Step, subject, WAYS.baselines)
        row = {"fixed_bytes": fixed_bytes(subject.module), "rounds": steps.rounds}
        if options.memory is not None:
            row["memory_cap"] = options.memory
            _enlarge(subject, options.memory, options.most, steps)
    return row | {"ways": steps.rows}


# --- checks


def checked_subject(case: Case, device: torch.device | str) -> Subject:
    """The case's model for comparing results: few layers at full width, few tokens, no dropout."""
    published = dropout_free(case.published)
    seq_len = published.image_tokens or min(TOKENS, case.seq_len)
    layers = min(LAYERS, case.layers)
    model = build(published, layers, torch.float32, "meta", 0)
    if 8 * sum(p.numel() for p in model.parameters()) > _LARGEST:
        published = dataclasses.replace(published, values=published.values | _FEW_WORDS)
    small = dataclasses.replace(case, layers=layers, batch=BATCH, seq_len=seq_len)
    return small.subject(device, published)


def checks_of(small: Subject) -> Checks:
    """Of its ways. Where transformers' own code computes in float32 whatever the dtype is, in norms
    and the loss, so does the model in float64."""
    return Checks(small, _FACTOR * TOLERANCE[small.dtype])


# --- memory


def memory(forward: Forward, subject: Subject, split: bool = True) -> dict[str, Any]:
    """Bytes by the allocator's account, above what is there before a step; and the step's loss.

    "kept_bytes" is what is alive between forward and backward, "kept_below_head_bytes" what of it
    embeddings and layers keep (None unless `split`): the rest is the head's and the loss's. Peaks
    are of a step that adds to gradients which are there; what it has before is "fixed_bytes":
    parameters, gradients, AdamW's moments (as torch's, in the parameters' dtype).
    """
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
    """The right ways of the whole model, with their memory in the rows.

    Without dropout the loss is compared with the unconverted model's at this size: it may be off by
    the roundings of ten results. Of a sum over all tokens that is generous, and what is wrong in a
    layer moves it by more.
    """
    dropout = any(v for k, v in subject.published.values.items() if "dropout" in k)
    rows, allowed = steps.rows, 10 * TOLERANCE[subject.dtype]

    def weigh(forward: Forward, name: str) -> dict[str, Any]:
        try:
            found = memory(forward, subject, not WAYS[name].traits["compiled"])
        except torch.OutOfMemoryError as error:
            raise Absent("out of memory at this batch") from error
        if not dropout and BASELINE in steps.forwards and name != BASELINE:
            loss, theirs = found["loss"], rows[BASELINE]["loss"]
            error = abs(loss - theirs) / abs(theirs)
            if not error <= allowed:
                raise WrongResultError(
                    f"the loss at the measured size is {loss:.6g}, the unconverted model's "
                    f"{theirs:.6g}"
                )
            found["check"] = rows[name]["check"] | {"loss": error}
        return found

    for name in [name for name, row in rows.items() if "check" in row]:
        finds = [] if steps.rig.dry else [functools.partial(weigh, name=name)]
        steps.admit(name, functools.partial(WAYS[name].build, subject), *finds)


def peak_of(forward: Forward, subject: Subject) -> Peak:
    """A step's measured peak at any batch, and the fixed bytes."""

    def peak(batch: int) -> int | None:
        x = subject.inputs(batch)
        own = sum(t.nbytes for t in x.values())
        try:
            found = measure_allocations(lambda: forward(x).backward(), subject.device).peak
        except torch.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            return None
        return found + own + fixed_bytes(subject.module)

    return peak


def largest_batch(peak: Peak, cap: int, most: int) -> tuple[int, dict[int, int | None]]:
    """The largest batch, `most` at most, whose peak is within `cap`, and all that was measured.

    Doubling as long as it fits (farther the memory may not be there), then bisection, both cut
    short where peaks grow evenly: the line through the two largest that fit says where that would
    end. That is tried first, then the one after it; every other time the middle of what is left.

    >>> largest_batch(lambda batch: 100 + 7 * batch, cap=500, most=1000)[0]
    57
    """
    tried: dict[int, int | None] = {}
    fits, fails = 0, most + 1
    while fails - fits > 1:
        line = _line_end(tried, fits, cap)
        if fails > most:
            batch = min(max(1, 2 * fits), line or most)
        elif line is None or (len(tried) % 2 and line > fits + 1):
            batch = (fits + fails) // 2
        else:
            batch = line
        batch = min(max(batch, fits + 1), fails - 1)
        tried[batch] = found = peak(batch)
        if found is not None and found <= cap:
            fits = batch
        else:
            fails = batch
    return fits, tried


def _line_end(tried: dict[int, int | None], fits: int, cap: int) -> int | None:
    """Where the line through the two largest batches that fit reaches the cap."""
    below = sorted((b, n) for b, n in tried.items() if n is not None and b <= fits)[-2:]
    if len(below) < 2 or below[1][1] <= below[0][1]:
        return None
    (first, low), (last, high) = below
    return last + (cap - high) * (last - first) // (high - low)


def _enlarge(subject: Subject, cap: int, most: int, steps: Steps) -> None:
    """Every way's largest batch, and then all of them in turns, each at its own."""
    there: dict[str, Step] = {}

    def enlarge(forward: Forward, name: str) -> dict[str, Any]:
        batch, tried = largest_batch(peak_of(forward, subject), cap, most)
        if batch:
            large = dataclasses.replace(subject, x=subject.inputs(batch))
            there[name] = Step(forward, large, steps.rig.clock)
        return {"largest_batch": batch, "peaks": tried}

    for name, forward in list(steps.forwards.items()):
        if not WAYS[name].traits["compiled"]:
            find = functools.partial(enlarge, name=name)
            steps.admit(name, lambda forward=forward: forward, find)
    times: dict[str, list[float]] = {name: [] for name in there}
    for index in range(1 if steps.rig.dry else _ROUNDS_THERE):
        for name in rotated(list(there), index):
            times[name].append(there[name]()["step"])
    for name, found in times.items():
        seconds = quantiles(found)
        tokens = steps.rows[name]["largest_batch"] * subject.case.seq_len
        rate = tokens / seconds["p50"]
        steps.rows[name] |= {"step_seconds_there": seconds, "tokens_per_second": rate}
