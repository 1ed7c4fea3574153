"""The README's generated parts: what its picture shows, and the presets in words."""

from __future__ import annotations

from statistics import fmean, geometric_mean

from bench import tables
from bench.pages import plans
from bench.pages.frontier import DATA, Panel, family, panels
from bench.pages.presets import D, Kept, block, products, quoted
from bench.tables import RESULTS, Cell, Row
from fused_remat.policies import EXACT_PRESETS

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
    """Return kept bytes and time, relative to eager, of each way measured at all shapes."""
    found = {}
    for title, shapes in _panels().items():
        by_way = [{point.way: point for point in shape.points} for shape in shapes]
        ways = [way for way in by_way[0] if all(way in points for points in by_way)]
        shared = {way: [points[way] for points in by_way] for way in ways}
        rows = [
            {"way": way, "family": family(way), "kept": geometric_mean(p.kept for p in points),
             "time": geometric_mean(p.p50 for p in points)}
            for way, points in shared.items()
        ]  # fmt: skip
        found[title] = sorted(rows, key=lambda row: (row["kept"], row["time"]))
    return found


def caption() -> str:
    """Return the picture's caption."""
    with_dropout, without = _panels().values()
    machine = tables.measured_on({**with_dropout[0].machine, "commit": None})
    return (
        f"Training methods for an `nn.TransformerEncoderLayer` (float32, {machine}): means over "
        f"{len(with_dropout)} shapes with dropout and {len(without)} without. The band is the "
        "Pareto front."
    )


def headline() -> str:
    """Return three lines: figures of the demo, of a Llama with its loss, of plans."""
    found, every = tables.load(DEMO), tables.load(RESULTS / "plan-cpu.json")["results"]
    way = {name: _measured(way) for name, way in found["ways"].items()}
    (eager, _), (checkpoint, slower), (full, time) = way["eager"], way["checkpoint"], way["full"]
    ours = sorted(str(way[name][1]) for name in way if name in EXACT_PRESETS)
    without = [p["time"] for p in means()[WITHOUT_DROPOUT] if p["way"] in EXACT_PRESETS]
    adapted = [row for row in _models() if row["case"]["lora"]]
    llamas = (row for row in adapted if row["case"]["model"] == "smollm-135m")
    lora = max(llamas, key=lambda row: row["case"]["layers"])  # `make bench` measures two layers
    tuned = [_measured(lora["ways"][name]) for name in ("eager", "checkpoint", "full_loss")]
    off = [error for row in every for error in plans.errors(row)["peak"].values()]
    worst = max(map(abs, off))
    return f"""- **Checkpointing's memory, at about its time or less.** A step of the demo \
(byte-level language model, dropout {found["sizes"]["dropout"]}, on \
{tables.measured_on(found["machine"])}) peaks at {full} instead of {eager}, and takes {time} \
eager's time; `torch.utils.checkpoint`: {checkpoint}, {slower}. Presets take {ours[0]} to \
{ours[-1]}; without dropout, in the picture, {min(without):.2f}× to {max(without):.2f}×.
- **The loss too.** LoRA on a Llama (SmolLM-135M's shape, {lora["case"]["seq_len"]} tokens, \
`loss=True`) peaks at {tuned[2][0]} instead of {tuned[0][0]}, at {tuned[2][1]}; with transformers' \
checkpointing at {tuned[1][0]}, {tuned[1][1]}.
- **Plans to a budget.** `plan(model, x, budget=...)` finds the fastest policies that fit. \
{len(off)} plans were run; the measured peak was \
{"the predicted one, to the byte" if worst == 0 else f"{worst:.1%} off at most"}."""


def demo() -> str:
    """Return the results of `make demo`, a line per way."""
    head = ("", "validation loss", "bytes kept per token per layer", "whole-step peak", "step time")
    rows = [
        [name, tables.number(way["validation_loss"], 3),
         tables.number(way["kept_bytes_per_token_per_layer"]), *_measured(way)]
        for name, way in tables.load(DEMO)["ways"].items()
    ]  # fmt: skip
    return tables.markdown(head, rows)


def _models() -> list[Row]:
    paths = tables.files("model-cpu.json")
    return [row for path in paths for row in tables.load(path)["results"]]


#: Name of an activation -> what it is.
WORDS = {
    "input": "the layer's input",
    "attn": "attention's output",
    "mid": "the sum between attention and MLP",
    "qkv": "queries, keys, values",
    "up": "the MLP before its activation",
}


def presets_table() -> str:
    """Return the presets of a pre-norm encoder layer in words, with eager and checkpoint."""
    graph, ran = block(True), tables.load(DEMO)["ways"]
    # Bytes of a token that eager keeps at 16 bits, in widths D, as measured in float32.
    eager = fmean(
        point.kept_bytes_per_token / panel.case["d_model"] / 2
        for panel in _panels()[WITHOUT_DROPOUT]
        for point in panel.points
        if point.way == "eager"
    )
    forward = products(graph, graph.nodes)
    # Where nothing after the last product is saved (dropout's mask is), checkpoint stops before it.
    last = products(graph, graph.nodes[-1:])
    replayed = f"{(forward - last) / forward / 3:.0%} to {1 / 3:.0%} + attention"
    rows: list[list[Cell]] = [
        ["eager PyTorch", "everything", f"{1:.0%}", "0%"],
        ["`torch.utils.checkpoint`", WORDS["input"], f"{2 / eager:.0%}", replayed],
    ]
    before: list[str] = []
    for preset in EXACT_PRESETS:
        kept = Kept(graph, preset)
        share = sum(nbytes for _, nbytes in kept.sizes) / D / eager
        rebuilt = f"{kept.products / (3 * forward):.0%}" + " + attention" * bool(kept.attentions)
        rows.append([quoted(preset), _words(kept.names, before), f"{share:.0%}", rebuilt])
        before = kept.names
    for row, way in zip(rows, ("eager", "checkpoint", *EXACT_PRESETS), strict=True):
        row += _measured(ran.get(way, {}))
    head = ("policy", "keeps for backward", "memory kept", "products rebuilt")
    return tables.markdown((*head, "demo: peak", "step"), rows)


def _measured(way: Row) -> tuple[Cell, Cell]:
    """Return a way's peak, and the ratio of its step's time to eager's."""
    time = way.get("step_time_ratio") or way.get("step_ratio", {}).get("eager")
    return tables.mib(way.get("step_peak_bytes")), tables.times(time)


def _words(kept: list[str], before: list[str]) -> str:
    """Return what is kept, in addition to `before`, the names in the entry above."""
    more = [WORDS[name] for name in kept if name not in before]
    return ("+ " if before else "") + ", ".join(more)
