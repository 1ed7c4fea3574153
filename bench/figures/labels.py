"""Where the labels of points go: beside them, and off the other points and labels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: A row for each box: left, bottom, right, top, in pixels.
Boxes = NDArray[np.float64]
_NEAR, _RADIUS = (7.0, 14.0, 22.0, 32.0, 44.0), 4.5  # of a label from its point; of a point; points
_DIRECTIONS = 12
_STEP = 3.0  # from one square on a line to the next, half of it on either side; points


class Label(NamedTuple):
    """What is said of a point, and how."""

    x: float
    y: float
    text: str
    colour: str
    size: float = 7.5
    weight: str = "normal"


def overlap(boxes: Boxes, others: Boxes) -> Boxes:
    """The area that each box shares with each other: (boxes, others).

    >>> overlap(np.array([[0, 0, 2, 2]]), np.array([[1, 1, 3, 3], [2, 0, 3, 1]])).tolist()
    [[1, 0]]
    """
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    area: Boxes = np.clip(high - low, 0, None).prod(-1)
    return area


def candidates(x: float, y: float, width: float, height: float, unit: float) -> Boxes:
    """Boxes around a point, the nearest first, to the right before all others."""
    found = []
    for near in _NEAR:
        for index in range(_DIRECTIONS):
            turn = (index + 1) // 2 * (-1) ** index  # right, up, down, further up, ...
            angle = 2 * math.pi * turn / _DIRECTIONS
            dx, dy = near * unit * math.cos(angle), near * unit * math.sin(angle)
            left = x + dx - (0.0 if dx > 0.1 else width if dx < -0.1 else width / 2)
            low = y + dy - height / 2
            found.append((left, low, left + width, low + height))
    return np.array(found)


def along(path: Boxes, unit: float) -> Boxes:
    """Squares that cover a line through points (x, y).

    >>> len(along(np.array([(0.0, 0.0), (9.0, 0.0)]), 1.0))
    3
    """
    middles = [path[:0]]  # of one point there is no line
    for start, end in itertools.pairwise(path):
        count = max(1, round(math.dist(start, end) / (_STEP * unit)))
        parts = (np.arange(count) + 0.5) / count
        middles.append(start + parts[:, None] * (end - start))
    return squares(np.concatenate(middles), _STEP * unit / 2)


def squares(middles: Boxes, radius: float) -> Boxes:
    """Squares around points (x, y)."""
    return np.hstack([middles - radius, middles + radius])


def place(axes: Any, points: Sequence[Label], renderer: Any, veil: str = "white") -> None:
    """Label points, one after another, each where it covers least.

    What it may cover: points, lines, labels. One that is far from its point is joined to it by a
    thin line.
    """
    unit = renderer.points_to_pixels(1.0)
    at = axes.transData.transform([point[:2] for point in points])
    taken = [squares(at, _RADIUS * unit)]
    for line in axes.lines:
        if line.get_linestyle() != "None":
            taken.append(along(line.get_transform().transform_path(line.get_path()).vertices, unit))
    inside = np.array([axes.get_window_extent(renderer).extents])
    back = axes.transData.inverted()
    box = {"facecolor": veil, "edgecolor": "none", "alpha": 0.6, "pad": 0.3}
    # Those with most neighbours first, while there is room around them.
    crowd = [sum(math.dist(a, b) < 60 * unit for b in at) for a in at]
    for index in sorted(range(len(points)), key=lambda i: -crowd[i]):
        (x, y), label = at[index], points[index]
        text = axes.text(0, 0, label.text, color=label.colour, fontsize=label.size,
                         fontweight=label.weight, va="bottom", zorder=4, bbox=box)  # fmt: skip
        extent = text.get_window_extent(renderer)
        tried = candidates(x, y, extent.width + unit, extent.height, unit)
        # Further away is worth it if it uncovers a few square points more; outside never is.
        costs = overlap(tried, np.concatenate(taken)).sum(1)
        costs += 2 * (overlap(tried[:1], tried[:1])[0] - overlap(tried, inside)[:, 0])
        best = int(np.argmin(costs + np.arange(len(tried)) * 0.8 * unit**2))
        left, low, right, top = tried[best]
        taken.append(tried[best : best + 1])
        text.set_position(back.transform((left, low)))
        if best >= 2 * _DIRECTIONS:
            middle = back.transform((min(max(x, left), right), min(max(y, low), top)))
            axes.plot(*zip(label[:2], middle, strict=True), color=label.colour, linewidth=0.4,
                      zorder=2)  # fmt: skip
