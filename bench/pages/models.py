"""Whole models: every measured case, losses of every step, and the targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench import tables
from bench.subjects.configs import MODELS
from bench.tables import MIB, RESULTS, Cell, Columns, Row, Verdict

FILE = "model-cpu.json"


def rows_of(results: Row) -> list[Row]:
    """The rows of whole models of a file's last run; `bench gpu` has others besides."""
    rows = [row | {"case": row.get("model", row["case"])} for row in tables.current(results)]
    return [row for row in rows if "ways" in row and row["case"].get("model") in MODELS
            and "fixed_bytes" in row]  # fmt: skip


def title(row: Row) -> str:
    """A case in a few words."""
    c = row["case"]
    published = MODELS[c["model"]].layers
    layers = "all" if c["layers"] == published else f"{c['layers']} of {published}"
    kind = f"LoRA of rank {c['lora']}" if c["lora"] else "full fine-tuning"
    sizes = f"B = {c['batch']}, S = {c['seq_len']}"
    return f"{c['model']}, {layers} layers, {kind}, {c['dtype']}, {sizes}"


def case_table(row: Row) -> str:
    """A case's results, a line per way; below it what they share."""

    def size(what: str) -> Callable[[Row], Cell]:
        return lambda way: _size(way[what])

    def share(what: str) -> Callable[[Row], Cell]:
        return lambda way: tables.number(kept_share(way, row, what), 3)

    columns: Columns = [
        ("step", lambda way: tables.ms(way["step_seconds"]["p50"])),
        ("vs eager", lambda way: tables.times(way["step_ratio"].get("eager"))),
        ("vs checkpoint", lambda way: tables.times(way["step_ratio"].get("checkpoint"))),
        ("kept", size("kept_bytes")),
        ("of eager's", share("kept_bytes")),
        ("below the head", size("kept_below_head_bytes")),
        ("of eager's", share("kept_below_head_bytes")),
        ("peak", size("step_peak_bytes")),
        ("largest batch", lambda way: tables.number(way.get("largest_batch"))),
        ("tokens/s there", lambda way: tables.number(way.get("tokens_per_second"))),
    ]
    table = tables.ways_table(row["ways"], columns, "way")
    fixed = f"Parameters, gradients and AdamW's moments: {_size(row['fixed_bytes'])}"
    cap = row.get("memory_cap")
    within = f", within the cap of {_size(cap)} as well" if cap else ""
    return f"{table}\n\n{fixed}{within}; {row['rounds']} rounds."


def _size(nbytes: float | None) -> Cell:
    return tables.kib(nbytes) if nbytes is not None and nbytes < 10 * MIB else tables.mib(nbytes)


def kept_share(found: Row, row: Row, what: str) -> float | None:
    """Bytes kept, relative to the unconverted model's; None where either is not known."""
    theirs = row["ways"].get("eager", {}).get(what)
    return found[what] / theirs if theirs and found.get(what) is not None else None


def losses_table(row: Row) -> str:
    """Losses of every step side by side, and the largest relative differences; "" if not asked."""
    if "losses_failure" in row:
        return f"Losses: FAIL: {row['losses_failure']}"
    if "losses" not in row:
        return ""
    found = row["losses"]
    steps = enumerate(zip(*found["curves"].values(), strict=True), 1)
    rows = [[str(step), *(f"{loss:.6f}" for loss in losses)] for step, losses in steps]
    differences = ", ".join(f"{way} {d:.1e}" for way, d in found["differences"].items())
    noise = (
        f"Largest relative difference to eager: {differences or 'none compared'}. Of eager from "
        f"parameters moved by a rounding each: {found['noise']:.1e}; "
        f"allowed {found['allowed']:.1e}."
    )
    return f"{tables.markdown(['step', *found['curves']], rows)}\n\n{noise}"


