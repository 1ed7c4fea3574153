"""Tables of `bench.model`'s results, which are plain data: a case's ways, losses, the targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.layers.report import Verdict, current
from bench.subjects.configs import MODELS

_MIB = 2**20
HEADER = (
    "way", "step", "vs eager", "vs checkpoint", "kept", "of eager's", "below the head",
    "of eager's", "peak", "largest batch", "tokens/s there",
)  # fmt: skip


def rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of whole models of a file's last run; `bench gpu` has others besides."""
    rows = [row | {"case": row.get("model", row["case"])} for row in current(results)]
    return [row for row in rows if "ways" in row and row["case"].get("model") in MODELS
            and "fixed_bytes" in row]  # fmt: skip


def title(row: dict[str, Any]) -> str:
    """A case in a few words."""
    c = row["case"]
    published = MODELS[c["model"]].layers
    layers = "all" if c["layers"] == published else f"{c['layers']} of {published}"
    kind = f"LoRA of rank {c['lora']}" if c["lora"] else "full fine-tuning"
    return (
        f"{c['model']}, {layers} layers, {kind}, {c['dtype']}, B = {c['batch']}, S = {c['seq_len']}"
    )


def case_table(row: dict[str, Any]) -> str:
    """A case's results as a Markdown table, a line per way; below it what they share."""
    lines = [_line(HEADER), _line(["---"] * len(HEADER))]
    for way, found in row["ways"].items():
        absent = found.get("unavailable") or found.get("absent")
        reason = absent or found.get("failure") or found.get("error")
        if reason is not None:
            said = ("absent: " if absent else "FAIL: ") + " ".join(reason.split())
            lines.append(_line([way, said, *[""] * (len(HEADER) - 2)]))
        else:
            lines.append(_line([way, *_cells(found, row)]))
    fixed = f"Parameters, gradients and AdamW's moments: {_size(row['fixed_bytes'])}"
    cap = row.get("memory_cap")
    within = f", within the cap of {_size(cap)} as well" if cap else ""
    return "\n".join([*lines, "", f"{fixed}{within}; {row['rounds']} rounds."])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _size(count: float) -> str:
    return f"{count / _MIB:,.0f} MiB" if count >= 10 * _MIB else f"{count / 1024:,.1f} KiB"


def _cells(found: dict[str, Any], row: dict[str, Any]) -> Iterator[str]:
    yield f"{1e3 * found['step_seconds']['p50']:,.0f} ms"
    for peer in ("eager", "checkpoint"):
        ratio = found["step_ratio"].get(peer)
        yield "" if ratio is None else f"{ratio['p50']:.2f}×"
    for what in ("kept_bytes", "kept_below_head_bytes"):
        yield "" if found[what] is None else _size(found[what])
        share = kept_share(found, row, what)
        yield "" if share is None else f"{share:.3f}"
    yield _size(found["step_peak_bytes"])
    yield str(found.get("largest_batch", ""))
    speed = found.get("tokens_per_second")
    yield "" if speed is None else f"{speed:,.0f}"


def kept_share(found: dict[str, Any], row: dict[str, Any], what: str) -> float | None:
    """Bytes kept, relative to the unconverted model's; None where either is not known."""
    theirs = row["ways"].get("eager", {}).get(what)
    return found[what] / theirs if theirs and found.get(what) is not None else None


def has_losses(row: dict[str, Any]) -> bool:
    """Whether losses were asked for."""
    return "losses" in row or "losses_failure" in row


def losses_table(row: dict[str, Any]) -> str:
    """Losses of every step side by side, and the largest relative differences."""
    if "losses_failure" in row:
        return f"Losses: FAIL: {row['losses_failure']}"
    found = row["losses"]
    ways = list(found["curves"])
    lines = [_line(["step", *ways]), _line(["---"] * (1 + len(ways)))]
    for step, losses in enumerate(zip(*found["curves"].values(), strict=True), 1):
        lines.append(_line([str(step), *(f"{loss:.6f}" for loss in losses)]))
    differences = ", ".join(f"{way} {d:.1e}" for way, d in found["differences"].items())
    noise = (
        f"Largest relative difference to eager: {differences or 'none compared'}. Of eager from "
        f"parameters moved by a rounding each: {found['noise']:.1e}; "
        f"allowed {found['allowed']:.1e}."
    )
    return "\n".join([*lines, "", noise])


