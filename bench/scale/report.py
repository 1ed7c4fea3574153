"""A run's rows as text: bytes on paper beside those measured, and times."""

from __future__ import annotations

from typing import Any


def is_exact(row: dict[str, Any]) -> bool:
    """Whether all parts of all ranks are as predicted."""
    held = [part for rank in row["ranks"] for part in rank.values()]
    return all(part["measured"] == part["on_paper"] for part in held)


def is_right(row: dict[str, Any]) -> bool:
    """Whether it is exact, and the bound is one."""
    return is_exact(row) and row["taken"] <= row["bound"]


def title(case: dict[str, Any]) -> str:
    """
    >>> title({"data": 2, "tensor": 2, "sequence": True})
    'FSDP2 2 × tensor parallel 2, stream divided'
    """
    parts = [f"FSDP2 {case['data']}"] if case["data"] > 1 else []
    parts += [f"tensor parallel {case['tensor']}"] if case["tensor"] > 1 else []
    divided = ", stream divided" if case["sequence"] else ""
    return " × ".join(parts) + divided if parts else "one process"


def line(row: dict[str, Any]) -> str:
    """Of a row, while it runs."""
    said = "as predicted" if is_exact(row) else "NOT as predicted"
    taken = f"takes {row['taken'] / row['bound']:.0%} of the bound"
    return f"{title(row['case'])}, {row['case']['policy']}: bytes {said}, {taken}"


def table(data: dict[str, Any]) -> str:
    """A line for every layout and policy."""
    head = [
        "processes", "policy", "weights, gradients, states of rank 0", "kept by its layers",
        "of all ranks, on paper", "a step takes at most", "on paper", "step", "predicted",
    ]  # fmt: skip
    lines = [head, ["---"] * len(head), *map(_cells, data["results"])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    first = {name: part["measured"] for name, part in row["ranks"][0].items()}
    resting = [_kib(first[name]) for name in ("weights", "gradients", "optimizer states")]
    same = "the same bytes" if is_exact(row) else "**other bytes**"
    seconds = [row["seconds"], row["predicted_seconds"]]
    times = ["not timed" if s is None else f"{1e3 * s:.0f} ms" for s in seconds]
    return [
        title(row["case"]), f'`"{row["case"]["policy"]}"`', ", ".join(resting),
        _kib(first["kept by layers"]), same, _kib(row["taken"]),
        f"{_kib(row['bound'])} ({row['bound'] / row['taken']:.2f}×)", *times,
    ]  # fmt: skip


def _kib(nbytes: int) -> str:
    return f"{nbytes / 1024:,.1f} KiB"
