"""One layer on a CPU: the targets, every measured case, and where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bench import tables
from bench.commands import profile as profile_step
from bench.tables import RESULTS, Columns, Row, Verdict, load
from fused_remat.policies import EXACT_PRESETS

FILE = "layers-cpu.json"
WIDTHS = (512, 1024)  # the targets are for d_model between these


def title(row: Row) -> str:
    """A case in a few words."""
    c = row["case"]
    sizes = f"(B, S, D, H) = ({c['batch']}, {c['seq_len']}, {c['d_model']}, {c['nhead']})"
    rest = ["relu"] * (c.get("activation") == "relu") + ["causal"] * bool(c.get("causal"))
    return ", ".join([c["dtype"], f"{c['norm']}-norm", *rest, f"dropout {c['dropout']:g}", sizes])


def _columns(more: int = 0) -> Columns:
    """What is said of a way; `more`: digits than on the page."""
    return [
        ("forward", lambda way: tables.ms(way["forward_seconds"]["p50"], more)),
        ("backward", lambda way: tables.ms(way["backward_seconds"]["p50"], more)),
        ("step", lambda way: tables.ms(way["step_seconds"]["p50"], more)),
        ("vs eager", lambda way: tables.times(way["step_ratio"].get("eager"), 2 + more)),
        ("vs checkpoint", lambda way: tables.times(way["step_ratio"].get("checkpoint"), 2 + more)),
        ("kept bytes per token", lambda way: tables.number(way["kept_bytes_per_token"])),
        ("backward's peak", lambda way: tables.mib(way.get("backward_peak_bytes"), more)),
        ("step's peak", lambda way: tables.mib(way.get("step_peak_bytes"), more)),
    ]


def case_table(row: Row) -> str:
    """A case's ways, for a terminal."""
    return tables.ways_table(row["ways"], _columns(more=1), write=tables.terminal)


class Target(NamedTuple):
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

    def covers(self, case: Row) -> bool:
        return (
            (case["dtype"], case["dropout"]) == (self.dtype, self.dropout)
            and case["norm"] in self.norms
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


def verdict(target: Target, results: Row) -> Verdict:
    """A target's verdict: met if it is in every case that was measured."""
    wrong, ratios = [], {}
    for row in (row for row in tables.current(results) if target.covers(row["case"])):
        c = row["case"]
        sizes = "x".join(str(c[name]) for name in ("batch", "seq_len", "d_model", "nhead"))
        for way in target.ways:
            found = row["ways"].get(way, {})
            where = f"{way} {c['norm']}-norm {sizes}"
            wrong += [where] * ("failure" in found)
            if target.baseline in found.get("step_ratio", {}):
                ratios[where] = found["step_ratio"][target.baseline]["p50"]
    if wrong:
        return Verdict(target.text, f"wrong results: {', '.join(wrong)}", False)
    if not ratios:
        return Verdict(target.text, "not measured", None)
    within = sum(ratio <= target.limit for ratio in ratios.values())
    several = f", {within} of {len(ratios)} within" if len(ratios) > 1 else ""
    worst = max(ratios, key=ratios.__getitem__)
    said = f"{tables.span(ratios.values(), '.3f')}{several} (worst: {worst})"
    slow = target.dtype == "bfloat16" and not results["machine"].get("native_bfloat16", True)
    return Verdict(target.text, said + f"; {SLOW_BFLOAT16}" * slow, within == len(ratios))


def target_table(results: Row) -> str:
    """Every target, met or not."""
    return tables.verdict_table(verdict(target, results) for target in TARGETS)


def targets(root: Path = RESULTS) -> str:
    """The targets of CPUs, met or not."""
    return target_table(load(root / FILE))


def profile(root: Path = RESULTS) -> str:
    """Where a step spends its time."""
    return profile_step.table(load(root / "profile-cpu.json"))


def cases(root: Path = RESULTS) -> str:
    """Every measured case: times beside eager's and checkpoint's, kept bytes, peaks."""
    data = load(root / FILE)
    parts = [tables.machine_line(data["machine"])]
    for row in tables.current(data):
        name = f"{title(row)}, {row['rounds']} rounds"
        parts.append(tables.folded(name, tables.ways_table(row["ways"], _columns())))
    return "\n\n".join(parts)
