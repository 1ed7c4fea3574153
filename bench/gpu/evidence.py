"""What the rows of `bench gpu` say of each target: every case of it, and what stands between.

Of what is missed: the least that it could be at the same run's ceilings, and what takes more than
its own least, from the profiled steps and the floors of kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu.layers import LONG_LEN, SEQ_LEN
from bench.gpu.profile import KINDS
from fused_remat.policies import EXACT_PRESETS

Row = Mapping[str, Any]
#: Width of a layer -> limit.
Limits = Mapping[int, float]
#: Who computes attention or a norm beside us: not by explicit scores.
_LIBRARY = (
    "aten", "flash", "cudnn", "efficient", "varlen", "flex", "flash-attn", "flash-attn 3",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What was measured of a target in a case."""

    where: str  # the case, and of several ways which
    value: float | None  # None where results are wrong, or none came
    limit: float
    between: str = ""  # what stands between where it is missed


def _rows(rows: Sequence[Row], section: str, name: str = "") -> Iterator[Row]:
    for row in rows:
        case = row["case"]
        if case.get("section") == section and "ways" in row and case["name"].startswith(name):
            yield row


def _judged(
    where: str, way: Row, value: float | None, limit: float, between: str = ""
) -> Iterator[Found]:
    """A way's value: nothing where it was not measured, a wrong one where it failed."""
    if "error" in way or value is not None:
        yield Found(where, None if "error" in way else value, limit, between)


def _ratio(way: Row, baseline: str) -> float | None:
    """Of a step or a call to the baseline's, by round."""
    return way.get("ratio", {}).get(baseline, {}).get("p50")


def _us(ways: Row, names: Iterable[str]) -> dict[str, float]:
    """Microseconds of those that were measured, the fastest first."""
    found = {name: ways[name]["us"]["p50"] for name in names if "us" in ways.get(name, {})}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _kept(way: Row) -> float:
    return float(way.get("kept_bytes") or way.get("held_bytes") or 0.0)


def steps(
    rows: Sequence[Row], section: str, name: str, way: str, baseline: str, limits: Limits
) -> Iterator[Found]:
    for width, row in _widths(rows, section, name, limits):
        found, case = row["ways"].get(way, {}), row["case"]
        between = _of_floor(row, way, baseline)
        if section != "mlp":
            profiled = name == "pre-norm", width, case.get("seq_len", SEQ_LEN)
            between = of_profile(rows, *profiled, way, baseline)
        given = found, _ratio(found, baseline), limits[width], between
        yield from _judged(f"D = {width}", *given)


def kept(rows: Sequence[Row], way: str, baseline: str, limits: Limits) -> Iterator[Found]:
    for width, row in _widths(rows, "layers", "pre-norm", limits):
        found, whole = row["ways"].get(way, {}), _kept(row["ways"].get(baseline, {}))
        share = (whole and _kept(found) / whole) or None
        yield from _judged(f"D = {width}", found, share, limits[width])


def _widths(
    rows: Sequence[Row], section: str, name: str, limits: Limits
) -> Iterator[tuple[int, Row]]:
    for row in _rows(rows, section, name):
        if row["case"]["width"] in limits and not row["case"].get("dropout"):
            yield row["case"]["width"], row


def of_profile(
    rows: Sequence[Row], pre_norm: bool, width: int, seq_len: int, way: str, baseline: str
) -> str:
    """The least of a way's step relative to the baseline's step, and what takes how much more."""
    at = {"width": width, "seq_len": seq_len}
    profiles = _rows(rows, "profile", "pre-norm") if pre_norm else ()
    ways = next((r["ways"] for r in profiles if at.items() <= r["case"].items()), {})
    if not all("kinds_us" in ways.get(name, {}) for name in (way, baseline)):
        return "not profiled"
    found, least = ways[way], ways[way]["least_us"]
    step, total = found["us"]["p50"], sum(least.values())
    if not least:
        return "no ceiling was measured"
    above = {kind: found["kinds_us"][kind] - least.get(kind, 0.0) for kind in KINDS}
    above["gaps"] = found["gaps_us"]
    most = sorted(above, key=lambda kind: -above[kind])
    parts = [f"{kind} +{above[kind]:,.0f}" for kind in most if above[kind] > 0.01 * step]
    over = total / ways[baseline]["us"]["p50"]
    said = f"least {total:,.0f} of {step:,.0f} µs, {over:.2f}× {baseline}'s step"
    return f"{said}; above the least, µs: {', '.join(parts) or 'nothing'}"


def _of_floor(row: Row, *names: str) -> str:
    """The floor, and these ways' shares of its speed."""
    if not row.get("floor_us"):
        return ""
    shares = [f"{n} {row['floor_us'] / us:.0%}" for n, us in _us(row["ways"], names).items()]
    return f"floor {row['floor_us']:,.0f} µs; of its speed: {', '.join(shares)}"


def _where(case: Row) -> str:
    names = {"seq_len": "S", "head_dim": "E", "kv_heads": "KV", "width": "D"}
    sizes = [f"{short} = {case[key]}" for key, short in names.items() if key in case]
    return ", ".join([re.sub(r"^\w+_(fwd|bwd) ", "", case["name"]), *sizes])


