"""The example of docs/scale.md: a command, and what it prints."""

from __future__ import annotations

from fused_remat.cli import scale

#: With assumed rates, so that the output is the same on every machine.
EXAMPLE = "--model llama3-70b --mesh 8x8 --seq 8192 --batch 2"


def example() -> str:
    """Return the command and its output."""
    lines = "\n".join(scale.lines(scale.estimated(scale.parse(EXAMPLE.split()))))
    return f"```\n$ python -m fused_remat scale {EXAMPLE}\n{lines}\n```"
