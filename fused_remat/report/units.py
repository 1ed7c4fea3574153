"""Amounts of memory and time as text, memory budgets read from text, and aligned tables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

import torch

#: A memory budget: text, a number of bytes, or a fraction of the device's memory.
Budget = str | int | float

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip
_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*%\s*")


def human(nbytes: float) -> str:
    """Return the bytes with a binary unit and one decimal.

    >>> human(12), human(1536), human(3 * 2**20), human(-(2**31))
    ('12 B', '1.5 KiB', '3.0 MiB', '-2.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


def milliseconds(seconds: float, decimals: int = 1) -> str:
    """Return the seconds as milliseconds with their unit."""
    return f"{1e3 * seconds:.{decimals}f} ms"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return a table as lines: the first `left` columns are left-aligned, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def run_name(names: Sequence[str]) -> str:
    """Return the name of one table row for several equal layers: "layers.0 … layers.2 (3×)"."""
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)}×)"


def reason_lines(layers: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each state and reason of layers (name, state, reason) that have a reason.

    >>> reason_lines([("0", "converted", ""), ("1", "plain", "hooks"), ("2", "plain", "hooks")])
    ['1 … 2 (2×) plain: hooks']
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, state, reason in layers:
        if reason:
            groups.setdefault((state, reason), []).append(name)
    return [f"{run_name(names)} {state}: {reason}" for (state, reason), names in groups.items()]


def device_memory(device: torch.device | str) -> int:
    """Total memory in bytes of a CUDA device, or of the machine for "cpu".

    Raises: NotImplementedError for any other device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    raise NotImplementedError(f"the memory of {device} is unknown; give the budget in bytes")


def bytes_of(budget: Budget, device: torch.device | str = "cpu") -> int:
    """Return a memory budget in bytes.

    Args:
        budget: bytes (int), text ("6GiB", "500 MB", "80%"), or a fraction of the device's memory
            (float in (0, 1]).
        device: the device that a percentage or a fraction refers to.
    Raises: TypeError or ValueError for any other budget, with the value.

    >>> bytes_of("6GiB"), bytes_of("1.5 kB"), bytes_of(4096)
    (6442450944, 1500, 4096)
    >>> bytes_of("50%") == bytes_of(0.5) == device_memory("cpu") // 2
    True
    """
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise TypeError(
            f"a budget is text, a number of bytes (int) or a fraction (float), got {budget!r}"
        )
    if isinstance(budget, str):
        nbytes = _read(budget, device)
    elif isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise ValueError(
                f"a float budget is a fraction of the device's memory, in (0, 1], got {budget!r}; "
                "give bytes as an int"
            )
        nbytes = int(device_memory(device) * budget)
    else:
        nbytes = budget
    if not 0 < nbytes < 2**63:
        raise ValueError(
            f"a budget is at least 1 byte and less than 2**63 bytes, got {budget!r}; write a "
            "percentage as text, such as '80%'"
        )
    return nbytes


def _read(text: str, device: torch.device | str) -> int:
    percent, amount = _PERCENT.fullmatch(text), _BYTES.fullmatch(text)
    if percent is not None and 0 < float(percent[1]) <= 100:
        return int(device_memory(device) * float(percent[1]) / 100)
    if amount is None:
        raise ValueError(
            f"cannot read {text!r} as an amount of memory; examples: '6GiB', '500 MB', "
            "'6442450944' (bytes), '80%' (of the device's memory)"
        )
    return int(float(amount[1]) * _UNITS[(amount[2] or "").lower()])
