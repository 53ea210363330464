"""HTML and SVG as nested calls: what is not markup already is escaped, and every tag that opens closes.

A page shows names and ids out of crawled data. Escaping is therefore not left to whoever writes a table: a `str` that
did not come out of `tag` is text, always.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

_LONG_WORD = re.compile(r"\S{21,}")
_PIECE = re.compile(r"[^/._,:;=@?&-]+[/._,:;=@?&-]{0,3}|[/._,:;=@?&-]{1,3}")
LONGEST_PIECE, PIECE_LENGTH = 20, 12
"""Characters of a word without any separator that stay together, and of the parts in which a longer one may break."""

_TAG = re.compile(r"<[^>]*>")
WIDE_TEXT = 24
"""Characters up to which a cell shares a line with another one on a phone."""

MANY_COLUMNS = 8
"""From which a table is too wide for a tablet too."""

_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Characters that HTML forbids."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | int | None
"""Something inside a tag; None is nothing."""


def tag(name: str, *children: Child, **attributes: str | float | None) -> Markup:
    """One element.

    Args:
        name: of the element.
        children: markup, or text to escape.
        attributes: `class_` stands for class, `text_anchor` for text-anchor; None leaves one out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Elements one behind the other."""
    return Markup("".join(each if isinstance(each, Markup) else _escape(each) for each in children if each is not None))


def link(address: str) -> Markup:
    """An address to follow, if it is one of the web; else its text."""
    try:
        is_web = urlsplit(address).scheme in ("http", "https")
    except ValueError:
        is_web = False
    return tag("a", address, href=address, rel="noreferrer") if is_web else tag("span", address)


def soft(text: str) -> Markup:
    """Text in which long words may break where it hurts least: paths, settings and fingerprints behind a separator."""
    if isinstance(text, Markup):
        return text
    parts, end = [], 0
    for word in _LONG_WORD.finditer(text):
        pieces = [cut for piece in _PIECE.findall(word[0]) for cut in _cut(piece)]
        parts += [_escape(text[end : word.start()]), "<wbr>".join(map(_escape, pieces))]
        end = word.end()
    return Markup("".join([*parts, _escape(text[end:])]))


def table(head: list[str], rows: list[list[Child]], *, numbers_from: int = 1, stacked: bool = True) -> Markup:
    """A table.

    Args:
        head: titles of the columns.
        rows: their cells.
        numbers_from: the columns from here on hold numbers, and are set flush right.
        stacked: on a phone each row becomes a block under its first cell; otherwise it stays a table, which has to be
            narrow enough.
    """

    def cell(column: int, child: Child) -> Markup:
        inside = soft(child) if isinstance(child, str) else join(child)
        longest = max(map(len, _TAG.split(inside.replace("<wbr>", ""))))
        says = {"num": column >= numbers_from, "wide": longest > WIDE_TEXT, "nothing": inside in ("", "–")}
        styles = [style for style, holds in says.items() if holds]
        return tag("td", inside, class_=" ".join(styles) or None, data_label=(column and head[column]) or None)

    titles = (tag("th", soft(title), class_="num" if n >= numbers_from else None) for n, title in enumerate(head))
    body = tag("tbody", *(tag("tr", *(cell(*each) for each in enumerate(cells))) for cells in rows))
    style = ("stacked many" if len(head) >= MANY_COLUMNS else "stacked") if stacked else None
    whole = tag("table", tag("thead", tag("tr", *titles)), body, class_=style)
    return tag("div", whole, class_="scroll")


def strip(parts: Sequence[tuple[float, str, str | None]]) -> Markup:
    """A bar as wide as its place.

    Args:
        parts: from the left, each with its share of the whole width, its style and what it says under the pointer.
    """
    found, left = [], 0.0
    for share, style, told in parts:
        width = max(1000 * share, 1.0) if share else 0.0  # what is more than nothing can be seen
        title = tag("title", told) if told else None
        found.append(tag("rect", title, x=f"{left:.1f}", y=0, width=f"{width:.1f}", height=10, class_=style))
        left += width
    box = {"viewBox": "0 0 1000 10", "preserveAspectRatio": "none"}
    return tag("svg", *found, **box, class_="strip", aria_hidden="true")


def details(summary: Child, *children: Child) -> Markup:
    """Something that opens with a click."""
    return tag("details", tag("summary", summary), *children)


def _cut(piece: str) -> list[str]:
    """A piece of a word that has no separator inside, in parts if it is long."""
    if len(piece) <= LONGEST_PIECE:
        return [piece]
    return [piece[start : start + PIECE_LENGTH] for start in range(0, len(piece), PIECE_LENGTH)]


def _escape(value: Child | float) -> str:
    return html.escape(_UNSEEN.sub("\N{REPLACEMENT CHARACTER}", str(value)))


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, in their order."""
    flat: dict[str, Any] = {}
    for name, each in settings.items():
        flat |= flatten(each, f"{prefix}{name}.") if isinstance(each, dict) and each else {f"{prefix}{name}": each}
    return flat
