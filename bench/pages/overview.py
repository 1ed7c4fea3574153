"""The README's generated parts: its picture and headline, an H100's first, and the presets."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench import tables
from bench.pages import models, plans
from bench.pages.frontier import DATA, SLACK, Panel, Point, family, panels
from bench.pages.presets import D, Kept, block, products, quoted
from bench.tables import RESULTS, Cell, Row
from fused_remat.policies import EXACT_PRESETS

DEMO = RESULTS / "demo-cpu" / "demo.json"
WIDTHS, PICTURED = (1024, 2048, 4096), 2048
#: Title of a panel of the picture -> norm and dropout of the layer.
KINDS = {
    f"{norm.capitalize()}-norm{f', dropout {p}' * bool(p)}": (norm, p)
    for p in (0.0, 0.1)
    for norm in ("pre", "post")
}
#: Ways that a panel of the picture shows at least.
_NEEDED = {"eager", "checkpoint", *EXACT_PRESETS}


@functools.cache
def _encoders() -> tuple[tuple[Path, Panel], ...]:
    """Return folders and steps of encoder layers on a GPU, S = 2048, the newest first."""
    return tuple(
        (folder, panel)
        for folder, data in tables.gpu_files()
        for panel in panels(data)
        if panel.case["seq_len"] == 2048 and {p.way for p in panel.points} >= _NEEDED
    )


def _encoder(norm: str, dropout: float, width: int) -> tuple[Path, Panel] | None:
    """Return the newest measurement of a layer of this kind, and its folder."""
    sought = {"norm": norm, "dropout": dropout, "d_model": width}
    return next((found for found in _encoders() if sought.items() <= found[1].case.items()), None)


def _widths() -> tuple[Row, list[dict[str, Point]]]:
    """Return the newest machine that measured pre-norm layers at all `WIDTHS`, and their ways."""
    for folder in dict.fromkeys(folder for folder, _ in _encoders()):
        found = {
            panel.case["d_model"]: panel
            for where, panel in _encoders()
            if where == folder and (panel.case["norm"], panel.case["dropout"]) == ("pre", 0.0)
        }
        if set(WIDTHS) <= set(found):
            ways = [{p.way: p for p in found[width].points} for width in WIDTHS]
            return found[WIDTHS[0]].machine, ways
    raise FileNotFoundError("no GPU has measured all widths")


def _pictured() -> dict[str, tuple[Path, Panel]]:
    found = {title: _encoder(*kind, PICTURED) for title, kind in KINDS.items()}
    return {title: pair for title, pair in found.items() if pair}


def shown() -> dict[str, list[Row]]:
    """Return the picture's panels: bytes and time of every way, relative to eager."""
    return {
        title: [
            {"way": p.way, "family": family(p.way), "kept": p.kept, "time": p.p50}
            for p in sorted(panel.points, key=lambda p: (p.kept, p.p50))
        ]
        for title, (_, panel) in _pictured().items()
    }


def caption() -> str:
    """Return the picture's caption."""
    titles: dict[Path, list[str]] = {}
    machines, case = {}, {}
    for title, (folder, panel) in _pictured().items():
        titles.setdefault(folder, []).append(title)
        machines[tables.measured_on({**panel.machine, "commit": None})] = None
        case = case or panel.case
    names = [f"`{tables.in_results(path)}` ({'; '.join(of)})" for path, of in titles.items()]
    return (
        f"Training methods for an `nn.TransformerEncoderLayer` on {' and '.join(machines)}: "
        f"{case['dtype']}, D = {case['d_model']}, S = {case['seq_len']}, B = {case['batch']}, "
        f"causal ([all steps](docs/tables/gpu.md), from {', '.join(names)}). Blue: FusedRemat. "
        "Purple: `torch.compile`, where measured (budget: `activation_memory_budget`). Orange: "
        "checkpointing, by `torch.utils.checkpoint` or the package torch-remat, of all but matrix "
        "products (selective matmuls), or of attention alone. Gray band: no other method is both "
        f"faster and smaller; bytes within {SLACK:.0%} count as equal."
    )


def headline() -> str:
    """Return lines with figures of layers and models on a GPU, of the CPU demo, and of plans."""
    return "\n".join([layers(), _loss(), _demo(), _plans()])


