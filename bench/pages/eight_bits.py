"""docs/tables/formats.md: what is worth keeping in 8 bits, and what that costs on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from bench.frontier.points import case_of
from bench.pages.presets import SHAPES, D, block, in_widths, rebuilt_nodes, row_bytes, trained
from bench.tables import Cell, Row, current, gpu_sets, markdown
from fused_remat.formats import split_name
from fused_remat.graph.graph import Graph
from fused_remat.graph.quantized import in_formats
from fused_remat.graph.schedule import kept_bytes
from fused_remat.planner.options import packable
from fused_remat.policies import ALL_PRESETS, kept_names

#: Targets of "fast8" beside "none" on a GPU: time, and kept bytes.
MOST_TIME, MOST_BYTES = 1.03, 0.68


class Kept(NamedTuple):
    """A set of names, each as it is or in 8 bits, and what backward then costs."""

    save: frozenset[str]
    bytes: int  # of a token, input, scales and statistics included
    products: int  # FLOPs of a token that backward rebuilds in products
    attentions: int  # how many attentions it runs again

    @property
    def cost(self) -> tuple[int, int, int]:
        return self.bytes, self.products, self.attentions


def sets(
    graph: Graph, shapes: Mapping[str, tuple[int, ...]], packed: Collection[str]
) -> list[Kept]:
    """All sets of names of a graph, those in `packed` as they are or in int8, at 16 bits.

    Names that backward would not ask for are not in them, so that no set is there twice.
    """
    needs_grad = trained(graph)
    of: dict[str, tuple[int, ...]] = {p: (D,) for p in graph.params}  # norms and biases
    of |= {n: ((1, 1, *shape) if n in graph.inputs else shape) for n, shape in shapes.items()}
    choices = [("", n, f"{n}:int8") if n in packed else ("", n) for n in graph.names]
    found: dict[frozenset[str], Kept] = {}
    for names in itertools.product(*choices):
        save = frozenset(filter(None, names))
        kept = kept_bytes(in_formats(graph, save), save, needs_grad, of, 2)
        save = save.intersection(kept)
        if save not in found:
            nodes = rebuilt_nodes(graph, save)
            widths = graph.widths(of)
            products = sum(n.flops(widths, of, 1) for n in nodes if not n.per_sequence)
            attentions = sum(n.per_sequence for n in nodes)
            found[save] = Kept(save, sum(kept.values()), products, attentions)
    return list(found.values())


def undominated(found: Iterable[Kept]) -> list[Kept]:
    """Those that no other beats: it keeps no more and rebuilds no more, products or attention."""
    best: list[Kept] = []
    for kept in sorted(found, key=lambda k: (k.cost, len(k.save), sorted(k.save))):
        if not any(all(map(int.__le__, other.cost, kept.cost)) for other in best):
            best.append(kept)
    return best


def table(graph: Graph, shapes: Mapping[str, tuple[int, ...]], packed: Collection[str]) -> str:
    """The undominated sets, fewest bytes first."""
    presets = {kept_names(preset, graph): preset for preset in ALL_PRESETS}
    order = {name: i for i, name in enumerate(graph.names)}
    widths = graph.widths(shapes)
    head = (
        "keeps, besides the input", "preset", "bytes",
        f"bytes of a token at D = {D}, with statistics", "rebuilds",
    )  # fmt: skip
    rows = []
    for kept in undominated(sets(graph, shapes, packed)):
        names = sorted(kept.save, key=lambda name: order[split_name(name)[0]])
        preset = f'`"{presets[kept.save]}"`' if kept.save in presets else ""
        size = in_widths(sum(row_bytes(name, widths) for name in ["input", *names]))
        again = [f"{kept.products // D**2}D²"] * bool(kept.products)
        again += ["attention"] * bool(kept.attentions)
        cells = [", ".join(names) or "nothing", preset, f"{size}D", f"{kept.bytes:,}"]
        rows.append([*cells, " + ".join(again) or "pointwise only"])
    return markdown(head, rows)


def frontier8() -> str:
    """The pre-norm encoder's sets: what the planner may pack in 8 bits; and any name."""
    graph = block(norm_first=True)
    few = sorted(packable(graph))
    counts = [len(sets(graph, SHAPES, packed)) for packed in (few, graph.names)]
    return "\n\n".join([
        f"In 8 bits only what nobody but attention and the activation reads ({', '.join(few)}), of "
        f"{counts[0]:,} sets:",
        table(graph, SHAPES, few),
        f"In 8 bits any name, of {counts[1]:,} sets:",
        table(graph, SHAPES, graph.names),
    ])  # fmt: skip


def targets8() -> str:
    """ "fast8" beside "none", of every step of a layer that was measured with both on a GPU."""
    head = ("on", "step", f"time (≤ {MOST_TIME}×)", f"kept bytes (≤ {MOST_BYTES}×)", "met")
    rows = [
        [data["machine"]["gpu"], *_target(row)]
        for files in gpu_sets().values()
        for data in files
        for row in current(data)
        if {"none", "fast8"} <= row.get("ways", {}).keys()
    ]
    return markdown(head, rows) if rows else "Not yet measured on a GPU."


def _target(row: Row) -> list[Cell]:
    """Time by what each is relative to eager in the same rounds."""
    case = case_of(row) or row["case"]
    where = ", ".join(f"{key} {value}" for key, value in case.items())
    found = [row["ways"][way] for way in ("fast8", "none")]
    wrong = [str(way[key]) for way in found for key in ("error", "failure") if key in way]
    if wrong or not all("step_ratio" in way for way in found):
        return [where, wrong[0] if wrong else "not measured", None, "no"]
    times = [way["step_ratio"]["eager"]["p50"] for way in found]
    sizes = [way.get("kept_bytes") for way in found]
    time = times[0] / times[1]
    size = sizes[0] / sizes[1] if all(sizes) else math.inf
    met = time <= MOST_TIME and size <= MOST_BYTES
    return [where, f"{time:.3f}×", f"{size:.3f}×" if all(sizes) else "-", "yes" if met else "no"]
