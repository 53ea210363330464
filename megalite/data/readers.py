"""Reading documents out of a piece of one source: JSON lines, tables, web archives or text, each possibly compressed
and perhaps behind a URL (`remote.py`), or a shard of a Hugging Face data set (`hub.py`).

Every reader streams, and never stops at a bad record: it goes to the builder's rejects with a reason. A reader yields a
batch whenever one is full; what is left over stays in the builder for the next file.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from megalite.data.documents import ARROW_TYPE, SCHEMA, BatchBuilder, DocumentBatch, Rejected, make_documents
from megalite.data.hub import read_dataset
from megalite.data.recipe import DocumentSource
from megalite.data.remote import file_name, is_url, local_copy, open_remote
from megalite.errors import DataError, did_you_mean

NOT_UTF8 = "not UTF-8"
NOT_JSON = "not a JSON object"
NO_TEXT = "no text field, or not a string"
LONE_SURROGATE = "half of a surrogate pair"
BAD_ROW = "row with another number of columns"
UNREADABLE_FILE = "unreadable file"

READ_ERRORS = (OSError, pa.ArrowInvalid)

NOTHING = pa.scalar("", ARROW_TYPE)

COLUMN_BATCH_ROWS = 1024
"""Rows of a foreign Parquet or Arrow file taken at once."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Arrow's names of them."""


@dataclass(frozen=True)
class Piece:
    """A file of a source, or a part of a large one."""

    path: str
    """Absolute, or a URL; the name of a data set."""
    id: str
    """What the file is called in ids."""
    start: int = 0
    stop: int | None = None
    """Bytes of JSON lines, or row groups of a Parquet file, None being the end; of a data set, which shard out of how
    many."""
    first: int = 1
    """Number of the first line or row, for ids."""
    num_bytes: int = 0
    """Of the whole file, as it lies there; 0 when that is not known."""


Reader = Callable[[Piece, DocumentSource, BatchBuilder], Iterator[DocumentBatch]]