def _listed(values: Sequence[Any]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}"


def layers() -> str:
    """Return the times of `full`, of checkpointing and of compiled layers on a GPU, by width."""
    machine, by_way = _widths()
    full, slower = (
        _listed([f"{ways[name].p50:.2f}×" for ways in by_way]) for name in ("full", "checkpoint")
    )
    return (
        f"- **Checkpointing's memory, at about eager's time.** On one GPU "
        f"({tables.measured_on(machine)}; bfloat16, pre-norm, no dropout, S = 2048) "
        f"`\"full\"` keeps {by_way[0]['full'].kept:.0%} of eager's bytes, and takes {full} eager's "
        f"time at D = {_listed(WIDTHS)}; `torch.utils.checkpoint`: {slower}.{_compiled(by_way)} "
        "GPU figures are of the commits named; the code has changed since."
    )


def _compiled(by_way: list[dict[str, Point]]) -> str:
    """Return a sentence on `torch.compile` with and without a budget, if the picture has them."""
    ways = by_way[WIDTHS.index(PICTURED)]
    found = {w: p["compile"] for w, p in zip(WIDTHS, by_way, strict=True) if "compile" in p}
    alone = {width: f"{point.p50:.2f}×" for width, point in found.items()}
    budgets = [p for p in ways.values() if p.way.startswith("compile_budget")]
    over = []
    for preset in (ways[name] for name in EXACT_PRESETS):
        fits = [p.p50 for p in budgets if p.kept <= preset.kept * (1 + SLACK)]
        over += [min(fits) / preset.p50] if fits else []
    if len(alone) < 2 or not over:
        return ""
    return (
        f" `torch.compile` keeps everything and takes {_listed([*alone.values()])} at D = "
        f"{_listed([*alone])}. Where its `activation_memory_budget` limits it to the bytes of a "
        f"preset, it takes {min(over):.2f}× to {max(over):.2f}× the preset's time (D = {PICTURED})."
    )


def _models() -> Iterator[tuple[Row, Row]]:
    """Yield machines and rows of models of every GPU that were fully trained, the newest first."""
    for _, data in tables.gpu_files():
        rows = models.rows_of(data)
        yield from ((data["machine"], row) for row in rows if not row["case"]["lora"])


def _loss() -> str:
    """Return a model's step with its loss compared with Liger's, and the largest batch's."""
    machine, row = next(
        (machine, row)
        for machine, row in _models()
        if row["case"]["model"] == "qwen2-1.5b"
        and all("step_seconds" in row["ways"].get(way, {}) for way in ("liger", "full_loss"))
    )
    c, time, peak = row["case"], {}, {}
    where = "the same GPU" if machine["gpu"] == _widths()[0]["gpu"] else machine["gpu"]
    for name, way in row["ways"].items():
        if "step_seconds" in way:
            time[name] = way["step_seconds"]["p50"]
            peak[name] = way["step_peak_bytes"]

    def both(way: str) -> str:
        return f"{1e3 * time[way]:.0f} ms, {peak[way] / 2**30:.1f} GiB"

    return (
        f"- **The loss too.** On {where}, a step of Qwen2-1.5B with `loss=True` (all weights "
        f"trained, {c['batch']} × {c['seq_len']} tokens, commit {machine['commit'][:7]}) takes "
        f"{time['full_loss'] / time['liger']:.2f}× the time of Liger's kernels without "
        f"checkpointing at {peak['full_loss'] / peak['liger']:.2f}× its peak: {both('full_loss')} "
        f"above weights and gradients instead of {both('liger')}; Liger with checkpointing "
        f"{both('liger_checkpoint')}, eager {both('eager')}.{_largest()}"
    )


def _largest() -> str:
    """Return a sentence on tokens a second of the largest batches within a cap, if measured."""
    for _, row in _models():
        rates = {n: w["tokens_per_second"] for n, w in row["ways"].items() if "largest_batch" in w}
        if {"full_loss", "liger_checkpoint"} <= set(rates):
            return (
                f" Not everywhere: with `{row['case']['model']}` at the largest batch in "
                f"{row['memory_cap'] / 2**30:.0f} GiB it reaches "
                f"{rates['full_loss'] / rates['liger_checkpoint']:.2f}× the tokens a second of "
                "Liger with checkpointing."
            )
    return ""


