"""docs/tables/formats.md: what gradients lose in 8 bits, and which sets are worth keeping."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path

from bench.commands.formats import KINDS
from bench.pages.presets import SHAPES, D, Kept, block
from bench.tables import RESULTS, Row, load, machine_line, markdown
from fused_remat.graph.graph import Graph
from fused_remat.graph.quantized import in_formats
from fused_remat.graph.schedule import kept_bytes
from fused_remat.planner.options import packable, preset_of


def errors(root: Path = RESULTS) -> str:
    """A row for each shape and size of outliers: the largest ratio to the error of "none"."""
    data = load(root / "formats-cpu.json")
    ways = [way for way in data["results"][0]["ways"] if way != "none"]
    head = ("layer", "outliers", "bf16's own error", *(f"`{way}`" for way in ways))
    lines = []
    for row in data["results"]:
        case, own = row["case"], row["ways"]["none"]
        name = f"{case['shape']} ({KINDS[case['shape']]})"
        error = f"{min(own) * 1e3:.1f} to {max(own) * 1e3:.1f}e-3"
        lines.append([name, f"×{case['scale']}", error, *(_largest(row, way) for way in ways)])
    return f"{markdown(head, lines)}\n\n{machine_line(data['machine'])}"


def _largest(row: Row, way: str) -> str:
    """The gradient that is the most times off, and how many."""
    pairs = zip(row["ways"][way], row["ways"]["none"], row["gradients"], strict=True)
    ratio, name = max((error / own, name) for error, own, name in pairs)
    return f"{ratio:.2f} ({name})"


def choices(graph: Graph, packed: Collection[str]) -> dict[Kept, tuple[int, int, int]]:
    """All sets of names of a graph, those in `packed` as they are or in int8, at 16 bits, each with
    its cost: bytes of a token with statistics, FLOPs of products and attentions that are rebuilt.

    Names that backward would not ask for are not in them, so that no set is there twice.
    """
    of: dict[str, tuple[int, ...]] = {p: (D,) for p in graph.params}  # norms and biases
    of |= {n: ((1, 1, *shape) if n in graph.inputs else shape) for n, shape in SHAPES.items()}
    forms = [("", n, f"{n}:int8") if n in packed else ("", n) for n in graph.names]
    wanted, found = Kept(graph, "full").needs_grad, {}
    for names in itertools.product(*forms):
        save = frozenset(filter(None, names))
        kept = kept_bytes(in_formats(graph, save), save, wanted, of, 2)
        if save <= kept.keys():
            one = Kept(graph, save)
            found[one] = (sum(kept.values()), one.products, one.attentions)
    return found


def undominated(found: Mapping[Kept, tuple[int, int, int]]) -> list[Kept]:
    """Those that no other beats: it keeps no more and rebuilds no more, products or attention."""
    best: list[Kept] = []
    for kept in sorted(found, key=lambda k: (found[k], len(k.save), sorted(k.save))):
        if not any(all(map(int.__le__, found[other], found[kept])) for other in best):
            best.append(kept)
    return best


def frontier() -> str:
    """The pre-norm encoder's sets with what the planner may pack in 8 bits, fewest bytes first."""
    graph = block(norm_first=True)
    few = sorted(packable(graph))
    found = choices(graph, few)
    head = (
        "keeps, besides the input", "preset", "bytes",
        f"bytes of a token at D = {D}, with statistics", "rebuilds",
    )  # fmt: skip
    rows = []
    for kept in undominated(found):
        preset = preset_of(graph, kept.save)
        names = ", ".join(kept.names[1:]) or "nothing"
        cells = [names, f'`"{preset}"`' if preset else None, kept.size, f"{found[kept][0]:,}"]
        rows.append([*cells, kept.work])
    only = f"In 8 bits only what nobody but attention and the activation reads ({', '.join(few)})"
    return f"{only}, of {len(found):,} sets:\n\n{markdown(head, rows)}"
