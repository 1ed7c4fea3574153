"""Profile where a layer's training step spends its time, operator by operator, against eager.

`python -m bench profile --way full --way fast --dtype bfloat16`: the steps take turns in one
process under torch's profiler; the times are each operator's own (without what it calls), means
over the rounds.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from bench.measure.case import DTYPES
from bench.measure.clock import interleave
from bench.measure.machine import machine
from bench.measure.options import Parser
from bench.measure.registry import Absent
from bench.subjects.layers import BASELINE, WAYS, Case
from bench.tables import markdown

#: Operator -> kind; what is in no kind is "the rest".
KINDS = {
    "products": (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::addmm_",
        "mkldnn::_linear_pointwise",
    ),
    "attention": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "activation": ("aten::gelu", "aten::gelu_backward"),
    "norms": ("aten::native_layer_norm", "aten::native_layer_norm_backward"),
    "copies and fills": ("aten::copy_", "aten::fill_", "aten::zero_", "aten::clone"),
    "sums": ("aten::add", "aten::add_", "aten::sum"),
}


#: Of the results, by dtype.
FILES = {name: f"profile-cpu{'' if name == 'float32' else '-' + name}.json" for name in DTYPES}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}


def measure(case: Case, ways: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds a step by way and kind, and "step", the wall time under the profiler."""
    subject = case.subject("cpu")
    forwards = {}
    for name in ways:
        try:
            forwards[name] = WAYS[name].make(subject.device, subject)
        except Absent as error:
            raise Absent(f"{name}: {error}") from error

    def milliseconds(name: str) -> dict[str, float]:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            start = time.perf_counter()
            forwards[name](subject.x).backward(subject.dy)
            found = {"step": 1e3 * (time.perf_counter() - start)}
        for event in recorded.key_averages():
            kind = KIND_OF.get(event.key, "the rest")
            found[kind] = found.get(kind, 0.0) + 1e-3 * event.self_cpu_time_total
        return found

    steps = {name: functools.partial(milliseconds, name) for name in ways}
    return {
        name: {kind: statistics.fmean(r.get(kind, 0.0) for r in found) for kind in found[0]}
        for name, found in interleave(steps, rounds, math.inf).items()
    }


def table(result: dict[str, Any]) -> str:
    ways = result["ways"]
    rows = [
        [kind, *(f"{found.get(kind, 0.0):.0f}" for found in ways.values())]
        for kind in (*KINDS, "the rest", "step")
    ]
    return markdown(["ms a step", *ways], rows)


def main(arguments: Sequence[str]) -> int:
    parser = Parser("profile", __doc__, "dtype rounds threads", rounds=10)
    parser.add("--way", action="append", choices=list(WAYS), help="(default: checkpoint, presets)")
    options = parser.parse(arguments)
    given = options.way or ["checkpoint", "full", "lean", "fast", "none"]
    ways = list(dict.fromkeys([BASELINE, *given]))
    dtype = options.dtype or "float32"
    case = Case(dtype, "pre", 0.0, 4, 512, 512, 8)
    try:
        found = measure(case, ways, options.rounds)
    except (Absent, ImportError) as error:
        parser.error(str(error))
    result = {"machine": machine("cpu"), "ways": found}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / FILES[dtype]).write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0