def _demo() -> str:
    """Return the demo's figures, and the times of presets without dropout, on CPUs."""
    found = tables.load(DEMO)
    way = {name: _measured(way) for name, way in found["ways"].items()}
    (eager, _), (checkpoint, slower), (full, time) = way["eager"], way["checkpoint"], way["full"]
    cpu = panels(tables.load(RESULTS / "frontier-cpu" / DATA))
    times = [
        geometric_mean(p.p50 for panel in cpu for p in panel.points if p.way == name)
        for name in EXACT_PRESETS
    ]
    return (
        f"- **On a CPU too.** A step of the demo (byte-level language model, dropout "
        f"{found['sizes']['dropout']}, on {tables.measured_on(found['machine'])}) peaks at {full} "
        f"instead of {eager} at {time} eager's time; checkpointing: {checkpoint}, {slower}. Layers "
        f"without dropout take {min(times):.2f}× to {max(times):.2f}× on "
        f"{tables.measured_on(cpu[0].machine)}."
    )


def _plans() -> str:
    found = tables.load(RESULTS / "plan-cpu.json")
    off = [error for row in found["results"] for error in plans.errors(row)["peak"].values()]
    worst = max(map(abs, off))
    return (
        "- **Plans to a budget.** `plan(model, x, budget=...)` finds the fastest policies that "
        f"fit. {len(off)} plans were run ({tables.measured_on(found['machine'])}); the measured "
        f"peak was {'the predicted one, to the byte' if not worst else f'{worst:.1%} off at most'}."
    )


def demo() -> str:
    """Return the results of `make demo`, a line per way."""
    head = ("", "validation loss", "bytes kept per token per layer", "whole-step peak", "step time")
    rows = [
        [name, tables.number(way["validation_loss"], 3),
         tables.number(way["kept_bytes_per_token_per_layer"]), *_measured(way)]
        for name, way in tables.load(DEMO)["ways"].items()
    ]  # fmt: skip
    return tables.markdown(head, rows)


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
    graph, found = block(True), tables.load(DEMO)
    machine, by_way = _widths()
    # Bytes of a token that eager keeps at 16 bits, in widths D.
    eager = by_way[0]["eager"].kept_bytes_per_token / WIDTHS[0]
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
        times = " / ".join(f"{ways[way].p50:.2f}" for ways in by_way)
        row += [f"{times} ×", *_measured(found["ways"].get(way, {}))]
    gpu, widths = machine["gpu"].removeprefix("NVIDIA "), " / ".join(map(str, WIDTHS))
    head = ("policy", "keeps for backward", "memory kept", "products rebuilt")
    measured = (f"{gpu}: step, D = {widths}", "CPU demo: peak", "step")
    measured_at = ((p.machine, p.case["d_model"], p.case) for _, p in _encoders())
    case = next(c for where, width, c in measured_at if (where, width) == (machine, WIDTHS[1]))
    unit = 2**30 / case["batch"] / case["seq_len"]  # from bytes of a token to GiB
    gib = [by_way[1][way].kept_bytes_per_token / unit for way in ("eager", "full")]
    return (
        f"{tables.markdown((*head, *measured), rows)}\n\n{gpu}: {case['dtype']}, S = "
        f"{case['seq_len']}, no dropout; CPU demo: dropout {found['sizes']['dropout']}, "
        f"{tables.measured_on(found['machine'])}. A layer of D = {WIDTHS[1]}, B = {case['batch']} "
        f'keeps {gib[0]:.2f} GiB in eager, {gib[1]:.2f} GiB under `"full"`.'
    )


def _measured(way: Row) -> tuple[Cell, Cell]:
    """Return a way's peak, and the ratio of its step's time to eager's."""
    time = way.get("step_time_ratio") or way.get("step_ratio", {}).get("eager")
    return tables.mib(way.get("step_peak_bytes")), tables.times(time)


def _words(kept: list[str], before: list[str]) -> str:
    """Return what is kept, in addition to `before`, the names in the entry above."""
    more = [WORDS[name] for name in kept if name not in before]
    return ("+ " if before else "") + ", ".join(more)
