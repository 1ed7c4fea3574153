"""Writes the generated parts of README.md and docs/: from the graphs, result files, tests' marks.

`python -m bench report` rewrites the text between `<!-- name:begin -->` and `<!-- name:end -->`;
`--check` fails if that would change anything. No number in those parts is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.layers import profile_step
from bench.layers import report as layers_report
from bench.report import composition
from fused_remat.blocks.encoder import PARAMS, EncoderConfig, encoder_graph
from fused_remat.blocks.program import Graph, programs
from fused_remat.policies import RUNGS

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "composition.md",
    ROOT / "docs" / "design.md",
    ROOT / "docs" / "kernels.md",
    ROOT / "docs" / "performance.md",
)
DEMO = ROOT / "bench" / "results" / "demo-cpu" / "demo.json"
PROFILE = ROOT / "bench" / "results" / "profile-cpu.json"
AUDIT = ROOT / "bench" / "results" / "audit" / "audit.json"
LAYERS = ROOT / "bench" / "results" / "layers-cpu.json"
# Large enough for D**2 to stand for a GEMM and F = 4 D; sizes cancel out of the tables.
D, H, S = 1024, 8, 1
SHAPES = {
    "input": (D,), "qkv.weight": (3 * D, D), "proj.weight": (D, D),
    "fc1.weight": (4 * D, D), "fc2.weight": (D, 4 * D),
}  # fmt: skip


def block(norm_first: bool) -> Graph:
    """The encoder block's graph without dropout."""
    return encoder_graph(EncoderConfig(norm_first, H, D // H, "gelu", 1e-5, 1e-5))


def rebuilt(graph: Graph, rung: str) -> str:
    """What backward rebuilds, as "16D² + attention"."""
    wants = frozenset({"input", *PARAMS} - {"mask", "padding", "seed"})
    plan = programs(graph, RUNGS[rung][graph.kind], wants, tiled=False)
    nodes = [s.node for s in plan.backward if s.kind == "compute" and s.node is not None]
    widths = graph.widths(SHAPES)
    products = sum(n.flops(widths, SHAPES, S) for n in nodes if not n.per_sequence)
    parts = [f"{products // D**2}D²"] if products else []
    parts += ["attention"] * any(n.per_sequence for n in nodes)
    return " + ".join(parts) or "pointwise only"


def rung_table() -> str:
    """The rungs: what each keeps and rebuilds, read from the graphs."""
    lines = [
        "| rung | pre-norm keeps | bytes | rebuilds | post-norm keeps | bytes | rebuilds |",
        "|---|---|---|---|---|---|---|",
    ]
    for rung, kept_by_block in RUNGS.items():
        cells = [f'`"{rung}"`' + (" (default)" if rung == "full" else "")]
        for norm_first in (True, False):
            graph = block(norm_first)
            widths = graph.widths(SHAPES)
            names = [n for n in graph.names if n in kept_by_block[graph.kind]]
            kept = 2 * (D + sum(widths[n] for n in names)) // D
            cells += [", ".join(["input", *names]), f"{kept}D", rebuilt(graph, rung)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _demo() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(DEMO.read_text())
    return results


def claim() -> str:
    """One sentence with the demo's figures."""
    found = _demo()
    ways, machine, sizes = found["ways"], found["machine"], found["sizes"]
    kept = {w: r["kept_bytes_per_token_per_layer"] for w, r in ways.items()}
    time = {w: r["step_time_ratio"]["p50"] for w, r in ways.items()}
    full, fast = ("full", "fast")
    return (
        f"In the demo (`make demo`: a causal byte-level language model, dropout "
        f"{sizes['dropout']}, {sizes['dtype']}), the layers keep "
        f"**{kept['eager'] / kept[full]:.0f} times less** for backward than "
        f"`nn.TransformerEncoderLayer` at {time[full]:.2f} times its step time "
        f"(`torch.utils.checkpoint`: {kept['eager'] / kept['checkpoint']:.0f} times less at "
        f"{time['checkpoint']:.2f}), or {kept['eager'] / kept[fast]:.0f} times less at "
        f'{time[fast]:.2f} times (`"fast"`). Measured on {machine["cpu"]}, '
        f"{machine['threads']} threads, torch {machine['torch']}."
    )


def demo_table() -> str:
    """The demo's results, a row per way."""
    found = _demo()
    lines = [
        "| | validation loss | bytes kept per token per layer | whole-step peak | step time |",
        "|---|---|---|---|---|",
    ]
    for way, r in found["ways"].items():
        lines.append(
            f"| {way} | {r['validation_loss']:.3f} | {r['kept_bytes_per_token_per_layer']:,.0f} "
            f"| {r['step_peak_bytes'] / 2**20:,.0f} MiB | {r['step_time_ratio']['p50']:.2f}× |"
        )
    return "\n".join(lines)


def _layers() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(LAYERS.read_text())
    return results


def layers_machine() -> str:
    """Where and with what the layers were measured."""
    m = _layers()["machine"]
    native = "with" if m["native_bfloat16"] else "without"
    return (
        f"Measured on {m['cpu']}, {m['threads']} threads, {native} bfloat16 products of its own, "
        f"torch {m['torch']}, commit {m['commit'][:7]}."
    )


def layers_tables() -> str:
    """Every measured case: step time beside eager and checkpoint, kept bytes, peak."""
    parts = []
    for row in layers_report.current(_layers()):
        lines = [
            f"**{layers_report.title(row)}**, {row['rounds']} rounds",
            "",
            "| | step | vs eager | vs checkpoint | kept bytes per token | peak |",
            "|---|---|---|---|---|---|",
        ]
        for way, r in row["ways"].items():
            if "step_ratio" not in r:
                lines.append(f"| {way} | {r.get('failure') or r.get('unavailable')} | | | | |")
                continue
            ratios = [f"{r['step_ratio'][peer]['p50']:.2f}×" for peer in ("eager", "checkpoint")]
            lines.append(
                f"| {way} | {1e3 * r['step_seconds']['p50']:.0f} ms | {ratios[0]} | {ratios[1]} "
                f"| {r['kept_bytes_per_token']:,.0f} | {r['step_peak_bytes'] / 2**20:,.0f} MiB |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def audit_table() -> str:
    """What the compiler made of every product in its largest tile, and of the norms."""
    found = json.loads(AUDIT.read_text())
    rows = found["rows"]
    spills = sum(bool(row["spills"] or row["stack"]) for row in rows)
    lines = [
        f"Triton {found['triton']}, {rows[0]['target'].replace(' ', ', ')}: {len(rows)} default "
        f"configurations, {spills} of which spill. The products in their largest tile (warps w, "
        "stages s, parts of the end after /), with what needs most registers:",
        "",
        "| kernel | tile | registers | shared | HGMMA | TMA loads | code |",
        "|---|---|---|---|---|---|---|",
    ]
    largest: dict[str, dict[str, Any]] = {}
    tiles: dict[str, str] = {}
    for row in rows:
        if not row["product"]:
            continue
        name, tile = row["name"].split(" ")[0], " ".join(row["name"].split(" ")[-3:])
        if tiles.setdefault(name, tile) == tile:
            worst = max(largest.get(name, row), row, key=lambda r: r["registers"])
            largest[name] = worst
    for name, row in largest.items():
        lines.append(
            f"| `{name}` | {tiles[name]} | {row['registers']} | {row['shared'] / 1024:.0f} KiB "
            f"| {row['tensor_core']} | {row['tma']} | {row['code'] / 1024:.0f} KiB |"
        )
    return "\n".join(lines)


def targets_compiled() -> str:
    """What the audit found for every architecture; of AMD's only that it compiles."""
    files = (AUDIT, AUDIT.parent / "others" / "audit.json")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in [row for file in files for row in json.loads(file.read_text())["rows"]]:
        found.setdefault(row["target"], []).append(row)
    lines = [
        "| target | compiled | spilling | products without tensor cores |",
        "|---|---|---|---|",
    ]
    for target, rows in sorted(found.items()):
        cells = ["not read", "not read"]
        if "registers" in rows[0]:
            spilling = sum(bool(row["spills"] or row["stack"]) for row in rows)
            plain = sum(row["product"] and not row["tensor_core"] for row in rows)
            cells = [str(spilling), str(plain)]
        lines.append(f"| {target} | {len(rows)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "audit": audit_table,
    "composition": composition.table,
    "targets_compiled": targets_compiled,
    "rungs": rung_table,
    "claim": claim,
    "demo": demo_table,
    "layers_machine": layers_machine,
    "layers": layers_tables,
    "profile": lambda: profile_step.table(json.loads(PROFILE.read_text())),
    "targets": lambda: layers_report.target_table(_layers()),
}


def render(text: str) -> str:
    """`text` with every generated part made anew."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- {name}:begin -->\n{PARTS[name]()}\n<!-- {name}:end -->"

    return re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", replace, text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Rewrite the pages, or with --check say which are out of date; 1 if any is."""
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check = parser.parse_args(arguments).check
    stale = []
    for page in PAGES:
        text = page.read_text()
        new = render(text)
        if new != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new)
    if stale:
        print(("out of date: " if check else "rewritten: ") + ", ".join(stale))
    return int(bool(stale) and check)
