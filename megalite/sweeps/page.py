"""sweep.html: the trials of a sweep in the report's style, one file that needs no network.

dots     what each trial came to, over each dimension that is a number
lines    the best at each value of it, where a value was tried more than once
"""

from __future__ import annotations

import datetime
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from megalite import __version__
from megalite.page.markup import Child, Markup, join, soft, table, tag
from megalite.page.numbers import count
from megalite.page.plot import Plot, Series, picture
from megalite.page.style import CSS
from megalite.page.write import write_page
from megalite.sweeps.record import SweepBook, TrialRecord
from megalite.sweeps.settings import SweepConfig
from megalite.sweeps.space import Dimension, label_of, overrides_of
from megalite.sweeps.table import in_order

FILE_NAME = "sweep.html"

MANY_DECADES = 10.0
"""Largest over smallest value, from which an axis is logarithmic."""

PLOTS_A_ROW = 2

HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
"""Nothing may be fetched, and no script may run."""


def write_sweep_page(settings: SweepConfig, book: SweepBook) -> Path:
    """Write the page of a sweep as it stands.

    Raises:
        UserError: it cannot be written.
    """
    path = settings.dir / FILE_NAME
    write_page(path, render_sweep(settings, book, time.time()))
    return path


def render_sweep(settings: SweepConfig, book: SweepBook, now: float) -> str:
    """The page.

    Args:
        now: seconds since 1970.
    """
    records = in_order(settings, book)
    parts = [
        _summary(settings, records),
        *_figures(settings, records),
        _rungs(settings, records),
        _table(settings, records),
    ]
    return whole_page(settings.dir.name, "sweep", now, parts)


def whole_page(name: str, kind: str, now: float, parts: Sequence[Markup | None]) -> str:
    """A page of parts one below the other, in the report's style."""
    written = f"{datetime.datetime.fromtimestamp(now, datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"
    faint = tag("p", f"{kind.capitalize()} of {written} by megalite {__version__}.", class_="faint")
    body = tag("body", tag("main", tag("h1", name), faint, *parts))
    head = tag("head", Markup(HEAD), tag("title", f"{name}: {kind}"), tag("style", Markup(CSS)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def part(title: str, *children: Child) -> Markup:
    """A part of a page under its own heading."""
    return tag("section", tag("h2", title), *children)


def tile(name: str, number: str, note: str) -> Markup:
    """A number that most readers come for."""
    return tag("div", join(tag("span", name), tag("b", number), tag("span", note)), class_="tile")


def _summary(settings: SweepConfig, records: Sequence[TrialRecord]) -> Markup:
    done = [each for each in records if each.state == "done"]
    states = {state: sum(each.state == state for each in records) for state in dict.fromkeys(e.state for e in records)}
    hours = sum(each.seconds for each in records) / 3600
    tiles = [
        tile("trials", count(len(records)), ", ".join(f"{number} {state}" for state, number in states.items())),
        tile("hours of training", f"{hours:.2f}", "steps alone, of all trials"),
    ]
    if not done:
        return tag("div", *tiles, class_="tiles")
    best = done[0]
    assert best.value is not None, "a trial that is done has one"
    tiles.insert(0, tile(f"best {settings.metric}", f"{best.value:.4f}", f"trial {best.number}"))
    lines = tag("p", "The best settings: ", tag("code", soft(shlex.join(overrides_of(best.point)))))
    return join(tag("div", *tiles, class_="tiles"), lines)


def _figures(settings: SweepConfig, records: Sequence[TrialRecord]) -> list[Markup]:
    done = [each for each in records if each.state == "done" and each.value is not None]
    plots = [plot for each in settings.dimensions() if (plot := _plot(settings, each, done)) is not None]
    rows = [plots[start : start + PLOTS_A_ROW] for start in range(0, len(plots), PLOTS_A_ROW)]
    return (
        [part(f"{settings.metric} over each setting", *(picture(row, stands_alone=False) for row in rows))]
        if rows
        else []
    )


def _plot(settings: SweepConfig, dimension: Dimension, done: Sequence[TrialRecord]) -> Plot | None:
    """Of a dimension of numbers, with a colour for each value of another one that has few."""
    values = [each.point[dimension.name] for each in done]
    if not values or any(type(value) not in (int, float) for value in values) or len(set(values)) < 2:
        return None
    log = min(values) > 0 and max(values) / min(values) >= MANY_DECADES
    series = []
    for colour, (label, members) in enumerate(_groups(settings, dimension, done).items()):
        points = sorted((each.point[dimension.name], each.value) for each in members if each.value is not None)
        pick = min if settings.goal == "min" else max
        best = {x: pick(y for other, y in points if other == x) for x, _ in points}
        if len(best) < len(points):
            series.append(Series("", [x for x, _ in points], [y for _, y in points], colour, "dots"))
        is_drawn = dimension.span is not None and not dimension.span.points
        series.append(Series(label, list(best), list(best.values()), colour, "dots" if is_drawn else "both"))
    return Plot(dimension.name, dimension.name, settings.metric, tuple(series), log_x=log)


def _groups(settings: SweepConfig, dimension: Dimension, done: Sequence[TrialRecord]) -> dict[str, list[TrialRecord]]:
    """Trials by the value of the first other dimension that is a list of some few."""
    others = [each for each in settings.dimensions() if each.span is None and each.name != dimension.name]
    other = next((each for each in others if 2 <= len(each.choices) <= 8), None)
    if other is None:
        return {settings.metric: list(done)}
    found: dict[str, list[TrialRecord]] = {}
    for value in other.choices:
        members = [each for each in done if each.point[other.name] == value]
        if members:
            found[f"{other.name} {label_of(value)}"] = members
    return found


def _rungs(settings: SweepConfig, records: Sequence[TrialRecord]) -> Markup | None:
    if settings.halving is None:
        return None
    lines = []
    for each in records:
        points = [(rung.steps, rung.value) for rung in each.rungs if rung.value is not None]
        if points:
            lines.append(Series("", [x for x, _ in points], [y for _, y in points], each.number - 1))
    if not lines:
        return None
    plot = Plot("trials at their rungs", "step", settings.metric, tuple(lines), log_x=True)
    return part("Successive halving", picture([plot], stands_alone=False))


def _table(settings: SweepConfig, records: Sequence[TrialRecord]) -> Markup:
    names = [each.name for each in settings.dimensions()]
    rows: list[list[Child]] = [
        [
            str(each.number),
            *(label_of(each.point[name]) for name in names),
            "–" if each.value is None else f"{each.value:.4f}",
            count(each.steps),
            f"{each.seconds / 60:.1f}",
            each.state,
            each.why,
        ]
        for each in records
    ]
    head = ["trial", *names, settings.metric, "step", "minutes", "state", "why"]
    return part("Trials", table(head, rows))
