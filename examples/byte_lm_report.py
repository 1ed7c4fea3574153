"""The report of `train_byte_lm.py`: table and plot of results, which are plain data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1]))  # for `bench`, which is not installed
from bench.tables import measured_on, mib, number, terminal, times

COLOURS = {"eager": "#444444", "checkpoint": "#c2571a"}
FUSED_COLOUR = "#1f6fb2"


def title(results: dict[str, Any]) -> str:
    """The sizes and the machine, in two lines."""
    s = results["sizes"]
    return (
        f"Byte LM, {s['layers']} layers, D={s['d_model']}, H={s['nhead']}, "
        f"F={s['dim_feedforward']}, S={s['seq_len']}, B={s['batch']}, dropout {s['dropout']}, "
        f"{s['dtype']}\n{measured_on(results['machine'])}"
    )


def table(results: dict[str, Any]) -> str:
    """The results as aligned text, a row per way."""
    head = ("", "train loss", "val loss", "kept B/token/layer", "less by", "step peak", "step time")
    eager_kept = results["ways"]["eager"]["kept_bytes_per_token_per_layer"]
    rows = []
    for way, r in results["ways"].items():
        kept = r["kept_bytes_per_token_per_layer"]
        losses = number(r["final_loss"], 3), number(r["validation_loss"], 3)
        peak, time = mib(r["step_peak_bytes"], 1), times(r["step_time_ratio"], spread=True)
        rows.append((way, *losses, number(kept), number(eager_kept / kept, 1, "×"), peak, time))
    return terminal(head, rows)


def notes(results: dict[str, Any]) -> str:
    """What the columns mean, and which ways have the same bits."""
    same = {True: "yes", False: "NO"}
    return (
        f"losses     nats per byte; train: mean of the last {results['final_steps']} steps\n"
        "kept       what one layer's forward leaves allocated for backward\n"
        "step peak  of forward, loss and backward, above weights and gradients; no optimizer\n"
        "step time  forward, loss, backward, optimizer, relative to eager in the same round:\n"
        "           the median, and the 20th and 80th percentile\n"
        "same bits in every loss and every final weight?\n"
        f"  the five presets: {same[results['presets_bit_identical']]};"
        f" checkpoint and eager: {same[results['checkpoint_bit_identical_to_eager']]}\n"
        "  (presets draw other dropout masks than eager: their losses agree within noise)"
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Write a plot of memory against time, a labeled point per way."""
    points = {
        way: (r["step_time_ratio"]["p50"], r["kept_bytes_per_token_per_layer"])
        for way, r in results["ways"].items()
    }
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for way, (x, y) in points.items():
        colour = COLOURS.get(way, FUSED_COLOUR)
        axes.plot(x, y, "o", color=colour, markersize=8)
        less = "reference" if way == "eager" else f"{points['eager'][1] / y:.1f}× less"
        near = [a for a, b in points.values() if max(y, b) / min(y, b) < 1.25]
        left = x < max(near)  # where another point is close on its right
        axes.annotate(
            f"{way} ({less})", (x, y), xytext=(-10 if left else 10, 0), textcoords="offset points",
            ha="right" if left else "left", va="center", color=colour,
        )  # fmt: skip
    axes.axvline(1.0, color="#bbbbbb", linewidth=1, linestyle="--", zorder=0)
    axes.margins(x=0.5, y=0.1)
    axes.set(
        yscale="log", xlabel="step time relative to eager", ylabel="bytes kept per token per layer"
    )
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title(results), fontsize=10, loc="left")
    figure.savefig(path, dpi=150)
