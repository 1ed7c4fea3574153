"""Losses of runs whose kept activations are exact and in 8 bits, beside each other, over seeds.

A results file of `examples/compare_losses.py` has a row per model and seed; in it, every way's loss
of each step and its validation loss.
"""

from __future__ import annotations

from math import isnan
from pathlib import Path
from statistics import fmean, stdev

from bench.tables import RESULTS, Row, machine_line, markdown, picture, read

UNMEASURED = "Not measured yet: `make losses`."
#: How many of the last steps' losses make a run's training loss.
LAST = 50
TITLES = {"byte_lm": "Byte-level LM", "smollm": "SmolLM-shaped"}
#: What is compared at the end of a run.
MEASURES = ("training", "validation")

Rows = list[Row]


def models(data: Row) -> dict[str, Rows]:
    """Model -> its rows, by seed."""
    found: dict[str, Rows] = {}
    for row in sorted(data["results"], key=lambda row: int(row["case"]["seed"])):
        found.setdefault(row["case"]["model"], []).append(row)
    return {name: found[name] for name in TITLES if name in found}


def title(rows: Rows) -> str:
    """A model and its sizes in a line."""
    case = rows[0]["case"]
    rise = f"{case.get('warmup_steps', 5)} steps of warm-up"
    return (
        f"{TITLES[case['model']]}, {rows[0]['parameters'] / 1e6:.2f} M parameters: "
        f"{case['layers']} layers, D = {case['d_model']}, H = {case['nhead']}, "
        f"F = {case['dim_feedforward']}, S = {case['seq_len']}, B = {case['batch']}, "
        f"dropout {case['dropout']:g}, {case['dtype']}; {rise}, then "
        + ("a cosine to 0" if case.get("decays") else "constant")
    )


def finals(rows: Rows, way: str, measure: str) -> list[float]:
    """A way's losses at the end, by seed."""
    mine = [row["ways"][way] for row in rows]
    if measure == "validation":
        return [run["validation_loss"] for run in mine]
    return [fmean(run["losses"][-LAST:]) for run in mine]


def spread(values: list[float]) -> float:
    """The standard deviation over seeds; nan of one."""
    return stdev(values) if len(values) > 1 else float("nan")


def apart(rows: Rows, way: str, other: str, measure: str) -> list[float]:
    """By how much a way's loss at the end is above another's, by seed."""
    pairs = zip(finals(rows, way, measure), finals(rows, other, measure), strict=True)
    return [mine - theirs for mine, theirs in pairs]


# --- the page


def table(data: Row) -> str:
    """Every model's ways: mean and spread over seeds, and each seed beside eager's."""
    head = (
        "model", "way", "training loss", "validation loss", "above eager's, by seed",
        "above native's, by seed",
    )  # fmt: skip
    lines = []
    for name, rows in models(data).items():
        for way in rows[0]["ways"]:
            ends = [finals(rows, way, measure) for measure in MEASURES]
            means = [f"{fmean(values):.4f} ± {spread(values):.4f}" for values in ends]
            others = [_signed(rows, way, other) for other in ("eager", "native")]
            lines.append([TITLES[name], way, *means, *others])
    return markdown(head, lines)


def _signed(rows: Rows, way: str, other: str) -> str:
    if way == other or (way, other) == ("eager", "native"):
        return ""
    return ", ".join(f"{value:+.5f}" for value in apart(rows, way, other, "validation"))


def verdicts(data: Row) -> str:
    """Of each model and measure: whether the mean of "fast8" is within eager's spread of its.

    Beside it "native", whose distance is not of the rounding but of other dropout and other sums.
    """
    lines = []
    for name, rows in models(data).items():
        for measure in MEASURES:
            noise = spread(finals(rows, "eager", measure))
            distance, exact, rounding = (
                abs(fmean(apart(rows, *pair, measure)))
                for pair in (("fast8", "eager"), ("native", "eager"), ("fast8", "native"))
            )
            verdict = f"**{'within' if distance <= noise else 'NOT within'}**"
            if isnan(noise):
                verdict = "one seed says nothing"
            lines.append(
                f"- {TITLES[name]}, {measure} loss: the means of fast8 and eager are "
                f"{distance:.4f} apart; eager's standard deviation over {len(rows)} "
                f"seed{'s' * (len(rows) > 1)} is {noise:.4f}: {verdict}. (native and eager: "
                f"{exact:.5f}; fast8 and native: {rounding:.5f}.)"
            )
    return "\n".join(lines)


def files(root: Path = RESULTS) -> list[Path]:
    """Every results file of losses."""
    return sorted(root.glob("losses-*.json"))


def section(root: Path = RESULTS) -> str:
    """Of every file: the picture, the sizes, the table, and whether "fast8" is within the noise."""
    return "\n\n".join(map(_set, files(root))) or UNMEASURED


def _set(path: Path) -> str:
    data = read(path)
    seeds, steps = ({row["case"][key] for row in data["results"]} for key in ("seed", "steps"))
    parts = [
        picture(path, "Training and validation losses, a row of panels per model"),
        "\n".join(f"- {title(rows)}" for rows in models(data).values()),
        f"{len(seeds)} seeds, {max(steps)} steps each. A seed is that of the weights, of the "
        f"order of the batches and of dropout. Training loss: mean of the last {LAST} steps. "
        'Mean ± standard deviation over seeds, in nats per byte; "above": of the validation '
        "loss, each seed beside the same seed's run.",
        table(data),
        verdicts(data),
        machine_line(data["machine"]),
    ]
    return "\n\n".join(parts)
