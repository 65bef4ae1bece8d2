"""Charts as SVG text, for a page that is read by people and needs nothing else: no script, no font, no request.

matplotlib's SVG of the same chart is several times as long, and has its colours in it; these take theirs from the page
(CSS variables), so that they are right in light and in dark. Marks carry a <title>, which browsers show under the
mouse. Text is escaped here, wherever it comes from.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from decentral.core.plain_text import printable

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 66, 90, 8, 34
LABEL_HEIGHT = 13  # of a line of small text
TICKS = 5
MOST_LABELLED = 12  # lines whose names stand at their ends

Point = tuple[float, float]
Writer = Callable[[float], str]
"""A number as it stands at an axis."""


@dataclass(frozen=True, slots=True)
class Ink:
    """How a mark is coloured: by a class of the page's style, or by a hue of its own (0 to 360)."""

    name: str = ""
    hue: float | None = None

    def attributes(self) -> str:
        return f'class="{self.name}"' if self.hue is None else f'class="hue {self.name}" style="--h:{self.hue:.0f}"'


@dataclass(frozen=True, slots=True)
class Line:
    """Points in segments, drawn as one line with gaps between them."""

    name: str
    ink: Ink
    segments: Sequence[Sequence[Point]]
    marked: bool = False  # with a dot at each point, and without its name at its end


@dataclass(slots=True)
class Chart:
    """One drawing with two axes. x and y are in the units of the data."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: int = 240
    x_text: Writer = str
    x_unit: float = 1.0  # ticks are round numbers of it
    y_text: Writer = str
    x_name: str = ""
    parts: list[str] = field(default_factory=list)

    def at(self, x: float, y: float) -> Point:
        """Where this point is drawn."""
        across, up = (_part(value, span) for value, span in ((x, self.x), (y, self.y)))
        return LEFT + across * (WIDTH - LEFT - RIGHT), self.height - BOTTOM - up * (self.height - TOP - BOTTOM)

    def lines(self, lines: Sequence[Line]) -> None:
        """Draws lines, and their names at their ends where they are few."""
        for line in lines:
            points = [[self.at(*point) for point in segment] for segment in line.segments if segment]
            path = "".join("M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in segment) for segment in points)
            dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for one in points for x, y in one)
            title = f"<title>{shown(line.name)}</title>"
            marks = dots if line.marked else ""
            self.parts.append(f'<g {line.ink.attributes()}>{title}<path class="line" d="{path}"/>{marks}</g>')
        named = [line for line in lines if not line.marked and line.segments and line.segments[-1]]
        ends = [(self.at(*line.segments[-1][-1]), line) for line in named]
        if len(ends) <= MOST_LABELLED:
            self._name(ends)

    def _name(self, ends: Sequence[tuple[Point, Line]]) -> None:
        """Names beside the lines' ends, moved apart where they would cover one another."""
        last = -math.inf
        ordered = sorted(ends, key=lambda end: end[0][1])
        room = self.height - BOTTOM - LABEL_HEIGHT * len(ordered)
        for number, ((x, y), line) in enumerate(ordered):
            last = max(min(y, room + LABEL_HEIGHT * (number + 1)), last + LABEL_HEIGHT)
            self.text(x + 6, last + 4, line.name, ink=line.ink)

    def areas(self, times: Sequence[float], layers: Sequence[tuple[str, Ink, Sequence[float]]]) -> None:
        """Draws layers on top of one another, each as high as its values."""
        below = [0.0] * len(times)
        for name, ink, values in layers:
            above = [low + value for low, value in zip(below, values, strict=True)]
            ahead = [self.at(t, y) for t, y in zip(times, above, strict=True)]
            back = [self.at(t, y) for t, y in zip(reversed(times), reversed(below), strict=True)]
            path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in [*ahead, *back]) + "Z"
            self.parts.append(
                f'<g {ink.attributes()}><path class="area" d="{path}"><title>{shown(name)}</title></path></g>'
            )
            below = above

    def bar(self, x: tuple[float, float], y: tuple[float, float], ink: Ink, title: str) -> None:
        """A filled rectangle between two x and two y."""
        (left, bottom), (right, top) = self.at(x[0], y[0]), self.at(x[1], y[1])
        size = (
            f'x="{left:.1f}" y="{top:.1f}" width="{max(0.0, right - left):.1f}" height="{max(0.0, bottom - top):.1f}"'
        )
        self.parts.append(f'<g {ink.attributes()}><rect class="bar" {size}><title>{shown(title)}</title></rect></g>')

    def text(self, x: float, y: float, text: str, anchor: str = "start", ink: Ink | None = None) -> None:
        """A text at a place of the drawing, not of the data."""
        self.parts.append(_text(x, y, text, anchor, ink))

    def svg(self, title: str, levels: bool = True) -> str:
        """The drawing. `levels`: with a scale at the left and lines across."""
        back = [self._x_scale()]
        if levels:
            back.append(self._y_scale())
        named = f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{shown(title)}">'
        return named + "".join(back) + "".join(self.parts) + "</svg>"

    def _x_scale(self) -> str:
        base, right = self.height - BOTTOM, WIDTH - RIGHT
        ticks = [(self.at(value, self.y[0])[0], self.x_text(value)) for value in self._x_ticks()]
        marks = "".join(f'<path class="tick" d="M{x:.1f},{base}v4"/>' for x, _ in ticks)
        texts = "".join(_text(x, base + 16, text, "middle") for x, text in ticks)
        name = _text((LEFT + right) / 2, base + 30, self.x_name, "middle")
        return f'<path class="axis" d="M{LEFT},{base}H{right}"/>{marks}{texts}{name}'

    def _x_ticks(self) -> list[float]:
        return [number * self.x_unit for number in nice(self.x[0] / self.x_unit, self.x[1] / self.x_unit)]

    def _y_scale(self) -> str:
        ticks = [(self.at(self.x[0], value)[1], self.y_text(value)) for value in nice(*self.y)]
        lines = "".join(f'<path class="grid" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>' for y, _ in ticks)
        return lines + "".join(_text(LEFT - 6, y + 4, text, "end") for y, text in ticks)


def _text(x: float, y: float, text: str, anchor: str, ink: Ink | None = None) -> str:
    how = f'class="hue text" style="--h:{ink.hue:.0f}"' if ink and ink.hue is not None else 'class="text"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {how}>{shown(text)}</text>'


def shown(text: str) -> str:
    """A text of whatever origin, fit to stand in the page."""
    return escape(printable(text, 400))


def nice(low: float, high: float, count: int = TICKS) -> list[float]:
    """Round numbers from low to high, about so many."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, int(high / step + 1e-9) + 1)]


def limits(values: Iterable[float], from_zero: bool = False) -> tuple[float, float]:
    """The least and the largest of these, with some air; 0 to 1 for none."""
    known = [value for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    low = min(0.0, low) if from_zero else low
    air = 0.04 * (high - low) or 0.5
    return (low if from_zero else low - air), high + air


def _part(value: float, span: tuple[float, float]) -> float:
    return (value - span[0]) / (span[1] - span[0]) if span[1] > span[0] else 0.5
