"""Tables on terminals of every width: nothing is cut off, no figure is broken."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megalite.page.terminal import FittingTable, figures

WIDTHS = (50, 80, 120)


def printed(table: FittingTable, width: int) -> list[str]:
    """What a terminal shows of it."""
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()


def stages(num_rows: int) -> tuple[FittingTable, list[list[str]]]:
    """A table of figures as `config check` prints it, and its cells."""
    heads = ("stage", "blocks", "parameters", "weights", "gradients", "optimizer", "activations", "total")
    table = figures(*heads, title="GiB on each rank")
    for column in table.columns[2:]:
        column.justify = "right"
    rows = [
        [f"{n}", f"{n}0-{n}9", f"{n}2,172,452,864", *(f"{n}{part}.{n}" for part in range(5))] for n in range(num_rows)
    ]
    for row in rows:
        table.add_row(*row)
    return table, rows


@pytest.mark.parametrize("width", [30, *WIDTHS])
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_every_figure_in_one_piece(width, num_rows):
    """As a table where it fits, turned on its side where it does not; with every title and cell, and no ellipsis."""
    table, rows = stages(num_rows)
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    words = " ".join(lines).split()
    for row in rows:
        assert set(row) <= set(words)
    assert {column.header for column in table.columns} <= set(words)
    assert words[:5] == ["GiB", "on", "each", "rank", "stage"]


def test_rows_stay_beside_each_other_where_they_fit():
    """At 50 columns two stages are compared in one block, not one under the other."""
    table, _ = stages(2)
    lines = printed(table, 50)
    assert sum("parameters" in line for line in lines) == 1
    (total,) = (line for line in lines if "total" in line)
    assert total.split() == ["total", "04.0", "14.1"]


def test_text_wraps_before_a_table_is_turned():
    """A column of words gives way; the table stays one, and its figures whole."""
    table = figures("preset", "hidden", "what it is")
    table.add_row("llama-8b", "4096", "the shape of a well-known model with eight billion parameters " * 2)
    lines = printed(table, 50)
    assert lines[1].split() == ["preset", "hidden", "what", "it", "is"]
    assert "llama-8b  4096    the shape of" in lines[3]
    assert max(map(len, lines)) <= 50


def test_empty_cells():
    """Where all cells of a block are empty there is no line for them."""
    table = figures("checkpoint", "saved (UTC)", "written by", "storage", "health", "valid. loss")
    table.add_row("step-0000030", "2026-11-22 23:36", "1 rank, zero 1", "full", "complete", "")
    lines = printed(table, 40)
    assert not any("valid. loss" in line for line in lines)
    assert any(line.split() == ["health", "complete"] for line in lines)
