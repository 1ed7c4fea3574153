"""What the rows of `bench gpu` say of each target: every case of it, and what stands between.

Of what is missed: the least that it could be at the same run's ceilings, and what takes more than
its own least, from the profiled steps and the floors of kernels.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu.kinds import KINDS

Row = Mapping[str, Any]
#: Width of a layer -> limit.
Limits = Mapping[int, float]
LONG_LEN, SEQ_LEN = 32768, 2048
#: Products of an MLP's step that keeps its input only: the rebuilt one, two forward, four backward.
_MLP_PRODUCTS = 7
_OURS = ("full", "lean", "balanced", "fast", "none")
#: Who computes attention or a norm beside us: not by explicit scores.
_LIBRARY = (
    "aten", "flash", "cudnn", "efficient", "varlen", "flex", "flash-attn", "flash-attn 3",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What was measured of a target in a case.

    Attributes:
        where: the case, and of several ways which.
        value: None where results are wrong, or none came.
        between: what stands between where it is missed.
    """

    where: str
    value: float | None
    limit: float
    between: str = ""


def _rows(rows: Sequence[Row], section: str, name: str = "") -> Iterator[Row]:
    """The measured rows of a section, by the beginning of their names."""
    for row in rows:
        case = row["case"]
        if case.get("section") == section and "ways" in row and case["name"].startswith(name):
            yield row


def _judged(
    where: str, way: Row, read: Callable[[Row], float | None], limit: float, between: str = ""
) -> Iterator[Found]:
    """What is read of a way: nothing where it was not measured, a wrong one where it failed."""
    value = read(way) if "us" in way else None
    if value is not None or "error" in way:
        yield Found(where, None if "error" in way else value, limit, between)


def _ratio(way: Row, baseline: str) -> float | None:
    """Of a step or a call to the baseline's, by round."""
    return way["ratio"].get(baseline, {}).get("p50")


def _kept(way: Row) -> float:
    return float(way.get("kept_bytes") or way.get("held_bytes") or 0.0)


def steps(
    rows: Sequence[Row], section: str, name: str, way: str, baseline: str, limits: Limits
) -> Iterator[Found]:
    """A way's step at every width over the baseline's."""
    for width, row in _widths(rows, section, name, way, limits):
        between = _between(rows, row, way, baseline)
        read = functools.partial(_ratio, baseline=baseline)
        yield from _judged(f"D = {width}", row["ways"][way], read, limits[width], between)


def kept(rows: Sequence[Row], way: str, limits: Limits) -> Iterator[Found]:
    """The bytes that a way keeps at every width over those of eager."""
    for width, row in _widths(rows, "layers", "pre-norm", way, limits):
        whole = _kept(row["ways"].get("eager", {}))
        read = lambda way, of=whole: (of and _kept(way) / of) or None  # noqa: E731
        yield from _judged(f"D = {width}", row["ways"][way], read, limits[width])


def _widths(
    rows: Sequence[Row], section: str, name: str, way: str, limits: Limits
) -> Iterator[tuple[int, Row]]:
    for row in _rows(rows, section, name):
        width = row["case"]["width"]
        if width in limits and not row["case"].get("dropout") and way in row["ways"]:
            yield width, row


def _between(rows: Sequence[Row], row: Row, way: str, baseline: str) -> str:
    """Of a step: its profile where there is one; of an MLP's, what its products take."""
    case = row["case"]
    if case["section"] == "mlp":
        return _mlp_least(rows, row, baseline)
    if not case["name"].startswith("pre-norm"):
        return "not profiled"
    return of_profile(rows, case["width"], case.get("seq_len", SEQ_LEN), way, baseline)


def of_profile(rows: Sequence[Row], width: int, seq_len: int, way: str, baseline: str) -> str:
    """The least of a way's step relative to the baseline's step, and what takes how much more."""
    at, profiles = {"width": width, "seq_len": seq_len}, _rows(rows, "profile", "pre-norm")
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


def _mlp_least(rows: Sequence[Row], row: Row, baseline: str) -> str:
    ceilings = [way for found in _rows(rows, "ceilings") for way in found["ways"].values()]
    most = [way["TFLOP/s"] for way in ceilings if "TFLOP/s" in way]
    case, theirs = row["case"], row["ways"].get(baseline, {})
    if not most or "tokens" not in case or "us" not in theirs:
        return ""
    least = _MLP_PRODUCTS * 2e-6 * case["tokens"] * 4 * case["width"] ** 2 / most[0]
    said = f"{_MLP_PRODUCTS} products take {least:,.0f} µs at least"
    return f"{said}, {least / theirs['us']['p50']:.2f}× {baseline}'s step"


