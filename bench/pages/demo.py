"""The demo's table, and the README's first claim."""

from __future__ import annotations

from bench.tables import RESULTS, load, markdown, mib, number, times

DEMO = RESULTS / "demo-cpu" / "demo.json"


def claim() -> str:
    """One sentence with the demo's figures."""
    found = load(DEMO)
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
    found = load(DEMO)
    head = ("", "validation loss", "bytes kept per token per layer", "whole-step peak", "step time")
    rows = [
        [way, number(r["validation_loss"], 3), number(r["kept_bytes_per_token_per_layer"]),
         mib(r["step_peak_bytes"]), times(r["step_time_ratio"])]
        for way, r in found["ways"].items()
    ]  # fmt: skip
    return markdown(head, rows)
