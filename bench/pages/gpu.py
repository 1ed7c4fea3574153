"""Rows of `bench gpu`: a line each for a terminal; tables of steps and profiles for a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench import tables
from bench.gpu.profile import KINDS
from bench.pages.frontier import REMOVED
from bench.tables import MIB, RESULTS, Row
from fused_remat.policies import EXACT_PRESETS, LONG_SEQUENCE

#: Ways whose step times are columns of the page, if any row has them.
STEPS = (
    "checkpoint", "checkpoint_offload", "save_on_cpu", "compile", *EXACT_PRESETS, "full_loss",
    "trl", "trl_checkpoint", "liger", "liger_checkpoint",
)  # fmt: skip


def _way(name: str, way: Row) -> str:
    us, ratios = tables.us(way), tables.ratios(way)
    if us is None:
        return f"{name} {'absent' if 'absent' in way else 'FAIL'}"
    text = f"{name} {us['p50']:.0f}"
    baseline = next(iter(ratios), name)
    if baseline != name:
        text += f" {ratios[baseline]['p50']:.2f}x"
    if "of_ceiling" in way:
        text += f" {way['of_ceiling']:.0%}"
    peak, held = (way.get(f"step_{key}", way.get(key)) for key in ("peak_bytes", "kept_bytes"))
    if peak is not None:
        text += f" {way.get('held_bytes', held) / MIB:.0f}/{peak / MIB:.0f}M"
    return text


def title(row: Row) -> str:
    """Return a case in a few words."""
    case = dict(row["case"])
    return " ".join([case.pop("section"), case.pop("name"), *(f"{k}={v}" for k, v in case.items())])


def line(row: Row) -> str:
    """Return a row in a line: of each way what `report` explains."""
    for key in ("error", "skipped"):
        if key in row:
            return f"{title(row)}: {key.upper()} {row[key]}"
    if "found" in row:
        return f"{title(row)}: " + ", ".join(f"{k} {v}" for k, v in row["found"].items())
    return f"{title(row)}: " + " | ".join(_way(*item) for item in row["ways"].items())


def steps_table(rows: Sequence[Row]) -> str:
    """Return training steps, a line per case: eager's time, and the ratio of each way to it."""
    times = [(row, us) for row in rows if (us := tables.us(row.get("ways", {}).get("eager", {})))]
    ways = [name for name in STEPS if any(tables.us(r["ways"].get(name, {})) for r, _ in times)]
    cells = [
        [title(row), tables.ms(1e-6 * us["p50"], 2), *(_ratio(row["ways"].get(n)) for n in ways)]
        for row, us in times
    ]
    return tables.markdown(("case", "eager", *ways), cells) if cells else ""


def _ratio(way: Row | None) -> tables.Cell:
    if way is None or "absent" in way:
        return None
    return "FAIL" if "error" in way else tables.times(tables.ratios(way).get("eager"))


def profile_table(row: Row) -> str:
    """Return a profiled case: microseconds of a step by kind of kernel.

    "busy" is the time in which anything ran on the device, "gaps" the rest of a step; "launches"
    are kernels, copies and fills; "host" is the time to launch a step.
    """
    ways = {n: way for n, way in row["ways"].items() if "kinds_us" in way and n not in REMOVED}
    labels = (*KINDS, "busy", "gaps", "host", "step", "launches")
    rows = [[label, *(_profiled(way, label) for way in ways.values())] for label in labels]
    return f"{title(row)}, microseconds of a step\n{tables.terminal(['', *ways], rows)}"


def _profiled(way: Row, label: str) -> str:
    host = way["host_us"] if "host_us" in way else 1e6 * way["host_seconds"]["p50"]
    found = {**way["kinds_us"], "host": host, "launches": way["launches"]}
    step = (tables.us(way) or {"p50": way["busy_us"]})["p50"]
    found |= {"step": step, "busy": way["busy_us"], "gaps": step - way["busy_us"]}
    return f"{found[label]:.0f}"


def report(rows: Sequence[Row]) -> str:
    """Return the text of a run: the machine, all rows, failures, profiled steps."""
    where = [tables.machine_line(row["machine"]) for row in rows[:1]]
    lines = [line(row) for row in rows if "ways" in row or "found" in row]
    wrong, skipped = tables.errors_of(rows, title), sum("skipped" in row for row in rows)
    lines += [f"\n{len(wrong)} failures, {skipped} cases without time", *wrong]
    legend = "\nmicroseconds, ratio to the first, share of the ceiling or MiB held/peak"
    steps = ["\n" + profile_table(row) for row in rows if "profiled" in row and "ways" in row]
    return "\n".join([*where, legend, *lines, *steps])


def long_sequences(root: Path = RESULTS) -> str:
    """Return `lean` compared with `full` in every measured layer of long sequences."""
    head = ("run", "S", "D", "norm", "`full`", "`lean`", "`lean` / `full`", "kept bytes per token")
    cells: list[list[tables.Cell]] = []
    for _, data in tables.gpu_files(root):
        for row in tables.current(data):
            layer, ways = row.get("layer", {}), row.get("ways", {})
            times = [tables.us(ways.get(name, {})) for name in ("full", "lean")]
            if layer.get("seq_len", 0) < LONG_SEQUENCE or None in times:
                continue
            full, lean = (time["p50"] for time in times if time is not None)
            kept = (tables.number(ways[n]["kept_bytes_per_token"]) for n in ("full", "lean"))
            sizes = [str(layer["seq_len"]), str(layer["d_model"]), layer["norm"]]
            shown = [tables.ms(1e-6 * us, 1) for us in (full, lean)]
            where, share = tables.measured_on(data["machine"]), f"{lean / full:.2f}×"
            cells.append([where, *sizes, *shown, share, " → ".join(map(str, kept))])
    return tables.markdown(head, cells) if cells else ""


def section(root: Path = RESULTS) -> str:
    """Return the steps and profiles of every set of `bench gpu`."""
    parts = []
    for folder, data in tables.gpu_files(root):
        rows = [row for row in tables.current(data) if "section" in row["case"]]
        if rows:
            machine = data["machine"]
            parts += [tables.heading(machine, folder), tables.machine_line(machine)]
            parts.append(steps_table(rows))
        found = [profile_table(row) for row in rows if "profiled" in row and "ways" in row]
        if found:
            steps = "```\n" + "\n\n".join(found) + "\n```"
            parts.append(tables.folded("Where a step spends its time", steps))
    return "\n\n".join(filter(None, parts))
