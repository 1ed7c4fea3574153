"""Writes the generated parts of README.md and docs/, and the figures, from what they are made of.

That is graphs, result files and tests' marks. `python -m bench report` rewrites the text between
`<!-- module.function:begin -->` and its `:end`, on whichever page that stands, by what the function
of that module beside this one says, and the pictures that are not of their data; `--check` fails if
that would change anything. No number in them is typed by hand.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from pathlib import Path

from bench.measure.machine import ROOT
from bench.pages import pictures

UNMEASURED = "Not measured yet."
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def part(name: str, **given: Path) -> str:
    """What a function of a module beside this one says, by "module.function"."""
    module, function = name.split(".")
    try:
        text = getattr(importlib.import_module(f"bench.pages.{module}"), function)(**given)
    except FileNotFoundError:
        text = ""
    return text or UNMEASURED


def render(text: str, page: Path) -> str:
    """A page's text with every generated part made anew; links are written for where it stands."""

    def link(match: re.Match[str]) -> str:
        """Parts link files from the root of the repository."""
        target = ROOT / match[1]
        return f"]({os.path.relpath(target, page.parent)})" if target.exists() else match[0]

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        text = re.sub(r"\]\(([\w./-]+)\)", link, part(name))
        return f"<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->"

    return re.sub(r"<!-- ([\w.]+):begin -->.*?<!-- \1:end -->", replace, text, flags=re.DOTALL)


def stale_pages() -> dict[Path, str]:
    """Pages of which a generated part says something else now -> what they should be.

    How the cells of a table are padded does not matter.
    """

    def cells(text: str) -> str:
        return re.sub(r" *\| *", "|", text)

    found = {page: render(page.read_text(), page) for page in PAGES}
    return {page: new for page, new in found.items() if cells(new) != cells(page.read_text())}


def main(arguments: list[str]) -> int:
    """Rewrite pages and figures, or with --check say which are out of date; 1 if any is."""
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check = parser.parse_args(arguments).check
    stale, pages = pictures.stale(), stale_pages()
    if not check:
        try:
            pictures.rewrite()
        except ImportError as error:  # no matplotlib
            print(f"python -m bench report: {error}", file=sys.stderr)
            return 2
        for page, text in pages.items():
            page.write_text(text)
    if stale or pages:
        names = ", ".join(str(path.relative_to(ROOT)) for path in [*stale, *pages])
        print(("out of date: " if check else "rewritten: ") + names)
    return int(check and bool(stale or pages))
