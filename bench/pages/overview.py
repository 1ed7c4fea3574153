"""The README's generated parts: the picture of every way, what it says, and the presets in words.

The picture has two panels, with dropout and without: kept bytes and step time relative to eager,
geometric means over the shapes that `python -m bench frontier` measured, and the front of the ways
that no other beats in both. It is written once for light pages and once for dark ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.figures.drawing import MARK, digest, drawn_of
from bench.pages import demo, plans, presets
from bench.tables import (
    RESULTS,
    Cell,
    Row,
    geometric_mean,
    load,
    markdown,
    measured_on,
    mib,
    times,
)
from fused_remat.formats import NATIVE, split_name
from fused_remat.graph.graph import Graph
from fused_remat.policies import ALL_PRESETS, EXACT_PRESETS
from fused_remat.steps.node import Node

#: A panel's title, and the folder of its measurements.
PANELS = (
    ("Dropout 0.1", RESULTS / "frontier-dropout-cpu"),
    ("No dropout", RESULTS / "frontier-cpu"),
)
PICTURES = {theme: RESULTS / f"overview-{theme}.svg" for theme in ("light", "dark")}
#: Theme -> text, faint lines, and the colour of each family.
THEMES: dict[str, dict[str, str]] = {
    "light": {
        "text": "#1f2328", "faint": "#d8dee4", "ours": "#0969da", "checkpointing": "#c2410c",
        "compile": "#8250df", "stock": "#1f2328",
    },
    "dark": {
        "text": "#e6edf3", "faint": "#3d444d", "ours": "#58a6ff", "checkpointing": "#f0883e",
        "compile": "#bc8cff", "stock": "#e6edf3",
    },
}  # fmt: skip
#: Way -> its label, where the name alone does not say it.
LABELS = {
    "checkpoint_reentrant": "checkpoint, reentrant", "torch_remat": "torch-remat",
    "selective_matmuls": "selective: products", "selective_attention": "selective: attention",
    "compile_budget_0": "compile, budget 0", "compile_budget_0.25": "budget 0.25",
    "compile_budget_0.5": "budget 0.5", "compile_budget_0.75": "budget 0.75",
}  # fmt: skip
#: Panel's title -> way -> where its label goes from its point, in points, and from which side.
PLACES: dict[str, dict[str, tuple[float, float, str]]] = {
    "Dropout 0.1": {
        "checkpoint": (8, 5, "left"), "torch_remat": (8, -6, "left"), "full": (8, 3, "left"),
        "lean": (-1, -13, "right"), "balanced": (-2, -14, "center"), "fast": (0, 11, "center"),
        "none": (0, -14, "center"), "compile": (0, -12, "center"), "eager": (9, 4, "left"),
    },
    "No dropout": {
        "torch_remat": (9, 1, "left"), "checkpoint_reentrant": (9, 4, "left"),
        "checkpoint": (-9, 4, "right"), "compile_budget_0": (-9, -3, "right"),
        "full": (10, 2, "left"), "lean": (-3, -13, "center"), "balanced": (-8, 12, "center"),
        "compile_budget_0.25": (9, 1, "left"), "fast": (-4, -13, "center"),
        "compile_budget_0.5": (-6, 10, "left"), "compile_budget_0.75": (-9, -3, "right"),
        "none": (-10, -4, "right"), "selective_matmuls": (8, -1, "left"),
        "selective_attention": (-5, 15, "left"), "eager": (0, -12, "center"),
        "compile": (9, 2, "left"),
    },
}  # fmt: skip
#: Panel's title -> the least and most of its axes.
LIMITS = {"Dropout 0.1": ((1 / 54, 1.9), (0.76, 1.62)), "No dropout": ((1 / 64, 2.1), (0.95, 1.38))}


def points(folder: Path) -> list[Row]:
    """Of each way measured at all shapes: its kept bytes and step time relative to eager."""
    panels = load(folder / "frontier.json")["frontier"]["panels"]
    found: dict[str, list[Row]] = {}
    for panel in panels:
        for point in panel["points"]:
            found.setdefault(point["way"], []).append(point)
    means = [
        {
            "way": way,
            "family": alike[0]["family"],
            "kept": geometric_mean([p["kept"] for p in alike]),
            "time": geometric_mean([p["time"]["p50"] for p in alike]),
        }
        for way, alike in found.items()
        if len(alike) == len(panels)
    ]
    return sorted(means, key=lambda p: (p["kept"], p["time"]))


def data() -> Row:
    """All that is drawn."""
    return {title: points(folder) for title, folder in PANELS}


def stale() -> list[Path]:
    """Pictures that are not of their data, or not there yet."""
    drawn = digest(data())
    return [path for path in PICTURES.values() if drawn_of(path) != drawn]


def rewrite() -> None:
    """Draw them anew where they are stale. Raises: ImportError without matplotlib."""
    if stale():
        for theme, path in PICTURES.items():
            draw(theme, path)


def draw(theme: str, path: Path) -> None:
    """Write one theme's picture."""
    import matplotlib
    from matplotlib.figure import Figure

    colours = THEMES[theme]
    options = {
        "svg.hashsalt": "overview", "font.size": 10.0, "text.color": colours["text"],
        "axes.labelcolor": colours["text"], "xtick.color": colours["text"],
        "ytick.color": colours["text"], "axes.edgecolor": colours["faint"],
    }  # fmt: skip
    with matplotlib.rc_context(options):
        figure = Figure(figsize=(11.0, 4.9), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12)
        figure.patch.set_alpha(0)
        axes = figure.subplots(1, 2)
        for panel, (title, folder) in zip(axes, PANELS, strict=True):
            _panel(panel, title, points(folder), colours)
        axes[0].set_ylabel("step time, relative to eager")
        figure.supxlabel("memory kept for backward, relative to eager", fontsize=10)
        metadata = {"Date": None, "Creator": None, "Description": MARK + digest(data())}
        figure.savefig(path, transparent=True, metadata=metadata)


