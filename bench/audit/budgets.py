"""What kernels may take: `budgets.tsv`, a row for each kernel and target, of two kinds of cases.

`default` rows are of what ordinary tensors lead to, `other` rows of the rest. A row holds the most
registers, shared memory and stack of its configurations, and the least share of the tensor cores in
their hot loops, in percent. Sums over all configurations show one that grows below the worst.
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
#: Numbers of a row: its configurations, the most of each, the registers of all, the least share and
#: all shares.
FIELDS = (*_KEY, "configurations", *_MOST, "all_registers", "tensor_share", "all_shares")
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
            one = found.setdefault(key_of(row, triton), dict.fromkeys(FIELDS[len(_KEY) :], 0))
            one |= {name: max(one[name], row[name]) for name in _MOST}
            one["configurations"] += 1
            one["all_registers"] += row["registers"]
            if share := _percent(row):
                one["tensor_share"] = min(one["tensor_share"] or share, share)
                one["all_shares"] += share
    return found


def _percent(row: Mapping[str, Any]) -> int:
    return int(100 * (tensor_share(row["loops"]) or 0))


def read() -> dict[Key, Budget]:
    with BUDGETS.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {
        tuple(row[k] for k in _KEY): {k: int(row.get(k) or 0) for k in FIELDS[len(_KEY) :]}
        for row in rows
    }


def write(rows: Sequence[Mapping[str, Any]], triton: str) -> None:
    """Write the rows as budgets, in place of those of the same targets and cases."""
    found = summed(rows, triton)
    anew = {(key[0], key[1], key[3]) for key in found}
    kept = {key: one for key, one in read().items() if (key[0], key[1], key[3]) not in anew}
    with BUDGETS.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(FIELDS)
        for key, one in sorted((kept | found).items()):
            writer.writerow([*key, *one.values()])


def over(row: Mapping[str, Any], budget: Budget | None) -> list[str]:
    if budget is None or "registers" not in row:
        return []
    found = [f"{n} {row[n]} over its budget {budget[n]}" for n in _MOST if row[n] > budget[n]]
    if _percent(row) < budget["tensor_share"]:
        found.append(f"tensor cores {_percent(row)}% of a loop, at least {budget['tensor_share']}%")
    return found


def grown(
    rows: Iterable[Mapping[str, Any]], triton: str, budgets: Mapping[Key, Budget]
) -> list[str]:
    """Kernels of which as many configurations as budgeted are worse in all."""
    found = []
    for key, one in summed(rows, triton).items():
        budget = budgets.get(key, one)
        if one["configurations"] != budget["configurations"]:
            continue
        together = f"{key[1]}: {key[2]}, {key[3]}: all configurations together"
        if one["all_registers"] > budget["all_registers"]:
            used = f"{one['all_registers']} registers over the budget {budget['all_registers']}"
            found.append(f"{together} take {used}")
        if one["all_shares"] < budget["all_shares"]:
            shares = f"{one['all_shares']}, under the budget {budget['all_shares']}"
            found.append(f"{together} have shares of the tensor cores of {shares}")
    return found
