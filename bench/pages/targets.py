"""Targets of GPUs: the newest measurement of each, and the least that its products take.

A bound is the time of a step's matrix products at the rate of the run's largest product, with
attention as fast as it was profiled; copies, norms and launches are not counted. A target below its
bound is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from bench import tables
from bench.pages.kernels import ceilings
from bench.pages.overview import WIDTHS
from bench.pages.presets import D, Kept, block, products
from bench.tables import Row


class Value(NamedTuple):
    """A measured value, the folder of its results, and the least possible if that is known."""

    value: float
    folder: str
    bound: float | None = None


class Target(NamedTuple):
    """A line of the table; limits by case are the most, or where `at_least` the least."""

    text: str
    find: Callable[[Any], Value | None]  # of a case
    limits: dict[Any, float]
    at: str = "D = "
    at_least: bool = False

    def cells(self) -> list[tables.Cell]:
        """Return the text, where, and of each case the value, limit, outcome, bound and folder."""
        columns, folders = [], set()
        for case, limit in self.limits.items():
            value, folder, bound = self.find(case) or (None, "", None)
            dropped = bound is not None and limit < bound
            met = value is not None and (value >= limit if self.at_least else value <= limit)
            shown = [tables.number(x, 2) or "–" for x in (value, None if dropped else limit, bound)]
            outcome = "dropped" if dropped else "–" if value is None else "yes" if met else "no"
            columns.append([str(case), *shown[:2], outcome, shown[2]])
            folders |= {folder.rpartition("-")[2]} - {""}
        where, values, limits, *rest = (" / ".join(c) for c in zip(*columns, strict=True))
        sign = "≥" if self.at_least else "≤"
        return [self.text, self.at + where, values, f"{sign} {limits}", *rest,
                ", ".join(sorted(folders))]  # fmt: skip


def _newest(
    right: Callable[[Row], Any], *sections: str, **case: Any
) -> tuple[Row, str, dict[str, float]] | None:
    """Return the newest row that is right, by section, its folder, and the ceilings of its run."""
    for section in sections:
        for folder, data in tables.gpu_files():
            for row in tables.current(data):
                fits = {"section": section, **case}.items() <= row["case"].items()
                if fits and "ways" in row and right(row["ways"]):
                    return row, folder.name, ceilings(data["results"])
    return None


def _over(
    way: str, baseline: str, *sections: str, key: str = "step", least: Any = None, **case: Any
) -> Value | None:
    """Return the ratio of a way's time to a baseline's in the newest row that has both.

    key: "step" or "host". least: gives the least microseconds, of the row and the rate of products.
    """
    both = {way, baseline}
    found = _newest(lambda w: all("step_seconds" in w.get(n, {}) for n in both), *sections, **case)
    if found is None:
        return None
    row, folder, most = found
    seconds = {name: row["ways"][name][f"{key}_seconds"]["p50"] for name in both}
    ratio = row["ways"][way]["step_ratio"].get(baseline, {}) if key == "step" else {}
    us = least(row, most["TFLOP/s"] * 1e6) if least and "TFLOP/s" in most else None
    bound = us and us / seconds[baseline] / 1e6
    return Value(ratio.get("p50", seconds[way] / seconds[baseline]), folder, bound)


def encoder(preset: str, baseline: str) -> Callable[[int], Value | None]:
    """Return the time of a preset of the pre-norm layer over a baseline's, of a width."""
    kept = Kept(block(True), preset)
    flops = (3 * products(kept.graph, kept.graph.nodes) + kept.products) / D**2  # in D² a token
    sections = ("layers",) if baseline == "eager" else ("compile", "profile")

    def least(row: Row, rate: float) -> float | None:
        case = row.get("layer") or row["profiled"]
        sizes = {"width": case["d_model"], "seq_len": case["seq_len"]}
        found = _newest(lambda ways: "kinds_us" in ways.get("full", {}), "profile", **sizes)
        if found is None:
            return None
        ways = {
            n: w["kinds_us"]["attention"] for n, w in found[0]["ways"].items() if "kinds_us" in w
        }
        again = [us for name, us in ways.items() if name in ("checkpoint", "full")]
        tokens = case["batch"] * case["seq_len"]
        attention = min(again if kept.attentions else ways.values())
        return float(flops * case["d_model"] ** 2 * tokens / rate + attention)

    name = "pre-norm" if baseline == "eager" else "pre-norm, compiled"

    def find(width: int) -> Value | None:
        given = {"least": least, "width": width, "seq_len": 2048}
        found = _over(preset, baseline, sections[0], name=name, **given)
        return found or _over(preset, baseline, *sections[1:], name="pre-norm", **given)

    return find


