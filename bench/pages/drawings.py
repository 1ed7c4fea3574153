"""The drawing of docs/how-it-works.md that says what presets keep and rebuild, of a block's graph.

It is an SVG whose colours follow the reader's light or dark theme. The one beside it, block.svg, is
drawn by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.figures.drawing import Picture, marked
from bench.measure.machine import ROOT
from bench.pages.presets import Kept, block
from fused_remat.policies import EXACT_PRESETS

IMAGES = ROOT / "docs" / "images"
_STYLE = """<title>What presets keep and rebuild of a pre-norm encoder block</title>
<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11px; fill: #59636e; }
.name { font-weight: 600; }
.kept { fill: #0969da; }
.rebuilt { fill: none; stroke: #c2410c; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #9198a1; }
  .kept { fill: #58a6ff; }
  .rebuilt { stroke: #f0883e; }
}
</style>"""
_STEP, _LEFT, _TOP, _ROW = 68, 120, 58, 34  # columns and rows, pixels


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{text}</text>'


def _circle(kind: str, x: float, y: float, radius: float) -> str:
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}"/>'


def drawing() -> str:
    """What each exact preset keeps of the block, and what backward rebuilds."""
    graph = block(True)
    columns = {n: _LEFT + i * _STEP for i, n in enumerate(["input", *graph.names, "output"])}
    size, rebuilds = (_LEFT + len(columns) * _STEP + more for more in (-15, 105))
    parts = [_text(x, 26, name, "name", "middle") for name, x in columns.items()]
    parts += [_text(size, 26, "bytes a token", "name"), _text(rebuilds, 26, "rebuilds", "name")]
    for row, preset in enumerate(EXACT_PRESETS):
        y = _TOP + row * _ROW
        kept = Kept(graph, preset)
        parts.append(_text(10, y + 5, f"&quot;{preset}&quot;", "name"))
        parts += [_circle("kept", columns[name], y, 9) for name in kept.names]
        parts += [_circle("rebuilt", columns[node.name], y, 8) for node in kept.nodes]
        parts += [_text(size, y + 5, kept.size), _text(rebuilds, y + 5, kept.work)]
    y = _TOP + len(EXACT_PRESETS) * _ROW + 8
    parts += [
        _circle("kept", _LEFT, y, 6),
        _text(_LEFT + 14, y + 4, "kept", "small"),
        _circle("rebuilt", _LEFT + _STEP, y, 5.5),
        _text(_LEFT + _STEP + 14, y + 4, "rebuilt in backward, once", "small"),
        _text(_LEFT + 4 * _STEP, y + 4, "no circle: backward does not read it", "small"),
    ]
    wide = f'viewBox="0 0 985 {y + 18}" width="985" height="{y + 18}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {wide} role="img">'
    return "\n".join([head, _STYLE, *parts])


def picture() -> Picture:
    """The drawing, which says by a digest what it is of."""
    return Picture((IMAGES / "presets.svg",), drawing(), _write)


def _write(svg: str, files: Sequence[Path]) -> None:
    files[0].write_text(f"{svg}\n<!-- {marked(svg)} -->\n</svg>\n")
