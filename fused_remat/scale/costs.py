"""Rates of devices and links, each with its source.

A rate counts as measured only if a costs file marks it as measured on the machine that it
describes. All others are assumed, and are printed as such.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A number, its source, and whether it was measured on the machine that it describes."""

    value: float
    source: str
    measured: bool = False

    def __str__(self) -> str:
        kind = "measured" if self.measured else "assumed, not measured"
        return f"{kind}: {self.source}"


@dataclass(frozen=True)
class Costs:
    """Rates of a device in a mesh.

    Attributes:
        name: name of the hardware.
        peak: FLOP/s of 16-bit products as the maker states them; MFU is relative to it.
        products: FLOP/s of large products.
        attention_forward, attention_backward: FLOP/s of attention kernels, without masked scores.
        bandwidth: bytes of memory read and written per second.
        link: bytes per second that a device sends within its node.
        network: bytes per second that a device sends to other nodes.
        host: bytes per second between a device and the host's memory, each way.
        overhead: least seconds of a step.
        node: devices in a node.
        memory: bytes of memory of a device.
    """

    name: str
    peak: Figure
    products: Figure
    attention_forward: Figure
    attention_backward: Figure
    bandwidth: Figure
    link: Figure
    network: Figure
    host: Figure
    overhead: Figure
    node: int
    memory: Figure

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures by name."""
        found = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in found if isinstance(value, Figure)}


_PRODUCTS = Figure(780e12, "8192³ bf16 products on an H200, reported 770 to 798 TFLOP/s")
_FORWARD = Figure(644e12, "cuDNN 9.19, causal, heads of 128, 8192 tokens, as reported of an H200")
_BACKWARD = Figure(541e12, "cuDNN 9.19, causal, heads of 128, 8192 tokens, as reported of an H200")
_PEAK = Figure(989.5e12, "dense bf16, as its maker states")
_H200 = Costs(
    "h200", _PEAK, _PRODUCTS, _FORWARD, _BACKWARD,
    Figure(4.3e12, "a copy on an H200, as reported"),
    Figure(450e9, "NVLink 4, one direction, as its maker states"),
    Figure(50e9, "400 Gb/s a device, as its maker states"),
    Figure(55e9, "PCIe 5 x16, 64 GB/s stated, less a seventh"),
    Figure(2e-6, "a kernel's launch and tail"),
    8,
    Figure(141e9, "memory, as its maker states"),
)  # fmt: skip
#: Hardware by name. An H100 has the cores of an H200, so its products are assumed to be as fast.
HARDWARE: dict[str, Costs] = {
    "h200": _H200,
    "h100": dataclasses.replace(
        _H200,
        name="h100",
        bandwidth=Figure(3.0e12, "3.35 TB/s stated, at the H200's share of what is stated"),
        memory=Figure(80 * 2**30, "memory, as its maker states"),
    ),
}


#: Keys of a costs file, with their field of `Costs` and their unit.
FILE_KEYS: dict[str, tuple[str, float]] = {
    "peak_tflops": ("peak", 1e12),
    "products_tflops": ("products", 1e12),
    "attention_forward_tflops": ("attention_forward", 1e12),
    "attention_backward_tflops": ("attention_backward", 1e12),
    "bandwidth_GBps": ("bandwidth", 1e9),
    "link_GBps": ("link", 1e9),
    "network_GBps": ("network", 1e9),
    "host_GBps": ("host", 1e9),
    "overhead_us": ("overhead", 1e-6),
}


def rate_text(name: str, value: float) -> str:
    """Return a figure of `Costs` with its unit."""
    unit = next(unit for field, unit in FILE_KEYS.values() if field == name)
    return f"{value / unit:.4g} { {1e12: 'TFLOP/s', 1e9: 'GB/s', 1e-6: 'µs'}[unit] }"


def of_file(path: Path, base: Costs) -> Costs:
    """Return `base` with the rates of a file, by the keys of `FILE_KEYS`.

    The file is JSON such as {"name": "...", "source": "...", "measured": true,
    "products_tflops": 700}; every key is optional.

    Raises: ValueError if the file has no rates, OSError if it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    source = f"{path.name}: {data.get('source', 'no source given')}"
    unknown = sorted(set(data) - set(FILE_KEYS) - {"name", "source", "measured"})
    if unknown or not set(data) & set(FILE_KEYS):
        what = f"unknown keys {', '.join(map(repr, unknown))}" if unknown else "no rates"
        raise ValueError(f"{path} has {what}; valid keys: {', '.join(FILE_KEYS)}")
    given = {}
    for key, (name, unit) in FILE_KEYS.items():
        if key in data:
            value = data[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(f"{path}: {key} must be a positive number, got {value!r}")
            given[name] = Figure(value * unit, source, data.get("measured") is True)
    if products := given.get("products"):  # also the rate of attention, if that is not given
        assumed = Figure(products.value, f"that of products ({products.source})")
        given = dict.fromkeys(("attention_forward", "attention_backward"), assumed) | given
    changes: dict[str, Any] = {"name": str(data.get("name", path.stem)), **given}
    return dataclasses.replace(base, **changes)
