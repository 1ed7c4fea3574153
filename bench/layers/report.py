"""Tables of `bench.layers`' results, which are plain data: a case's ways, and the targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fused_remat.policies import EXACT_PRESETS

PARTS = ("forward", "backward", "step")  # what is timed
WIDTHS = (512, 1024)  # the targets are for d_model between these


def title(row: dict[str, Any]) -> str:
    """A case in a few words."""
    c = row["case"]
    sizes = f"(B, S, D, H) = ({c['batch']}, {c['seq_len']}, {c['d_model']}, {c['nhead']})"
    rest = ["relu"] if c.get("activation") == "relu" else []
    rest += ["causal"] if c.get("causal") else []
    return ", ".join([c["dtype"], f"{c['norm']}-norm", *rest, f"dropout {c['dropout']:g}", sizes])


def _p50(quantiles: dict[str, float] | None, suffix: str = "x") -> str:
    return "-" if quantiles is None else f"{quantiles['p50']:.3f}{suffix}"


def _cells(way: str, r: dict[str, Any]) -> tuple[str, ...]:
    reason = r.get("unavailable") or r.get("failure")
    if reason is not None:
        return (way, ("absent: " if "unavailable" in r else "FAIL: ") + reason)
    peaks = (r.get(f"{part}_peak_bytes") for part in ("backward", "step"))
    return (
        way, *(f"{1e3 * r[f'{part}_seconds']['p50']:.1f}" for part in PARTS),
        _p50(r["step_ratio"].get("eager")), _p50(r["step_ratio"].get("checkpoint")),
        f"{r['kept_bytes_per_token']:,.0f}",
        *("-" if peak is None else f"{peak / 2**20:,.1f}" for peak in peaks),
    )  # fmt: skip


def case_table(row: dict[str, Any]) -> str:
    """A case's results as aligned text, a line per way."""
    header = (
        "", "forward ms", "backward ms", "step ms", "vs eager", "vs checkpoint", "kept B/token",
        "backward peak MiB", "peak MiB",
    )  # fmt: skip
    lines = [header, *(_cells(way, r) for way, r in row["ways"].items())]
    full = [line for line in lines if len(line) == len(header)]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    widths[0] = max(len(line[0]) for line in lines)
    aligned = []
    for first, *others in lines:
        if len(others) == 1:
            aligned.append(f"{first.ljust(widths[0])}  {others[0]}")
        else:
            cells = map(str.rjust, others, widths[1:])
            aligned.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(aligned)


@dataclass(frozen=True)
class Target:
    """A limit to the ratio of step times (medians over the rounds), in every case it is for."""

    dtype: str
    ways: tuple[str, ...]
    baseline: str
    limit: float
    norms: tuple[str, ...]
    dropout: float

    @property
    def text(self) -> str:
        ways = "every preset" if self.ways == tuple(EXACT_PRESETS) else ", ".join(self.ways)
        norms = " and ".join(f"{norm}-norm" for norm in self.norms)
        where = f"{self.dtype}, {norms}, dropout {self.dropout:g}"
        return f"{ways} ≤ {self.limit:.2f}× {self.baseline} ({where})"

    def covers(self, case: dict[str, Any]) -> bool:
        return (
            case["dtype"] == self.dtype
            and case["norm"] in self.norms
            and case["dropout"] == self.dropout
            and WIDTHS[0] <= case["d_model"] <= WIDTHS[1]
            and case.get("activation", "gelu") == "gelu"
            and not case.get("causal")
        )


#: Target 9 of the project, for CPUs.
TARGETS = tuple(
    Target(dtype, *rest)
    for dtype in ("float32", "bfloat16")
    for rest in (
        (("full",), "checkpoint", 0.95, ("pre",), 0.0),
        (("lean",), "checkpoint", 0.90, ("pre",), 0.0),
        (("fast",), "checkpoint", 0.82, ("pre",), 0.0),
        (("lean",), "checkpoint", 0.88, ("post",), 0.0),
        (("fast",), "eager", 1.00, ("pre", "post"), 0.0),
        (tuple(EXACT_PRESETS), "eager", 0.80, ("pre", "post"), 0.1),
    )
)
#: Why a ratio says little of the method: the stock ways' products take most of the time.
SLOW_BFLOAT16 = (
    "the stock ways' bfloat16 products are unaccelerated on this CPU, ours run in float32"
)


@dataclass(frozen=True)
class Verdict:
    """What was measured for a target; `met` is None where nothing was."""

    target: str
    measured: str
    met: bool | None


def current(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that were measured on the file's machine and commit, not those left of others."""
    same = {**results["machine"], "date": None}
    return [row for row in results["results"] if {**row["machine"], "date": None} == same]


def _ratios(target: Target, results: dict[str, Any]) -> Iterator[tuple[float | None, str]]:
    """(median ratio, where) of every way and case that the target is for; None: wrong results."""
    for row in current(results):
        c = row["case"]
        if not target.covers(c):
            continue
        sizes = "x".join(str(c[name]) for name in ("batch", "seq_len", "d_model", "nhead"))
        for way in target.ways:
            found = row["ways"].get(way, {})
            where = f"{way} {c['norm']}-norm {sizes}"
            if "failure" in found:
                yield None, where
            elif target.baseline in found.get("step_ratio", {}):
                yield found["step_ratio"][target.baseline]["p50"], where


def verdict(target: Target, results: dict[str, Any]) -> Verdict:
    """A target's verdict: met if it is in every case that was measured."""
    found = list(_ratios(target, results))
    wrong = [where for ratio, where in found if ratio is None]
    ratios = [(ratio, where) for ratio, where in found if ratio is not None]
    if wrong:
        return Verdict(target.text, f"wrong results: {', '.join(wrong)}", False)
    if not ratios:
        return Verdict(target.text, "not measured", None)
    worst, where = max(ratios)
    within = sum(ratio <= target.limit for ratio, _ in ratios)
    slow = target.dtype == "bfloat16" and not results["machine"].get("native_bfloat16", True)
    note = f"; {SLOW_BFLOAT16}" if slow else ""
    span = f"{min(ratios)[0]:.3f} to {worst:.3f}, {within} of {len(ratios)} within"
    measured = span if len(ratios) > 1 else f"{worst:.3f}"
    return Verdict(target.text, f"{measured} (worst: {where}){note}", worst <= target.limit)


def verdicts(results: dict[str, Any], targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """Every target's verdict, from the results file's data."""
    return [verdict(target, results) for target in targets]


def target_table(results: dict[str, Any]) -> str:
    """The targets as a Markdown table."""
    met = {True: "yes", False: "no", None: "-"}
    lines = ["| target | measured | met |", "|---|---|---|"]
    lines += [f"| {v.target} | {v.measured} | {met[v.met]} |" for v in verdicts(results)]
    return "\n".join(lines)
