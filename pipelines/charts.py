"""Charts as inline SVG: no script, no network, a text alternative each. Pure.

Boxes are 400 units wide, so that their text stays legible on a phone. Colours are CSS classes
`s0`, `s1`, ... which the page gives for light and dark; lines differ in their dashes as well.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

_WIDTH = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 34
_MAX_POINTS = 240
_LABEL_HEIGHT, _LABEL_WIDTH = 14, 34  # of a mark's label
_BINS = 24
_LONG_TAIL = 16  # the longest over the median, from which on bins grow


@dataclass(frozen=True)
class Line:
    """A named line; its colour and dashes follow its place in the list."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Mark:
    """A moment on the x axis, with the number of the words that say it; "" has none.

    `kind` is a CSS class: restart, stop, alarm, note, wait.
    """

    x: float
    label: str
    kind: str


@dataclass(frozen=True)
class Bar:
    """A value with its interval, where there is one. None is drawn as "unknown"."""

    name: str
    value: float | None
    interval: tuple[float, float] | None


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x: str,
    y: str,
    floor: float | None = None,
    start: float | None = None,
    marks: Sequence[Mark] = (),
) -> Markup:
    """Lines over a shared x axis. `floor` and `start` are the least values that y and x show."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return Markup("")
    xs = [point[0] for line in drawn for point in line.points]
    ys = [point[1] for line in drawn for point in line.points]
    xs += [mark.x for mark in marks] + ([] if start is None else [start])
    low_x, high_x = min(xs), max(xs)
    ticks = nice_ticks(min(ys) if floor is None else floor, max(ys))
    low_y, high_y = ticks[0], ticks[-1]
    height = 220
    top = _TOP + (_LABEL_HEIGHT if any(mark.label for mark in marks) else 0)

    def place(point: tuple[float, float]) -> str:
        across = (point[0] - low_x) / (high_x - low_x or 1)
        up = (point[1] - low_y) / (high_y - low_y or 1)
        return (
            f"{_LEFT + across * (_WIDTH - _LEFT - _RIGHT):.1f},"
            f"{height - _BOTTOM - up * (height - top - _BOTTOM):.1f}"
        )

    parts = []
    for tick in ticks:
        level = float(place((low_x, tick)).split(",")[1])
        parts.append(_rule(_LEFT, level, _WIDTH - _RIGHT, level))
        parts.append(_text(_LEFT - 6, level + 4, number(tick), "end"))
    parts.append(_text(_LEFT, height - 18, number(low_x), "start"))
    parts.append(_text(_WIDTH - _RIGHT, height - 18, number(high_x), "end"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, height - 4, x, "middle"))
    for mark in marks:
        across = float(place((mark.x, low_y)).split(",")[0])
        parts.append(_rule(across, top, across, height - _BOTTOM, f"mark {mark.kind}"))
    for across, label in _labels([(float(place((m.x, low_y)).split(",")[0]), m) for m in marks]):
        parts.append(_text(across, top - 4, label, "middle"))
    for at, line in enumerate(lines):
        if len(line.points) == 1:
            cx, cy = place(line.points[0]).split(",")
            parts.append(
                Markup('<circle class="dot s{}" cx="{}" cy="{}" r="4"/>').format(at, cx, cy)
            )
        elif line.points:
            path = " ".join(place(point) for point in thin(line.points))
            parts.append(Markup('<polyline class="line s{}" points="{}"/>').format(at, path))
    spoken = "; ".join(
        f"{line.name} from {number(line.points[0][1])} to {number(line.points[-1][1])}"
        for line in drawn
    )
    return _svg(height, f"{title}. {y} over {x}: {spoken}.", parts)


def _labels(placed: Sequence[tuple[float, Mark]]) -> list[tuple[float, str]]:
    """Where each label stands; labels too near to each other are one, "3-5"."""
    found: list[tuple[float, list[str]]] = []
    for across, mark in sorted(placed, key=lambda one: one[0]):
        if not mark.label:
            continue
        if found and across - found[-1][0] < _LABEL_WIDTH:
            found[-1][1].append(mark.label)
        else:
            found.append((across, [mark.label]))
    return [
        (min(across, _WIDTH - _RIGHT - 8), names[0] + (f"-{names[-1]}" if names[1:] else ""))
        for across, names in found
    ]


def bar_chart(
    groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str, floor: float, unknown: str
) -> Markup:
    """Groups of horizontal bars, each with its value in words and its interval as a whisker."""
    values = [bar.value for _, bars in groups for bar in bars if bar.value is not None]
    if not values:
        return Markup("")
    ends = [bar.interval[1] for _, bars in groups for bar in bars if bar.interval]
    top = nice_ticks(floor, max([*values, *ends]))[-1]
    left, right, thick = 104, 44, 15

    def across(value: float) -> float:
        return left + (value - floor) / (top - floor or 1) * (_WIDTH - left - right)

    parts: list[Markup] = []
    y = 4.0
    for name, bars in groups:
        parts.append(_text(left - 8, y + len(bars) * thick / 2 + 4, name, "end"))
        for at, bar in enumerate(bars):
            if bar.value is None:
                parts.append(_text(left + 4, y + 11, unknown, "start"))
            else:
                parts.append(
                    Markup(
                        '<rect class="bar s{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}"/>'
                    ).format(at, left, y + 2, max(across(bar.value) - left, 0.5), thick - 4)
                )
                end = bar.value
                if bar.interval:
                    low, high = (across(max(one, floor)) for one in bar.interval)
                    parts.append(_rule(low, y + thick / 2, high, y + thick / 2, "whisker"))
                    end = max(end, bar.interval[1])
                parts.append(_text(across(end) + 4, y + 11, f"{bar.value:.2f}", "start"))
            y += thick
        y += 12
    for tick in (floor, top):
        parts.append(_text(across(tick), y + 8, number(tick), "middle"))
    spoken = "; ".join(
        f"{name}: " + ", ".join(f"{bar.name} {_said(bar, unknown)}" for bar in bars)
        for name, bars in groups
    )
    return _svg(math.ceil(y + 14), f"{title}. {spoken}.", parts)


def histogram(values: Sequence[int], *, title: str, at: int) -> Markup:
    """Counts of positive lengths in tokens, in at most 24 bins; `at` chooses the colour.

    Bins are of equal width, or where few values are far longer than most, of equal ratio.
    """
    if not values:
        return Markup("")
    edges = _edges(values)
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[bisect_right(edges, value) - 1] += 1
    height, most = 86, max(counts)
    step = (_WIDTH - 20) / len(counts)
    parts = [
        Markup(
            '<rect class="bar s{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
        ).format(
            at,
            10 + index * step,
            height - 20 - max(62 * count / most, 1),
            max(step - 1.5, 1),
            max(62 * count / most, 1),
        )
        for index, count in enumerate(counts)
        if count
    ]
    parts.append(_rule(10, height - 20, _WIDTH - 10, height - 20))
    low, high = min(values), max(values)
    scale = " (log scale)" if edges[1] - edges[0] != edges[-1] - edges[-2] else ""
    parts.append(_text(10, height - 4, f"{low:,}", "start"))
    if low != high:
        parts.append(_text(_WIDTH - 10, height - 4, f"{high:,} tokens{scale}", "end"))
    middle = sorted(values)[len(values) // 2]
    said = f"{len(values):,} values from {low:,} to {high:,} tokens, median {middle:,}"
    return _svg(height, f"{title}. {said}.", parts)


def _edges(values: Sequence[int]) -> list[float]:
    """Ascending ends of bins; every value is in [first, last)."""
    low, high = min(values), max(values)
    if low >= 1 and high > _LONG_TAIL * sorted(values)[len(values) // 2]:
        ratio = ((high + 1) / low) ** (1 / _BINS)
        return [*(low * ratio**at for at in range(_BINS)), high + 1.0]
    width = max(1, math.ceil((high - low + 1) / _BINS))
    return [float(low + width * at) for at in range((high - low) // width + 2)]


def nice_ticks(low: float, high: float) -> list[float]:
    """About five round numbers that cover [low, high]."""
    span = high - low or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step = next(step * times for times in (1, 2, 2.5, 5, 10) if span / (step * times) <= 4.5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(at * step, 10) for at in range(first, max(last, first + 1) + 1)]


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most a few hundred points: means of neighbours, first and last kept as they are."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / _MAX_POINTS)
    means = []
    for start in range(0, len(points), size):
        some = points[start : start + size]
        means.append((sum(p[0] for p in some) / len(some), sum(p[1] for p in some) / len(some)))
    return [points[0], *means[1:-1], points[-1]]


def number(value: float) -> str:
    """A number as an axis says it: no needless digits."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.3g}"


def _said(bar: Bar, unknown: str) -> str:
    if bar.value is None:
        return unknown
    if bar.interval is None:
        return f"{bar.value:.2f}"
    return f"{bar.value:.2f} (95% {bar.interval[0]:.2f} to {bar.interval[1]:.2f})"


def _svg(height: int, spoken: str, parts: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" xmlns="http://www.w3.org/2000/svg">'
        "{}</svg>"
    ).format(_WIDTH, height, spoken, Markup("").join(parts))


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        x, y, anchor, escape(words)
    )


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str = "rule") -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(
        kind, x1, y1, x2, y2
    )
