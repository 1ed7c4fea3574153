"""What a model keeps between forward and backward, its step's peak, and the batch that fits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from bench.measure.steps import kept_bytes, peaks
from bench.subjects.forwards import Forward, Loss
from bench.subjects.models import Subject
from fused_remat.report.allocations import measure_allocations

#: Bytes that a step takes at its peak at a batch, all included; None: more than there is.
Peak = Callable[[int], int | None]


def memory(forward: Forward, subject: Subject, split: bool = True) -> dict[str, Any]:
    """Bytes by the allocator's account, above what is there before a step.

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
        "fixed_bytes": subject.fixed_bytes(),
    }


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
        return found + own + subject.fixed_bytes()

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
