"""Where the labels of points go: beside them, and off the other points and labels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

#: Left, bottom, right, top, in pixels.
Box = tuple[float, float, float, float]
Pixel = tuple[float, float]
_NEAR, _RADIUS = (7.0, 14.0, 22.0, 32.0, 44.0), 4.5  # of a label from its point; of a point; points
_DIRECTIONS = 12
_STEP = 3.0  # from one square on a line to the next, half of it on either side; points


def overlap(one: Box, other: Box) -> float:
    """The area that two boxes share.

    >>> overlap((0, 0, 2, 2), (1, 1, 3, 3)), overlap((0, 0, 1, 1), (2, 0, 3, 1))
    (1, 0.0)
    """
    if one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]:
        return 0.0  # most are: asked a million times of a picture
    width = min(one[2], other[2]) - max(one[0], other[0])
    return width * (min(one[3], other[3]) - max(one[1], other[1]))


def candidates(x: float, y: float, width: float, height: float, unit: float) -> Iterator[Box]:
    """Boxes around a point, the nearest first, to the right before all others."""
    for near in _NEAR:
        for index in range(_DIRECTIONS):
            turn = (index + 1) // 2 * (-1) ** index  # right, up, down, further up, ...
            angle = 2 * math.pi * turn / _DIRECTIONS
            dx, dy = near * unit * math.cos(angle), near * unit * math.sin(angle)
            left = x + dx - (0.0 if dx > 0.1 else width if dx < -0.1 else width / 2)
            low = y + dy - height / 2
            yield left, low, left + width, low + height


def along(path: Sequence[Pixel], unit: float) -> Iterator[Box]:
    """Squares that cover a line through points.

    >>> len(list(along([(0.0, 0.0), (9.0, 0.0)], 1.0)))
    3
    """
    half = _STEP * unit / 2
    for (x, y), (to_x, to_y) in itertools.pairwise(path):
        count = max(1, round(math.hypot(to_x - x, to_y - y) / (2 * half)))
        for index in range(count):
            part = (index + 0.5) / count
            mid_x, mid_y = x + part * (to_x - x), y + part * (to_y - y)
            yield mid_x - half, mid_y - half, mid_x + half, mid_y + half


def place(axes: Any, points: Sequence[tuple[float, float, str, str]], renderer: Any) -> None:
    """Label points (x, y, text, colour), one after another, each where it covers least.

    What it may cover: points, lines, labels. One that is far from its point is joined to it by a
    thin line.
    """
    unit = renderer.points_to_pixels(1.0)
    frame = axes.get_window_extent(renderer)
    at = [tuple(axes.transData.transform((x, y))) for x, y, _, _ in points]
    r = _RADIUS * unit
    taken: list[Box] = [(x - r, y - r, x + r, y + r) for x, y in at]
    for line in axes.lines:
        if line.get_linestyle() != "None":
            pixels = line.get_transform().transform_path(line.get_path()).vertices
            taken += along([tuple(pixel) for pixel in pixels], unit)
    inside = frame.x0, frame.y0, frame.x1, frame.y1
    back = axes.transData.inverted()
    veil = {"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 0.3}
    # Those with most neighbours first, while there is room around them.
    crowd = [sum(math.dist(a, b) < 60 * unit for b in at) for a in at]
    for index in sorted(range(len(points)), key=lambda i: -crowd[i]):
        (x, y), (_, _, text, colour) = at[index], points[index]
        label = axes.text(0, 0, text, color=colour, fontsize=7.5, va="bottom", zorder=4,
                          bbox=veil)  # fmt: skip
        extent = label.get_window_extent(renderer)
        sizes = extent.width + unit, extent.height
        best, box = _cheapest(list(candidates(x, y, *sizes, unit)), taken, inside, unit)
        taken.append(box)
        label.set_position(tuple(back.transform((box[0], box[1]))))
        if best >= 2 * _DIRECTIONS:
            middle = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
            ends = [points[index][:2], tuple(back.transform(middle))]
            axes.plot(*zip(*ends, strict=True), color=colour, linewidth=0.4, zorder=2)


def _cheapest(
    tried: Sequence[Box], taken: Sequence[Box], inside: Box, unit: float
) -> tuple[int, Box]:
    """The box that covers least, and its place in the order.

    Further away is worth it if it uncovers a few square points more; outside the panel never is.
    """
    lefts, lows, rights, tops = zip(*tried, strict=True)
    reach = min(lefts), min(lows), max(rights), max(tops)
    near = [box for box in taken if overlap(box, reach)]
    area = overlap(tried[0], tried[0])
    costs = [
        sum(overlap(box, other) for other in near)
        + 2 * (area - overlap(box, inside))
        + further * 0.8 * unit**2
        for further, box in enumerate(tried)
    ]
    best = costs.index(min(costs))
    return best, tried[best]
