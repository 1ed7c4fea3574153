"""One layer on a CPU: the targets, every measured case, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench import tables
from bench.commands import profile as profile_step
from bench.tables import RESULTS, Columns, Row, Verdict, load
from fused_remat.policies import EXACT_PRESETS

FILE = "layers-cpu.json"
#: Of a small layer, on one thread: `bench layers --threads 1 --batch 2 --seq-len 16 --d-model 64
#: --nhead 4 --norm pre --dropout 0 --out bench/results/small-cpu`.
SMALL = "small-cpu/layers-cpu.json"


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
    """Limits to ratios of step times (medians over the rounds), in every case they are for.

    Attributes:
        limits: by way.
        sizes: (B, S, D, H) of the cases; () for all.
    """

    baseline: str
    limits: Mapping[str, float]
    sizes: tuple[int, ...] = ()
    dtype: str = "float32"
    norm: str = "pre"
    dropout: float = 0.0

    @property
    def text(self) -> str:
        if self.limits == MOST:
            ways = "every preset ≤ 1.00"
        else:
            ways = ", ".join(f"{way} ≤ {limit:.2f}" for way, limit in self.limits.items())
        where = [self.dtype, f"{self.norm}-norm", f"dropout {self.dropout:g}"]
        where += [str(self.sizes)] if self.sizes else []
        return f"{ways} × {self.baseline} ({', '.join(where)})"

    def covers(self, case: Row) -> bool:
        kind = case["dtype"], case["norm"], case["dropout"]
        return (
            kind == (self.dtype, self.norm, self.dropout)
            and self.sizes in ((), sizes_of(case))
            and case.get("activation", "gelu") == "gelu"
            and not case.get("causal")
        )


def sizes_of(case: Row) -> tuple[int, ...]:
    return tuple(case[name] for name in ("batch", "seq_len", "d_model", "nhead"))


#: No preset takes longer than checkpointing.
MOST = dict.fromkeys(EXACT_PRESETS, 1.0)
_SMALL, _WIDE, _LARGE = (4, 512, 512, 8), (4, 512, 1024, 16), (8, 512, 512, 8)
#: The project's targets for CPUs.
TARGETS = (
    Target("checkpoint", {"full": 0.90}, _SMALL),
    Target(
        "eager", {"full": 1.12, "lean": 1.05, "balanced": 1.03, "fast": 1.0, "none": 0.93}, _SMALL
    ),
    Target("checkpoint", {"full": 0.85}, _WIDE),
    Target("eager", {"full": 1.05}, _WIDE),
    Target("checkpoint", {"full": 0.88}, _LARGE),
    Target("eager", {"full": 1.12}, _LARGE),
    Target("checkpoint", {"full": 0.55}, _SMALL, dropout=0.1),
    Target("eager", {"full": 0.85, "none": 0.68}, _SMALL, dropout=0.1),
    Target("checkpoint", {"lean": 0.88}, norm="post"),
    Target("eager", {"full": 1.0, "none": 0.9}, (2, 16, 64, 4)),
    Target("checkpoint", {"full": 0.92}, _SMALL, "bfloat16"),
    Target("eager", {"none": 1.0}, _SMALL, "bfloat16"),
    *(
        Target("checkpoint", MOST, (), dtype, norm, dropout)
        for dtype in ("float32", "bfloat16", "float16")
        for norm in ("pre", "post")
        for dropout in (0.0, 0.1)
    ),
)
#: Why a ratio says little of the method: the stock ways' products take most of the time.
SLOW_BFLOAT16 = (
    "the stock ways' bfloat16 products are unaccelerated on this CPU, ours run in float32"
)


def verdict(target: Target, *files: Row) -> Verdict:
    """A target's verdict: met if it is in every case that was measured."""
    wrong, ratios, within = [], {}, 0
    rows = [row for data in files for row in tables.current(data)]
    for row in (row for row in rows if target.covers(row["case"])):
        c = row["case"]
        for way, limit in target.limits.items():
            found = row["ways"].get(way, {})
            where = way if target.sizes else f"{way} {sizes_of(c)}"
            wrong += [where] * ("failure" in found)
            if target.baseline in found.get("step_ratio", {}):
                ratios[where] = found["step_ratio"][target.baseline]["p50"]
                within += ratios[where] <= limit
    if wrong:
        return Verdict(target.text, f"wrong results: {', '.join(wrong)}", False)
    if not ratios:
        return Verdict(target.text, "not measured", None)
    if target.sizes:
        said = ", ".join(f"{where} {ratio:.3f}" for where, ratio in ratios.items())
    else:
        worst = max(ratios, key=ratios.__getitem__)
        said = f"{tables.span(ratios.values(), '.3f')} (worst: {worst})"
    said += f"; {within} of {len(ratios)} within" if 1 < len(ratios) != within else ""
    slow = target.dtype == "bfloat16" and not files[0]["machine"].get("native_bfloat16", True)
    return Verdict(target.text, said + f"; {SLOW_BFLOAT16}" * slow, within == len(ratios))


def target_table(*files: Row) -> str:
    """Every target, met or not, by the results in all files."""
    return tables.verdict_table(verdict(target, *files) for target in TARGETS)


def targets(root: Path = RESULTS) -> str:
    """The targets of CPUs, met or not."""
    small = [load(root / SMALL)] if (root / SMALL).exists() else []
    return target_table(load(root / FILE), *small)


def profile(root: Path = RESULTS, dtype: str = "float32") -> str:
    """Where a step spends its time, in this dtype, and on which machine."""
    data = load(root / profile_step.FILES[dtype])
    return f"{profile_step.table(data)}\n\n{tables.machine_line(data['machine'])}"


def profile_bfloat16(root: Path = RESULTS) -> str:
    return profile(root, "bfloat16")


def cases(root: Path = RESULTS) -> str:
    """Every measured case: times beside eager's and checkpoint's, kept bytes, peaks."""
    data = load(root / FILE)
    parts = [tables.machine_line(data["machine"])]
    for row in tables.current(data):
        name = f"{title(row)}, {row['rounds']} rounds"
        parts.append(tables.folded(name, tables.ways_table(row["ways"], _columns())))
    return "\n\n".join(parts)
