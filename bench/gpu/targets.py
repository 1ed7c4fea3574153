"""Targets 1 to 8 of the project, for GPUs, held against the rows of `bench gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu import evidence, kernels
from bench.gpu.evidence import LONG_LEN, Found, Row
from bench.gpu.layers import BATCHES
from bench.tables import Verdict, markdown

UNMEASURED = "not measured"
#: Cases that are all shown; of more, the best and the worst.
_FEW = 3


@dataclass(frozen=True)
class Line:
    """A line of the table: a target or a part of one."""

    number: int
    verdict: Verdict
    between: str = ""  # the least, and what is above it; "" where it is not missed


@dataclass(frozen=True)
class Target:
    """A part of a target: its text, and what rows say of it."""

    number: int
    text: str
    find: Callable[..., Iterator[Found]]  # (rows, *given) -> every case that was measured
    given: tuple[Any, ...]
    cases: int  # how many there have to be
    at_least: bool = False  # the limit is the least that is wanted, not the most

    def line(self, rows: Sequence[Row], unmeasured: str = UNMEASURED) -> Line:
        """Met if it is in every case; not said to be while one of them is not measured."""

        def shortfall(one: Found) -> float:
            """Above 1 where it is missed."""
            assert one.value is not None
            off = one.value / one.limit
            return 1.0 / max(off, 1e-9) if self.at_least else off

        found = list(self.find(rows, *self.given))
        wrong = [one.where for one in found if one.value is None]
        if wrong:
            said = f"wrong, or failed: {', '.join(wrong)}"
            return Line(self.number, Verdict(self.text, said, False))
        if not found:
            return Line(self.number, Verdict(self.text, unmeasured, None))
        order = sorted(found, key=shortfall)
        missed = [one for one in order if shortfall(one) > 1.0]
        missing = max(0, self.cases - len({one.where for one in found}))
        few = len(found) <= _FEW
        each = [f"{one.value:.3f} ({one.where})" for one in order]
        within = f"{each[0]} to {each[-1]}, {len(found) - len(missed)} of {len(found)} within"
        said = ", ".join(each) if few else within
        said += f"; {missing} of {self.cases} {UNMEASURED}" if missing else ""
        met = False if missed else None if missing else True
        shown = missed if few else missed[-1:]
        stands = [f"{one.where}: {one.between}" for one in shown if one.between]
        return Line(self.number, Verdict(self.text, said, met), "; ".join(stands))


_WIDTHS = (1024, 2048, 4096)


def _step(number: int, way: str, baseline: str, section: str, name: str, *at: float) -> Target:
    shown, limits = "/".join(f"{limit:.2f}" for limit in at), dict(zip(_WIDTHS, at, strict=True))
    text = f"{name}: {way} ≤ {shown}× the time of {baseline}, D = 1024/2048/4096"
    return Target(number, text, evidence.steps, (section, name, way, baseline, limits), len(at))


def _kept(way: str, limit: float, number: int = 1, baseline: str = "eager") -> Target:
    text = f"pre-norm: {way} keeps ≤ {limit:.2f}× the bytes of {baseline}"
    given = way, baseline, dict.fromkeys(_WIDTHS, limit)
    return Target(number, text, evidence.kept, given, len(_WIDTHS))


#: Cases of `bench gpu`: plain attention of a direction, norms, of each kind at each width.
_ATTENTION, _NORMS = 8, 2 * len(kernels.WIDTHS)

TARGETS = (
    _step(1, "fast", "eager", "layers", "pre-norm", 0.98, 1.04, 1.09),
    _kept("fast", 0.39),
    _step(1, "balanced", "eager", "layers", "pre-norm", 1.03, 1.10, 1.16),
    _kept("balanced", 0.20),
    _step(1, "full", "checkpoint", "layers", "pre-norm", 0.90, 0.94, 0.97),
    _step(1, "lean", "checkpoint", "layers", "pre-norm", 0.86, 0.91, 0.95),
    _step(1, "lean", "checkpoint", "layers", "post-norm", 0.85, 0.88, 0.92),
    _step(2, "full", "eager", "mlp", "mlp", 1.03, 1.11, 1.16),
    Target(3, "MLP backward, rebuild and gradients ≤ 1.11× its two bare products",
           evidence.mlp_backward, (), len(_WIDTHS)),
    Target(4, f"S = {LONG_LEN}, D = 2048: balanced ≤ 1.08× the time of none",
           evidence.steps, ("long", "pre-norm", "balanced", "none", {2048: 1.08}), 1),
    Target(4, f"S = {LONG_LEN}: balanced runs attention's forward once a step",
           evidence.attention_forwards, (), 1),
    Target(5, "own attention forward ≥ 0.85× the speed of the best library kernel",
           evidence.own_attention, ("fwd", 0.85), _ATTENTION, at_least=True),
    Target(5, "own attention backward ≥ 0.80× the speed of the best library kernel",
           evidence.own_attention, ("bwd", 0.80), _ATTENTION, at_least=True),
    Target(5, "where the library's kernel is used ≤ 1.01× its device time (not the host's)",
           evidence.dispatch, (), 2 * _ATTENTION),
    Target(6, "norm backward ≥ 0.80× of the copy's bandwidth",
           evidence.norms, (lambda way: way.get("of_ceiling"), 0.80), _NORMS, at_least=True),
    Target(6, "norm backward ≥ 1.00× the speed of torch at every width",
           evidence.norms, (evidence.norm_speed, 1.0), _NORMS, at_least=True),
    Target(7, "within one memory cap, each at its largest batch: tokens/s ≥ 1.15× checkpoint's",
           evidence.largest_batch, ("checkpoint", ""), len(BATCHES), at_least=True),
    Target(7, "the same with a fused loss: ≥ 1.15× that of checkpoint with Liger's",
           evidence.largest_batch, ("liger_checkpoint", "_loss"), len(BATCHES), at_least=True),
    Target(8, "at no more bytes than torch.compile keeps: ≤ 0.95× its time",
           evidence.compiled, (), 2 * len(_WIDTHS)),
)  # fmt: skip


def lines(rows: Sequence[Row], unmeasured: str = UNMEASURED) -> list[Line]:
    """Every target's line, from the rows of one run in bfloat16, which is what they are for."""
    rows = [row for row in rows if row.get("config", {}).get("dtype", "bfloat16") == "bfloat16"]
    return [target.line(rows, unmeasured) for target in TARGETS]


def table(rows: Sequence[Row], unmeasured: str = UNMEASURED) -> str:
    head = ("", "target", "measured", "met", "the least, and what is above it")
    cells = [[str(line.number), *line.verdict.cells, line.between]
             for line in lines(rows, unmeasured)]  # fmt: skip
    return markdown(head, cells)
