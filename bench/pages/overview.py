"""The README's generated parts: what its picture shows and says, and the presets in words.

The picture has two panels, with dropout and without: kept bytes and step time relative to eager,
geometric means over the shapes that `python -m bench frontier` measured, and the front of the ways
that no other beats in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, geometric_mean

from bench import tables
from bench.figures.overview import PICTURES
from bench.frontier import DATA, Panel, family, panels
from bench.pages import plans, presets
from bench.tables import RESULTS, Cell, Row
from fused_remat.formats import NATIVE, split_name
from fused_remat.policies import ALL_PRESETS, EXACT_PRESETS

DEMO = RESULTS / "demo-cpu" / "demo.json"
WITHOUT_DROPOUT = "No dropout"
#: A panel's title -> its measurements.
PANELS = {
    "Dropout 0.1": RESULTS / "frontier-dropout-cpu" / DATA,
    WITHOUT_DROPOUT: RESULTS / "frontier-cpu" / DATA,
}


def _panels() -> dict[str, list[Panel]]:
    return {title: panels(tables.load(path)) for title, path in PANELS.items()}


def means() -> dict[str, list[Row]]:
    """Of each way measured at all shapes: its kept bytes and step time relative to eager."""
    found = {}
    for title, shapes in _panels().items():
        by_way = [{point.way: point for point in shape.points} for shape in shapes]
        ways = [way for way in by_way[0] if all(way in points for points in by_way)]
        alike = {way: [points[way] for points in by_way] for way in ways}
        rows = [
            {"way": way, "family": family(way), "kept": geometric_mean(p.kept for p in points),
             "time": geometric_mean(p.p50 for p in points)}
            for way, points in alike.items()
        ]  # fmt: skip
        found[title] = sorted(rows, key=lambda row: (row["kept"], row["time"]))
    return found


def picture() -> str:
    """The picture, for a light page or a dark one, and what its points are."""
    light, dark = (tables.place(PICTURES[theme]) for theme in ("light", "dark"))
    with_dropout, without = _panels().values()
    machine = tables.measured_on({**with_dropout[0].machine, "commit": None})
    alt = "Step time against memory kept for backward, for every way to train a layer"
    return f"""<picture>
  <source media="(prefers-color-scheme: dark)" srcset="{dark}">
  <img alt="{alt}" src="{light}">
</picture>

Every way to train an `nn.TransformerEncoderLayer` (float32, {machine}): means \
over {len(with_dropout)} shapes with dropout and {len(without)} without. \
The band is the Pareto front."""


def headline() -> str:
    """The demo's figures, those of a Llama with its loss, and those of plans, in three lines."""
    return "\n".join((_demo(), _llama(), _plans()))


def _demo() -> str:
    found = tables.load(DEMO)
    ways, dropout = found["ways"], found["sizes"]["dropout"]
    time = {way: tables.times(row["step_time_ratio"]) for way, row in ways.items()}
    peak = {way: tables.mib(row["step_peak_bytes"]) for way, row in ways.items()}
    ours = sorted(str(time[way]) for way in ways if way in ALL_PRESETS)
    without = [p["time"] for p in means()[WITHOUT_DROPOUT] if p["way"] in ALL_PRESETS]
    return (
        f"- **Checkpointing's memory, at about its time or less.** A step of the demo (byte-level "
        f"language model, dropout {dropout}, on {tables.measured_on(found['machine'])}) peaks at "
        f"{peak['full']} instead of {peak['eager']}, and takes {time['full']} eager's time; "
        f"`torch.utils.checkpoint`: {peak['checkpoint']}, {time['checkpoint']}. Presets take "
        f"{ours[0]} to {ours[-1]}; without dropout, in the picture, {min(without):.2f}× to "
        f"{max(without):.2f}×."
    )


def demo() -> str:
    """What `make demo` wrote, a row per way."""
    head = ("", "validation loss", "bytes kept per token per layer", "whole-step peak", "step time")
    rows = [
        [way, tables.number(r["validation_loss"], 3),
         tables.number(r["kept_bytes_per_token_per_layer"]), *_measured(r, "step_time_ratio")]
        for way, r in tables.load(DEMO)["ways"].items()
    ]  # fmt: skip
    return tables.markdown(head, rows)


