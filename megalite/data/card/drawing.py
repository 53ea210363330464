"""The drawings of a card, as SVG inside the page: no script, no file from elsewhere, colours from the page's style.

funnel      read       ################################  4,926
            clean      ############################      4,341   41.8 MB   -11.9 %
bars        too short  ############  178
histogram   columns of equal width, one a class of lengths; documents beside the text that they hold
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalite.data.card.card import Stage
from megalite.data.card.measure import Lengths
from megalite.page.markup import Markup, tag
from megalite.page.numbers import count, share, short, size

WIDTH = 760
"""Of every drawing, in units that a narrow window scales down."""

LABEL_WIDTH = 190
"""Left of a funnel's bars."""

NUMBER_WIDTH = 210
"""Right of them."""

FUNNEL_ROW = 44

BAR_LABEL_WIDTH = 330
BAR_ROW = 24

HISTOGRAM_HEIGHT = 170

MAX_TICKS = 12
"""Classes of lengths that are named; with more of them every second one is."""

MAX_LABEL = 46
"""Characters of a label; the whole of it shows under the pointer."""


def funnel(stages: Sequence[Stage], titles: Mapping[str, str]) -> Markup:
    """Documents, and under them text, from station to station.

    Args:
        stages: what was read, and what each station left.
        titles: what a station does, by its name.
    """
    room = WIDTH - LABEL_WIDTH - NUMBER_WIDTH
    most = max(stage.kept.documents for stage in stages) or 1
    most_bytes = max(stage.kept.text_bytes or 0 for stage in stages) or 1
    rows = []
    for number, stage in enumerate(stages):
        y = number * FUNNEL_ROW
        rows += [
            _label(stage.name, 0, y + 15, class_="name"),
            _label(titles.get(stage.name, ""), 0, y + 31, class_="faint small"),
            _bar(LABEL_WIDTH, y + 3, room * stage.kept.documents / most, 18, "a"),
        ]
        said = count(stage.kept.documents)
        if stage.kept.text_bytes is not None:
            rows.append(_bar(LABEL_WIDTH, y + 23, room * stage.kept.text_bytes / most_bytes, 7, "b"))
            said += f" · {size(stage.kept.text_bytes)}"
        rows.append(_label(said, WIDTH - NUMBER_WIDTH + 12, y + 15))
        if number:
            lost = _lost(stages[number - 1], stage)
            rows.append(_label(lost, WIDTH - NUMBER_WIDTH + 12, y + 31, class_="faint small"))
    return _svg(len(stages) * FUNNEL_ROW, "Documents and text after each station", rows)


def bars(counts: Mapping[str, int], whole: int, what: str, *, most: int = 0) -> Markup:
    """A bar for each count.

    Args:
        counts: by label.
        whole: what a percentage is of; 0 for none.
        what: is counted, for people who cannot see the drawing.
        most: the count of the longest bar, if another drawing has it.
    """
    room = WIDTH - BAR_LABEL_WIDTH - 150
    most = max(most, *counts.values(), 1)
    rows = []
    for number, (label, amount) in enumerate(counts.items()):
        y = number * BAR_ROW
        width = room * amount / most
        said = f"{count(amount)} · {share(amount, whole)}" if whole else count(amount)
        rows += [
            _label(label, BAR_LABEL_WIDTH - 12, y + 16, text_anchor="end"),
            _bar(BAR_LABEL_WIDTH, y + 4, width, 16, "a"),
            _label(said, BAR_LABEL_WIDTH + max(width, 1) + 8, y + 16, class_="faint small"),
        ]
    return _svg(len(counts) * BAR_ROW, what, rows)


def histogram(lengths: Lengths, unit: str) -> Markup:
    """How long documents are: the share of documents in each class of lengths, and the share of all text.

    Args:
        lengths: in `unit`.
        unit: bytes or tokens.
    """
    bottom = HISTOGRAM_HEIGHT
    step = WIDTH / max(len(lengths.bins), 8)
    every = -(-len(lengths.bins) // MAX_TICKS)
    whole, total = lengths.documents or 1, lengths.total or 1
    highest = max((max(each.documents / whole, each.total / total) for each in lengths.bins), default=0) or 1
    parts = [tag("line", x1=0, x2=WIDTH, y1=bottom + 0.5, y2=bottom + 0.5, class_="axis")]
    for number, each in enumerate(lengths.bins):
        x = number * step
        heights = [(bottom - 22) * part / highest for part in (each.documents / whole, each.total / total)]
        told = (
            f"{count(each.least)} to {count(each.most)} {unit}: {count(each.documents)} documents "
            f"({share(each.documents, whole)}), {share(each.total, total)} of all {unit}"
        )
        columns = [
            _bar(x + step * (0.1 + 0.4 * side), bottom - height, step * 0.38, height, "ab"[side])
            for side, height in enumerate(heights)
        ]
        parts.append(tag("g", tag("title", told), *columns))
        if number % every == 0:
            parts.append(_label(short(each.least), x + step * 0.1, bottom + 17, class_="faint small"))
    return _svg(HISTOGRAM_HEIGHT + 24, f"Lengths of documents in {unit}", parts)


def _lost(before: Stage, after: Stage) -> str:
    """What a station took away."""
    said = f"−{share(after.removed, before.kept.documents)} documents" if after.removed else "no document less"
    if before.kept.text_bytes is not None and after.kept.text_bytes is not None:
        said += f" · −{share(before.kept.text_bytes - after.kept.text_bytes, before.kept.text_bytes)} text"
    return said


def _bar(x: float, y: float, width: float, height: float, style: str) -> Markup:
    """A rectangle; what is more than nothing can be seen."""
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
    return tag("rect", **place, width=f"{max(width, 0.8):.1f}", height=f"{max(height, 0):.1f}", rx=2, class_=style)


def _label(text: str, x: float, y: float, **attributes: str) -> Markup:
    shown = text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"
    title = tag("title", text) if shown != text else None
    return tag("text", title, shown, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)


def _svg(height: float, title: str, parts: Sequence[Markup]) -> Markup:
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=title)
