"""The table of rungs, read from the encoder block's graphs."""

from __future__ import annotations

from fused_remat.blocks.encoder import PARAMS, EncoderConfig, encoder_graph
from fused_remat.blocks.program import Graph, programs
from fused_remat.policies import RUNGS

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
