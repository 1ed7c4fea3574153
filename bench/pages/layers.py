"""One layer on a CPU: every measured case, and a profile of its steps."""

from __future__ import annotations

from pathlib import Path

from bench import tables
from bench.commands import profile as profile_step
from bench.tables import RESULTS, Columns, Row, load

FILE = "layers-cpu.json"


def title(row: Row) -> str:
    """Return a case in a few words."""
    c = row["case"]
    sizes = f"(B, S, D, H) = ({c['batch']}, {c['seq_len']}, {c['d_model']}, {c['nhead']})"
    rest = ["relu"] * (c.get("activation") == "relu") + ["causal"] * bool(c.get("causal"))
    return ", ".join([c["dtype"], f"{c['norm']}-norm", *rest, f"dropout {c['dropout']:g}", sizes])


def _columns(more: int = 0) -> Columns:
    """Return the columns of a way, with so many digits more than on the page."""
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
    """Return a case's ways, for a terminal."""
    return tables.ways_table(row["ways"], _columns(more=1), write=tables.terminal)


def profile(root: Path = RESULTS, dtype: str = "float32") -> str:
    """Return the profile of a step in this dtype, and its machine."""
    data = load(root / profile_step.FILES[dtype])
    return f"{profile_step.table(data)}\n\n{tables.machine_line(data['machine'])}"


def profile_bfloat16(root: Path = RESULTS) -> str:
    """Return the profile of a step in bfloat16."""
    return profile(root, "bfloat16")


def cases(root: Path = RESULTS) -> str:
    """Return every measured case of every CPU: times, kept bytes, peaks."""
    parts = []
    for path in tables.files(FILE, root):
        data = load(path)
        parts += [tables.heading(data["machine"], path), tables.machine_line(data["machine"])]
        for row in tables.current(data):
            name = f"{title(row)}, {row['rounds']} rounds"
            parts.append(tables.folded(name, tables.ways_table(row["ways"], _columns())))
    return "\n\n".join(parts)
