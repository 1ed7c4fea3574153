"""Writes the generated parts of README.md and docs/, and the figures, from what they are made of.

That is graphs, result files and tests' marks. `python -m bench report` rewrites the text between
`<!-- name:begin -->` and `<!-- name:end -->`, on whichever page that stands, and each folder's
frontier and the pictures of plans and of losses where they are not of their data; `--check` fails
if that would change anything. No number in them is typed by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bench.measure.machine import ROOT
from bench.pages import (
    audit,
    composition,
    demo,
    drawings,
    eight_bits,
    formats,
    frontier,
    gpu,
    kernels,
    layers,
    lora,
    losses,
    models,
    overview,
    pictures,
    plans,
    presets,
    scale,
)

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PARTS: dict[str, Callable[[], str]] = {
    "audit": audit.audit_table,
    "composition": composition.table,
    "targets_compiled": audit.targets_compiled,
    "lora": lora.tables,
    "losses": losses.section,
    "presets": presets.rung_table,
    "decoder_rungs": presets.decoder_rung_table,
    "rungs_transformer": presets.transformer_table,
    "overview": overview.picture,
    "headline": overview.headline,
    "presets_in_words": overview.presets_table,
    "status": overview.status,
    "demo": demo.demo_table,
    "kernels": kernels.cpu,
    "work": kernels.work_table,
    "hardware": kernels.gpu,
    "targets_gpu": gpu.section,
    "layers_machine": layers.machine,
    "layers": layers.tables,
    "models": models.section,
    "models_readme": overview.models_table,
    "profile": layers.profile,
    "targets": layers.targets,
    "planner": plans.section,
    "planner_readme": plans.readme,
    "scale_example": scale.example,
    "scale_checked": scale.checked,
    "formats": formats.section,
    "frontier8": eight_bits.frontier8,
    "targets8": eight_bits.targets8,
    "frontier": frontier.section,
    "frontier_readme": frontier.readme,
}


def render(text: str, page: Path) -> str:
    """A page's text with every generated part made anew; links are written for where it stands.

    Raises: KeyError for a part of no such name.
    """

    def link(match: re.Match[str]) -> str:
        """Parts link files from the root of the repository."""
        target = ROOT / match[1]
        return f"]({os.path.relpath(target, page.parent)})" if target.exists() else match[0]

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        part = re.sub(r"\]\(([\w./-]+)\)", link, PARTS[name]())
        return f"<!-- {name}:begin -->\n{part}\n<!-- {name}:end -->"

    return re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", replace, text, flags=re.DOTALL)


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
    stale = overview.stale() + drawings.stale() + frontier.stale() + pictures.stale()
    if stale and not check:
        try:
            overview.rewrite()
            drawings.rewrite()
            frontier.rewrite()
            pictures.rewrite()
        except ImportError as error:  # no matplotlib
            print(f"python -m bench report: {error}", file=sys.stderr)
            return 2
    for page, text in stale_pages().items():
        stale.append(page)
        if not check:
            page.write_text(text)
    if stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(("out of date: " if check else "rewritten: ") + names)
    return int(bool(stale) and check)
