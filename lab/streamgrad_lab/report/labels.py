"""Names beside the points of a figure, where they hide nothing.

Everything on the canvas is a rectangle: left, bottom, right and top, in points (1/72 inch).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# The first are read best.
ANGLES = (0, 180, 45, -45, 135, -135, 90, -90, 15, -15, 165, -165, 30, -30, 150, -150, 60, -60, 120, -120, 75, -75)
DISTANCES = (8.0, 11.0, 15.0, 20.0, 26.0, 33.0, 41.0, 50.0, 60.0, 72.0)
MARK = 7.0  # half of the width of what is kept free around a point
FAR = 19.0  # from here on a thin line leads from the name to its point
HIDDEN = 100  # what it costs that a name hides anything at all of another or of a point
MISTAKEN = 20.0  # what it costs if a name may be taken for that of another point
GAP = 3.0  # between two names in one line
PIECES = 16  # of that line, each of which is better not hidden
ROUNDS = 5  # in which each name is placed again, given the others

Spot = tuple[float, float]


class Places(NamedTuple):
    """Where a name may stand.

    Attributes:
      boxes: what it covers, one row for each place.
      leads: what the thin line to its point covers, `[places, pieces, 4]`; empty rectangles where there is none.
      prices: the further away and the odder the side, the higher.
    """

    boxes: np.ndarray
    leads: np.ndarray
    prices: np.ndarray


def place_labels(
    ax: Any,
    points: Sequence[Spot],
    names: Sequence[str],
    important: Sequence[bool],
    lines: Sequence[tuple[Spot, Spot]],
    colours: tuple[str, str],
    size: float = 8.5,
) -> None:
    """Write each name beside its point: over no other name and no other point, and not across a line if possible.

    Args:
      ax: the axes; the figure has been laid out, so that everything has its place.
      points: where they are, in data coordinates.
      names: one for each.
      important: whether it is placed first, and written in the first colour.
      lines: pieces that are level or upright, which names had better not cover; in data coordinates, from and to.
      colours: of the important names and of the others.
      size: of the font.
    """
    scale = 72 / ax.figure.dpi
    spots = scale * ax.transData.transform(points)
    ends = [scale * ax.transData.transform(line) for line in lines]
    thin = np.array([[*(end.min(axis=0) - 1), *(end.max(axis=0) + 1)] for end in ends])
    sizes = []
    for name in names:
        text = ax.text(0, 0, name, fontsize=size, parse_math=False)
        sizes.append(scale * text.get_window_extent().size + np.array([GAP, 0]))
        text.remove()
    found, far = arrange(spots, np.array(sizes), important, thin, scale * ax.get_window_extent().extents)
    for index, box in enumerate(found):
        colour = colours[0] if important[index] else colours[1]
        lead = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.7, "shrinkA": 0, "shrinkB": 3}
        note = ax.annotate(
            names[index],
            points[index],
            (box[:2] + box[2:]) / 2 - spots[index],
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            parse_math=False,
            color=colour,
            arrowprops=lead if far[index] else None,
        )
        note.set_in_layout(False)


def arrange(
    spots: np.ndarray, sizes: np.ndarray, important: Sequence[bool], lines: np.ndarray, frame: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A place for each name, on the canvas.

    Args:
      spots: the points, `[n, 2]`.
      sizes: width and height of their names, likewise.
      important: which are placed first.
      lines: rectangles that are better not covered.
      frame: the rectangle that no name may leave.

    Returns:
      The rectangles of the names, and whether each is so far from its point that a line leads there. One name at a time
      takes the best place that the others leave, a few rounds long; of several orders to do so the best counts.

    Example:
      >>> import numpy as np
      >>> spots, sizes = np.array([[100.0, 50.0], [104.0, 50.0]]), np.array([[60.0, 10.0]] * 2)
      >>> boxes, _ = arrange(spots, sizes, [True, True], np.zeros((0, 4)), np.array([0.0, 0.0, 300.0, 100.0]))
      >>> float(shared_area(boxes[:1], boxes[1:])[0, 0])
      0.0
    """
    places = [_around(spot, size) for spot, size in zip(spots, sizes, strict=True)]
    found = []
    for direction in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        along = zip(np.logical_not(important), spots @ np.array(direction), range(len(spots)), strict=True)
        order = [index for _, _, index in sorted(along)]
        found.append(_in_turns(places, spots, order, lines, frame))
    rows = min(found)[1]
    return (
        np.stack([place.boxes[at] for place, at in zip(places, rows, strict=True)]),
        np.array([bool(np.any(place.leads[at])) for place, at in zip(places, rows, strict=True)]),
    )


