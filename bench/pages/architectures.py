"""What `bench architectures` found: what a converted step takes, compared with checkpointing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from bench.tables import RESULTS, Cell, Row, load, machine_line, markdown, span

FILE = RESULTS / "architectures.json"
#: What is compared with checkpointing, and its column.
MEASURES = {
    "kept": "kept", "peak": "peak", "first_peak": "first step's peak", "seconds": "step time",
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


def _summary(rows: list[Row], variant: str) -> Iterable[Cell]:
    """Yield a variant's cells: its models, those that pass, and the medians of the ratios."""
    mine = [row for row in rows if row["case"]["variant"] == variant]
    yield from (variant, str(len(mine)), str(sum(map(passes, mine))))
    compared = [row for row in mine if not row.get("effects")]
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


def table(file: Path = FILE) -> str:
    """Return the machine, the variants, an entry per architecture, and those that did not run."""
    data = load(file)
    rows = [row for row in data["results"] if ran(row)]
    variants = list(dict.fromkeys(row["case"]["variant"] for row in rows))
    names = dict.fromkeys(row["case"]["name"] for row in rows)
    of = {name: [row for row in rows if row["case"]["name"] == name] for name in names}
    absent = {
        row["case"]["name"]: row["absent"].replace("|", "\\|")
        for row in data["results"]
        if not ran(row) and row["case"]["name"] not in of
    }
    bare = [found[0] for found in of.values()]
    fused = sum(set(row.get("layers", {"": 1})) == {"blocks"} for row in bare)
    size = (
        f"Batch 2, texts of {data['config']['tokens']} tokens. {fused} of {len(names)} "
        "architectures run every layer as a block."
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
        size += f" Measured at commit {commit}: {', '.join(counted)}."
    titles = tuple(MEASURES.values())
    units = tuple(f"{title}, {'ms' if title == 'step time' else 'KiB'}" for title in titles)
    head = ("architecture", "layers", *units, "gradients", "failed checks")
    parts = [f"{machine_line(most)} {size}"]
    parts += [
        markdown(
            ("variant", "models", "pass every check", *titles),
            [list(_summary(rows, variant)) for variant in variants],
        ),
        markdown(head, [list(_cells(found)) for found in of.values()]),
    ]
    if absent:
        parts += ["Not run: " + "; ".join(f"{name} ({why})" for name, why in absent.items()) + "."]
    return "\n\n".join(parts)
