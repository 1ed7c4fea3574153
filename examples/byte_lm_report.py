"""The report of `train_byte_lm.py`: machine, table and plot of results, which are plain data."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

COLOURS = {"eager": "#444444", "checkpoint": "#c2571a"}
MARKERS = {"eager": "*", "checkpoint": "s"}
FUSED_COLOUR, FUSED_MARKER = "#1f6fb2", "o"


def quantiles(values: list[float]) -> dict[str, float]:
    """The 20th, 50th and 80th percentile."""
    levels = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    found = torch.tensor(values, dtype=torch.float64).quantile(levels).tolist()
    return dict(zip(("p20", "p50", "p80"), found, strict=True))


def commit() -> str | None:
    """The commit of the checkout that this file is in, if it is in one."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    return subprocess.run(
        command, cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip() or None  # fmt: skip


def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    on_gpu = torch.device(device).type == "cuda"
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def title(results: dict[str, Any]) -> str:
    """The sizes and the machine, in two lines."""
    s, m = results["sizes"], results["machine"]
    where = m["gpu"] or f"{m['cpu']}, {m['threads']} threads"
    return (
        f"Byte LM, {s['layers']} layers, D={s['d_model']}, H={s['nhead']}, "
        f"F={s['dim_feedforward']}, S={s['seq_len']}, B={s['batch']}, dropout {s['dropout']}, "
        f"{s['dtype']}\n{where}, torch {m['torch']}"
    )


def table(results: dict[str, Any]) -> str:
    """The results as aligned text, a row per way."""
    header = (
        "", "train loss", "val loss", "kept B/token/layer", "less by",
        "step peak MiB", "step time", "p20-p80",
    )  # fmt: skip
    rows = [header]
    eager_kept = results["ways"]["eager"]["kept_bytes_per_token_per_layer"]
    for way, r in results["ways"].items():
        kept, ratio = r["kept_bytes_per_token_per_layer"], r["step_time_ratio"]
        rows.append((
            way, f"{r['final_loss']:.3f}", f"{r['validation_loss']:.3f}",
            f"{kept:,.0f}", f"{eager_kept / kept:.1f}x", f"{r['step_peak_bytes'] / 2**20:,.1f}",
            f"{ratio['p50']:.2f}x", f"{ratio['p20']:.2f}-{ratio['p80']:.2f}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def notes(results: dict[str, Any]) -> str:
    """What the columns mean, and which ways have the same bits."""
    same = {True: "yes", False: "NO"}
    return (
        f"losses     nats per byte; train: mean of the last {results['final_steps']} steps\n"
        "kept       what one layer's forward leaves allocated for backward\n"
        "step peak  of forward, loss and backward, above weights and gradients; no optimizer\n"
        "step time  forward, loss, backward, optimizer; median of the rounds' ratios to eager\n"
        "same bits in every loss and every final weight?\n"
        f"  the five presets: {same[results['rungs_bit_identical']]};"
        f" checkpoint and eager: {same[results['checkpoint_bit_identical_to_eager']]}\n"
        "  (presets draw other dropout masks than eager: their losses agree within noise)"
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Write a plot of memory against time, a labelled point per way."""
    points = {
        way: (r["step_time_ratio"]["p50"], r["kept_bytes_per_token_per_layer"])
        for way, r in results["ways"].items()
    }
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for way, (x, y) in points.items():
        size = 14 if way == "eager" else 8
        marker, colour = MARKERS.get(way, FUSED_MARKER), COLOURS.get(way, FUSED_COLOUR)
        axes.plot(x, y, marker, color=colour, markersize=size)
        label(axes, way, points)
    axes.axvline(1.0, color="#bbbbbb", linewidth=1, linestyle="--", zorder=0)
    xs, ys = zip(*points.values(), strict=True)
    room = 0.5 * max(0.1, max(xs) - min(xs))
    axes.set(
        xlim=(min(xs) - room, max(xs) + 1.3 * room),
        ylim=(min(ys) / 1.5, max(ys) * 1.8), yscale="log",
        xlabel="step time relative to eager", ylabel="bytes kept per token per layer",
    )  # fmt: skip
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title(results), fontsize=10, loc="left")
    figure.savefig(path, dpi=150)


def label(axes: Axes, way: str, points: dict[str, tuple[float, float]]) -> None:
    """The way's name beside its point: on the left if another point is close on its right."""
    x, y = points[way]
    crowded = any(
        other != way and a >= x and max(y, b) / min(y, b) < 1.25 for other, (a, b) in points.items()
    )
    share = "reference" if way == "eager" else f"{points['eager'][1] / y:.1f}x less"
    axes.annotate(
        f"{way} ({share})", (x, y), xytext=(-10 if crowded else 10, 0),
        textcoords="offset points", ha="right" if crowded else "left", va="center",
        color=COLOURS.get(way, FUSED_COLOUR), bbox={"color": "white", "pad": 1},
    )  # fmt: skip
