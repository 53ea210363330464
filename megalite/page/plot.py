"""Lines and dots over two axes as a picture that stands alone, or inside a page: an SVG without a script.

Text and axes take the colour of what is around them, so a page's dark style is theirs too; the colours of the data are
legible on white and on black. Several plots go beside each other with one legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megalite.page.markup import Markup, tag

COLOURS = ("#4c7bd9", "#e08a2e", "#3fa37c", "#c9566b", "#8e6fc9", "#8a8f98", "#b0933a", "#4aa3b8")
WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 44
TICKS = 5
MARGIN_SHARE = 0.06
"""Of the span of the numbers, left free on each side."""
LEGEND_LINE, LEGEND_CHARACTER, LEGEND_GAP = 20, 6.7, 34


@dataclass(frozen=True)
class Series:
    """Some points of one colour. `x` and `y` are of one length, all finite."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    kind: Literal["line", "dots", "both"] = "both"
    low: Sequence[float] | None = None
    """Lower ends of bars, or of a band behind a line; with `high`."""
    high: Sequence[float] | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False


def picture(plots: Sequence[Plot], *, stands_alone: bool = True) -> Markup:
    """Plots beside each other, and what their colours mean.

    Args:
        stands_alone: on white, as a file of its own; otherwise in the colours of the page around it.
    """
    width = WIDTH * len(plots)
    shown = {each.label: each for plot in plots for each in plot.series if each.label}
    legend, legend_height = _legend(list(shown.values()), width)
    height = HEIGHT + legend_height
    parts = [_draw(plot, number * WIDTH) for number, plot in enumerate(plots)]
    back = tag("rect", width=width, height=height, fill="#ffffff") if stands_alone else None
    return tag(
        "svg",
        tag("title", "; ".join(plot.title for plot in plots)),
        back,
        *parts,
        *legend,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width if stands_alone else "100%",
        height=height if stands_alone else None,
        role="img",
        color="#222222" if stands_alone else None,
        font_family="sans-serif",
        font_size="12",
        fill="currentColor",
    )


class _Scale:
    """Numbers to places on a line."""

    def __init__(self, values: Sequence[float], start: float, stop: float, *, log: bool):
        self._log, self._start, self._stop = log, start, stop
        low, high = (self._of(pick(values)) for pick in (min, max))
        free = MARGIN_SHARE * (high - low) or (MARGIN_SHARE * abs(high) or 1.0)
        self._low, self._high = low - free, high + free

    def _of(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def place(self, value: float) -> float:
        share = (self._of(value) - self._low) / (self._high - self._low)
        return round(self._start + share * (self._stop - self._start), 1)

    def ticks(self) -> list[float]:
        """Round numbers inside."""
        if self._log and self._high - self._low >= 1.0:
            span = range(math.floor(self._low), math.ceil(self._high) + 1)
            factors = (1, 2, 5) if self._high - self._low < 2.5 else (1,)
            found = [factor * 10.0**power for power in span for factor in factors]
        else:
            found = _round_steps(*((10**end if self._log else end) for end in (self._low, self._high)))
        return [each for each in found if (not self._log or each > 0) and self._low <= self._of(each) <= self._high]


def _round_steps(low: float, high: float) -> list[float]:
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _draw(plot: Plot, left: float) -> Markup:
    ys = [y for each in plot.series for y in (*each.y, *(each.low or ()), *(each.high or ()))]
    x = _Scale([x for each in plot.series for x in each.x], left + LEFT, left + WIDTH - RIGHT, log=plot.log_x)
    y = _Scale(ys, HEIGHT - BOTTOM, TOP, log=plot.log_y)
    middle = left + LEFT + (WIDTH - LEFT - RIGHT) / 2
    names = [
        _text(plot.title, middle, 18, weight="600"),
        _text(plot.x_label, middle, HEIGHT - 8),
        tag("text", plot.y_label, transform=f"translate({left + 14} {HEIGHT / 2}) rotate(-90)", text_anchor="middle"),
    ]
    return tag("g", *_axes(x, y, left), *names, *(part for each in plot.series for part in _series(each, x, y)))


def _axes(x: _Scale, y: _Scale, left: float) -> list[Markup]:
    found: list[Markup] = []
    bottom, right = HEIGHT - BOTTOM, left + WIDTH - RIGHT
    for each in x.ticks():
        found.append(_rule(x.place(each), TOP, x.place(each), bottom))
        found.append(_text(_number(each), x.place(each), bottom + 16))
    for each in y.ticks():
        found.append(_rule(left + LEFT, y.place(each), right, y.place(each)))
        found.append(_text(_number(each), left + LEFT - 6, y.place(each) + 4, anchor="end"))
    return found


def _series(series: Series, x: _Scale, y: _Scale) -> list[Markup]:
    colour = COLOURS[series.colour % len(COLOURS)]
    places = [(x.place(a), y.place(b)) for a, b in zip(series.x, series.y, strict=True)]
    found: list[Markup] = []
    if series.low is not None and series.high is not None:
        ends = zip(places, series.low, series.high, strict=True)
        bars = [(at, y.place(low), y.place(high)) for (at, _), low, high in ends]
        if series.kind == "line":
            outline = [*((at, low) for at, low, _ in bars), *((at, high) for at, _, high in reversed(bars))]
            found.append(tag("polygon", points=_points(outline), fill=colour, fill_opacity="0.18"))
        else:
            for at, low, high in bars:
                found.append(tag("line", x1=at, y1=low, x2=at, y2=high, stroke=colour, stroke_width="2"))
    if series.kind != "dots":
        dashes = "5 4" if series.dashed else None
        line = {"fill": "none", "stroke": colour, "stroke_width": "1.8", "stroke_dasharray": dashes}
        found.append(tag("polyline", points=_points(places), **line))
    if series.kind != "line":
        told = [f"{series.label}: {_number(a)}, {b:.4g}" for a, b in zip(series.x, series.y, strict=True)]
        for (at, height), said in zip(places, told, strict=True):
            found.append(tag("circle", tag("title", said), cx=at, cy=height, r="3.6", fill=colour))
    return found


def _legend(series: Sequence[Series], width: float) -> tuple[list[Markup], float]:
    found: list[Markup] = []
    at, line = float(LEFT), 0
    for each in series:
        needed = LEGEND_GAP + LEGEND_CHARACTER * len(each.label)
        if at + needed > width and at > LEFT:
            at, line = float(LEFT), line + 1
        height = HEIGHT + LEGEND_LINE * line + 8
        colour = COLOURS[each.colour % len(COLOURS)]
        dashes = "5 4" if each.dashed else None
        stroke = {"stroke": colour, "stroke_width": "2", "stroke_dasharray": dashes}
        if each.kind != "dots":
            found.append(tag("line", x1=round(at, 1), y1=height, x2=round(at + 18, 1), y2=height, **stroke))
        if each.kind != "line":
            found.append(tag("circle", cx=round(at + 9, 1), cy=height, r="3.6", fill=colour))
        found.append(_text(each.label, at + 23, height + 4, anchor="start"))
        at += needed
    return found, LEGEND_LINE * (line + 1) + 6 if series else 0.0


def _rule(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke="currentColor", stroke_opacity="0.15")


def _text(text: str, x: float, y: float, *, anchor: str = "middle", weight: str | None = None) -> Markup:
    return tag("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, font_weight=weight)


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)


def _number(value: float) -> str:
    """As short as an axis needs."""
    size = abs(value)
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if scale <= size < 1e15 and size >= 10_000:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"
