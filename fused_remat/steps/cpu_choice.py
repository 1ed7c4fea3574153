"""Which implementation of products and of attention runs on a CPU, and products other than ATen's.

One table chooses, without timing, by the processor, the dtype and the sizes. Forward, the rebuild
in backward and every other process on the same machine make the same choice. Each entry cites the
result in `bench/results` that shows its gain; where no entry applies, PyTorch's own implementation
runs. In float32 ATen's products are MKL's on x86, and oneDNN's are faster on some processors. In 16
bits ATen's are oneDNN's, and on some processors two of half the columns each are faster. Weight
gradients of linear layers are ATen's. Experts take oneDNN's products, for weight gradients as well,
where linear layers of an expert's average rows do (`experts_cpu`).
"""

from __future__ import annotations

import functools
import math
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fused_remat.steps import linear
from fused_remat.steps.linear import LOW, linear_dx, linear_fwd
from fused_remat.steps.operations import faster

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
#: with full products 1.25 × at 76d650c. No gain in float16, nor on a Zen 4.
#: Of experts' products on AMD no committed result exists: a trial by hand on a Zen 5 gained. In
#: float32 on Intel ATen's are faster, and in bfloat16 on AMX halves of columns gain nothing.
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


def _available() -> bool:
    """Return whether ATen's products have an alternative in this process at all."""
    choice = forced(PRODUCTS)
    return choice != "aten" and (choice != "" or bool(rules_for(PRODUCTS)))


def forget() -> None:
    """Read the processor and the environment again."""
    for cached in (processor, forced, applies):
        cached.cache_clear()


# The products of 16 bits that may run in halves: tokens, columns and multiply-adds.
_TOKENS, _MOST_TOKENS, _LEAST_COLUMNS = 256, 2048, 128


def _onednn() -> Any:
    """Return oneDNN's product if PyTorch has it with the arguments of the calls here, else None."""
    product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if product is None or not torch.backends.mkldnn.is_available():
        return None
    if product not in flop_registry:
        register_flop_formula(product)(lambda x, w, *_, **__: 2 * math.prod(x) * w[0])
    expected = ["X", "W", "B", "attr", "scalars", "algorithm"]
    named = [argument.name for argument in product.default._schema.arguments]
    return product.default if named == expected else None


_ONEDNN = _onednn()


def _unsupported_reason(backward: bool, key: tuple[Any, ...]) -> str | None:
    dtype, device, *_, (tokens, *weight) = key
    low, size = dtype in LOW, math.prod((tokens, *weight))
    has = linear.cpu_has_native(dtype) if low else dtype == torch.float32 and _ONEDNN is not None
    if device.type != "cpu" or not has:
        return ""
    if size < SMALLEST_PRODUCT:
        return "" if low else "slower at this size"
    columns = weight[1] if backward else weight[0]
    in_range = _TOKENS <= tokens < _MOST_TOKENS and size <= LARGEST_16_BIT
    if low and not (in_range and columns >= _LEAST_COLUMNS):
        return ""
    if forced(PRODUCTS) == "onednn":
        return None
    chosen = applies(PRODUCTS, dtype, size)
    return None if chosen else "" if low else "slower on this processor"


def _describe(key: tuple[Any, ...], *_: Any, **__: Any) -> str:
    return "ATen's addmm, half the columns at a time" if key[0] in LOW else "oneDNN's linear"


@faster(
    linear_fwd, "eager", name="oneDNN", available=_available, description=_describe,
    unsupported_reason=functools.partial(_unsupported_reason, False),
)  # fmt: skip
def linear_fwd_onednn(x, weight, bias, residual=None, mask=None, out=None):
    if x.dtype in LOW:
        y = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
        biases = (None, None) if bias is None else bias.chunk(2)
        for half, rows, b in zip(y.chunk(2, 1), weight.chunk(2), biases, strict=True):
            linear_fwd(x, rows, b, out=half)
    elif not torch._C._get_mkldnn_enabled():
        return linear_fwd(x, weight, bias, residual, mask, out)
    else:
        y = _ONEDNN(x, weight, bias, "none", [], "")
    if mask is not None:
        y.mul_(mask.tensor())
    if residual is not None:
        y.add_(residual)
    return y if out is None or out is y else out.copy_(y)


@faster(
    linear_dx, "eager", name="oneDNN", available=_available, description=_describe,
    unsupported_reason=functools.partial(_unsupported_reason, True),
)  # fmt: skip
def linear_dx_onednn(dy, weight, into=None):
    if dy.dtype not in LOW:
        if not torch._C._get_mkldnn_enabled():
            return linear_dx(dy, weight, into)
        dx = _ONEDNN(dy, weight.t(), None, "none", [], "")
        return dx if into is None else into.add_(dx)
    dx = dy.new_empty((dy.shape[0], weight.shape[1])) if into is None else into
    for half, columns in zip(dx.chunk(2, 1), weight.chunk(2, 1), strict=True):
        if into is None:
            torch.mm(dy, columns, out=half)
        else:
            torch.addmm(half, dy, columns, out=half)
    return dx