def mlp(width: int) -> Value | None:
    """Return the time of an MLP that keeps its input alone over eager's."""

    def least(row: Row, rate: float) -> float:  # three passes, and the first product again
        eager = row["ways"]["eager"]
        tokens = eager["kept_bytes"] / eager["kept_bytes_per_token"]
        return float(56 * width**2 * tokens / rate)

    return _over("full", "eager", "mlp", width=width, least=least)


def largest_batch(_: Any) -> Value | None:
    """Return tokens a second of the best preset over those of Liger with checkpointing."""
    found = _newest(lambda ways: "largest_batch" in ways.get("liger_checkpoint", {}), "model")
    if found is None:
        return None
    rates = {n: w["tokens_per_second"] for n, w in found[0]["ways"].items() if "largest_batch" in w}
    peer = rates.pop("liger_checkpoint")
    ours = [rate for name, rate in rates.items() if name not in ("eager", "checkpoint")]
    return Value(max(ours) / peer, found[1])


def _by_width(*limits: float) -> dict[Any, float]:
    return dict(zip(WIDTHS, limits, strict=True))


def _host(width: int) -> Value | None:
    case = {"name": "pre-norm", "width": width, "dropout": 0.0}
    return _over("full", "eager", "layers", key="host", **case)


TARGETS = (
    Target("pre-norm layer, `full` over eager", encoder("full", "eager"),
           _by_width(0.88, 0.97, 1.03)),
    Target("the same, `lean`", encoder("lean", "eager"), _by_width(0.85, 0.94, 1.01)),
    Target("the same, `none` over `torch.compile`", encoder("none", "compile"),
           _by_width(0.97, 0.95, 0.97)),
    Target("D = 2048, `lean` over eager", lambda s: _over("lean", "eager", "long", seq_len=s),
           {32768: 1.0}, "S = "),
    Target("Qwen2-1.5B, `full` with `loss=True` over eager", lambda batch: _over(
        "full_loss", "eager", "model", name="qwen2-1.5b, full fine-tuning"), {4: 0.83}, "B = "),
    Target("SmolLM-135M, largest batch: tokens a second over Liger with checkpointing",
           largest_batch, {"24 GiB": 1.15}, "", at_least=True),
    Target("MLP from its input alone, over eager", mlp, _by_width(1.13, 1.13, 1.15)),
    Target("host time of a layer's step, `full` over eager", _host, _by_width(1.15, 1.15, 1.15)),
)  # fmt: skip


def table(targets: tuple[Target, ...] = TARGETS) -> str:
    """Return every target, the newest measurement of it on any GPU, and its bound."""
    machines = dict.fromkeys(data["machine"]["gpu"] for _, data in tables.gpu_files())
    head = ("target", "at", "measured", "limit", "met", "bound", "results")
    where = f"The newest results of each case, measured on {', '.join(machines)}."
    rows = [target.cells() for target in targets]
    met = sum(set(str(row[4]).split(" / ")) == {"yes"} for row in rows)
    return f"{where} Targets met: {met} of {len(rows)}.\n\n{tables.markdown(head, rows)}"
