"""What `bench architectures` found: what a converted step takes, compared with checkpointing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from bench.subjects.architectures import group
from bench.tables import RESULTS, Cell, Row, load, machine_line, markdown, span

FILE = RESULTS / "architectures.json"
#: What is compared with checkpointing, and its column.
MEASURES = {
    "kept": "kept", "peak": "peak", "first_peak": "first step's peak", "seconds": "step time",
}  # fmt: skip
#: The groups of `bench.subjects.architectures`, and their headings.
TITLES = {
    "language": "Language models", "mixtures": "Mixtures of experts", "vision": "Vision",
    "diffusion": "Diffusion models", "speech": "Speech and sound",
}  # fmt: skip


def ran(row: Row) -> bool:
    """Return whether the stock model runs, so that a comparison is possible."""
    return "ways" in row


def ratio(row: Row, measure: str) -> float | None:
    """Return the ratio of a converted step to one with the model's own checkpointing."""
    own, new = (row["ways"][way].get(measure) for way in ("own", "converted"))
    return float(new / own) if new is not None and own else None


def line(row: Row) -> str:
    """Return a row in a line, for a terminal."""
    name = f"{row['case']['name']} {row['case']['variant']}"
    if not ran(row):
        return f"{name}: not run: {row['absent'][:150]}"
    found = {title: ratio(row, measure) for measure, title in MEASURES.items()}
    words = [f"{title} {value:.2f}×" for title, value in found.items() if value is not None]
    wrong = ", ".join(row["violations"])
    return f"{name}: {', '.join([layers(row), *words])}{'; WRONG: ' + wrong if wrong else ''}"


def passes(row: Row) -> bool:
    """Return whether a converted step is compared with checkpointing, and passes every check."""
    return not row["violations"] and not row.get("effects") and "kept" in row["ways"]["own"]


def layers(row: Row) -> str:
    """Return how many layers ran as blocks and under checkpointing."""
    return ", ".join(f"{count} {state}" for state, count in row.get("layers", {}).items())


def fused(row: Row) -> bool:
    """Return whether every layer ran as a block."""
    return set(row.get("layers", {"": 1})) == {"blocks"}


def _summary(title: str, rows: list[Row]) -> Iterable[Cell]:
    """Yield the cells of some rows: how many, fused, passing, and the medians of the ratios."""
    yield from (title, *(str(sum(map(check, rows))) for check in (ran, fused, passes)))
    compared = [row for row in rows if not row.get("effects")]
    for measure in MEASURES:
        found = [value for row in compared if (value := ratio(row, measure)) is not None]
        yield f"{median(found):.2f}× ({span(found)})" if found else None


def _cells(rows: list[Row]) -> Iterable[Cell]:
    """Yield an architecture's cells: of its bare variant, and the failed checks of all."""
    first = rows[0]
    own, new = first["ways"]["own"], first["ways"]["converted"]
    text = ": ".join(filter(None, [layers(first), "; ".join(first.get("conversion", ()))]))
    yield from (first["case"]["name"], text.replace("|", "\\|").replace("\n", " "))
    for measure in MEASURES:
        value, unit = ratio(first, measure), 1e-3 if measure == "seconds" else 1024
        pair = [f"{way[measure] / unit:,.1f}" for way in (own, new) if measure in way]
        yield None if value is None else f"{' → '.join(pair)} ({value:.2f}×)"
    error = new.get("gradient64", new.get("gradient"))
    yield None if error is None else f"{error:.0e}"
    failed = {row["case"]["variant"]: ", ".join(row["violations"]) for row in rows}
    failed |= {row["case"]["variant"]: "not compared" for row in rows if row.get("effects")}
    yield "; ".join(f"{variant}: {checks}" for variant, checks in failed.items() if checks)


def _place(machine: Row) -> tuple[str, str]:
    return machine["commit"], machine["cpu"]


def first_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the first row of each architecture that ran, which is that of its bare variant."""
    first = dict[str, Row]()
    for row in filter(ran, rows):
        first.setdefault(row["case"]["name"], row)
    return list(first.values())


def table(file: Path = FILE) -> str:
    """Return the machine, the variants, an entry per architecture, and those that did not run."""
    data = load(file)
    rows = [row for row in data["results"] if ran(row)]
    variants, groups = dict[str, list[Row]](), dict[str, dict[str, list[Row]]]()
    for row in rows:
        name = row["case"]["name"]
        variants.setdefault(row["case"]["variant"], []).append(row)
        groups.setdefault(group(name), {}).setdefault(name, []).append(row)
    absent = {
        row["case"]["name"]: row["absent"].replace("|", "\\|")
        for row in data["results"]
        if not ran(row)
    }
    titles = tuple(MEASURES.values())
    units = tuple(f"{title}, {'ms' if title == 'step time' else 'KiB'}" for title in titles)
    counts = ("models", "every layer a block", "pass every check")
    own = [(title, groups[name]) for name, title in TITLES.items() if name in groups]
    first = [(title, [found[0] for found in of.values()]) for title, of in own]
    parts = [
        _measured(data, rows),
        markdown(("group, bare", *counts, *titles), [list(_summary(*entry)) for entry in first]),
        markdown(
            ("variant", *counts, *titles), [list(_summary(*entry)) for entry in variants.items()]
        ),
    ]
    for title, of in own:
        head = ("architecture", "layers", *units, "gradients", "failed checks")
        parts += [f"## {title}", markdown(head, [list(_cells(found)) for found in of.values()])]
    missing = {name: why for name, why in absent.items() if all(name not in of for _, of in own)}
    if missing:
        lines = "; ".join(f"{name} ({why})" for name, why in missing.items())
        parts += ["## Not run", f"{lines}."]
    return "\n\n".join(parts)


def _measured(data: Row, rows: list[Row]) -> str:
    """Return the machine that most rows were measured on, the sizes, and the other machines."""
    bare = first_rows(rows)
    text = (
        f"Batch 2, texts of {data['config']['tokens']} tokens. {sum(map(fused, bare))} of "
        f"{len(bare)} architectures run every layer as a block."
    )
    counts = Counter(_place(row["machine"]) for row in bare)
    machines = [row["machine"] for row in bare]
    most = max(machines, key=lambda m: counts[_place(m)], default=data["machine"])
    others = dict[str, dict[str, set[str]]]()
    for row in rows:
        machine, case = row["machine"], row["case"]
        if _place(machine) != _place(most):
            where = "" if machine["cpu"] == most["cpu"] else f" on {machine['cpu']}"
            of_variant = others.setdefault(f"{machine['commit'][:7]}{where}", {})
            of_variant.setdefault(case["variant"], set()).add(case["name"])
    for commit, of_variant in others.items():
        counted = [f"{variant} ({len(models)} models)" for variant, models in of_variant.items()]
        text += f" Measured at commit {commit}: {', '.join(counted)}."
    return f"{machine_line(most)} {text}"
