"""Documents out of tables, Parquet and Arrow, as whole batches of columns where every text is good.

A damaged row group of a Parquet file, or batch of an Arrow file, costs its own rows; they are counted, and the next
one is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megalite.corpus.conversations import COLUMNS, MalformedRecordError, parse_conversation, text_of, to_metadata
from megalite.corpus.documents import (
    ARROW_TYPE,
    BATCH_BYTES,
    BatchBuilder,
    DocumentBatch,
    Rejected,
    make_documents,
)
from megalite.corpus.reading.arrow_values import (
    AS_BYTES,
    fields_of,
    plain,
    unpacked,
    values_of,
    with_readable_names,
)
from megalite.corpus.reading.decompression import EXPANSION_FROM
from megalite.corpus.reading.files import (
    DAMAGED_FILE,
    READ_ERRORS,
    TOO_LARGE,
    FilePiece,
    is_machine_fault,
    shown,
)
from megalite.corpus.reading.kept_fields import id_of, kept_fields, spelt_out
from megalite.corpus.reading.remote import open_remote
from megalite.corpus.reading.separated import row_numbers, typed
from megalite.corpus.source import DocumentSource, is_url
from megalite.errors import DataError, did_you_mean

NOT_UTF8 = "not UTF-8"

NO_TEXT = "no text field, or not a string"

NOTHING = pa.scalar("", ARROW_TYPE)

COLUMN_BATCH_ROWS = 1024
"""Rows of a foreign Parquet or Arrow file taken at once, fewer where they are long."""


def open_parquet(path: str) -> pq.ParquetFile:
    """A Parquet file; of one behind a URL only the columns and row groups that are read are fetched."""
    file = open_remote(path, in_ranges=True) if is_url(path) else path
    return pq.ParquetFile(file, page_checksum_verification=True)


def read_parquet(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """The documents of some row groups."""
    with open_parquet(piece.path) as file:
        columns = choose_columns(file.schema_arrow.names, piece.path, config)
        row = piece.first
        for group in range(piece.start, file.num_row_groups if piece.stop is None else piece.stop):
            metadata = file.metadata.row_group(group)
            batch_rows, problem = _look_at_sizes(metadata, config)
            batches: Iterator[pa.RecordBatch] = iter(())
            if not problem:
                batches = file.iter_batches(batch_size=batch_rows, columns=columns, row_groups=[group])
            rows = TableRows(piece, builder, row, metadata.num_rows)
            yield from read_columns(rows.as_far_as_possible(batches, problem), piece, config, builder, first=row)
            row += metadata.num_rows


class TableRows:
    """The rows of one part of a table, and an account of those that cannot be read.

    Args:
        piece: the table.
        builder: is told of them.
        first: number of the first row.
        count: rows; None if that is not known.
        refused: numbers of those that are in no batch.
    """

    def __init__(
        self, piece: FilePiece, builder: BatchBuilder, first: int, count: int | None, refused: Sequence[int] = ()
    ):
        self._piece = piece
        self._builder = builder
        self._first = first
        self._count = count
        self._refused = refused

    def as_far_as_possible(self, batches: Iterator[pa.RecordBatch], problem: str = "") -> Iterator[pa.RecordBatch]:
        """The batches up to the first one that cannot be read."""
        num_read = 0
        try:
            for batch in batches:
                yield batch
                num_read += batch.num_rows
        except READ_ERRORS as error:
            if is_machine_fault(error):
                raise
            problem = str(error)
        if problem:
            first = self._first + num_read + len(self._refused)
            lost = "the rest" if self._count is None else f"rows {first} to {self._first + self._count - 1}"
            self._builder.reject(f"{self._piece.id}:{first}", f"{lost} lost: {problem}", DAMAGED_FILE)
            self._builder.lose(damaged_files=1, rows=0 if self._count is None else self._count - num_read)


def _look_at_sizes(metadata: pq.RowGroupMetaData, config: DocumentSource) -> tuple[int, str]:
    """How many rows of a row group to take at once, and what is wrong with it before any is taken."""
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    texts = next((chunk for chunk in chunks if chunk.path_in_schema == config.text_field), None)
    if texts is None or not metadata.num_rows:
        return COLUMN_BATCH_ROWS, ""
    unpacked, packed = texts.total_uncompressed_size, texts.total_compressed_size
    if unpacked > max(EXPANSION_FROM, packed * config.max_expansion):
        return 0, f"its texts grow to more than {config.max_expansion:g} times their size"
    rows = BATCH_BYTES * metadata.num_rows // max(unpacked, 1)
    return min(max(rows, 1), COLUMN_BATCH_ROWS), ""


def read_arrow(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """The documents of an Arrow file or stream."""
    with open_remote(piece.path, in_ranges=True) if is_url(piece.path) else pa.memory_map(piece.path) as file:
        try:
            reader = pa.ipc.open_file(file)
        except pa.ArrowInvalid:
            file.seek(0)
            stream = pa.ipc.open_stream(file)
            columns = choose_columns(stream.schema.names, piece.path, config)
            sound = (_refuse_broken(batch.select(columns)) for batch in stream)
            batches = TableRows(piece, builder, piece.first, None).as_far_as_possible(sound)
            yield from read_columns(batches, piece, config, builder)
            return
        columns, row = choose_columns(reader.schema.names, piece.path, config), piece.first
        for number in range(reader.num_record_batches):
            one = (_refuse_broken(reader.get_batch(number).select(columns)) for number in (number,))
            for batch in TableRows(piece, builder, row, None).as_far_as_possible(one):
                yield from read_columns(iter([batch]), piece, config, builder, first=row)
                row += batch.num_rows


def _refuse_broken(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Look at every offset before anyone follows one: Arrow maps files as they are, and kills the process over a wrong
    one. Whether texts are UTF-8 is another matter, so they are looked at as bytes.

    Raises:
        ArrowInvalid: one leads elsewhere.
    """
    batch.validate()
    for column in batch.columns:
        as_bytes = AS_BYTES.get(column.type)
        (column if as_bytes is None else column.view(as_bytes)).validate(full=True)
    return batch


