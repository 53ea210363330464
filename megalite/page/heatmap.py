"""A table of shares as a picture that stands alone: an SVG of coloured fields, each with its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalite.page.markup import Markup, tag

FIELD_WIDTH, FIELD_HEIGHT, MARGIN = 72, 28, 78
FROM, TO = (214, 96, 77), (67, 147, 195)
"""Red and blue of equal lightness about, which people who see no red tell apart."""


def heatmap(shares: Mapping[tuple[str, str], float], columns: Sequence[str], rows: Sequence[str], title: str) -> Markup:
    """Shares from 0 to 1 as percentages.

    Args:
        shares: by column and row.
        title: what the picture shows, with a word for columns and rows.
    """
    width, height = MARGIN + FIELD_WIDTH * len(columns) + 10, 2 * FIELD_HEIGHT + FIELD_HEIGHT * len(rows) + 10
    fields = [
        _field(shares[column, row], MARGIN + x * FIELD_WIDTH, (y + 2) * FIELD_HEIGHT)
        for x, column in enumerate(columns)
        for y, row in enumerate(rows)
    ]
    names = [_text(name, MARGIN + (x + 0.5) * FIELD_WIDTH, 1.6 * FIELD_HEIGHT) for x, name in enumerate(columns)]
    names += [_text(name, MARGIN / 2, (y + 2.6) * FIELD_HEIGHT) for y, name in enumerate(rows)]
    heading = _text(title, width / 2, 0.6 * FIELD_HEIGHT)
    back = tag("rect", width=width, height=height, fill="#ffffff")
    return tag(
        "svg",
        *(tag("title", title), back, heading, *names, *fields),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        font_family="sans-serif",
        font_size="12",
        text_anchor="middle",
    )


def _field(share: float, x: float, y: float) -> Markup:
    colour = ",".join(str(round(a + (b - a) * share)) for a, b in zip(FROM, TO, strict=True))
    box = tag("rect", x=x + 1, y=y + 1, width=FIELD_WIDTH - 2, height=FIELD_HEIGHT - 2, fill=f"rgb({colour})")
    return tag("g", box, _text(f"{share:.0%}", x + FIELD_WIDTH / 2, y + 0.62 * FIELD_HEIGHT, "#ffffff"))


def _text(text: str, x: float, y: float, fill: str = "#222222") -> Markup:
    return tag("text", text, x=round(x, 1), y=round(y, 1), fill=fill)
