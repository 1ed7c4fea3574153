"""Losses of training with exact and with 8-bit kept activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.frontier.figure import drawn_of
from bench.losses import figure
from bench.losses.report import LAST, models, table, title, verdicts
from bench.report.plans import pictures
from bench.report.sets import RESULTS, machine_line, read

UNMEASURED = "Not measured yet: `make losses`."


def files(root: Path = RESULTS) -> list[Path]:
    """Every results file of losses."""
    return sorted(root.glob("losses-*.json"))


def _data(path: Path) -> dict[str, Any]:
    data = read(path)
    assert data is not None
    return data


def stale(root: Path = RESULTS) -> list[Path]:
    """Pictures that are not of their file's data, or not there yet."""
    return [
        picture
        for path in files(root)
        for picture in pictures(path)
        if drawn_of(picture) != figure.drawn_from(_data(path))
    ]


def rewrite(root: Path = RESULTS) -> None:
    """Draw those anew. Raises: ImportError without matplotlib."""
    for path in {picture.with_suffix(".json") for picture in stale(root)}:
        figure.draw(_data(path), path.parent, path.stem)


def section(root: Path = RESULTS) -> str:
    """Of every file: the picture, the sizes, the table, and whether "fast8" is within the noise."""
    return "\n\n".join(map(_set, files(root))) or UNMEASURED


def _set(path: Path) -> str:
    data = _data(path)
    found = models(data)
    seeds, steps = ({row["case"][key] for row in data["results"]} for key in ("seed", "steps"))
    picture = f"../bench/results/{pictures(path)[0].name}"
    return "\n\n".join(
        [
            f"![Training and validation losses, a row of panels per model]({picture})",
            "\n".join(f"- {title(rows)}" for rows in found.values()),
            f"{len(seeds)} seeds, {max(steps)} steps each. A seed is that of the weights, of the "
            f"order of the batches and of dropout. Training loss: mean of the last {LAST} steps. "
            'Mean ± standard deviation over seeds, in nats per byte; "above": of the validation '
            "loss, each seed beside the same seed's run.",
            table(data),
            verdicts(data),
            machine_line(data["machine"]),
        ]
    )