def choose_columns(names: Sequence[str], path: str, config: DocumentSource) -> list[str]:
    """The columns of a table that are read, by the names of all.

    Raises:
        DataError: the text's is not there, or one that is read is there twice.
    """
    if config.conversations is not None:
        wanted = dict.fromkeys([*COLUMNS, config.id_field, *config.keep_fields])
        if not set(COLUMNS) & set(names):
            raise DataError(f"{path}: no column of a conversation; it has {', '.join(names)}: leave it out")
    else:
        wanted = dict.fromkeys([config.text_field, config.id_field, *config.keep_fields])
        if config.text_field not in names:
            hint = did_you_mean(config.text_field, names)
            raise DataError(f"{path}: no column {config.text_field!r}{hint}; it has {', '.join(names)}: set text_field")
    counts = Counter(names)
    if repeated := [name for name in wanted if counts[name] > 1]:
        raise DataError(
            f"{path}: {counts[repeated[0]]} columns are called {repeated[0]!r}, so which one is meant is not known; "
            "give them names of their own"
        )
    return [name for name in wanted if name in counts]


def read_columns(
    batches: Iterator[pa.RecordBatch],
    piece: FilePiece,
    config: DocumentSource,
    builder: BatchBuilder,
    *,
    first: int | None = None,
    refused: Sequence[int] = (),
    are_texts: bool = False,
) -> Iterator[DocumentBatch]:
    """Whole batches of columns, as they are where every text is good; what the builder holds goes before them.

    Args:
        batches: columns of a table.
        piece: the table.
        config: which columns.
        builder: of what is read one by one.
        first: number of the first row; None takes the piece's.
        refused: ascending numbers of rows that are in no batch; when a batch comes, all up to its end are known.
        are_texts: the table knows nothing else, so that kept fields may be numbers that are written out.
    """
    untyped = set(config.keep_fields) - {config.text_field, config.id_field} if are_texts else set[str]()
    yield from builder.take()
    row = piece.first if first is None else first
    for batch in _without_long_dictionaries(batches, config.text_field):
        batch = with_readable_names(plain(batch), config.text_field)
        rows = pa.array(row_numbers(row, batch.num_rows, refused))
        row = rows[-1].as_py() + 1 if len(rows) else row
        if config.conversations is not None:
            yield from _read_conversations(batch, rows.to_pylist(), piece, config, builder, untyped)
            continue
        texts, rejected = batch.column(config.text_field), []
        good = _good_texts(texts, int(config.max_record_mb * 1e6))
        if good is not None:
            names = _ids(batch, rows, piece, config).to_pylist()
            bad = [(names[i], texts[i]) for i in np.flatnonzero(~good).tolist()]
            rejected = [Rejected(name, builder.source, *_what_is_wrong(text)) for name, text in bad]
            batch, rows = batch.filter(pa.array(good)), rows.filter(pa.array(good))
            texts = batch.column(config.text_field)
        metadata = None
        if config.keep_fields:
            metadata = [kept_fields(typed(fields, untyped), config) for fields in fields_of(batch)]
        ids = _ids(batch, rows, piece, config)
        texts = texts.cast(ARROW_TYPE) if _is_text(texts.type) else pa.array([], ARROW_TYPE)  # of lists none is left
        yield DocumentBatch(make_documents(ids, builder.source, texts, metadata), rejected)


