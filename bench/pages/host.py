"""The host's time of a layer's step (`bench host`), and that of an earlier commit."""

from __future__ import annotations

from pathlib import Path

from bench.tables import RESULTS, Cell, load, machine_line, markdown

FILE = RESULTS / "host.json"


def table(file: Path = FILE) -> str:
    """Of every layer and way: its time, that of its ATen calls, and what it takes beyond them."""
    data = load(file)
    cells: list[list[Cell]] = []
    for case, found in data["results"].items():
        here, there = found["this"], found.get("beside")
        layer, way = case.split()
        numbers = [f"{here[key]:.0f}" for key in ("step", "aten", "above", "launches")]
        if there is not None:
            numbers.append("" if way == "stock" else f"{here['above'] / there['above']:.2f}")
        cells.append([layer, f"`{way}`", *numbers])
    head = ["layer", "way", "µs a step", "its ATen calls alone", "above", "kernels of ours"]
    if data["beside"]:
        head.append(f"above, to {data['beside'][:7]}'s")
    return f"{machine_line(data['machine'])}\n\n{markdown(head, cells)}"
