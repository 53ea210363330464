"""The drawings of a card: no script, no file from elsewhere, colours from the page's style.

funnel      read       ################################  4,926
            clean      ############################      4,341   41.8 MB   11.9 % less
bars        too short  ############  178
histogram   columns of equal width, one a class of lengths; documents beside the text that they hold

What they say is text of the page, which wraps and keeps its size on a phone; only bars are SVG, as wide as their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalite.corpus.card.card import StageCard
from megalite.corpus.card.measure import Lengths
from megalite.page.markup import Markup, join, soft, strip, tag
from megalite.page.numbers import count, share, short, size

MAX_TICKS = 12
"""Classes of lengths that are named; with more of them every second one is, and half as many on a phone."""


def funnel(stages: Sequence[StageCard], titles: Mapping[str, str]) -> Markup:
    """Documents, and under them text, from station to station.

    Args:
        stages: what was read, and what each station left.
        titles: what a station does, by its name.
    """
    most = max(stage.kept.documents for stage in stages) or 1
    most_bytes = max(stage.kept.text_bytes or 0 for stage in stages) or 1
    rows = []
    for before, stage in zip((None, *stages), stages, strict=False):
        documents, text_bytes = stage.kept.documents, stage.kept.text_bytes
        strips, said = [strip([(documents / most, "a", None)])], count(documents)
        if text_bytes is not None:
            strips.append(strip([(text_bytes / most_bytes, "b", None)]))
            said += f" · {size(text_bytes)}"
        lost = tag("small", _lost(before, stage)) if before else None
        name = join(tag("b", soft(stage.name)), tag("span", tag("small", titles.get(stage.name, ""))))
        rows.append(tag("div", tag("div", name), tag("div", *strips), tag("div", tag("span", said), lost)))
    return tag("div", *rows, class_="bars funnel", role="figure", aria_label="Documents and text after each station")


def bars(counts: Mapping[str, int], whole: int, what: str, *, most: int = 0) -> Markup:
    """A bar for each count.

    Args:
        counts: by label.
        whole: what a percentage is of; 0 for none.
        what: is counted, for people who cannot see the drawing.
        most: the count of the longest bar, if another drawing has it.
    """
    most = max(most, *counts.values(), 1)
    rows = []
    for label, amount in counts.items():
        said = f"{count(amount)} · {share(amount, whole)}" if whole else count(amount)
        rows.append(tag("div", tag("span", soft(label)), strip([(amount / most, "a", None)]), tag("span", said)))
    return tag("div", *rows, class_="bars plain", role="figure", aria_label=what)


def histogram(lengths: Lengths, unit: str) -> Markup:
    """How long documents are: the share of documents in each class of lengths, and the share of all text.

    Args:
        lengths: in `unit`.
        unit: bytes or tokens.
    """
    every = -(-len(lengths.bins) // MAX_TICKS)
    whole, total = lengths.documents or 1, lengths.total or 1
    highest = max((max(each.documents / whole, each.total / total) for each in lengths.bins), default=0) or 1
    columns = []
    for number, each in enumerate(lengths.bins):
        told = (
            f"{count(each.least)} to {count(each.most)} {unit}: {count(each.documents)} documents "
            f"({share(each.documents, whole)}), {share(each.total, total)} of all {unit}"
        )
        heights = [96 * part / highest for part in (each.documents / whole, each.total / total)]
        drawn = (_column(10 + 40 * side, height, "ab"[side]) for side, height in enumerate(heights))
        svg = tag("svg", tag("title", told), *drawn, viewBox="0 0 100 100", preserveAspectRatio="none")
        name = short(each.least) if number % every == 0 else ""
        label = tag("span", name, class_="seldom" if number % (2 * every) else None)
        columns.append(tag("div", svg, label))
    return tag("div", *columns, class_="histogram", role="figure", aria_label=f"Lengths of documents in {unit}")


def _lost(before: StageCard, after: StageCard) -> str:
    """What a station took away."""
    said = f"{share(after.removed, before.kept.documents)} of documents" if after.removed else "no document"
    said += " less"
    if before.kept.text_bytes is not None and after.kept.text_bytes is not None:
        text = before.kept.text_bytes - after.kept.text_bytes
        change = "less" if text >= 0 else "more"
        said += f", {share(abs(text), before.kept.text_bytes)} of text {change}"
    return said


def _column(x: int, height: float, style: str) -> Markup:
    """A rectangle; what is more than nothing can be seen."""
    height = max(height, 0.6) if height else 0.0
    return tag("rect", x=x, y=f"{100 - height:.1f}", width=38, height=f"{height:.1f}", class_=style)
