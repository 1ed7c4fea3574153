"""The demo's results, and their table."""

from __future__ import annotations

from bench.tables import RESULTS, Row, load, markdown, mib, number, times

DEMO = RESULTS / "demo-cpu" / "demo.json"


def results() -> Row:
    """What `make demo` wrote."""
    found: Row = load(DEMO)
    return found


def table() -> str:
    """The demo's results, a row per way."""
    head = ("", "validation loss", "bytes kept per token per layer", "whole-step peak", "step time")
    rows = [
        [way, number(r["validation_loss"], 3), number(r["kept_bytes_per_token_per_layer"]),
         mib(r["step_peak_bytes"]), times(r["step_time_ratio"])]
        for way, r in results()["ways"].items()
    ]  # fmt: skip
    return markdown(head, rows)