def _in_turns(
    places: Sequence[Places], spots: np.ndarray, order: Sequence[int], lines: np.ndarray, frame: np.ndarray
) -> tuple[float, list[int]]:
    """What the places of all names cost in the end, and which they are."""
    marks = np.concatenate([spots - MARK, spots + MARK], axis=1)
    chosen: dict[int, int] = {}
    costs: dict[int, float] = {}
    for _ in range(ROUNDS):
        for own in order:
            others = [(places[i].boxes[at], places[i].leads[at]) for i, at in chosen.items() if i != own]
            boxes = np.concatenate([np.delete(marks, own, axis=0), *(box[None] for box, _ in others)])
            leads = np.concatenate([lines, *(lead[lead.any(axis=1)] for _, lead in others)])
            here = places[own]
            cost = _harm(here, boxes, leads, frame) + _mistaken(here, spots, own) + here.prices
            chosen[own] = int(np.argmin(cost))
            costs[own] = float(cost[chosen[own]])
    return sum(costs.values()), [chosen[index] for index in range(len(spots))]


def _harm(places: Places, boxes: np.ndarray, leads: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """How much each place hides of other names and points, lies outside of the frame, and crosses lines."""
    area = np.prod(places.boxes[0, 2:] - places.boxes[0, :2])
    hidden = shared_area(places.boxes, boxes).sum(axis=1) + area - shared_area(places.boxes, frame[None])[:, 0]
    # Whatever is hidden, be it a corner, is worth a longer way.
    harm = 10 * hidden + HIDDEN * (hidden > 1e-6) + 5 * shared_area(places.boxes, leads).sum(axis=1)
    far = places.leads.any(axis=(1, 2))
    if np.min(harm[~far]) < 1e-6:
        return harm  # a place further away has a higher price, wherever its line leads
    pieces = places.leads[far]
    crossed = shared_area(pieces.reshape(-1, 4), np.concatenate([boxes, leads])).sum(axis=1)
    harm[far] += 5 * crossed.reshape(len(pieces), -1).sum(axis=1)
    return harm


def _mistaken(places: Places, spots: np.ndarray, own: int) -> np.ndarray:
    """What it costs that a name without a line lies nearer to the point of another than to its own."""
    beyond = np.maximum(places.boxes[:, None, :2] - spots[None], spots[None] - places.boxes[:, None, 2:])
    apart = np.linalg.norm(np.maximum(beyond, 0), axis=2)
    nearest = np.min(np.delete(apart, own, axis=1), axis=1, initial=np.inf)
    return np.where(places.leads.any(axis=(1, 2)), 0.0, MISTAKEN * (nearest < apart[:, own]))


def shared_area(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The area that each rectangle of `a` shares with each of `b`.

    Example:
      >>> import numpy as np
      >>> shared_area(np.array([[0, 0, 2, 2]]), np.array([[1, 1, 3, 3], [2, 0, 3, 1]])).tolist()
      [[1, 0]]
    """
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    return np.prod(np.maximum(high - low, 0), axis=2)


def _around(spot: np.ndarray, size: np.ndarray) -> Places:
    """Places for a name around a point."""
    boxes, leads, prices = [], [], []
    for distance in DISTANCES:
        for odd, angle in enumerate(np.radians(ANGLES)):
            side = np.array([np.cos(angle), np.sin(angle)])
            # The name's nearest edge is at that distance: its own size pushes it out along the same direction.
            middle = spot + side * distance + size / 2 * np.clip(side * np.array([1.6, 1.0]), -1, 1)
            box = np.concatenate([middle - size / 2, middle + size / 2])
            way = spot + np.linspace(0, 1, PIECES + 2)[1:-1, None] * (middle - spot)
            inside = np.all((way >= box[:2]) & (way <= box[2:]), axis=1)
            drawn = (~inside & (distance >= FAR))[:, None]
            boxes.append(box)
            leads.append(np.where(drawn, np.concatenate([way - 1, way + 1], axis=1), 0.0))
            prices.append(distance + 0.2 * odd)
    return Places(np.stack(boxes), np.stack(leads), np.array(prices))