def _of_floor(row: Row, way: str, other: str) -> str:
    """Of a contest of kernels: the floor, and the shares of its speed."""
    if not row.get("floor_us"):
        return ""
    shares = (f"{n} {row['ways'][n]['of_ceiling']:.0%}" for n in (way, other)
              if "of_ceiling" in row["ways"].get(n, {}))  # fmt: skip
    return f"floor {row['floor_us']:,.0f} µs; of its speed: {', '.join(shares)}"


def _where(case: Row) -> str:
    """A contest's case in a few words."""
    names = {"seq_len": "S", "head_dim": "E", "kv_heads": "KV", "width": "D"}
    sizes = [f"{short} = {case[key]}" for key, short in names.items() if key in case]
    return ", ".join([re.sub(r"^\w+_(fwd|bwd) ", "", case["name"]), *sizes])


def mlp_backward(rows: Sequence[Row]) -> Iterator[Found]:
    """The fastest of our routes over its two products alone; all of them have to be right."""
    for row in _rows(rows, "products", "mlp_bwd gelu"):
        ways = {name: way for name, way in row["ways"].items() if name not in ("aten", "bare")}
        where = f"D = {row['case']['width']}"
        if any("error" in way for way in ways.values()):
            yield Found(where, None, 1.11)
            continue
        right = {name: _ratio(way, "bare") for name, way in ways.items() if "us" in way}
        right = {name: value for name, value in right.items() if value}
        if right:
            best = min(right, key=lambda name: right[name])
            yield Found(f"{where}, {best}", right[best], 1.11, _of_floor(row, best, "bare"))


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
            ways = row["ways"]
            times = {n: ways[n]["us"]["p50"] for n in _LIBRARY if "us" in ways.get(n, {})}
            if times:
                best = min(times, key=lambda name: times[name])
                read = lambda way, best=times[best]: best / way["us"]["p50"]  # noqa: E731
                given = ways.get(mine, {}), read, limit, _of_floor(row, mine, best)
                yield from _judged(_where(row["case"]), *given)


def dispatch(rows: Sequence[Row]) -> Iterator[Found]:
    """Our function over PyTorch's where it takes PyTorch's kernel: plain calls, as many key heads.

    Device time: the launches of both are queued ahead.
    """
    read = functools.partial(_ratio, baseline="aten")
    for row in _rows(rows, "attention", "attention_"):
        direction = row["case"]["name"].split()[0].removeprefix("attention_")
        ours = row["ways"].get("fused_remat triton", {})
        yield from _judged(f"{direction} {_where(row['case'])}", ours, read, 1.01)


def norms(
    rows: Sequence[Row], read: Callable[[Row], float | None], limit: float
) -> Iterator[Found]:
    mine = "fused_remat triton"
    for row in _rows(rows, "norms", "norm_bwd"):
        between = _of_floor(row, mine, "aten")
        yield from _judged(_where(row["case"]), row["ways"].get(mine, {}), read, limit, between)


def norm_speed(way: Row) -> float | None:
    ratio = _ratio(way, "aten")
    return None if ratio is None else 1.0 / ratio


def largest_batch(rows: Sequence[Row], baseline: str, loss: str) -> Iterator[Found]:
    """The best of ours over gradient checkpointing, each at its own largest batch.

    loss: "_loss": of ours with their fused loss, else of those without.
    """
    for row in _rows(rows, "model"):
        model, _, rest = row["case"]["name"].partition(",")
        ours = {name + loss: row["ways"].get(name + loss, {}) for name in _OURS}
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
        ours = {name: ways[name] for name in ways if name in _OURS}
        if any("error" in way for way in ours.values()):
            yield Found(f"{norm}, D = {width}", None, 0.95)
            continue
        beside, less = [], []
        for name, theirs in ways.items():
            if not name.startswith("compile") or "us" not in theirs:
                continue
            fits = {n: way["us"]["p50"] for n, way in ours.items()
                    if "us" in way and 0 < _kept(way) <= _kept(theirs)}  # fmt: skip
            if fits:
                best = min(fits, key=lambda n: fits[n])
                beside.append((fits[best] / theirs["us"]["p50"], best, name))
            else:
                less.append(name)
        if beside:
            value, best, name = max(beside)
            where = f"{best} beside {name}, {norm}, D = {width}"
            where += f" (none keeps as little as {', '.join(less)})" if less else ""
            between = "not profiled"
            if norm == "pre-norm":
                between = of_profile(rows, width, SEQ_LEN, best, "eager")
            yield Found(where, value, 0.95, between)
