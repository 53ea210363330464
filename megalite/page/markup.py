"""HTML and SVG as nested calls: what is not markup already is escaped, and every tag that opens closes.

A page shows names and ids out of crawled data. Escaping is therefore not left to whoever writes a table: a `str` that
did not come out of `tag` is text, always.
"""

from __future__ import annotations

import html
import re
from urllib.parse import urlsplit

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


def table(head: list[str], rows: list[list[Child]], *, numbers_from: int = 1) -> Markup:
    """A table.

    Args:
        head: titles of the columns.
        rows: their cells.
        numbers_from: the columns from here on hold numbers, and are set flush right.
    """

    def row(kind: str, cells: list[Child]) -> Markup:
        aligned = ("num" if column >= numbers_from else None for column in range(len(cells)))
        return tag("tr", *(tag(kind, cell, class_=style) for cell, style in zip(cells, aligned, strict=True)))

    body = tag("tbody", *(row("td", cells) for cells in rows))
    return tag("div", tag("table", tag("thead", row("th", list(head))), body), class_="scroll")


def details(summary: Child, *children: Child) -> Markup:
    """Something that opens with a click."""
    return tag("details", tag("summary", summary), *children)


def _escape(value: Child | float) -> str:
    return html.escape(_UNSEEN.sub("\N{REPLACEMENT CHARACTER}", str(value)))
