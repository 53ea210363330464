"""The timeline of a pipeline, drawn: on a terminal and as a page.

stage 0  0011223344..00b11b22b...        digits: the forward pass of that micro-batch (its last digit);
stage 1  ..00b11b22b..........           b, i, w: its backward pass, whole, for the input, for the weights
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from megalite.page.markup import Markup, tag
from megalite.page.style import CSS
from megalite.parallel.schedules.simulation import TimedPass, Timeline

NAME_COLUMNS = len("stage 000  ")
STYLES = {"F": "white on blue", "B": "black on green", "I": "black on cyan", "W": "black on bright_black"}
LEGEND = "0-9 forward (micro-batch, last digit), b backward, i its half for the input, w for the weights, . waiting"

COLOURS = {"F": "var(--a)", "B": "var(--b)", "I": "#3aa17e", "W": "var(--faint)"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, for the input", "W": "backward, for the weights"}
PAGE_WIDTH, ROW_HEIGHT, NAME_WIDTH = 1600, 30, 60
LABEL_WIDTH = 30
"""A pass so wide is labelled; narrower ones say what they are when pointed at."""


def draw_lines(timeline: Timeline, width: int) -> Iterator[Text]:
    """A line for each stage, `width` columns of time wide."""
    for stage, spans in enumerate(timeline.spans):
        line = Text(f"stage {stage:<5}")
        for column in range(width):
            found = _at(spans, (column + 0.5) * timeline.end / width)
            line.append(_letter(found) if found else ".", STYLES[found.operation.kind] if found else "dim")
        yield line


def _at(spans: Sequence[TimedPass], moment: float) -> TimedPass | None:
    return next((span for span in spans if span.start <= moment < span.end), None)


def _letter(span: TimedPass) -> str:
    kind, _, micro_batch = span.operation
    return str(micro_batch % 10) if kind == "F" else kind.lower()


def draw_page(timeline: Timeline, title: str, facts: Sequence[str]) -> str:
    """An HTML page that needs nothing else."""
    height = ROW_HEIGHT * len(timeline.spans)
    drawing = tag(
        "svg",
        *(_row(spans, stage, timeline.end) for stage, spans in enumerate(timeline.spans)),
        viewBox=f"0 0 {NAME_WIDTH + PAGE_WIDTH} {height}",
        role="img",
        aria_label=f"timeline of {title}",
        style=f"min-width: {PAGE_WIDTH // 2}px",
    )
    legend = [
        tag("span", tag("b", "\N{BLACK SQUARE} ", style=f"color: {COLOURS[kind]}"), f"{name}  ")
        for kind, name in NAMES.items()
    ]
    paragraphs = [tag("p", fact) for fact in facts]
    main = tag("main", tag("h1", title), *paragraphs, tag("p", *legend), tag("div", drawing, class_="scroll"))
    head = tag("head", tag("meta", charset="utf-8"), tag("title", title), tag("style", Markup(CSS + WIDE)))
    return f"<!doctype html>\n{tag('html', head, tag('body', main), lang='en')}\n"


WIDE = "main { max-width: none; } svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }"


def _row(spans: Sequence[TimedPass], stage: int, end: float) -> Markup:
    top = stage * ROW_HEIGHT
    name = tag("text", f"stage {stage}", x=0, y=top + 19)
    return tag("g", name, *(_box(span, top, PAGE_WIDTH / end) for span in spans))


def _box(span: TimedPass, top: int, scale: float) -> Markup:
    kind, chunk, micro_batch = span.operation
    left, width = NAME_WIDTH + scale * span.start, scale * (span.end - span.start)
    says = f"{span.operation}: {NAMES[kind]} of chunk {chunk}, micro-batch {micro_batch}"
    box = tag(
        "rect",
        tag("title", says),
        x=round(left, 2),
        y=top + 2,
        width=round(max(width, 0.1), 2),
        height=ROW_HEIGHT - 4,
        fill=COLOURS[kind],
        stroke="var(--page)",
    )
    if width < LABEL_WIDTH:
        return box
    return tag("g", box, tag("text", str(span.operation), x=round(left + 3, 2), y=top + 19))