#: What is limited -> how: bytes against eager's, a step against HF's gradient checkpointing.
LIMITS = {
    "kept_bytes": "bytes kept ≤ {:.2f}× eager's, head and loss included",
    "kept_below_head_bytes": "bytes kept ≤ {:.2f}× eager's, up to the head",
    "step": "step ≤ {:.2f}× gradient checkpointing's",
}
#: Model -> way, what is limited, to what, and S if of one only: in every case of full fine-tuning,
#: in float32 on a CPU. Of the first model's whole the head's logits are a large share, which no
#: layer can do without: there the ways with a fused loss are judged.
TARGETS: dict[str, tuple[tuple[str, str, float, int | None], ...]] = {
    "smollm-135m": (
        ("full", "kept_below_head_bytes", 0.10, None),
        ("full_loss", "kept_bytes", 0.10, None),
        ("fast", "kept_below_head_bytes", 0.45, None),
        ("fast_loss", "kept_bytes", 0.45, None),
        ("full", "step", 0.95, None),
        ("lean", "step", 0.90, None),
    ),
    "llama-512": (
        ("full", "step", 0.90, 512),
        ("full", "step", 0.95, 256),
        ("none", "step", 0.80, None),
    ),
}


def verdicts(results: Row) -> list[Verdict]:
    """Every target's verdict, of the models in a results file's data; the last is of losses."""
    found, known = [], rows_of(results)
    for model, targets in TARGETS.items():
        rows = [row for row in known if row["case"]["model"] == model]
        mine = [r for r in rows if not r["case"]["lora"] and r["case"]["dtype"] == "float32"]
        for way, what, limit, seq_len in targets if rows else ():
            asked = [row for row in mine if seq_len in (None, row["case"]["seq_len"])]
            where = model + (f", S = {seq_len}" if seq_len else "")
            found.append(_verdict(where, way, what, limit, asked))
    return [*found, _same_losses(known)]


def _verdict(where: str, name: str, what: str, limit: float, rows: list[Row]) -> Verdict:
    text, known = f"{where}: {name}: {LIMITS[what].format(limit)}", []
    for row in rows:
        way = row["ways"].get(name, {})
        if "failure" in way:
            return Verdict(text, f"wrong results: {name}", False)
        time = way.get("step_ratio", {}).get("checkpoint", {}).get("p50")
        value = time if what == "step" else kept_share(way, row, what)
        known += [] if value is None else [value]
    if not known:
        return Verdict(text, "not measured", None)
    return Verdict(text, tables.span(known, ".3f"), max(known) <= limit)


def _same_losses(rows: list[Row]) -> Verdict:
    found = [row["losses"] for row in rows if "losses" in row]
    steps = max((losses["steps"] for losses in found), default=30)
    text = f"losses of {steps} steps are the unconverted model's within rounding"
    worst = [(d, losses["allowed"]) for losses in found for d in losses["differences"].values()]
    if not worst:
        return Verdict(text, "not measured", None)
    difference, allowed = max(worst, key=lambda pair: pair[0] / pair[1])
    said = f"{difference:.1e} relative, allowed {allowed:.1e}"
    return Verdict(text, said, difference <= allowed)


def target_table(results: Row) -> str:
    """The targets, met or not."""
    return tables.verdict_table(verdicts(results))


def section(root: Path = RESULTS) -> str:
    """Every CPU's, then every set of a GPU's."""
    parts = [file_section(tables.load(path)) for path in tables.files(FILE, root)]
    for folder, data in tables.gpu_files(root):
        if rows_of(data):
            parts += [tables.heading(data["machine"], folder), file_section(data)]
    return "\n\n".join(parts)


def file_section(data: Row) -> str:
    """A results file: where it was measured, a CPU's targets, and every case."""
    parts = [tables.machine_line(data["machine"])]
    parts += [] if data["machine"].get("gpu") else [target_table(data)]
    for row in rows_of(data):
        shown = filter(None, (case_table(row), losses_table(row)))
        parts.append(tables.folded(title(row), *shown))
    return "\n\n".join(parts)
