"""Write the generated parts of README.md and docs/, and the figures, from results and graphs.

`python -m bench report` rewrites the text between `<!-- module.function:begin -->` and its `:end`
on every page, by that function of a module of `bench.pages`, and the figures whose data changed;
`--check` fails if that would change anything. No number in them is typed by hand.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import figures
from bench.figures import Picture
from bench.measure.machine import ROOT
from bench.pages import mixtures
from bench.pages.frontier import sets
from bench.pages.overview import shown
from bench.pages.presets import Kept, block
from fused_remat.policies import EXACT_PRESETS

UNMEASURED = "Not measured yet."
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
DRAWN_BLOCK = ROOT / "docs" / "images" / "presets.svg"


def part(name: str, **options: Path) -> str:
    """Return the text of a function of a module of this package, by "module.function"."""
    module, function = name.split(".")
    try:
        text = getattr(importlib.import_module(f"bench.pages.{module}"), function)(**options)
    except FileNotFoundError:
        text = ""
    return text or UNMEASURED


def render(text: str, page: Path) -> str:
    """Return a page's text with every generated part written again, its links relative to it."""

    def link(match: re.Match[str]) -> str:
        """Return a link of a part, which starts at the repository's root, relative to the page."""
        target = ROOT / match[1]
        return f"]({os.path.relpath(target, page.parent)})" if target.exists() else match[0]

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        text = re.sub(r"\]\(([\w./-]+)\)", link, part(name))
        return f"<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->"

    return re.sub(r"<!-- ([\w.]+):begin -->.*?<!-- \1:end -->", replace, text, flags=re.DOTALL)


def stale_pages() -> dict[Path, str]:
    """Return pages that are out of date, with their new text; padding of cells does not count."""

    def cells(text: str) -> str:
        return re.sub(r" *\| *", "|", text)

    texts = {page: render(page.read_text(), page) for page in PAGES}
    return {page: new for page, new in texts.items() if cells(new) != cells(page.read_text())}


def pictures() -> Iterator[Picture]:
    """Yield the figures of folders of results and of pages."""
    for folder, panels in {**sets(), **mixtures.sets()}.items():
        yield figures.frontier(folder, panels)
    yield from figures.overview(shown())
    graph = block(True)
    kept = {preset: Kept(graph, preset) for preset in EXACT_PRESETS}
    entries = [
        {"preset": preset, "kept": k.names, "rebuilt": [n.name for n in k.nodes],
         "size": k.size, "work": k.work}
        for preset, k in kept.items()
    ]  # fmt: skip
    yield figures.presets(DRAWN_BLOCK, ["input", *graph.names, "output"], entries)


def stale_files() -> list[Path]:
    """Return the files of figures that are missing or show other data."""
    return [path for picture in pictures() for path in picture.stale()]


def main(arguments: list[str]) -> int:
    """Rewrite pages and figures, or with --check name those out of date; 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only name the files out of date")
    check = parser.parse_args(arguments).check
    stale, pages = stale_files(), stale_pages()
    if not check:
        try:
            for picture in pictures():
                if picture.stale():
                    picture.draw(picture)
        except ImportError as error:  # no matplotlib
            print(f"python -m bench report: {error}", file=sys.stderr)
            return 2
        for page, text in pages.items():
            page.write_text(text)
    if stale or pages:
        names = ", ".join(str(path.relative_to(ROOT)) for path in [*stale, *pages])
        print(("out of date: " if check else "rewritten: ") + names)
    return int(check and bool(stale or pages))
