"""Budgets: "6GiB", a number of bytes, or a fraction of a device's memory."""

from __future__ import annotations

import os
import re

import torch

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*%\s*")

#: What a budget is given as.
Budget = str | int | float


class BudgetError(ValueError):
    """A budget that no plan of a method meets.

    Attributes:
        budget: in bytes.
        least: the least peak that any method can reach, in bytes; for "sqrt" and "manual", theirs.
        parts: what that peak is made of, in bytes, the largest first.
    """

    def __init__(self, message: str, budget: int, least: int, parts: dict[str, int]) -> None:
        super().__init__(message)
        self.budget, self.least, self.parts = budget, least, parts


def device_memory(device: torch.device | str) -> int:
    """Bytes of memory of a device: all of a CUDA device's, or the machine's.

    Raises: NotImplementedError for another device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    raise NotImplementedError(f"the memory of {device} is not known: give a number of bytes")


def bytes_of(budget: Budget, device: torch.device | str = "cpu") -> int:
    """A budget in bytes.

    Args:
        budget: an int of bytes, text ("6GiB", "500 MB", "80%"), or a float in (0, 1], a fraction of
            the device's memory.
    Raises: TypeError or ValueError for anything else, with the value.

    >>> bytes_of("6GiB"), bytes_of("1.5 kB"), bytes_of(4096)
    (6442450944, 1500, 4096)
    >>> bytes_of("50%") == bytes_of(0.5) == device_memory("cpu") // 2
    True
    """
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise TypeError(f"a budget is text, bytes (int) or a fraction (float), got {budget!r}")
    if isinstance(budget, str):
        nbytes = _read(budget, device)
    elif isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise ValueError(
                f"a float is a fraction of the device's memory, in (0, 1], got {budget!r}; give "
                "bytes as an int"
            )
        nbytes = int(device_memory(device) * budget)
    else:
        nbytes = budget
    if not 0 < nbytes < 2**63:
        raise ValueError(
            f"a budget is at least a byte and less than 2**63, got {budget!r}; a fraction as text: "
            "'80%'"
        )
    return nbytes


def _read(text: str, device: torch.device | str) -> int:
    percent, match = _PERCENT.fullmatch(text), _PATTERN.fullmatch(text)
    if percent is not None and 0 < float(percent[1]) <= 100:
        return int(device_memory(device) * float(percent[1]) / 100)
    if match is None:
        raise ValueError(
            f"cannot read the budget {text!r}; examples: '6GiB', '500 MB', '6442450944' (bytes), "
            "'80%' (of the device's memory)"
        )
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])
