"""What is found wrong while a kernel runs, by instruction, and what is counted."""

from __future__ import annotations

from collections import Counter

from .decode import Instruction


class Reports:
    """Findings: how often each kind came up at each instruction, and an example."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.example: dict[tuple[str, str], str] = {}

    def add(self, kind: str, i: Instruction | None, count: int = 1, example: str = "") -> None:
        key = kind, str(i) if i is not None else "at the end"
        self.found[key] += int(count)
        self.example.setdefault(key, example)

    def lines(self) -> list[str]:
        return [
            f"{kind}: {where}: {count} times" + (f", e.g. {example}" if example else "")
            for (kind, where), count in self.found.items()
            for example in [self.example[kind, where]]
        ]