def read_piece(piece: Piece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """Read one piece into the builder; yield the batches that it fills.

    Raises:
        DataError: a table without the column that is to hold the text.
        UnavailableError: what is not on this machine cannot be reached.
    """
    reader = _read_dataset if config.kind == "datasets" else READERS.get(data_suffix(piece.path), _read_text)
    try:
        yield from reader(piece, config, builder)
    except READ_ERRORS as error:
        builder.reject(piece.id, str(error), UNREADABLE_FILE)
    if builder.full():
        yield from builder.take()


def data_suffix(path: str) -> str:
    """The suffix of a path or URL that tells the format, `.gz` and `.zst` taken off."""
    name = PurePosixPath(file_name(path))
    inner = name.with_suffix("") if name.suffix in COMPRESSIONS else name
    return inner.suffix.lower()


def is_compressed(path: str) -> bool:
    """Whether a path or URL ends in `.gz` or `.zst`."""
    return PurePosixPath(file_name(path)).suffix in COMPRESSIONS


def read_station_shard(path: Path) -> Iterator[DocumentBatch]:
    """The documents of one file that a station wrote, row group by row group."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            for batch in file.read_row_group(group, columns=SCHEMA.names).cast(SCHEMA).to_batches():
                yield DocumentBatch(batch, [])


def _open(path: str) -> BinaryIO:
    """A file as a stream of bytes, uncompressed on the way.

    Arrow's readers refuse a stream that ends early; zstandard's own takes it for the end of the file.
    """
    if is_url(path) and not is_compressed(path):
        return open_remote(path)
    return io.BufferedReader(_open_arrow(path), buffer_size=1 << 20)


def _open_arrow(path: str) -> pa.NativeFile:
    """The same as a stream of Arrow's."""
    if not is_url(path):
        return pa.input_stream(path, compression="detect")
    suffix = PurePosixPath(file_name(path)).suffix
    return pa.input_stream(open_remote(path), compression=COMPRESSIONS.get(suffix))


def _read_text(piece: Piece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    with _open(piece.path) as file:
        content = file.read()
    if _is_utf8(content):
        builder.add(piece.id, content)
    else:
        builder.reject(piece.id, content.decode(errors="backslashreplace"), NOT_UTF8)
    return iter(())


def _read_json_lines(piece: Piece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    with _open(piece.path) as file:
        if piece.start:
            file.seek(piece.start)
        left = float("inf") if piece.stop is None else piece.stop - piece.start
        for number, line in enumerate(file, start=piece.first):
            if not line.isspace():
                _add_line(line, f"{piece.id}:{number}", config, builder)
                if builder.full():
                    yield from builder.take()
            left -= len(line)
            if left <= 0:
                return


def _add_line(line: bytes, where: str, config: DocumentSource, builder: BatchBuilder) -> None:
    try:
        fields = orjson.loads(line)
    except ValueError:  # orjson is strict and fast; Python's own reader says what is wrong, or forgives a NaN
        fields = _read_leniently(line, where, builder)
        if fields is None:
            return
    if not isinstance(fields, dict):
        builder.reject(where, line.decode(errors="backslashreplace"), NOT_JSON)
        return
    text = fields.get(config.text_field)
    if not isinstance(text, str):
        builder.reject(where, line.decode(errors="backslashreplace"), NO_TEXT)
        return
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        builder.reject(where, line.decode(errors="backslashreplace"), LONE_SURROGATE)
        return
    given = fields.get(config.id_field)
    builder.add(where if given is None else str(given), encoded, _kept_fields(fields, config))


def _read_leniently(line: bytes, where: str, builder: BatchBuilder) -> Any:
    """The content of a line that orjson refuses, or None when it is rejected."""
    if not _is_utf8(line):
        builder.reject(where, line.decode(errors="backslashreplace"), NOT_UTF8)
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        builder.reject(where, line.decode(errors="backslashreplace"), NOT_JSON)
        return None


def _kept_fields(fields: dict[str, Any], config: DocumentSource) -> str:
    if not config.keep_fields:
        return ""
    kept = {name: fields[name] for name in config.keep_fields if name in fields}
    return json.dumps(kept, ensure_ascii=False, default=str)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def open_parquet(path: str) -> pq.ParquetFile:
    """A Parquet file; of one behind a URL only the columns and row groups that are read are fetched."""
    return pq.ParquetFile(open_remote(path, in_ranges=True) if is_url(path) else path)


def _read_parquet(piece: Piece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    with open_parquet(piece.path) as file:
        columns = _columns(file.schema_arrow, piece.path, config)
        groups = range(piece.start, file.num_row_groups if piece.stop is None else piece.stop)
        batches = file.iter_batches(batch_size=COLUMN_BATCH_ROWS, columns=columns, row_groups=list(groups))
        yield from _read_columns(batches, piece, config, builder)


def _read_arrow(piece: Piece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    with open_remote(piece.path, in_ranges=True) if is_url(piece.path) else pa.memory_map(piece.path) as file:
        try:
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            file.seek(0)
            reader = batches = pa.ipc.open_stream(file)
        columns = _columns(reader.schema, piece.path, config)
        yield from _read_columns((batch.select(columns) for batch in batches), piece, config, builder)


def _columns(schema: pa.Schema, path: str, config: DocumentSource) -> list[str]:
    if config.text_field not in schema.names:
        hint = did_you_mean(config.text_field, schema.names)
        raise DataError(
            f"{path}: no column {config.text_field!r}{hint}; it has {', '.join(schema.names)}: set text_field"
        )
    wanted = dict.fromkeys([config.text_field, config.id_field, *config.keep_fields])
    return [name for name in wanted if name in schema.names]


def _read_columns(
    batches: Iterator[pa.RecordBatch], piece: Piece, config: DocumentSource, builder: BatchBuilder
) -> Iterator[DocumentBatch]:
    """Whole batches of columns, as they are where every text is good; what the builder holds goes before them."""
    yield from builder.take()
    row = piece.first
    for batch in batches:
        rows = pa.array(np.arange(row, row + batch.num_rows))
        row += batch.num_rows
        texts, rejected = batch.column(config.text_field), []
        good = _good_texts(texts)
        if good is not None:
            names = _ids(batch, rows, piece, config).to_pylist()
            bad = [(names[i], texts[i]) for i in np.flatnonzero(~good).tolist()]
            rejected = [Rejected(name, builder.source, *_what_is_wrong(text)) for name, text in bad]
            batch, rows = batch.filter(pa.array(good)), rows.filter(pa.array(good))
            texts = batch.column(config.text_field)
        metadata = None
        if config.keep_fields:
            metadata = [_kept_fields(fields, config) for fields in batch.to_pylist()]
        ids = _ids(batch, rows, piece, config)
        yield DocumentBatch(make_documents(ids, builder.source, texts.cast(ARROW_TYPE), metadata), rejected)


def _ids(batch: pa.RecordBatch, rows: pa.Array, piece: Piece, config: DocumentSource) -> pa.Array:
    """Given ids; file and row where there is none."""
    places = pc.binary_join_element_wise(pa.scalar(f"{piece.id}:", ARROW_TYPE), rows.cast(ARROW_TYPE), NOTHING)
    if config.id_field not in batch.schema.names:
        return places
    given = batch.column(config.id_field)
    if not (pa.types.is_string(given.type) or pa.types.is_large_string(given.type) or pa.types.is_integer(given.type)):
        given = pa.array([None if value is None else str(value) for value in given.to_pylist()], ARROW_TYPE)
    return pc.coalesce(given.cast(ARROW_TYPE), places)


def _good_texts(texts: pa.Array) -> np.ndarray | None:
    """bool [rows]: which texts are there and are UTF-8 (readers of Parquet do not check); None when all are."""
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        return np.zeros(len(texts), bool)
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        values = texts.cast(pa.large_binary()).to_pylist()
        return np.array([value is not None and _is_utf8(value) for value in values], bool)
    return None if texts.null_count == 0 else texts.is_valid().to_numpy(zero_copy_only=False)


def _what_is_wrong(text: pa.Scalar) -> tuple[str, str]:
    """How to show a bad text, and why it is bad."""
    if not text.is_valid or not (pa.types.is_string(text.type) or pa.types.is_large_string(text.type)):
        return repr(text.as_py()), NO_TEXT
    return text.as_buffer().to_pybytes().decode(errors="backslashreplace"), NOT_UTF8


def _read_csv(piece: Piece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    delimiter = "\t" if data_suffix(piece.path) == ".tsv" else ","

    def refuse(row: csv.InvalidRow) -> str:
        builder.reject(f"{piece.id}:{row.number}", row.text or "", BAD_ROW)
        return "skip"

    with _open_arrow(piece.path) as file:
        reader = csv.open_csv(
            file,
            read_options=csv.ReadOptions(use_threads=False),  # else rows have no numbers
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=refuse),
            convert_options=csv.ConvertOptions(
                check_utf8=False, column_types={config.text_field: ARROW_TYPE, config.id_field: ARROW_TYPE}
            ),
        )
        columns = _columns(reader.schema, piece.path, config)
        yield from _read_columns((batch.select(columns) for batch in reader), piece, config, builder)


def _read_html(piece: Piece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    from megalite.data.html import decode, extract

    with _open(piece.path) as file:
        page = decode(file.read())
    try:
        builder.add(piece.id, extract(page).encode())
    except DataError as error:
        builder.reject(piece.id, page, f"no page: {error}")
    return iter(())


def _read_archive(piece: Piece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    from megalite.data.warc import read_archive

    skipped: Counter[str] = Counter()
    with local_copy(piece.path) if is_url(piece.path) else nullcontext(Path(piece.path)) as path:
        for number, page in enumerate(read_archive(path, skipped), start=1):
            fields = {"url": page.url, "date": page.date, "content_type": page.content_type}
            builder.add(f"{piece.id}:{number}", page.text.encode(errors="replace"), _kept_fields(fields, config))
            if builder.full():
                yield from builder.take()
    for reason, count in skipped.items():
        builder.reject(piece.id, f"{count} records", f"archive: {reason}")


def _read_dataset(piece: Piece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    batches = read_dataset(config, piece.start, piece.stop)
    chosen = (batch.select(_columns(batch.schema, config.root, config)) for batch in batches)
    yield from _read_columns(chosen, piece, config, builder)


READERS: dict[str, Reader] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".html": _read_html,
    ".htm": _read_html,
    ".warc": _read_archive,
    ".wet": _read_archive,
    ".arc": _read_archive,
}
"""By suffix; any other file is plain text, one document each."""
