"""Our plans for a whole stack within the peaks of their peers on a GPU, as `bench plan` has them.

Rows are those of `bench.plan.measure`, and besides of each way what a contest's rows have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu.layers import as_contest
from bench.layers.subjects import DTYPES
from bench.measure.contest import Rig
from bench.plan.command import SIZES
from bench.plan.measure import Options, measure
from bench.plan.subjects import Case

_LONGER = 5.0  # than a kernel's contest, for steps take longer, and there are many ways

Entry = tuple[dict[str, Any], Callable[[Rig], dict[str, Any]]]


def plan_entries(rig: Rig) -> Iterator[Entry]:
    """A causal stack in this dtype, without `torch.compile`, which takes long."""
    dtype = next(name for name, dtype in DTYPES.items() if dtype == rig.dtype)
    layers, batch, seq_len, width, heads = (3, 1, 8, 16, 2) if rig.dry else SIZES["cuda"]
    case = Case(layers, dtype, "pre", 0.0, batch, seq_len, width, heads, causal=True)
    yield {"name": "plans", "layers": layers, "width": width}, lambda rig: _measure(case, rig)


def _measure(case: Case, rig: Rig) -> dict[str, Any]:
    longer = dataclasses.replace(rig, seconds=_LONGER * rig.seconds)
    row = measure(case, Options(rig.device.type, compiled=False), rig=longer)
    ways = {}
    for name, found in row["ways"].items():
        ways[name] = as_contest(found)
        if "peak_bytes" in found:
            both = {"held_bytes": found["kept_bytes"], "step_peak_bytes": found["peak_bytes"]}
            ways[name] |= both
    return row | {"stack": row.pop("case"), "ways": ways}