def _llama() -> str:
    found = (row for path in sorted(RESULTS.glob("*/model-cpu.json")) for row in _rows(path))
    row = next(r for r in found if r["case"]["model"] == "smollm-135m" and r["case"]["lora"])
    cells = {way: _measured(r, "step_ratio") for way, r in row["ways"].items()}
    (eager, _), (checkpoint, slower), (ours, time) = map(
        cells.__getitem__, ("eager", "checkpoint", "full_loss")
    )
    return (
        f"- **The loss too.** LoRA on a Llama (SmolLM-135M's shape, {row['case']['seq_len']} "
        f"tokens, `loss=True`) peaks at {ours} instead of {eager}, at {time}; with transformers' "
        f"checkpointing at {checkpoint}, {slower}."
    )


def _plans() -> str:
    rows = _rows(RESULTS / "plan-cpu.json")
    off = [error for row in rows for error in plans.errors(row)["peak"].values()]
    worst = max(map(abs, off))
    return (
        f"- **Plans to a budget.** `plan(model, x, budget=...)` finds the fastest policies "
        f"that fit. {len(off)} plans were run; the measured peak was "
        f"{'the predicted one, to the byte' if worst == 0 else f'{worst:.1%} off at most'}."
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
        for way in shown:
            peak, time = _measured(row["ways"].get(way, {}), "step_ratio")
            cells.append(f"{peak}<br>{time}".replace(" ", "&nbsp;") if time else "")
        rows.append(cells)
    return tables.markdown(["model", *shown], rows)


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
    graph, ran = presets.block(True), tables.load(DEMO)["ways"]
    # Bytes of a token that eager keeps at 16 bits, in widths D, as measured in float32.
    points = [(p, panel) for panel in _panels()[WITHOUT_DROPOUT] for p in panel.points]
    eager = fmean(
        point.kept_bytes_per_token / panel.case["d_model"] / 2
        for point, panel in points
        if point.way == "eager"
    )
    forward = presets.products(graph, graph.nodes)
    # Where nothing after the last product is saved (dropout's mask is), checkpoint stops before it.
    last = presets.products(graph, graph.nodes[-1:])
    replayed = f"{(forward - last) / forward / 3:.0%} to {1 / 3:.0%} + attention"
    rows: list[list[Cell]] = [
        ["eager PyTorch", "everything", f"{1:.0%}", "0%"],
        ["`torch.utils.checkpoint`", WORDS["input"], f"{2 / eager:.0%}", replayed],
    ]
    before: list[str] = []
    for preset in ALL_PRESETS:
        kept = presets.kept_of(graph, preset)
        widths = graph.widths(presets.SHAPES)
        share = sum(presets.row_bytes(name, widths) for name in kept) / presets.D / eager
        nodes = presets.rebuilt_nodes(graph, frozenset(kept) - {"input"})
        rebuilt = f"{presets.products(graph, nodes) / (3 * forward):.0%}"
        rebuilt += " + attention" * any(node.per_sequence for node in nodes)
        rows.append([presets.quoted(preset), _words(kept, before), f"{share:.0%}", rebuilt])
        before = kept if preset in EXACT_PRESETS else before
    for row, way in zip(rows, ("eager", "checkpoint", *ALL_PRESETS), strict=True):
        row += _measured(ran.get(way, {}), "step_time_ratio")
    head = ("policy", "keeps for backward", "memory kept", "products rebuilt")
    return tables.markdown((*head, "demo: peak", "step"), rows)


def _measured(way: Row, ratio: str) -> list[Cell]:
    """A way's peak, and its step's time beside eager's."""
    time = way.get(ratio, {})
    return [tables.mib(way.get("step_peak_bytes")), tables.times(time.get("eager", time) or None)]


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


def status() -> str:
    """What has run, what stands for GPUs until one has run anything, and what is not timed."""
    default, more = (
        tables.load(RESULTS / "audit" / name)["rows"]
        for name in ("audit.json", "others/audit.json")
    )
    mine, others = ({row["target"].split(" ")[0] for row in rows} for rows in (default, more))
    spilling = sum(bool(row["spills"] or row["stack"]) for row in default)
    return f"""> **Status: nothing has run on a GPU yet.**
>
> - **Ran:** all tests and every figure above, on CPUs; distributed training in two and four \
processes over gloo.
> - **Evidence for GPUs:** the tests run every Triton kernel in the interpreter, against float64. \
The compiler accepts all {len(default)} default configurations for {_listed(mine)} ({spilling} \
spill registers), and most of them for {_listed(others - mine)}.
> - **Not timed:** every kernel, the tables of tiles and routes, offload, CUDA graphs, NCCL. What \
a page says is fast on a GPU is an estimate, and it says so."""


def _listed(targets: Iterable[str]) -> str:
    return ", ".join(sorted(targets))


def _rows(path: Path) -> list[Row]:
    found: list[Row] = tables.load(path)["results"]
    return found
