"""The host's time of a layer's step (`bench host`)."""

from __future__ import annotations

from pathlib import Path

from bench.tables import RESULTS, Cell, load, machine_line, markdown

FILE = RESULTS / "host.json"


def table(file: Path = FILE) -> str:
    """Return times of layers by way: the step, its ATen calls alone, and the difference.

    With a table of the guards of traced layers, if they were measured.
    """
    data = load(file)
    cells: list[list[Cell]] = []
    for case, found in data["results"].items():
        layer, way = case.split()
        numbers = [f"{found[key]:.0f}" for key in ("step", "steps", "aten", "above", "launches")]
        cells.append([layer, f"`{way}`", *numbers])
    head = ["layer", "way", "µs a step", "without programs", "its ATen calls alone", "above"]
    head.append("kernels of ours")
    parts = [machine_line(data["machine"]), markdown(head, cells)]
    if data.get("guards"):
        names = ("median", "least", "calls")
        cells = [[n, *[f"{row[key]:.0f}" for key in names]] for n, row in data["guards"].items()]
        parts.append(markdown(["traced layer", "µs of guards a call", "least", "calls"], cells))
    return "\n\n".join(parts)


def chunks(file: Path = FILE) -> str:
    """Return what a step of a narrow layer counts, by the size of its chunks."""
    data = load(file)
    cells: list[list[Cell]] = [
        [f"{n['chunks']} of {name}", f"{n['launches']:,}", f"{n['bytes'] / 2**20:,.0f} MiB"]
        for name, n in data["chunks"].items()
    ]
    return markdown(["chunks", "launches of a step", "most bytes at once"], cells)
