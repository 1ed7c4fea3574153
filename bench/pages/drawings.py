"""The drawings of docs/how-it-works.md: a block's graph, and what presets keep and rebuild of it.

They are SVG whose colours follow the reader's light or dark theme. What the second one says is read
from the block's graph and schedules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from bench.measure.machine import ROOT
from bench.pages import presets
from fused_remat.policies import EXACT_PRESETS

IMAGES = ROOT / "docs" / "images"
_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11px; fill: #59636e; }
.name { font-weight: 600; }
.box { fill: #f6f8fa; stroke: #818b98; }
.product { fill: #ddf4ff; stroke: #0969da; }
.line { stroke: #818b98; stroke-width: 1.5; fill: none; }
.tip { fill: #818b98; }
.stream { stroke: #818b98; stroke-width: 4; fill: none; }
.kept { fill: #0969da; }
.rebuilt { fill: none; stroke: #c2410c; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #9198a1; }
  .box { fill: #21262d; stroke: #656c76; }
  .product { fill: #0c2d6b; stroke: #58a6ff; }
  .kept { fill: #58a6ff; }
  .rebuilt { stroke: #f0883e; }
}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
 orient="auto-start-reverse"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>"""

#: Name -> left, top, what it is, and whether it is a product.
_BOXES = {
    "input": (10, 30, "D", False),
    "norm1": (60, 150, "LayerNorm · D", False),
    "qkv": (180, 150, "linear · 3D", True),
    "attn": (300, 150, "attention · D", False),
    "mid": (375, 30, "input + linear · D", True),
    "norm2": (445, 150, "LayerNorm · D", False),
    "up": (565, 150, "linear · 4D", True),
    "act": (685, 150, "activation · 4D", False),
    "output": (760, 30, "mid + linear · D", True),
}
_WIDTH, _HEIGHT = 100, 46


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
    )
    return "\n".join([head, f"<title>{title}</title>", _STYLE, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{text}</text>'


def _circle(kind: str, x: float, y: float, radius: float) -> str:
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}"/>'


def block() -> str:
    """The pre-norm encoder block: the stream above, its two branches below."""
    graph = presets.block(True)
    assert ("input", *graph.names, "output") == tuple(_BOXES), "the drawing is of this graph"
    parts = []
    for left, right in (("input", "mid"), ("mid", "output")):
        x, y, *_ = _BOXES[left]
        parts.append(
            f'<path class="stream" d="M{x + _WIDTH} {y + _HEIGHT / 2} H{_BOXES[right][0]}"/>'
        )
    for source, target in itertools.pairwise(_BOXES):
        (x, y, *_), (to_x, to_y, *_) = _BOXES[source], _BOXES[target]
        start, end = (x + _WIDTH, y + _HEIGHT / 2), (to_x, to_y + _HEIGHT / 2)
        if y < to_y:  # down into a branch
            start, end = (x + _WIDTH / 2, y + _HEIGHT), (to_x + _WIDTH / 2, to_y)
        elif y > to_y:  # up to the stream
            start, end = (x + _WIDTH / 2, y), (to_x + _WIDTH / 2, to_y + _HEIGHT)
        points = f"M{start[0]} {start[1]} L{end[0]} {end[1]}"
        parts.append(f'<path class="line" d="{points}" marker-end="url(#tip)"/>')
    for name, (x, y, what, product) in _BOXES.items():
        kind = "product" if product else "box"
        parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        )
        parts.append(_text(x + _WIDTH / 2, y + 20, name, "name"))
        parts.append(_text(x + _WIDTH / 2, y + 36, what, "small"))
    parts += [
        _text(250, 22, "residual stream", "small"),
        _text(230, 222, "attention branch", "small"),
        _text(615, 222, "MLP branch", "small"),
    ]
    return _svg(870, 235, "Graph of a pre-norm encoder block", parts)


def kept() -> str:
    """What each exact preset keeps of the block, and what backward rebuilds."""
    graph = presets.block(True)
    widths = graph.widths(presets.SHAPES)
    columns = ["input", *graph.names, "output"]
    step, left, top = 68, 120, 58
    size, rebuilds = (left + len(columns) * step + more for more in (-15, 105))
    parts = [_text(left + i * step, 26, name, "name") for i, name in enumerate(columns)]
    parts += [
        _text(size, 26, "bytes a token", "name", "start"),
        _text(rebuilds, 26, "rebuilds", "name", "start"),
    ]
    for row, preset in enumerate(EXACT_PRESETS):
        y = top + row * 34
        names = presets.kept_of(graph, preset)
        rebuilt = {n.name for n in presets.rebuilt_nodes(graph, frozenset(names) - {"input"})}
        parts.append(_text(10, y + 5, f"&quot;{preset}&quot;", "name", "start"))
        for i, name in enumerate(columns):
            if name in names:
                parts.append(_circle("kept", left + i * step, y, 9))
            elif name in rebuilt:
                parts.append(_circle("rebuilt", left + i * step, y, 8))
        count = presets.in_widths(sum(presets.row_bytes(name, widths) for name in names))
        parts += [
            _text(size, y + 5, f"{count}D", "", "start"),
            _text(rebuilds, y + 5, presets.rebuilt(graph, preset), "", "start"),
        ]
    y = top + len(EXACT_PRESETS) * 34 + 8
    parts += [
        _circle("kept", left, y, 6),
        _text(left + 14, y + 4, "kept", "small", "start"),
        _circle("rebuilt", left + step, y, 5.5),
        _text(left + step + 14, y + 4, "rebuilt in backward, once", "small", "start"),
        _text(left + 4 * step, y + 4, "no circle: backward does not read it", "small", "start"),
    ]
    return _svg(985, y + 18, "What presets keep and rebuild of a pre-norm encoder block", parts)


def files() -> dict[Path, str]:
    """Each drawing's file, and its text."""
    return {IMAGES / "block.svg": block(), IMAGES / "presets.svg": kept()}


def stale() -> list[Path]:
    """Drawings that are not what the graphs say, or not there yet."""
    return [p for p, text in files().items() if not p.exists() or p.read_text() != text]


def rewrite() -> None:
    """Write them anew."""
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