def _panel(axes: Any, title: str, means: list[Row], colours: dict[str, str]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xscale("log", base=2)
    axes.set_xlim(*LIMITS[title][0])
    axes.set_ylim(*LIMITS[title][1])
    axes.xaxis.set_major_locator(FixedLocator([2.0**-n for n in range(6)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"1/{1 / x:.0f}" if x < 1 else "1"))
    axes.yaxis.set_major_locator(MultipleLocator(0.1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.1f}×"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3, color=colours["faint"])
    axes.axhline(1.0, color=colours["faint"], linewidth=1.0, zorder=0)
    best: list[Row] = []  # those that are faster than all that keep no more
    for point in means:
        if not best or point["time"] < best[-1]["time"]:
            best.append(point)
    axes.plot([p["kept"] for p in best], [p["time"] for p in best], color=colours["text"],
              linewidth=7, alpha=0.13, solid_capstyle="round", zorder=1)  # fmt: skip
    axes.text(0, 0.02, "  lower left is better", transform=axes.transAxes, fontsize=8.5, alpha=0.6)
    if any(p["family"] == "ours, compiled" for p in means):
        axes.text(1, 0.97, "hollow: the preset above or below it, compiled", ha="right",
                  transform=axes.transAxes, fontsize=8.5, alpha=0.6)  # fmt: skip
    for point in means:
        _point(axes, title, point, colours)


def _point(axes: Any, title: str, point: Row, colours: dict[str, str]) -> None:
    way, family = point["way"], point["family"]
    at, colour = (point["kept"], point["time"]), colours[family.removesuffix(", compiled")]
    compiled = family == "ours, compiled"
    axes.plot(*at, marker="o", markersize=4.5 if compiled else 8 if family == "ours" else 6.5,
              color=colour, markerfacecolor="none" if compiled else colour,
              markeredgewidth=1.0 if compiled else 0, zorder=2 if compiled else 3)  # fmt: skip
    if compiled:
        return
    dx, dy, side = PLACES[title].get(way, (8, 0, "left"))
    axes.annotate(LABELS.get(way, way), at, (dx, dy), textcoords="offset points", color=colour,
                  ha=side, va="center", fontsize=10 if family == "ours" else 8.5,
                  fontweight="bold" if family == "ours" else "normal", zorder=4)  # fmt: skip


def picture() -> str:
    """The picture, for a light page or a dark one, and what its points are."""
    light, dark = (f"bench/results/{PICTURES[theme].name}" for theme in ("light", "dark"))
    found = [load(folder / "frontier.json") for _, folder in PANELS]
    with_dropout, without = (len(data["frontier"]["panels"]) for data in found)
    where = measured_on({**found[0]["machine"], "commit": None})
    alt = "Step time against memory kept for backward, for every way to train a layer"
    lines = [
        "<picture>",
        f'  <source media="(prefers-color-scheme: dark)" srcset="{dark}">',
        f'  <img alt="{alt}" src="{light}">',
        "</picture>",
        "",
        f"Every way to train an `nn.TransformerEncoderLayer` (float32, {where}): means "
        f"over {with_dropout} shapes with dropout and {without} without. The band joins the ways "
        "that no other beats.",
    ]
    return "\n".join(lines)


def headline() -> str:
    """The demo's figures, those of a Llama with its loss, and those of plans, in three lines."""
    return "\n".join((_demo(), _llama(), _plans()))


def _demo() -> str:
    found = demo.results()
    ways, dropout = found["ways"], found["sizes"]["dropout"]
    time = {way: times(row["step_time_ratio"]) for way, row in ways.items()}
    peak = {way: mib(row["step_peak_bytes"]) for way, row in ways.items()}
    ours = sorted(str(time[way]) for way in ways if way in ALL_PRESETS)
    without = [p["time"] for p in points(PANELS[1][1]) if p["way"] in ALL_PRESETS]
    low, high = f"{min(without):.2f}×", f"{max(without):.2f}×"
    return (
        f"- **Checkpointing's memory, at about its time or less.** A step of the demo (byte-level "
        f"language model, dropout {dropout}, on {measured_on(found['machine'])}) peaks at "
        f"{peak['full']} instead of {peak['eager']}, "
        f"and takes {time['full']} eager's time; `torch.utils.checkpoint`: {peak['checkpoint']}, "
        f"{time['checkpoint']}. Presets take {ours[0]} to {ours[-1]}; without dropout, in the "
        f"picture, {low} to {high}."
    )


def _llama() -> str:
    found = [row for path in sorted(RESULTS.glob("*/model-cpu.json")) for row in _rows(path)]
    row = next(r for r in found if r["case"]["model"] == "smollm-135m" and r["case"]["lora"])
    ways = {way: r for way, r in row["ways"].items() if "step_ratio" in r}
    peak = {way: mib(r["step_peak_bytes"]) for way, r in ways.items()}
    time = {way: times(r["step_ratio"]["eager"]) for way, r in ways.items()}
    return (
        f"- **The loss too.** LoRA on a Llama (SmolLM-135M's shape, {row['case']['seq_len']} "
        f"tokens, `loss=True`) peaks at {peak['full_loss']} instead of {peak['eager']}, at "
        f"{time['full_loss']}; with transformers' checkpointing at {peak['checkpoint']}, "
        f"{time['checkpoint']}."
    )


def _plans() -> str:
    rows = _rows(RESULTS / "plan-cpu.json")
    runs = [way for row in rows for way in plans.right(row).values() if "predicted" in way]
    off = max(abs(way["predicted"]["peak_bytes"] / way["peak_bytes"] - 1) for way in runs)
    return (
        f"- **Plans to a budget.** `plan(model, x, budget=...)` finds the fastest policies "
        f"that fit. {len(runs)} plans were run; the measured peak was "
        f"{'the predicted one, to the byte' if off == 0 else f'{off:.1%} off at most'}."
    )


def models_table() -> str:
    """Of every model measured on a CPU: peaks and times of the main ways."""
    shown = ("eager", "checkpoint", "full", "lean", "fast", "none", "full_loss")
    files = (RESULTS / "model-cpu.json", *sorted(RESULTS.glob("*/model-cpu.json")))
    rows = []
    for row in (row for path in files for row in _rows(path)):
        case = row["case"]
        kind = f"LoRA {case['lora']}" if case["lora"] else "all trained"
        name = f"{case['model']}, {case['layers']} layers, S = {case['seq_len']}, {kind}; "
        cells = [name + row["machine"]["cpu"]]
        for way in (row["ways"].get(way, {}) for way in shown):
            time = times(way.get("step_ratio", {}).get("eager"))
            peak = str(mib(way.get("step_peak_bytes"))).replace(" ", "&nbsp;")
            cells.append(f"{peak}<br>{time}" if time else "")
        rows.append(cells)
    return markdown(["model", *shown], rows)


#: Name of an activation -> what it is.
WORDS = {
    "input": "the layer's input",
    "attn": "attention's output",
    "mid": "the sum between attention and MLP",
    "qkv": "queries, keys, values",
    "up": "the MLP before its activation",
}


def presets_table() -> str:
    """The presets of a pre-norm encoder layer in words, beside eager and checkpoint."""
    graph, eager = presets.block(True), _eager_widths()
    forward = _products(graph, graph.nodes)
    # Where nothing after the last product is saved (dropout's mask is), checkpoint stops before it.
    last = _products(graph, [graph.nodes[-1]])
    replayed = f"{(forward - last) / forward / 3:.0%} to {1 / 3:.0%} + attention"
    rows = [
        ["eager PyTorch", "everything", f"{1:.0%}", "0%", *_measured("eager")],
        ["`torch.utils.checkpoint`", WORDS["input"], f"{2 / eager:.0%}", replayed,
         *_measured("checkpoint")],
    ]  # fmt: skip
    before: list[str] = []
    for preset in ALL_PRESETS:
        kept = presets.kept_of(graph, preset)
        nbytes = sum(presets.row_bytes(name, graph.widths(presets.SHAPES)) for name in kept)
        nodes = presets.rebuilt_nodes(graph, frozenset(kept) - {"input"})
        rebuilt = f"{_products(graph, nodes) / (3 * forward):.0%}"
        rebuilt += " + attention" * any(node.per_sequence for node in nodes)
        name = f'`"{preset}"`' + " (default)" * (preset == "full")
        share = f"{nbytes / presets.D / eager:.0%}"
        rows.append([name, _words(kept, before), share, rebuilt, *_measured(preset)])
        before = kept if preset in EXACT_PRESETS else before
    head = (
        "policy", "keeps for backward", "memory kept", "products rebuilt", "demo: peak", "step"
    )  # fmt: skip
    return markdown(head, rows)


def _measured(way: str) -> list[Cell]:
    """Peak and step time in the demo."""
    found = demo.results()["ways"].get(way, {})
    return [mib(found.get("step_peak_bytes")), times(found.get("step_time_ratio"))]


def _words(kept: list[str], before: list[str]) -> str:
    """What is kept, beside what an exact preset keeps; `before` is the row above, or "none"."""
    names = dict(map(split_name, kept))
    packed = [WORDS[name] for name, stored in names.items() if stored != NATIVE]
    if packed:
        missing = [WORDS[name] for name in before if name not in names]
        without = f" without {', '.join(missing)}" if missing else ""
        return f'as `"none"`{without}; in 8 bits: {", ".join(packed)}'
    more = [WORDS[name] for name in kept if name not in before]
    return ("+ " if before else "") + ", ".join(more)


def _eager_widths() -> float:
    """Bytes of a token that eager keeps at 16 bits, in widths D, as measured in float32."""
    _, folder = PANELS[1]
    shares = [
        point["kept_bytes_per_token"] / panel["case"]["d_model"] / 2
        for panel in load(folder / "frontier.json")["frontier"]["panels"]
        for point in panel["points"]
        if point["way"] == "eager"
    ]
    return sum(shares) / len(shares)


def _products(graph: Graph, nodes: Iterable[Node]) -> int:
    """FLOPs of a token in the nodes' products, attention apart."""
    widths = graph.widths(presets.SHAPES)
    return sum(n.flops(widths, presets.SHAPES, presets.S) for n in nodes if not n.per_sequence)


def status() -> str:
    """What has run, what stands for GPUs until one has run anything, and what is not timed."""
    default, more = (
        load(RESULTS / "audit" / name)["rows"] for name in ("audit.json", "others/audit.json")
    )
    mine, others = ({row["target"].split(" ")[0] for row in rows} for rows in (default, more))
    spilling = sum(bool(row["spills"] or row["stack"]) for row in default)
    lines = [
        "**Status: nothing has run on a GPU yet.**",
        "",
        "- **Ran:** all tests and every figure above, on CPUs; distributed training in two and "
        "four processes over gloo.",
        "- **Evidence for GPUs:** the tests run every Triton kernel in the interpreter, against "
        f"float64. The compiler accepts all {len(default)} default configurations for "
        f"{', '.join(sorted(mine))} ({spilling} spill registers), and most of them for "
        f"{', '.join(sorted(others - mine))}.",
        "- **Not timed:** every kernel, the tables of tiles and routes, offload, CUDA graphs, "
        "NCCL. What a page says is fast on a GPU is an estimate, and it says so.",
    ]
    return "\n".join(f"> {line}".rstrip() for line in lines)


def _rows(path: Path) -> list[Row]:
    found: list[Row] = load(path)["results"]
    return found
