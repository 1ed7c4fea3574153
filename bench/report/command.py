"""Writes the generated parts of README.md and docs/, and the figures, from what they are made of.

That is graphs, result files and tests' marks. `python -m bench report` rewrites the text between
`<!-- name:begin -->` and `<!-- name:end -->`, and each folder's frontier and the pictures of plans
and of losses where they are not of their data; `--check` fails if that would change anything. No
number in them is typed by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bench.measure.machine import ROOT
from bench.report import (
    audit,
    composition,
    demo,
    drawings,
    eight_bits,
    formats,
    frontier,
    hardware,
    kernels,
    layers,
    lora,
    losses,
    models,
    overview,
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
    "targets_gpu": hardware.section,
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


def render(text: str, page: Path = PAGES[0]) -> str:
    """`text` of a page with every generated part made anew, links as from where the page is.

    Raises: KeyError for a part of no such name.
    """
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        part = re.sub(r"\]\((?:\.\./)*(bench|tests)/", rf"]({up}\1/", PARTS[name]())
        return f"<!-- {name}:begin -->\n{part}\n<!-- {name}:end -->"

    return re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", replace, text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Rewrite pages and figures, or with --check say which are out of date; 1 if any is."""
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check = parser.parse_args(arguments).check
    stale = overview.stale() + drawings.stale() + frontier.stale() + plans.stale() + losses.stale()
    if stale and not check:
        try:
            overview.rewrite()
            drawings.rewrite()
            frontier.rewrite()
            plans.rewrite()
            losses.rewrite()
        except ImportError as error:  # no matplotlib
            print(f"python -m bench report: {error}", file=sys.stderr)
            return 2
    for page in PAGES:
        text = page.read_text()
        new = render(text, page)
        if new != text:
            stale.append(page)
            if not check:
                page.write_text(new)
    if stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(("out of date: " if check else "rewritten: ") + names)
    return int(bool(stale) and check)
