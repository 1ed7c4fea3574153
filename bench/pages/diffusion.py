"""Diffusion models: a step with "full" and with "lean", relative to own checkpointing.

The results are those of `bench architectures`, in the newest folders whose name has "diffusion".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench import tables
from bench.pages.architectures import layers, ran, ratio
from bench.subjects.diffusion import DIFFUSERS
from bench.tables import RESULTS, Cell, Row

FILE = "architectures.json"
#: Of a column: its title, policy and measure, and the most that the ratio is to be.
COLUMNS = (
    ("kept", "full", "kept", 1.02),
    ("peak", "full", "peak", 1.0),
    ("first step's peak", "full", "first_peak", None),
    ("time", "full", "seconds", 1.0),
    ("`lean`: kept", "lean", "kept", None),
    ("peak", "lean", "peak", None),
    ("time", "lean", "seconds", 0.9),
)
HEAD = tuple(title for title, *_ in COLUMNS)
VARIANTS = {"bare": "All weights trained", "lora": "LoRA on all linear layers"}


def newest(root: Path = RESULTS) -> dict[str, dict[tuple[str, str], Row]]:
    """Return the rows of the newest file of each policy, by variant and model."""
    found = dict[str, dict[tuple[str, str], Row]]()
    for path in tables.files(FILE, root):
        data = tables.load(path)
        policy = data["config"].get("policy", "full")
        if "diffusion" in path.parent.name and policy not in found:
            rows = [row for row in data["results"] if ran(row)]
            found[policy] = {(row["case"]["variant"], row["case"]["name"]): row for row in rows}
    return found


def _cells(of: dict[str, Row]) -> Iterator[Cell]:
    """Yield the ratios of a model, by policy; in bold those above their target."""
    for _, policy, measure, most in COLUMNS:
        value = ratio(of[policy], measure) if policy in of else None
        missed = most is not None and value is not None and round(value, 2) > most
        shown = tables.number(value, 2, "×")
        yield f"**{shown}**" if missed else shown


def _machines(rows: Iterable[Row]) -> str:
    """Return a line for each machine and commit, with its sizes."""
    found = dict[str, Row]()
    for row in rows:
        found.setdefault(tables.machine_line(row["machine"]), row)
    texts = [
        f"{line} Batch 2, about {row['config']['tokens']} image tokens, 16 of text."
        for line, row in found.items()
    ]
    return "\n\n".join(texts)


def table(root: Path = RESULTS) -> str:
    """Return the machines, and of each variant an entry per model, relative to checkpointing."""
    found = newest(root)
    if not found:
        return ""
    parts = [_machines(row for of in found.values() for row in of.values())]
    for variant, title in VARIANTS.items():
        rows = list[list[Cell]]()
        for name in DIFFUSERS:
            of = {p: own[variant, name] for p, own in found.items() if (variant, name) in own}
            if of:
                first = next(iter(of.values()))
                failed = ", ".join(set(first["violations"]) - {column[2] for column in COLUMNS})
                text = layers(first) + (f"; failed: {failed}" if failed else "")
                rows.append([f"`{name}`", text, *_cells(of)])
        if rows:
            parts += [f"## {title}", tables.markdown(("model", "layers", *HEAD), rows)]
    return "\n\n".join(parts)


def _reasons(row: Row) -> str:
    """Return why layers run under checkpointing."""
    found = re.findall(r"training calls? \((.*)\)", "\n".join(row.get("conversion", ())))
    return "; ".join(dict.fromkeys(found)).replace("|", "\\|")


def models(root: Path = RESULTS) -> str:
    """Return what the layers of each class ran as, and the reasons, with all weights trained."""
    rows = newest(root).get("full", {})
    found = dict[str, str]()
    for name, one in DIFFUSERS.items():
        if row := rows.get(("bare", name)):
            found.setdefault(one.kind, ": ".join(filter(None, [layers(row), _reasons(row)])))
    entries = [[f"`{kind}`", text] for kind, text in found.items()]
    return tables.markdown(("model", "layers"), entries) if entries else ""
