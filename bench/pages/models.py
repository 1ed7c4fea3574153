"""Every measured case of a model's step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench import tables
from bench.subjects.models import MODELS
from bench.tables import MIB, RESULTS, Cell, Row

FILE = "model-cpu.json"
#: What is trained, by the kind of adapters; bitsandbytes quantizes.
NAMES = {"lora": "LoRA", "dora": "DoRA", "nf4": "LoRA on NF4 (QLoRA)", "int8": "LoRA on int8"}


def rows_of(results: Row) -> list[Row]:
    """Return the rows of models of a file's last run; `bench gpu` has other rows, too."""
    rows = [row | {"case": row.get("model", row["case"])} for row in tables.current(results)]
    return [row for row in rows if "ways" in row and row["case"].get("model") in MODELS
            and "fixed_bytes" in row]  # fmt: skip


def title(row: Row) -> str:
    """Return a case in a few words."""
    c = row["case"]
    published = MODELS[c["model"]].layers
    layers = "all" if c["layers"] == published else f"{c['layers']} of {published}"
    adapter = NAMES[c.get("adapter") or "lora"]
    kind = f"{adapter} of rank {c['lora']}" if c["lora"] else "full fine-tuning"
    sizes = f"B = {c['batch']}, S = {c['seq_len']}"
    return f"{c['model']}, {layers} layers, {kind}, {c['dtype']}, {sizes}"


def case_table(row: Row) -> str:
    """Return a case's results, a line per way; below it what they share."""

    def size(what: str) -> Callable[[Row], Cell]:
        return lambda way: _size(way.get(what))

    def share(what: str) -> Callable[[Row], Cell]:
        return lambda way: tables.number(kept_share(way, row, what), 3)

    columns = [
        ("step", lambda way: tables.ms(way["step_seconds"]["p50"])),
        ("vs eager", lambda way: tables.times(way["step_ratio"].get("eager"))),
        ("vs checkpoint", lambda way: tables.times(way["step_ratio"].get("checkpoint"))),
        ("kept", size("kept_bytes")),
        ("of eager's", share("kept_bytes")),
        ("below the head", size("kept_below_head_bytes")),
        ("of eager's", share("kept_below_head_bytes")),
        ("peak", size("step_peak_bytes")),
    ]
    cap = row.get("memory_cap")  # of rows of earlier commits
    if cap:
        columns.append(("largest batch", lambda way: tables.number(way.get("largest_batch"))))
        columns.append(("tokens/s there", lambda way: tables.number(way.get("tokens_per_second"))))
    table = tables.ways_table(row["ways"], columns, "way")
    fixed = f"Parameters, gradients and AdamW's moments: {_size(row['fixed_bytes'])}"
    within = f", within the cap of {_size(cap)} as well" if cap else ""
    return f"{table}\n\n{fixed}{within}; {row['rounds']} rounds."


def _size(nbytes: float | None) -> Cell:
    small = nbytes is not None and nbytes < 10 * MIB
    return f"{nbytes / 1024:,.1f} KiB" if small else tables.mib(nbytes)


def kept_share(way: Row, row: Row, what: str) -> float | None:
    """Return bytes kept relative to the unconverted model's; None where either is not known."""
    theirs = row["ways"].get("eager", {}).get(what)
    return way[what] / theirs if theirs and way.get(what) is not None else None


def section(root: Path = RESULTS) -> str:
    """Return the cases of every CPU, then of every GPU."""
    files = [(path, tables.load(path)) for path in tables.files(FILE, root)]
    parts = []
    for path, data in [*files, *tables.gpu_files(root)]:
        rows = [row for row in rows_of(data) if not row["case"].get("adapter")]
        if rows:
            parts += [tables.heading(data["machine"], path), tables.machine_line(data["machine"])]
        parts += [tables.folded(title(row), case_table(row)) for row in rows]
    return "\n\n".join(parts)
