"""What kernels may take: `budgets.tsv`, an entry per kernel and target, of two kinds of cases.

`default` entries are of what ordinary tensors lead to, `other` ones of the rest. Each has the most
registers, shared memory and stack of its configurations, and the least share of the tensor cores in
their hot loops, in percent.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.audit.machine_code import tensor_share

BUDGETS = Path(__file__).with_name("budgets.tsv")
_KEY = ("triton", "target", "kernel", "cases")
_MOST = ("registers", "shared", "stack")
_NUMBERS = (*_MOST, "tensor_share")
Key = tuple[str, ...]
Budget = dict[str, int]


def key_of(row: Mapping[str, Any], triton: str) -> Key:
    """Return the key of the budget of an audit's row."""
    name, part, *_ = f"{row['name']} -".split(" ")
    kernel = f"{name} {part}" if part in ("dk", "dv") else name
    return triton, row["target"], kernel, "default" if row["default"] else "other"


def summed(rows: Iterable[Mapping[str, Any]], triton: str) -> dict[Key, Budget]:
    """Return budgets equal to the rows; none for targets whose registers are not read."""
    found: dict[Key, Budget] = {}
    for row in rows:
        if "registers" in row:
            one = found.setdefault(key_of(row, triton), dict.fromkeys(_NUMBERS, 0))
            one |= {name: max(one[name], row[name]) for name in _MOST}
            if share := _percent(row):
                one["tensor_share"] = min(one["tensor_share"] or share, share)
    return found


def _percent(row: Mapping[str, Any]) -> int:
    return int(100 * (tensor_share(row["loops"]) or 0))


def read() -> dict[Key, Budget]:
    with BUDGETS.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {tuple(row[k] for k in _KEY): {k: int(row[k] or 0) for k in _NUMBERS} for row in rows}


def write(rows: Sequence[Mapping[str, Any]], triton: str) -> None:
    """Write the rows as budgets, in place of those of the same targets and cases."""
    found = summed(rows, triton)
    new = {(key[0], key[1], key[3]) for key in found}
    kept = {key: one for key, one in read().items() if (key[0], key[1], key[3]) not in new}
    with BUDGETS.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow((*_KEY, *_NUMBERS))
        for key, one in sorted((kept | found).items()):
            writer.writerow([*key, *one.values()])


def over(row: Mapping[str, Any], budget: Budget | None) -> list[str]:
    if budget is None or "registers" not in row:
        return []
    found = [f"{n} {row[n]} over its budget {budget[n]}" for n in _MOST if row[n] > budget[n]]
    if _percent(row) < budget["tensor_share"]:
        found.append(f"tensor cores {_percent(row)}% of a loop, at least {budget['tensor_share']}%")
    return found
