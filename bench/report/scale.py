"""The parts of the page on paper scale: an example's output, and what was checked by runs."""

from __future__ import annotations

from pathlib import Path

from bench.report.sets import RESULTS, machine_line, read
from bench.scale.report import table
from fused_remat.cli import scale

UNMEASURED = "Not measured yet: `python -m bench scale`."
#: The command whose output is shown.
EXAMPLE = "--model llama3-70b --mesh 8x8 --seq 8192 --batch 2"


def example() -> str:
    """A command and what it prints; with the rates that are assumed, so the same everywhere."""
    lines = "\n".join(scale.printed(scale.parse(EXAMPLE.split())))
    return f"```\n$ python -m fused_remat scale {EXAMPLE}\n{lines}\n```"


def checked(root: Path = RESULTS) -> str:
    """The rows of a run on a CPU."""
    data = read(root / "scale-cpu.json")
    if data is None:
        return UNMEASURED
    case = data["results"][0]["case"]
    sizes = f"{case['layers']} layers of width {case['width']}, two sequences of {case['seq']}"
    sizes = f"Processes of one thread, {sizes}"
    return f"{sizes}, float32. {machine_line(data['machine'])}\n\n{table(data)}"
