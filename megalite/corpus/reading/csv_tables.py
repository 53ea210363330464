"""Documents out of comma- and tab-separated values, by Arrow. Such a file has no parts: what is behind damage is lost.

A quote that is never closed takes all that follows into its field, and Arrow closes it at the end of the file without a
word. So an end is put behind the file, a row like no other: where it does not come out as a row, the last one has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from megalite.corpus.documents import ARROW_TYPE, BATCH_BYTES, BatchBuilder, DocumentBatch
from megalite.corpus.reading.columns import TableRows, choose_columns, read_columns
from megalite.corpus.reading.files import FilePiece, data_suffix, is_compressed, open_content, shown
from megalite.corpus.reading.separated import Beginning, End
from megalite.corpus.source import DocumentSource, is_url

BAD_ROW = "row with another number of columns"
UNCLOSED = "a quote in this row is never closed: the rest of the file is in it"

CSV_BLOCK_BYTES = 1 << 24
"""Arrow reads CSV in blocks, and a row must fit in one."""


def read_csv(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """The documents of a file of comma- or tab-separated values."""
    refused: list[int] = []
    delimiter = "\t" if data_suffix(piece.path) == ".tsv" else ","
    with _open_for_arrow(piece, config, builder) as (content, is_damaged):
        beginning = Beginning(content)
        if is_damaged() and not beginning.has_all_names:
            return  # no row is left; what is damaged is counted
        names = beginning.names(delimiter, piece.path)
        columns = choose_columns(names, piece.path, config) if names else []  # Arrow says what an empty file is
        end = End(delimiter, len(names))

        def refuse(row: csv.InvalidRow) -> str:
            if not end.came_as(row.text):
                refused.append(row.number - 2 + piece.first)  # Arrow's first row has the names
                text = end.taken_off(row.text or "")
                builder.reject(f"{piece.id}:{refused[-1]}", text, BAD_ROW if text == row.text else UNCLOSED)
            return "skip"

        reader = csv.open_csv(
            beginning.followed_by(end.content),
            # threads would take the rows' numbers away
            read_options=csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES),
            parse_options=csv.ParseOptions(
                delimiter=delimiter,
                newlines_in_values=True,
                invalid_row_handler=refuse,
            ),
            convert_options=csv.ConvertOptions(
                check_utf8=False, include_columns=columns, column_types=dict.fromkeys(columns, ARROW_TYPE)
            ),
        )
        rows = TableRows(piece, builder, piece.first, None, refused).as_far_as_possible(end.looked_for_behind(reader))
        whole = _whole_rows(rows, is_damaged, refused, piece, end, builder)
        whole = (_without_empty_ids(batch, config) for batch in whole)
        yield from read_columns(whole, piece, config, builder, refused=refused, are_texts=True)


@contextmanager
def _open_for_arrow(
    piece: FilePiece, config: DocumentSource, builder: BatchBuilder
) -> Iterator[tuple[BinaryIO | pa.NativeFile, Any]]:
    """A file for one of Arrow's own readers, and what tells, at its end, whether it ended early."""
    if not is_compressed(piece.path) and not is_url(piece.path):
        with pa.OSFile(piece.path) as file:
            yield file, lambda: False
        return
    with open_content(piece, config, builder) as reading:
        yield reading.file, lambda: reading.is_damaged


def _whole_rows(
    batches: Iterator[pa.RecordBatch],
    is_damaged: Any,
    refused: Sequence[int],
    piece: FilePiece,
    end: End,
    builder: BatchBuilder,
) -> Iterator[pa.RecordBatch]:
    """In parts of some MB: what Arrow reads at once may be 16 MB, and a station needs several times that. Of a file
    that ended early the last row was cut, and Arrow cannot tell; if it has another number of columns, it is refused
    already. So is one with a quote that was never closed."""
    last: pa.RecordBatch | None = None
    behind = piece.first
    for batch in batches:
        if last is not None:
            yield from _sliced(last)
        last = batch
        behind += batch.num_rows
    number = behind + len(refused) - 1
    is_refused = bool(refused) and refused[-1] == number
    if end.is_swallowed and not is_damaged():
        builder.lose(damaged_files=1)
        if last is not None and not is_refused:
            fields = b" ".join(column[-1].as_buffer().to_pybytes() for column in last.columns)
            builder.reject(f"{piece.id}:{number}", end.taken_off(shown(fields)), UNCLOSED)
    if last is not None:
        is_cut = (is_damaged() or end.is_swallowed) and not is_refused
        yield from _sliced(last.slice(0, last.num_rows - 1) if is_cut else last)


def _without_empty_ids(batch: pa.RecordBatch, config: DocumentSource) -> pa.RecordBatch:
    """An empty field is the only way to say that there is none."""
    place = batch.schema.get_field_index(config.id_field)
    if place < 0 or config.id_field == config.text_field:
        return batch
    ids = batch.column(place)
    is_empty = pc.equal(pc.binary_length(ids), 0)
    return batch.set_column(place, config.id_field, pc.if_else(is_empty, pa.scalar(None, ARROW_TYPE), ids))


def _sliced(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    step = max(1, BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1))
    yield from (batch.slice(first, step) for first in range(0, batch.num_rows, step))
