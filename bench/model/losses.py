"""The same training in several ways: are every step's losses the unconverted model's?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bench.measure.case import DTYPES
from bench.measure.checks import no_fallback
from bench.measure.contest import TOLERANCE
from bench.subjects.configs import dropout_free
from bench.subjects.model_ways import BASELINE, WAYS
from bench.subjects.models import Case, Inputs, Subject

LEARNING_RATE = 1e-4
#: How many times farther from the unconverted model's losses than those of the model that rounding
#: moved: the largest of a few dozen differences varies by about that.
_FACTOR = 3.0


def compare(
    case: Case, names: Sequence[str], steps: int, device: torch.device | str
) -> dict[str, Any]:
    """Losses of AdamW's first steps by way, from equal weights on equal data, without dropout.

    {"steps", "curves": {way: losses}, "differences": {way: the largest, relative}, "noise",
    "allowed"}. The noise is the largest difference of an unconverted model of which every parameter
    was moved by the rounding of one operation: what any other order of sums does, too.
    """
    subject = case.subject(device, dropout_free(case.published))
    data = [subject.inputs(case.batch) for _ in range(steps)]
    start = {name: p.detach().clone() for name, p in subject.leaves().items()}
    ways = [BASELINE, *(name for name in names if name != BASELINE)]
    curves = {name: _train(subject, name, data, start) for name in ways}
    eps = torch.finfo(DTYPES[case.dtype]).eps
    moved = {
        name: p * (1 + eps * (torch.rand_like(p, dtype=torch.float32) - 0.5).sign()).to(p.dtype)
        for name, p in start.items()
    }
    noise = _difference(_train(subject, BASELINE, data, moved), curves[BASELINE])
    return {
        "steps": steps,
        "curves": curves,
        "differences": {
            name: _difference(curves[name], curves[BASELINE]) for name in ways if name != BASELINE
        },
        "noise": noise,
        "allowed": max(TOLERANCE[DTYPES[case.dtype]], _FACTOR * noise),
    }


def _train(
    subject: Subject, name: str, data: Sequence[Inputs], start: dict[str, torch.Tensor]
) -> list[float]:
    leaves = subject.leaves()
    with torch.no_grad():
        for leaf_name, leaf in leaves.items():
            leaf.copy_(start[leaf_name])
    found = []
    with no_fallback():
        forward = WAYS[name].build(subject)
        optimizer = torch.optim.AdamW(leaves.values(), lr=LEARNING_RATE)
        for x in data:
            optimizer.zero_grad()
            loss = forward(x)
            loss.backward()
            optimizer.step()
            found.append(loss.value.item())
    return found


def _difference(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """NaN is the largest there is."""
    found = [abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True)]
    return float(torch.tensor(found, dtype=torch.float64).max())
