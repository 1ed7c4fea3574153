"""Where a training step of one layer spends its time, operator by operator, a way beside eager.

`python -m bench profile --way full --way fast`: the steps take turns in one process under torch's
profiler; the times are each operator's own (without what it calls), means over the rounds.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from bench.measure.admission import Absent
from bench.measure.machine import machine
from bench.measure.options import Parser
from bench.measure.turns import WARMUP_ROUNDS, rotated
from bench.subjects.layer_ways import BASELINE, WAYS
from bench.subjects.layers import Case
from bench.tables import markdown

#: Operator -> kind; what is in no kind is "the rest".
KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_"),
    "attention": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "activation": ("aten::gelu", "aten::gelu_backward"),
    "norms": ("aten::native_layer_norm", "aten::native_layer_norm_backward"),
    "copies and fills": ("aten::copy_", "aten::fill_", "aten::zero_", "aten::clone"),
    "sums": ("aten::add", "aten::add_", "aten::sum"),
}


def kinds(events: Sequence[Any]) -> Counter[str]:
    """Microseconds of a profile by kind of operator."""
    of = {name: kind for kind, names in KINDS.items() for name in names}
    found: Counter[str] = Counter()
    for event in events:
        found[of.get(event.key, "the rest")] += event.self_cpu_time_total
    return found


def measure(case: Case, ways: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step by way and kind, and "step", the wall time under the profiler.

    Raises: Absent, for a way that cannot run on a CPU.
    """
    subject = case.subject("cpu")
    forwards = {}
    for name in ways:
        try:
            forwards[name] = WAYS[name].make(subject.device, subject)
        except Absent as error:
            raise Absent(f"{name}: {error}") from error
    found: dict[str, Counter[str]] = {name: Counter() for name in ways}
    for index in range(WARMUP_ROUNDS + rounds):
        for name in rotated(ways, index):
            with profile(activities=[ProfilerActivity.CPU]) as recorded:
                start = time.perf_counter()
                forwards[name](subject.x).backward(subject.dy)
                wall = time.perf_counter() - start
            if index >= WARMUP_ROUNDS:
                found[name] += kinds(recorded.key_averages())
                found[name]["step"] += 1e6 * wall  # type: ignore[assignment]
    return {
        name: {kind: total / rounds / 1e3 for kind, total in sums.items()}
        for name, sums in found.items()
    }


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table: a row per kind, a column per way."""
    ways = result["ways"]
    rows = [
        [kind, *(f"{found.get(kind, 0.0):.0f}" for found in ways.values())]
        for kind in (*KINDS, "the rest", "step")
    ]
    return markdown(["ms a step", *ways], rows)


def main(arguments: Sequence[str]) -> int:
    """Profile, print the table and write `profile-cpu.json`."""
    parser = Parser("profile", __doc__, "rounds threads out", rounds=10)
    parser.add("--way", action="append", choices=list(WAYS), help="(default: checkpoint, presets)")
    options = parser.parse(arguments)
    given = options.way or ["checkpoint", "full", "lean", "fast", "none"]
    ways = list(dict.fromkeys([BASELINE, *given]))
    case = Case("float32", "pre", 0.0, 4, 512, 512, 8)
    try:
        found = measure(case, ways, options.rounds)
    except (Absent, ImportError) as error:
        parser.error(str(error))
    result = {"machine": machine("cpu"), "ways": found}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "profile-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0
