"""Which implementation of products and of attention runs on a CPU: one table, no timing.

The choice follows from the processor, the dtype and the sizes. Forward, the rebuild in backward and
every other process on the same machine make the same one. Each entry cites the result in
`bench/results` that shows its gain; where no entry applies, PyTorch's own implementation runs.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch

#: Environment variable -> the implementation that it can force instead of "aten".
SETTINGS = {"FUSED_REMAT_CPU_PRODUCTS": "onednn", "FUSED_REMAT_CPU_ATTENTION": "blocks"}
PRODUCTS, ATTENTION = SETTINGS

_VENDORS = ("AuthenticAMD", "GenuineIntel")
_ZEN4 = "2026-11-28-zen4-9d8e579/cpu-choice.json"
_ZEN5 = "2026-11-27-zen5-7ca746a/layers-cpu.txt"
#: Multiply-adds of the products with a second implementation; of 16 bits the last bound holds.
SMALLEST_PRODUCT, LARGEST_16_BIT = 256 * 256 * 512, 2**32


class Rule(NamedTuple):
    """An entry of `RULES`: where an implementation other than ATen's runs."""

    setting: str  # the environment variable that overrides it
    vendor: str  # vendor, capability: the processor, as `processor` returns them
    capability: str
    dtype: torch.dtype  # of the operands
    # smallest, largest: the sizes in which it applies: multiply-adds of a product, keys of a
    # causal attention
    smallest: int
    largest: float
    results: tuple[str, ...]  # files in `bench/results` that show the gain


#: 16-bit products in halves on Intel: "full" takes 1.13 × eager's time in bfloat16 at 81c55eb, and
#: with full products 1.26 × at 76d650c. No gain in float16, nor on a Zen 4.
#: Attention: causal only. Heads that share keys without causality gain nothing in blocks.
RULES = (
    Rule(
        PRODUCTS, "AuthenticAMD", "AVX512", torch.float32, SMALLEST_PRODUCT, float("inf"),
        (_ZEN5, _ZEN4),
    ),
    Rule(
        PRODUCTS, "GenuineIntel", "AVX512", torch.bfloat16, SMALLEST_PRODUCT, LARGEST_16_BIT,
        ("layers-cpu.json", "2026-11-27-xeon-76d650c/layers-cpu.json"),
    ),
    Rule(ATTENTION, "AuthenticAMD", "AVX512", torch.float32, 512, 2048, (_ZEN4,)),
    Rule(ATTENTION, "AuthenticAMD", "AVX512", torch.bfloat16, 128, 512, (_ZEN4,)),
)  # fmt: skip


@functools.cache
def processor() -> tuple[str, str]:
    """Return the vendor of the CPU, "" if unknown, and its instruction set, such as "AVX512"."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = platform.processor()
    vendor = next((name for name in _VENDORS if name in text), "")
    return vendor, torch.backends.cpu.get_cpu_capability()


@functools.cache
def forced(setting: str) -> str:
    """Return the implementation that an environment variable forces, or "" to apply `RULES`.

    Raises: ValueError for an unknown one.
    """
    value, other = os.environ.get(setting, ""), SETTINGS[setting]
    if value not in ("", "aten", other):
        raise ValueError(
            f"{setting} is {value!r}, which names no implementation; set it to 'aten' or "
            f"{other!r}, or unset it to choose by processor, dtype and size"
        )
    return value


def rules_for(setting: str) -> list[Rule]:
    """Return the entries for this processor."""
    key = setting, *processor()
    return [rule for rule in RULES if (rule.setting, rule.vendor, rule.capability) == key]


@functools.lru_cache(maxsize=4096)
def applies(setting: str, dtype: torch.dtype, size: int) -> bool:
    """Return whether an entry for this processor has the dtype and the size."""
    rules = rules_for(setting)
    return any(r.dtype == dtype and r.smallest <= size <= r.largest for r in rules)


def may_apply(setting: str) -> bool:
    """Return whether ATen's implementation has an alternative in this process at all."""
    choice = forced(setting)
    return choice != "aten" and (choice != "" or bool(rules_for(setting)))


def forget() -> None:
    """Read the processor and the environment again."""
    for cached in (processor, forced, applies):
        cached.cache_clear()
