"""Reading documents out of one file: JSON lines, Parquet, Arrow or plain text, each possibly compressed.

Every reader streams and never stops at a bad record: it yields it as `Rejected` with a reason, and goes on.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from megalite.data.documents import Document, Record, Rejected
from megalite.data.recipe import DocumentSource
from megalite.errors import DataError, did_you_mean

NOT_UTF8 = "not UTF-8"
NOT_JSON = "not a JSON object"
NO_TEXT = "no text field, or not a string"
LONE_SURROGATE = "half of a surrogate pair"
UNREADABLE_FILE = "unreadable file"

READ_ERRORS = (OSError, pa.ArrowException)

COLUMN_BATCH_ROWS = 256
"""Rows of a Parquet or Arrow file taken at once."""

Reader = Callable[[Path, str, str, DocumentSource], Iterator[Record]]


def read_file(path: Path, id: str, source: str, config: DocumentSource) -> Iterator[Record]:
    """Yield the records of one file.

    Args:
        path: the file.
        id: names the file in ids of documents.
        source: name of the source it belongs to.
        config: the source's settings.

    Raises:
        DataError: a table without the column that is to hold the text.
    """
    reader = READERS.get(data_suffix(path), _read_text)
    try:
        yield from reader(path, id, source, config)
    except READ_ERRORS as error:
        yield Rejected(id, source, str(error), UNREADABLE_FILE)


def data_suffix(path: Path) -> str:
    """The suffix that tells the format, `.gz` and `.zst` taken off."""
    inner = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
    return inner.suffix.lower()


def _open(path: Path) -> BinaryIO:
    """A file as a stream of bytes, uncompressed on the way.

    Arrow's readers refuse a stream that ends early; zstandard's own takes it for the end of the file.
    """
    return io.BufferedReader(pa.input_stream(str(path), compression="detect"))


def _read_text(path: Path, id: str, source: str, config: DocumentSource) -> Iterator[Record]:
    with _open(path) as file:
        content = file.read()
    yield _decode(content, id, source)


def _read_json_lines(path: Path, id: str, source: str, config: DocumentSource) -> Iterator[Record]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse_line(line, f"{id}:{number}", source, config)


def _parse_line(line: bytes, where: str, source: str, config: DocumentSource) -> Record:
    record = _decode(line, where, source)
    if isinstance(record, Rejected):
        return record
    try:
        fields = json.loads(record.text)
    except (ValueError, RecursionError):
        return Rejected(where, source, record.text, NOT_JSON)
    if not isinstance(fields, dict):
        return Rejected(where, source, record.text, NOT_JSON)
    text = fields.get(config.text_field)
    if not isinstance(text, str):
        return Rejected(where, source, record.text, NO_TEXT)
    try:
        text.encode()
    except UnicodeEncodeError:
        return Rejected(where, source, record.text, LONE_SURROGATE)
    given = fields.get(config.id_field)
    return Document(where if given is None else str(given), source, text)


def _decode(content: bytes, id: str, source: str) -> Record:
    try:
        return Document(id, source, content.decode())
    except UnicodeDecodeError:
        return Rejected(id, source, content.decode(errors="backslashreplace"), NOT_UTF8)


def _read_parquet(path: Path, id: str, source: str, config: DocumentSource) -> Iterator[Record]:
    with pq.ParquetFile(path) as file:
        columns = _columns(file.schema_arrow, path, config)
        batches = file.iter_batches(batch_size=COLUMN_BATCH_ROWS, columns=columns)
        yield from _read_tables(batches, id, source, config)


def _read_arrow(path: Path, id: str, source: str, config: DocumentSource) -> Iterator[Record]:
    with pa.memory_map(str(path)) as file:
        try:
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            file.seek(0)
            reader = batches = pa.ipc.open_stream(file)
        columns = _columns(reader.schema, path, config)
        yield from _read_tables((batch.select(columns) for batch in batches), id, source, config)


def _columns(schema: pa.Schema, path: Path, config: DocumentSource) -> list[str]:
    if config.text_field not in schema.names:
        hint = did_you_mean(config.text_field, schema.names)
        raise DataError(
            f"{path}: no column {config.text_field!r}{hint}; it has {', '.join(schema.names)}: set text_field"
        )
    return [name for name in dict.fromkeys([config.text_field, config.id_field]) if name in schema.names]


def _read_tables(batches: Iterator[pa.RecordBatch], id: str, source: str, config: DocumentSource) -> Iterator[Record]:
    row = 0
    for batch in batches:
        texts = batch.column(config.text_field).to_pylist()
        has_ids = config.id_field in batch.schema.names
        ids = batch.column(config.id_field).to_pylist() if has_ids else [None] * len(texts)
        for text, given in zip(texts, ids, strict=True):
            row += 1
            name = f"{id}:{row}" if given is None else str(given)
            if isinstance(text, str):
                yield Document(name, source, text)
            else:
                yield Rejected(name, source, repr(text), NO_TEXT)


READERS: dict[str, Reader] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""By suffix; any other file is plain text, one document each."""
