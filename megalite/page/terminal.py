"""Tables for terminals of any width.

    step     tokens   loss                 step    100
    100      122,880  2.31       ->        tokens  122,880
    200      245,760  2.05                 loss    2.31      ... and so on, as many rows at once as fit

Cells of words wrap; figures, names and dates never do. Where the columns do not fit even so, the table is turned on its
side, rather than cut to `st…  va…`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

WORDS = 4
"""A cell of so many words is a text, and may wrap ..."""

TEXT_WIDTH = 20
"""... down to so many columns."""

UNBOUNDED = 10_000


class FittingTable(Table):
    """A table that is turned on its side on a terminal that is too narrow for it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=UNBOUNDED)
        needed = Measurement.get(console, wide, self).maximum
        for column in self.columns:
            if _is_text(console, column):
                needed -= max(0, _column_width(console, wide, column) - TEXT_WIDTH)
            else:
                column.no_wrap = True
        if not self.row_count or needed <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield Group(*self._on_its_side(console, options))

    def _on_its_side(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide = options.update(width=UNBOUNDED)
        if self.title:
            yield Text.assemble((_plain(console, self.title), "italic"))
        rows = list(zip(*(column.cells for column in self.columns), strict=True))
        widths = [max(_width(console, wide, cell) for cell in row) for row in rows]
        left = options.max_width - max(_width(console, wide, column.header) for column in self.columns) - 4
        start = 0
        while start < len(rows):
            stop, taken = start + 1, widths[start]
            while stop < len(rows) and taken + 2 + widths[stop] <= left:
                taken += 2 + widths[stop]
                stop += 1
            yield self._block(rows[start:stop])
            start = stop
        if self.caption:
            yield Text(_plain(console, self.caption), "dim")

    def _block(self, rows: list[tuple[RenderableType, ...]]) -> Table:
        """Some rows beside each other, under what their first cells say."""
        head, *others = self.columns
        found = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        found.add_column(head.header, no_wrap=True)
        is_figures = len(rows) > 1 and all(column.justify == "right" for column in others[1:])
        for row in rows:
            found.add_column(row[0], justify="right" if is_figures else "left", overflow="fold")
        for column, cells in zip(others, list(zip(*rows, strict=True))[1:], strict=True):
            if any(cell != "" for cell in cells):
                found.add_row(column.header, *cells)
        return found


def figures(*columns: str, title: str | None = None) -> FittingTable:
    """A table without lines between its columns."""
    return FittingTable(
        *columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )


def _is_text(console: Console, column: Column) -> bool:
    return any(
        len(said.split()) >= WORDS and len(said) > TEXT_WIDTH
        for said in (_plain(console, cell) for cell in column.cells)
    )


def _column_width(console: Console, wide: ConsoleOptions, column: Column) -> int:
    return max(_width(console, wide, cell) for cell in (column.header, *column.cells))


def _width(console: Console, wide: ConsoleOptions, cell: RenderableType) -> int:
    return Measurement.get(console, wide, cell).maximum


def _plain(console: Console, cell: RenderableType) -> str:
    if isinstance(cell, str):
        return console.render_str(cell).plain
    return cell.plain if isinstance(cell, Text) else ""
