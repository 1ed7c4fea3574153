"""The frontier's parts of the pages, and whether its files are those of its data."""

from __future__ import annotations

from pathlib import Path

from bench.frontier import files, points
from bench.frontier.pareto import derive
from bench.frontier.report import brief, changes, panel_table, rules, sentences
from bench.tables import RESULTS, Row, folded, gpu_sets, load, machine_line, picture

CPU = RESULTS / "frontier-cpu"
UNMEASURED = "Not measured yet: `python -m bench frontier --device cpu`."


def folders(root: Path = RESULTS) -> list[Path]:
    """Every folder with a frontier's data, this CPU's first."""
    found = [path.parent for path in sorted(root.glob(f"*/{files.DATA}"))]
    return sorted(found, key=lambda folder: folder.name != CPU.name)


def undrawn(root: Path = RESULTS) -> dict[Path, Row]:
    """Folders of a GPU's results with steps of layers and no frontier yet -> its data."""
    found = {}
    for folder in gpu_sets(root):
        given = {p.name: load(p) for p in sorted(folder.glob("*.json"))}
        layers = {n: d for n, d in given.items() if d and "results" in d and points.current(d)}
        if layers and not (folder / files.DATA).exists():
            found[folder] = points.collected(layers)
    return found


def stale(root: Path = RESULTS) -> list[Path]:
    """Files that are not those of their folder's data, or not there yet."""
    missing = [folder / files.DATA for folder in undrawn(root)]
    return missing + [path for folder in folders(root) for path in files.stale(folder)]


def rewrite(root: Path = RESULTS) -> None:
    """Write the files anew where any is stale."""
    for folder, data in undrawn(root).items():
        files.write(folder, data)
    for folder in folders(root):
        if files.stale(folder):
            files.write(folder, files.source(folder))


def _derived(folder: Path) -> tuple[Row, Row]:
    data = load(folder / files.DATA)
    return data["machine"], derive(points.panels(data))


def _picture(folder: Path) -> str:
    text = "Step time against bytes kept for backward, a panel per shape"
    return picture(folder / files.DATA, text)


def readme() -> str:
    """This CPU's picture, and what every set of its says in a line."""
    if not (CPU / files.DATA).exists():
        return UNMEASURED
    found = [_derived(folder) for folder in (CPU, *(f for f in folders() if f != CPU))]
    lines = "\n".join(brief(derived) for machine, derived in found if not machine.get("gpu"))
    return "\n\n".join([_picture(CPU), lines, machine_line(found[0][0])])


def section() -> str:
    """Of every set: the picture, what it says, where the winner changes, and all tables, folded."""
    return "\n\n".join(map(_set, folders())) or UNMEASURED


def _set(folder: Path) -> str:
    machine, derived = _derived(folder)
    parts = [
        f"### {machine.get('gpu') or machine['cpu']} (`bench/results/{folder.name}`)",
        _picture(folder),
        machine_line(machine),
        sentences(derived),
        "Where the winner changes:",
        changes(derived),
        rules(),
        folded("Every shape", *map(panel_table, derived["panels"])),
    ]
    return "\n\n".join(parts)
