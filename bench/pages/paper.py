"""A layer's step on paper (`bench paper`): time over eager's, and what the targets lack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.tables import RESULTS, Cell, Row, load, markdown

FILE = RESULTS / "paper.json"
#: What is asked of the estimates: a way, of which other at most how much, up to which length.
TARGETS = (("none", "compile", 1.03, 8192), ("full", "checkpoint", 0.80, 8192),
           ("full", "eager", 1.05, 4096))  # fmt: skip


def ratio(way: Row, other: Row, errors: Mapping[str, float]) -> tuple[float, float]:
    """Time over another's, and its error: what each kind of work may be off, for both at once."""
    value = way["us"] / other["us"]
    square = 0.0
    for kind, error in errors.items():
        mine, theirs = (one["us"] + error * one["kinds_us"][kind] for one in (way, other))
        square += (mine / theirs - value) ** 2
    return value, square**0.5


def _said(way: Row, other: Row, errors: Mapping[str, float]) -> str:
    value, error = ratio(way, other, errors)
    return f"{value:.2f} ± {error:.2f}" if error >= 0.005 else f"{value:.2f}"


def line(row: Row, errors: Mapping[str, float]) -> str:
    """Of a row, while it runs."""
    ways = row["ways"]
    said = ", ".join(f"{name} {_said(way, ways['eager'], errors)}" for name, way in ways.items())
    return f"{row['layer']} D={row['width']} S={row['seq']}: {said}"


def ratios(file: Path = FILE) -> str:
    """Every way's time over eager's."""
    data = load(file)
    ways = [name for name in data["results"][0]["ways"] if name != "eager"]
    cells: list[list[Cell]] = []
    for row in data["results"]:
        eager = row["ways"]["eager"]
        said = [_said(row["ways"][way], eager, data["errors"]) for way in ways]
        case = [row["layer"], str(row["width"]), str(row["seq"])]
        cells.append([*case, f"{eager['us'] / 1e3:.2f} ms", *said])
    head = ("layer", "D", "S", "eager", *(f"`{way}`" for way in ways))
    return f"{_basis(data)}\n\n{markdown(head, cells)}"


def _basis(data: Row) -> str:
    errors = ", ".join(f"{kind} {error:.0%}" for kind, error in data["errors"].items())
    return (
        f"**An estimate that no hardware has confirmed.** H100, bfloat16, {data['tokens']} tokens, "
        f"time over eager's with one standard deviation, from errors of {errors}."
    )


def targets(file: Path = FILE) -> str:
    """Where the targets are reached on paper; else what full's products alone take."""
    data = load(file)
    cells: list[list[Cell]] = []
    for row in data["results"]:
        ways = row["ways"]
        said: list[Cell] = [row["layer"], str(row["width"]), str(row["seq"])]
        for way, other, most, longest in TARGETS:
            value = ways[way]["us"] / ways[other]["us"]
            wanted = row["seq"] <= longest
            said.append(f"{value:.2f}" if value <= most or not wanted else f"**{value:.2f}**")
        for what, pairs in (("flash_us", TARGETS), ("floor_us", TARGETS[1:])):
            found = (ways[way][what] / ways[other]["us"] for way, other, *_ in pairs)
            said.append(", ".join(f"{value:.2f}" for value in found))
        name, above = next(iter(ways["full"]["above_us"].items()))
        said.append(f"`{name}` {above / 1e3:.2f} ms of {ways['full']['us'] / 1e3:.2f}")
        cells.append(said)
    goals = [f"{way}/{other}, at most {most:.2f}" for way, other, most, _ in TARGETS]
    less = "all three with flash's attention", "the last two of products alone"
    return markdown(("layer", "D", "S", *goals, *less, "most beyond products in full"), cells)