def mlp_backward(rows: Sequence[Row]) -> Iterator[Found]:
    """The fastest of our routes over its two products alone; all of them have to be right."""
    for row in _rows(rows, "products", "mlp_bwd gelu"):
        ours = [name for name in row["ways"] if name not in ("aten", "bare")]
        where, best = f"D = {row['case']['width']}", next(iter(_us(row["ways"], ours)), "")
        if any("error" in row["ways"][name] for name in ours):
            yield Found(where, None, 1.11)
        elif best:
            value, between = _ratio(row["ways"][best], "bare"), _of_floor(row, best, "bare")
            yield from _judged(f"{where}, {best}", {}, value, 1.11, between)


def attention_forwards(rows: Sequence[Row]) -> Iterator[Found]:
    """Kernels of attention's forward in a profiled step.

    Not measured where none is known by name, or the profiler missed some: not a whole number.
    """
    for row in _rows(rows, "profile", "pre-norm"):
        count = row["ways"].get("balanced", {}).get("attention_forwards") or 0.0
        whole = count >= 1.0 and abs(count - round(count)) < 1e-6
        if row["case"]["seq_len"] == LONG_LEN and whole:
            yield Found(f"S = {LONG_LEN}", count, 1.0)


def own_attention(rows: Sequence[Row], direction: str, limit: float) -> Iterator[Found]:
    """The speed of our kernel relative to the fastest of the library's."""
    mine = "fused_remat kernel"
    for section in ("attention", "attention calls", "flex"):
        for row in _rows(rows, section, f"attention_{direction} "):
            best, time = next(iter(_us(row["ways"], _LIBRARY).items()), ("", 0.0))
            speeds = [time / us for us in _us(row["ways"], [mine]).values() if best]
            given = next(iter(speeds), None), limit, _of_floor(row, mine, best)
            yield from _judged(_where(row["case"]), row["ways"].get(mine, {}), *given)


def dispatch(rows: Sequence[Row]) -> Iterator[Found]:
    """Our function over PyTorch's where it takes PyTorch's kernel: plain calls, as many key heads.

    Device time: the launches of both are queued ahead.
    """
    for row in _rows(rows, "attention", "attention_"):
        direction = row["case"]["name"].split()[0].removeprefix("attention_")
        ours = row["ways"].get("fused_remat triton", {})
        yield from _judged(f"{direction} {_where(row['case'])}", ours, _ratio(ours, "aten"), 1.01)


def norms(
    rows: Sequence[Row], read: Callable[[Row], float | None], limit: float
) -> Iterator[Found]:
    mine = "fused_remat triton"
    for row in _rows(rows, "norms", "norm_bwd"):
        way, between = row["ways"].get(mine, {}), _of_floor(row, mine, "aten")
        yield from _judged(_where(row["case"]), way, read(way), limit, between)


def norm_speed(way: Row) -> float | None:
    ratio = _ratio(way, "aten")
    return ratio and 1.0 / ratio


def largest_batch(rows: Sequence[Row], baseline: str, loss: str) -> Iterator[Found]:
    """The best of ours over gradient checkpointing, each at its own largest batch.

    loss: "_loss": of ours with their fused loss, else of those without.
    """
    for row in _rows(rows, "model"):
        model, _, rest = row["case"]["name"].partition(",")
        ours = {name + loss: row["ways"].get(name + loss, {}) for name in EXACT_PRESETS}
        theirs = row["ways"].get(baseline, {})
        if not rest.endswith("the largest batch"):
            continue
        if any("error" in way for way in (*ours.values(), theirs)):
            yield Found(model, None, 1.15)
        speeds = {n: w["tokens_per_second"] for n, w in ours.items() if "tokens_per_second" in w}
        if speeds and "tokens_per_second" in theirs:
            best = max(speeds, key=lambda n: speeds[n])
            batches = f"batches of {ours[best]['largest_batch']} and {theirs['largest_batch']}"
            speed = speeds[best] / theirs["tokens_per_second"]
            yield Found(f"{model}, {best}", speed, 1.15, batches)


def compiled(rows: Sequence[Row]) -> Iterator[Found]:
    """Of each case the worst: the fastest of ours that keeps no more than a compiled way, over it.

    Compiled ways that keep less than any of ours are named, and are no comparison.
    """
    for row in _rows(rows, "compile"):
        norm, _, kind = row["case"]["name"].partition(", ")
        if kind != "budgets":
            continue
        ways, width = row["ways"], row["case"]["width"]
        where, beside, less = f"{norm}, D = {width}", [], []
        if any("error" in ways.get(name, {}) for name in EXACT_PRESETS):
            yield Found(where, None, 0.95)
            continue
        for name, time in _us(ways, [n for n in ways if n.startswith("compile")]).items():
            fits = [n for n in EXACT_PRESETS if 0 < _kept(ways.get(n, {})) <= _kept(ways[name])]
            if ours := _us(ways, fits):
                best = next(iter(ours))
                beside.append((ours[best] / time, best, name))
            else:
                less.append(name)
        if beside:
            value, best, name = max(beside)
            where = f"{best} beside {name}, {where}"
            where += f" (none keeps as little as {', '.join(less)})" if less else ""
            between = of_profile(rows, norm == "pre-norm", width, SEQ_LEN, best, "eager")
            yield Found(where, value, 0.95, between)