def _without_long_dictionaries(batches: Iterator[pa.RecordBatch], text_field: str) -> Iterator[pa.RecordBatch]:
    """The same rows, in parts of some MB when texts are written out: of a dictionary, one may stand in many rows."""
    for batch in batches:
        place = batch.schema.get_field_index(text_field)
        texts = None if place < 0 else batch.column(place)
        if texts is None or not pa.types.is_dictionary(texts.type) or not _is_text(texts.type.value_type):
            yield batch
            continue
        lengths = pc.fill_null(pc.binary_length(texts.dictionary).take(texts.indices), 0)
        ends = np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)
        start = 0
        while start < batch.num_rows:
            so_far = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, so_far + BATCH_BYTES, side="right")))
            yield batch.slice(start, stop - start)
            start = stop


def _read_conversations(
    batch: pa.RecordBatch,
    rows: list[int],
    piece: FilePiece,
    config: DocumentSource,
    builder: BatchBuilder,
    untyped: set[str],
) -> Iterator[DocumentBatch]:
    """Row by row; `untyped` are columns whose texts may be numbers."""
    for number, row in enumerate(rows):
        where = f"{piece.id}:{row}"
        try:
            (fields,) = fields_of(batch.slice(number, 1))
        except UnicodeDecodeError:
            builder.reject(where, "", NOT_UTF8)
            continue
        add_conversation(unpacked(typed(fields, untyped)), where, config, builder)
        if builder.full():
            yield from builder.take()


def add_conversation(fields: dict[str, Any], where: str, config: DocumentSource, builder: BatchBuilder) -> bool:
    """Add the conversation of a record as a document, or put the record aside; whether it was one."""
    assert config.conversations is not None
    try:
        found = parse_conversation(fields, config.conversations)
        metadata = to_metadata(found, kept_fields(fields, config))
        name = id_of(fields, where, config)
    except MalformedRecordError as error:
        builder.reject(where, spelt_out(fields), f"conversation: {error}")
        return False
    except RecursionError:
        builder.reject(where, spelt_out(fields), "conversation: too many groups one within another")
        return False
    builder.add(name, text_of(found).encode(), metadata)
    return True


def is_utf8(content: bytes) -> bool:
    """Whether bytes are a text."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _ids(batch: pa.RecordBatch, rows: pa.Array, piece: FilePiece, config: DocumentSource) -> pa.Array:
    """Given ids; file and row where there is none."""
    places = pc.binary_join_element_wise(pa.scalar(f"{piece.id}:", ARROW_TYPE), rows.cast(ARROW_TYPE), NOTHING)
    if config.id_field not in batch.schema.names:
        return places
    given = batch.column(config.id_field)
    if not (pa.types.is_string(given.type) or pa.types.is_large_string(given.type) or pa.types.is_integer(given.type)):
        given = pa.array([None if value is None else str(value) for value in values_of(given)], ARROW_TYPE)
    return pc.coalesce(given.cast(ARROW_TYPE), places)


def _good_texts(texts: pa.Array, max_bytes: int) -> np.ndarray | None:
    """bool [rows]: which texts are there, are not too large and are UTF-8 (readers of Parquet do not check); None when
    all are."""
    if not _is_text(texts.type):
        return np.zeros(len(texts), bool)
    lengths = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    good = (lengths <= max_bytes) & texts.is_valid().to_numpy(zero_copy_only=False)
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        values = texts.cast(pa.large_binary())
        good = np.array([ok and is_utf8(value.as_py()) for ok, value in zip(good, values, strict=True)], bool)
    return None if good.all() else good


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _what_is_wrong(text: pa.Scalar) -> tuple[str, str]:
    """How to show a bad text, and why it is bad."""
    if not text.is_valid or not _is_text(text.type):
        try:
            return repr(text.as_py()), NO_TEXT
        except (OverflowError, ValueError):  # a date that Python has not, bytes that are no UTF-8
            return f"a value of type {text.type}", NO_TEXT
    content = text.as_buffer().to_pybytes()
    return (shown(content), TOO_LARGE) if is_utf8(content) else (content.decode(errors="backslashreplace"), NOT_UTF8)
