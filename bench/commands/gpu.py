"""Tests, kernels, layers and models on one GPU; an interrupted run is still useful.

    python -m bench gpu --list
    python -m bench gpu --out bench/results/gpu --minutes 4
    TRITON_INTERPRET=1 python -m bench gpu --out DIR --dry-run

Sections run one after the other, each within its minutes, and what is left over in what remains;
within a section, what committed results of this GPU lack comes first. Every case is checked against
float64 before it is timed, and written to OUT/gpu.json at once, every test to OUT/tests.json. The
same command continues where the last one ended. A case that fails is recorded with its error; one
that hangs or breaks the device ends the process with status 3. `--dry-run`: the full path at tiny
sizes on this CPU, under Triton's interpreter; its times mean nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple


class Section(NamedTuple):
    """A section: its entries are a function of `bench.gpu`, imported when it runs."""

    minutes: float  # before the next section's turn
    needs: float  # seconds that a case takes at most, if all goes well
    entries: str
    measures: str


#: In this order, the most urgent first; nothing is compiled ahead before there are results.
#: `torch.compile` takes long to start, and the profiler may stay attached.
SECTIONS: dict[str, Section] = {
    "host": Section(0.5, 20.0, "apart.host_entries",
                    "an empty launch and an ATen call; a layer with and without huge pages"),
    "tests": Section(1.3, 30.0, "outcomes.lacking_entries", "tests that failed or have not run"),
    "loss": Section(2.0, 60.0, "layers.loss_entries",
                    "SmolLM-135M with its loss, batches 8 and 200, by method and chunk"),
    "loss profile": Section(0.4, 25.0, "apart.model_entries",
                            "SmolLM-135M by kind of kernel, host and device apart"),
    "ceilings": Section(0.1, 5.0, "session.ceilings", "a large copy, a large product"),
    "precompile": Section(1.0, 70.0, "session.precompiled", "nothing: compiles what follows"),
    "attention tiles": Section(1.2, 10.0, "tiles.attention_entries",
                               "each kernel of attention by tile"),
    "programs": Section(1.0, 20.0, "apart.program_entries",
                        "layers with pass programs and without"),
    "layers": Section(1.0, 20.0, "layers.layer_entries", "layers without dropout, every method"),
    "experts": Section(1.0, 20.0, "kernels.experts_entries",
                       "experts and their products compared with peers"),
    "mixtures": Section(0.7, 40.0, "layers.mixture_entries", "layers with experts"),
    "compile": Section(1.5, 60.0, "layers.compile_entries", "compiled layers, memory budgets"),
    "model": Section(1.5, 60.0, "layers.model_entries", "Qwen2-1.5B, and LoRA on both models"),
    "dropout": Section(1.0, 20.0, "layers.dropout_entries", "layers with dropout"),
    "profile": Section(1.0, 30.0, "profile.profile_entries", "layers by kind of kernel"),
    "long": Section(0.5, 40.0, "layers.long_entries", "one sequence of 32768 tokens"),
    "norms": Section(0.5, 5.0, "kernels.norm_entries", "norms by width"),
    "attention": Section(1.5, 8.0, "kernels.attention_entries", "attention compared with peers"),
    "attention calls": Section(1.0, 8.0, "kernels.special_entries",
                               "windows, packed sequences, shared heads"),
    "frontier": Section(0.7, 20.0, "layers.frontier_entries", "layers by length of sequences"),
    "tiles": Section(0.5, 10.0, "tiles.tile_entries", "products by tile"),
    "plans": Section(1.0, 60.0, "layers.plan_entries", "plans and peers at equal peaks"),
    "all tests": Section(5.0, 100.0, "outcomes.all_entries", "the other tests of a GPU"),
}  # fmt: skip


def listed() -> str:
    """Return the plan: a line per section, with the minute at which it ends."""
    lines, ends = [f"{'section':<17}minutes  ends at  measures"], [0.0]
    for name, section in SECTIONS.items():
        ends.append(ends[-1] + section.minutes)
        lines.append(f"{name:<17}{section.minutes:7.1f}  {ends[-1]:7.1f}  {section.measures}")
    four, eight = (sum(start < 0.9 * minutes for start in ends[:-1]) for minutes in (4, 8))
    lines.append(
        f"\nWith --minutes 4 the first {four} sections run, with 8 (the default) {eight}; a "
        "tenth is a reserve.\nWhere they take less than their minutes, more run."
    )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Measure and write the results, or with --list print the plan; 1 if anything failed."""
    if "--list" in arguments:
        print(listed())
        return 0
    status: int = importlib.import_module("bench.gpu.session").main(arguments)
    return status
