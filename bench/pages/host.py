"""The host's time of a layer's step (`bench host`)."""

from __future__ import annotations

from pathlib import Path

from bench.tables import RESULTS, Cell, load, machine_line, markdown

FILE = RESULTS / "host.json"


def table(file: Path = FILE) -> str:
    """Return times of layers by way: the step, its ATen calls alone, and the difference."""
    data = load(file)
    cells: list[list[Cell]] = []
    for case, found in data["results"].items():
        layer, way = case.split()
        numbers = [f"{found[key]:.0f}" for key in ("step", "aten", "above", "launches")]
        cells.append([layer, f"`{way}`", *numbers])
    head = ["layer", "way", "µs a step", "its ATen calls alone", "above", "kernels of ours"]
    return f"{machine_line(data['machine'])}\n\n{markdown(head, cells)}"