# --- the targets


@dataclass(frozen=True)
class Target:
    """A limit in every case of full fine-tuning of SmolLM-135M, in float32 on a CPU.

    Attributes:
        what: "kept_bytes" and "kept_below_head_bytes" against eager's, "step" against HF's
            gradient checkpointing.
    """

    ways: tuple[str, ...]
    what: str
    limit: float

    @property
    def text(self) -> str:
        names = {
            "kept_bytes": "bytes kept ≤ {:.2f}× eager's, head and loss included",
            "kept_below_head_bytes": "bytes kept ≤ {:.2f}× eager's, up to the head",
            "step": "step ≤ {:.2f}× gradient checkpointing's",
        }
        return f"{', '.join(self.ways)}: {names[self.what].format(self.limit)}"

    def value(self, found: dict[str, Any], row: dict[str, Any]) -> float | None:
        """What the limit is for, of a way that was measured."""
        if "step_ratio" not in found:
            return None
        if self.what == "step":
            ratio: float | None = found["step_ratio"].get("checkpoint", {}).get("p50")
            return ratio
        return kept_share(found, row, self.what)


#: Of the whole model the head's logits are a large share, which no layer can do without: there the
#: ways with a fused loss are judged.
TARGETS = (
    Target(("full",), "kept_below_head_bytes", 0.10),
    Target(("full_loss",), "kept_bytes", 0.10),
    Target(("fast",), "kept_below_head_bytes", 0.45),
    Target(("fast_loss",), "kept_bytes", 0.45),
    Target(("full",), "step", 0.95),
    Target(("lean",), "step", 0.90),
)
MODEL = "smollm-135m"


def verdicts(results: dict[str, Any]) -> list[Verdict]:
    """Every target's verdict, from the results file's data; the last is that of the losses."""
    rows = [row for row in rows_of(results) if row["case"]["model"] == MODEL]
    mine = [row for row in rows if not row["case"]["lora"]]
    return [*(_verdict(target, mine) for target in TARGETS), _same_losses(rows)]


def _verdict(target: Target, rows: Sequence[dict[str, Any]]) -> Verdict:
    values, wrong = [], []
    for row in rows:
        for way in target.ways:
            found = row["ways"].get(way, {})
            wrong += [way] if "failure" in found else []
            value = target.value(found, row)
            values += [] if value is None else [value]
    if wrong:
        return Verdict(target.text, f"wrong results: {', '.join(wrong)}", False)
    if not values:
        return Verdict(target.text, "not measured", None)
    span = " to ".join(f"{value:.3f}" for value in sorted({min(values), max(values)}))
    return Verdict(target.text, span, max(values) <= target.limit)


def _same_losses(rows: Sequence[dict[str, Any]]) -> Verdict:
    found = [row["losses"] for row in rows if "losses" in row]
    steps = max((losses["steps"] for losses in found), default=30)
    text = f"losses of {steps} steps are the unconverted model's within rounding"
    worst = [(d, losses["allowed"]) for losses in found for d in losses["differences"].values()]
    if not worst:
        return Verdict(text, "not measured", None)
    met = all(difference <= allowed for difference, allowed in worst)
    difference, allowed = max(worst, key=lambda pair: pair[0] / pair[1])
    return Verdict(text, f"{difference:.1e} relative, allowed {allowed:.1e}", met)


def target_table(results: dict[str, Any]) -> str:
    """The targets as a Markdown table."""
    met = {True: "yes", False: "no", None: "-"}
    lines = [f"| target ({MODEL}) | measured | met |", "|---|---|---|"]
    lines += [f"| {v.target} | {v.measured} | {met[v.met]} |" for v in verdicts(results)]
    return "\n".join(lines)


def article(results: dict[str, Any]) -> str:
    """All cases of a results file as a page: fine-tuning with and without checkpointing."""
    parts = ["# Fine-tuning in every way"]
    for row in rows_of(results):
        parts += [f"## {title(row)}", case_table(row)]
        if has_losses(row):
            parts += ["### Losses", losses_table(row)]
    return "\n\n".join([*parts, "## Targets", target_table(results)]) + "\n"
