"""An extension of mkdocstrings: this library's docstrings as it expects them.

Sections of one line, such as `Shapes: x (B, S, D)`, become paragraphs with a bold title;
examples become blocks of code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(Shapes|Units|Raises|Returns|Source|Args|Attributes): (?=\S)")


def _as_markdown(text: str) -> str:
    """A docstring with paragraphs for sections of one line, and fences around examples."""
    lines: list[str] = []
    in_section = in_example = False
    for line in text.splitlines():
        if in_example and not line.strip():
            lines.append("```")
            in_example = False
        elif line.startswith(">>> ") and not in_example:
            lines.append("```pycon")
            in_example, in_section = True, False
        elif _SECTION.match(line):
            lines += [""] if lines and lines[-1] else []
            line, in_section = _SECTION.sub(r"**\1:** ", line), True
        elif in_section and line[:1] != " ":
            lines += [""] if line else []
            in_section = False
        lines.append(line.lstrip() if in_section else line)
    return "\n".join([*lines, "```"] if in_example else lines)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _as_markdown(obj.docstring.value)
