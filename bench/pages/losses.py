"""Losses of runs whose kept activations are exact and in 8 bits, beside each other, over seeds.

A results file of `examples/compare_losses.py` has a row per model and seed; in it, every way's loss
of each step and its validation loss.
"""

from __future__ import annotations

from math import isnan, nan
from pathlib import Path
from statistics import fmean, stdev

from bench import tables
from bench.tables import RESULTS, Row

#: How many of the last steps' losses make a run's training loss.
LAST = 50
TITLES = {"byte_lm": "Byte-level LM", "smollm": "SmolLM-shaped"}
#: What is compared at the end of a run.
MEASURES = ("training", "validation")

Rows = list[Row]


def models(rows: Rows) -> dict[str, Rows]:
    """Model -> its rows, by seed."""
    order = sorted(rows, key=lambda row: int(row["case"]["seed"]))
    alike = {name: [row for row in order if row["case"]["model"] == name] for name in TITLES}
    return {name: mine for name, mine in alike.items() if mine}


def title(rows: Rows) -> str:
    """A model and its sizes in a line."""
    case = rows[0]["case"]
    return (
        f"{TITLES[case['model']]}, {rows[0]['parameters'] / 1e6:.2f} M parameters: "
        f"{case['layers']} layers, D = {case['d_model']}, H = {case['nhead']}, "
        f"F = {case['dim_feedforward']}, S = {case['seq_len']}, B = {case['batch']}, "
        f"dropout {case['dropout']:g}, {case['dtype']}; {case.get('warmup_steps', 5)} steps of "
        f"warm-up, then {'a cosine to 0' if case.get('decays') else 'constant'}"
    )


def finals(rows: Rows, way: str, measure: str) -> list[float]:
    """A way's losses at the end, by seed."""
    mine = [row["ways"][way] for row in rows]
    if measure == "validation":
        return [run["validation_loss"] for run in mine]
    return [fmean(run["losses"][-LAST:]) for run in mine]


def spread(values: list[float]) -> float:
    """The standard deviation over seeds; nan of one."""
    return stdev(values) if len(values) > 1 else nan


def apart(rows: Rows, way: str, other: str, measure: str) -> list[float]:
    """By how much a way's loss at the end is above another's, by seed."""
    pairs = zip(finals(rows, way, measure), finals(rows, other, measure), strict=True)
    return [mine - theirs for mine, theirs in pairs]


def table(data: Row) -> str:
    """Every model's ways: mean and spread over seeds, and each seed beside eager's."""
    against = {"eager": (), "native": ("eager",), "fast8": ("eager", "native")}
    head = ("model", "way", "training loss", "validation loss", "above eager's, by seed",
            "above native's, by seed")  # fmt: skip
    lines = []
    for name, rows in models(data["results"]).items():
        for way, others in against.items():
            ends = [finals(rows, way, measure) for measure in MEASURES]
            means = [f"{fmean(values):.4f} ± {spread(values):.4f}" for values in ends]
            signed = (apart(rows, way, other, "validation") for other in others)
            shown = [", ".join(f"{value:+.5f}" for value in values) for values in signed]
            lines.append([TITLES[name], way, *means, *shown])
    return tables.markdown(head, lines)


def verdicts(data: Row) -> str:
    """Of each model and measure: whether the mean of "fast8" is within eager's spread of its."""
    lines = []
    for name, rows in models(data["results"]).items():
        for measure in MEASURES:
            noise = spread(finals(rows, "eager", measure))
            distance = abs(fmean(apart(rows, "fast8", "eager", measure)))
            verdict = f"**{'within' if distance <= noise else 'NOT within'}**"
            if isnan(noise):
                verdict = "one seed says nothing"
            lines.append(
                f"- {TITLES[name]}, {measure} loss: the means of fast8 and eager are "
                f"{distance:.4f} apart; eager's standard deviation over {len(rows)} "
                f"seed{'s' * (len(rows) > 1)} is {noise:.4f}: {verdict}."
            )
    return "\n".join(lines)


def section(root: Path = RESULTS) -> str:
    """Of every file: the picture, the sizes, the table, and whether "fast8" is within the noise."""
    parts = []
    for path in tables.files("losses-*.json", root):
        data = tables.load(path)
        seeds, steps = ({row["case"][key] for row in data["results"]} for key in ("seed", "steps"))
        parts += [
            tables.picture(path, "Training and validation losses, a row of panels per model"),
            "\n".join(f"- {title(rows)}" for rows in models(data["results"]).values()),
            f"{len(seeds)} seeds, {max(steps)} steps each. A seed is that of the weights, of the "
            f"order of the batches and of dropout. Training loss: mean of the last {LAST} steps. "
            'Mean ± standard deviation over seeds, in nats per byte; "above": of the validation '
            "loss, each seed beside the same seed's run.",
            table(data), verdicts(data), tables.machine_line(data["machine"]),
        ]  # fmt: skip
    return "\n\n".join(parts)
