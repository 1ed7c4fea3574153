"""The frontier's parts of the pages, and whether its files are those of its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.frontier import files
from bench.frontier.pareto import derive
from bench.frontier.points import panels
from bench.frontier.report import changes, panel_table, rules, sentences
from bench.report.sets import RESULTS, machine_line, read

CPU = RESULTS / "frontier-cpu"
UNMEASURED = "Not measured yet: `python -m bench frontier --device cpu`."


def folders(root: Path = RESULTS) -> list[Path]:
    """Every folder with a frontier's data, this CPU's first."""
    found = [path.parent for path in sorted(root.glob(f"*/{files.DATA}"))]
    return sorted(found, key=lambda folder: folder.name != CPU.name)


def stale(root: Path = RESULTS) -> list[Path]:
    """Files that are not those of their folder's data."""
    return [path for folder in folders(root) for path in files.stale(folder)]


def rewrite(root: Path = RESULTS) -> None:
    """Write the files anew where any is stale."""
    for folder in folders(root):
        if files.stale(folder):
            data = json.loads((folder / files.DATA).read_text())
            files.write(folder, {k: v for k, v in data.items() if k != files.DERIVED})


def _derived(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    data = read(folder / files.DATA)
    return None if data is None else (data["machine"], derive(panels(data)))


def readme() -> str:
    """The picture, and what it says in a list."""
    found = _derived(CPU)
    if found is None:
        return UNMEASURED
    machine, derived = found
    return "\n\n".join([_picture(CPU, ""), sentences(derived), machine_line(machine)])


def _picture(folder: Path, up: str) -> str:
    path = f"{up}bench/results/{folder.name}/{files.PICTURES[0]}"
    return f"![Step time against bytes kept for backward, a panel per shape]({path})"


def section() -> str:
    """Of every set: the picture, what it says, where the winner changes, and all tables, folded."""
    return "\n\n".join(map(_set, folders())) or UNMEASURED


def _set(folder: Path) -> str:
    found = _derived(folder)
    assert found is not None
    machine, derived = found
    shown = "\n\n".join(map(panel_table, derived["panels"]))
    parts = [
        _picture(folder, "../"), machine_line(machine),
        sentences(derived), "Where the winner changes:", changes(derived), rules(),
        f"<details>\n<summary>Every shape</summary>\n\n{shown}\n\n</details>",
    ]  # fmt: skip
    return "\n\n".join(parts)
