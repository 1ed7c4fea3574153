"""Layers with experts: every measured case, bytes per token and layer, and the frontier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from bench import tables
from bench.pages.frontier import DATA, Panel
from bench.subjects.mixtures import MIXTURES, WAYS
from bench.tables import RESULTS, Cell, Row

FILE = "mixtures-cpu.json"
#: Preset, products -> what its step is to take at most, relative to checkpointing's.
TARGETS = {("full", "aten"): 0.95, ("fast", "aten"): 0.85, ("full", "onednn"): 0.80}
KIB = 1024


def title(row: Row) -> str:
    """Return a case in a few words."""
    c = row["case"]
    widths = "full widths" if c["part"] == 1 else f"widths and heads divided by {c['part']}"
    return f"{c['model']}, {widths}, {c['dtype']}, B = {c['batch']}, S = {c['seq_len']}"


def _products(machine: Row) -> str:
    """Return whose products ran: where none were forced, ATen's on Intel (`cpu_choice.RULES`)."""
    own = "aten" if "Intel" in machine["cpu"] else "default"
    return str(machine.get("products") or own)


def _against(way: Row, row: Row, what: str) -> float | None:
    own = row["ways"].get("checkpoint", {}).get(what)
    return way[what] / own if own and way.get(what) is not None else None


def case_table(row: Row) -> str:
    """Return a case's ways: times, kept bytes and peaks, compared with checkpointing."""

    def ratio(what: str) -> Callable[[Row], Cell]:
        return lambda way: tables.number(_against(way, row, what), 2, "×")

    columns = [
        ("forward", lambda way: tables.ms(way["forward_seconds"]["p50"])),
        ("step", lambda way: tables.ms(way["step_seconds"]["p50"])),
        ("vs checkpoint", lambda way: tables.times(way["step_ratio"].get("checkpoint"))),
        ("kept bytes per token", lambda way: tables.number(way["kept_bytes_per_token"])),
        ("vs checkpoint", ratio("kept_bytes")),
        ("step's peak", lambda way: tables.mib(way.get("step_peak_bytes"), 1)),
        ("vs checkpoint", ratio("step_peak_bytes")),
    ]
    return tables.ways_table(row["ways"], columns, "way")


def files(root: Path = RESULTS) -> Iterator[tuple[Path, Row]]:
    for path in tables.files(FILE, root):
        yield path, tables.load(path)


def cases(root: Path = RESULTS) -> str:
    """Return every measured case of every machine."""
    parts = []
    for path, data in files(root):
        parts += [tables.heading(data["machine"], path), tables.machine_line(data["machine"])]
        for row in tables.current(data):
            parts.append(tables.folded(f"{title(row)}, {row['rounds']} rounds", case_table(row)))
    return "\n\n".join(parts)


def targets(root: Path = RESULTS) -> str:
    """Return the time of presets compared with checkpointing's, and the targets."""
    rows = []
    for _, data in files(root):
        products = _products(data["machine"])
        for row in tables.current(data):
            for (preset, of), aim in TARGETS.items():
                found = row["ways"].get(preset, {}).get("step_ratio", {}).get("checkpoint")
                if of == products and found:
                    kept, peak = (
                        tables.number(_against(row["ways"][preset], row, what), 2, "×")
                        for what in ("kept_bytes", "step_peak_bytes")
                    )
                    step = tables.times(found, spread=True)
                    rows.append([title(row), products, preset, step, f"{aim:.2f}×", kept, peak])
    head = "layer", "products", "preset", "step", "target", "kept", "peak"
    return tables.markdown(head, rows) if rows else ""


def bytes_per_token(root: Path = RESULTS) -> str:
    """Return what experts of published sizes keep for a token and layer in 16 bits, by formula.

    k experts a token, width D, experts of width n, without the router. Everything: the input, as
    it is and gathered, the gate and up projections, the activation, the experts' results.
    """
    head = "a token and layer, 16 bits", *MIXTURES
    entries: dict[str, Callable[[int, int, int], int]] = {
        "keeping everything": lambda d, n, k: 2 * d + 4 * k * d + 6 * k * n,
        "SonicMoE (published: 2D + 4kn bytes)": lambda d, n, k: 2 * d + 4 * k * n,
        "`fast`, `none`: the input and the pre-activations": lambda d, n, k: 2 * d + 4 * k * n,
        "`full`, `lean`: the input, checkpointing's as well": lambda d, n, k: 2 * d,
    }
    sizes = [(m.d_model, m.expert, m.top_k) for m in MIXTURES.values()]
    rows = [
        [name, *(f"{of(*size) / KIB:.1f} KiB" for size in sizes)] for name, of in entries.items()
    ]
    return tables.markdown(head, rows)


def sets(root: Path = RESULTS) -> dict[Path, list[Panel]]:
    """Return by folder a panel of each case, for the figures."""
    found: dict[Path, list[Panel]] = {}
    for path, data in files(root):
        products = _products(data["machine"])
        for row in tables.current(data):
            name = f"{row['case']['model']}, widths / {row['case']['part']}, {products}"
            sizes = f"B = {row['case']['batch']}, S = {row['case']['seq_len']}"
            case = {**row["case"], "title": f"{name}, {sizes}, {row['case']['dtype']}"}
            panel = Panel(case, data["machine"], rounds=row["rounds"])
            panel.add(row)
            found.setdefault(path.parent, []).append(panel)
    return found


def frontier(root: Path = RESULTS) -> str:
    """Return bytes against time of every way, relative to transformers' eager layer."""
    parts = []
    for folder in sets(root):
        image = f"../../bench/results/{folder.name}/{Path(DATA).stem}.png"
        parts.append(f"![Step time against bytes kept for backward, a panel per layer]({image})")
    for _, data in files(root):
        products = _products(data["machine"])
        for row in tables.current(data):
            eager = row["ways"]["eager"]
            found = [
                [f"`{name}`", tables.number(way["kept_bytes"] / eager["kept_bytes"], 3),
                 tables.times(way["step_ratio"]["eager"], spread=True)]
                for name in WAYS if "step_ratio" in (way := row["ways"].get(name, {}))
            ]  # fmt: skip
            head = "way", "kept, of eager's", "step, of eager's"
            parts.append(
                tables.folded(f"{title(row)}, products: {products}", tables.markdown(head, found))
            )
    return "\n\n".join(parts)
