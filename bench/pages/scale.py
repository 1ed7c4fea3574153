"""The model on paper: an example's output, and bytes and times on paper beside those of runs."""

from __future__ import annotations

from pathlib import Path

from bench.tables import RESULTS, Row, kib, load, machine_line, markdown, ms
from fused_remat.cli import scale

#: The command whose output is shown.
EXAMPLE = "--model llama3-70b --mesh 8x8 --seq 8192 --batch 2"


def is_exact(row: Row) -> bool:
    """Whether all parts of all ranks are as predicted."""
    held = (part for rank in row["ranks"] for part in rank.values())
    return all(part["measured"] == part["on_paper"] for part in held)


def is_right(row: Row) -> bool:
    """Whether it is exact, and the bound is one."""
    return is_exact(row) and row["taken"] <= row["bound"]


def title(case: Row) -> str:
    """A layout in a few words."""
    parts = [f"FSDP2 {case['data']}"] if case["data"] > 1 else []
    parts += [f"tensor parallel {case['tensor']}"] if case["tensor"] > 1 else []
    divided = ", stream divided" if case["sequence"] else ""
    return " × ".join(parts) + divided if parts else "one process"


def line(row: Row) -> str:
    """Of a row, while it runs."""
    said = "as predicted" if is_exact(row) else "NOT as predicted"
    taken = f"takes {row['taken'] / row['bound']:.0%} of the bound"
    return f"{title(row['case'])}, {row['case']['policy']}: bytes {said}, {taken}"


def table(data: Row) -> str:
    """A line for every layout and policy."""
    head = (
        "processes", "policy", "weights, gradients, states of rank 0", "kept by its layers",
        "of all ranks, on paper", "a step takes at most", "on paper", "step", "predicted",
    )  # fmt: skip
    rows = []
    for row in data["results"]:
        first = {name: part["measured"] for name, part in row["ranks"][0].items()}
        resting = [kib(first[name]) for name in ("weights", "gradients", "optimizer states")]
        rows.append([
            title(row["case"]), f'`"{row["case"]["policy"]}"`', ", ".join(resting),
            kib(first["kept by layers"]), "the same bytes" if is_exact(row) else "**other bytes**",
            kib(row["taken"]), f"{kib(row['bound'])} ({row['bound'] / row['taken']:.2f}×)",
            *(ms(row[key]) or "not timed" for key in ("seconds", "predicted_seconds")),
        ])  # fmt: skip
    return markdown(head, rows)


def example() -> str:
    """A command and what it prints; with the rates that are assumed, so the same everywhere."""
    lines = "\n".join(scale.printed(scale.parse(EXAMPLE.split())))
    return f"```\n$ python -m fused_remat scale {EXAMPLE}\n{lines}\n```"


def checked(root: Path = RESULTS) -> str:
    """The rows of a run on a CPU."""
    data = load(root / "scale-cpu.json")
    case = data["results"][0]["case"]
    sizes = f"{case['layers']} layers of width {case['width']}, two sequences of {case['seq']}"
    where = machine_line(data["machine"])
    return f"Processes of one thread, {sizes}, float32. {where}\n\n{table(data)}"
