"""Reading documents out of a piece of one source: JSON lines, tables, web archives or text, each possibly compressed
and perhaps behind a URL (`remote.py`), or a shard of a Hugging Face data set (`hub.py`).

Every reader streams, and never stops at a bad record: it goes to the builder's rejects with a reason. A reader yields a
batch whenever one is full; what is left over stays in the builder for the next file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.parquet as pq

from megalite.corpus import exact_json
from megalite.corpus.conversations import MalformedRecordError
from megalite.corpus.documents import SCHEMA, BatchBuilder, DocumentBatch
from megalite.corpus.reading.brought import read_brought
from megalite.corpus.reading.columns import (
    NO_TEXT,
    NOT_UTF8,
    add_conversation,
    choose_columns,
    is_utf8,
    read_arrow,
    read_columns,
    read_parquet,
)
from megalite.corpus.reading.csv_tables import read_csv
from megalite.corpus.reading.decompression import EMPTY
from megalite.corpus.reading.docstrings import questions_in
from megalite.corpus.reading.files import (
    DAMAGED_FILE,
    READ_ERRORS,
    TOO_LARGE,
    UNREADABLE_FILE,
    FilePiece,
    data_suffix,
    is_compressed,
    is_machine_fault,
    open_content,
    reading_station_file,
    shown,
)
from megalite.corpus.reading.hub import read_dataset
from megalite.corpus.reading.kept_fields import id_of, kept_fields, spelt_out
from megalite.corpus.reading.remote import local_copy
from megalite.corpus.source import DocumentSource, file_name, is_url
from megalite.errors import DataError

NOT_JSON = "not a JSON object"
CHANGED = "one array of JSON, where there were lines when the file was cut: it has changed, run the station again"
LONE_SURROGATE = "half of a surrogate pair"
TAR = "a tar archive, which is not read: unpack it"
WAT = "the metadata of a web archive, which hold no text: take its WARC or WET file"
TAR_MARK = slice(257, 262)
"""Where the header of its first member names the format."""

Reader = Callable[[FilePiece, DocumentSource, BatchBuilder], Iterator[DocumentBatch]]


def read_piece(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """Read one piece into the builder; yield the batches that it fills.

    Raises:
        DataError: a table without the column that is to hold the text.
        UnavailableError: what is not on this machine cannot be reached.
        OSError: this machine cannot read.
    """
    builder.begin_file()
    reader = READERS.get(data_suffix(piece.path), _read_text)
    if config.conversations is not None:
        reader = _CONVERSATION_READERS.get(data_suffix(piece.path), _refuse_text)
        reader = _read_docstrings if config.kind == "python" else reader
    if config.kind == "datasets" or config.is_brought:
        reader = _read_dataset if config.kind == "datasets" else read_brought
    try:
        yield from reader(piece, config, builder)
    except READ_ERRORS as error:
        if is_machine_fault(error):
            raise
        builder.reject(piece.id, str(error), UNREADABLE_FILE)
        builder.lose(damaged_files=1)
    if builder.full():
        yield from builder.take()


def read_station_shard(path: Path) -> Iterator[DocumentBatch]:
    """The documents of one file that a station wrote, row group by row group.

    Raises:
        UserError: it is not what was written.
    """
    with reading_station_file(path), pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            for batch in file.read_row_group(group, columns=SCHEMA.names).cast(SCHEMA).to_batches():
                yield DocumentBatch(batch, [])


def _read_text(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    with open_content(piece, config, builder) as reading:
        content = reading.whole()
        if content is not None:
            _add_text(content, piece, builder)
        elif not reading.is_damaged:
            builder.reject(piece.id, f"more than {config.max_record_mb:g} MB", TOO_LARGE)
    return iter(())


def _refuse_metadata(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    builder.reject(piece.id, "", WAT)
    return iter(())


def _add_text(content: bytes, piece: FilePiece, builder: BatchBuilder) -> None:
    if content[TAR_MARK].startswith(b"ustar"):  # of texts, it is UTF-8 as well
        builder.reject(piece.id, "", TAR)
    elif is_utf8(content):
        builder.add(piece.id, content)
    else:
        builder.reject(piece.id, content.decode(errors="backslashreplace"), NOT_UTF8)


def _read_json_lines(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    with open_content(piece, config, builder) as reading:
        if piece.start:
            reading.file.seek(piece.start)
        left = float("inf") if piece.stop is None else piece.stop - piece.start
        for number, (line, num_bytes, is_whole) in enumerate(reading.lines(), start=piece.first):
            if not is_whole:
                return  # where the file is damaged; that is counted
            if num_bytes > reading.max_bytes:
                builder.reject(f"{piece.id}:{number}", f"{num_bytes} bytes: {shown(line)}", TOO_LARGE)
            elif not line.isspace():
                is_good = _add_line(line, f"{piece.id}:{number}", config, builder)
                if not is_good and reading.ends_at_bad_record(f"line {number}", builder):
                    return
                if builder.full():
                    yield from builder.take()
            left -= num_bytes
            if left <= 0:
                return


def _add_line(line: bytes, where: str, config: DocumentSource, builder: BatchBuilder) -> bool:
    """Add the document in a line, or put the line aside; whether it was one."""
    try:
        fields = exact_json.loads(line, (config.id_field, *config.keep_fields))
    except ValueError:  # orjson is strict and fast; Python's own reader says what is wrong, or forgives a NaN
        fields = _read_leniently(line, where, builder)
        if fields is None:
            return False
    if config.conversations is not None and isinstance(fields, dict):
        return add_conversation(fields, where, config, builder)
    text = fields.get(config.text_field) if isinstance(fields, dict) else None
    if not isinstance(text, str):
        why = NO_TEXT if isinstance(fields, dict) else NOT_JSON
        builder.reject(where, line.decode(errors="backslashreplace"), why)
        return False
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        builder.reject(where, line.decode(errors="backslashreplace"), LONE_SURROGATE)
        return False
    try:
        builder.add(id_of(fields, where, config), encoded, kept_fields(fields, config))
    except MalformedRecordError as error:
        builder.reject(where, line.decode(errors="backslashreplace"), str(error))
        return False
    return True


def _read_leniently(content: bytes, where: str, builder: BatchBuilder, told: str | None = None) -> Any:
    """JSON that orjson refuses, or None when it is rejected; `told` is shown in the place of what is long."""
    if is_utf8(content):
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            why = NOT_JSON
    else:
        why = NOT_UTF8
    builder.reject(where, content.decode(errors="backslashreplace") if told is None else told, why)
    return None


def _read_json(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """Conversations in one array of JSON, as sets of them are often handed on, or one a line."""
    with open_content(piece, config, builder) as reading:
        is_array = is_json_array(reading.file.peek(1024) if hasattr(reading.file, "peek") else b"")
        if is_array and piece.stop is not None:
            builder.reject(piece.id, "", CHANGED)
            return
        content = reading.whole() if is_array else b""
        if content is None and not reading.is_damaged:
            builder.reject(piece.id, f"more than {config.max_record_mb:g} MB", TOO_LARGE)
    if not is_array:
        yield from _read_json_lines(piece, config, builder)
        return
    try:
        records = exact_json.loads(content or b"[]", (config.id_field, *config.keep_fields))
    except ValueError as error:  # one record may hold a NaN or half of a surrogate pair, which is no fault of the rest
        records = _read_leniently(content or b"", piece.id, builder, told=str(error))
    for number, fields in enumerate(records or (), start=1):
        if isinstance(fields, dict):
            add_conversation(fields, f"{piece.id}:{number}", config, builder)
        else:
            builder.reject(f"{piece.id}:{number}", spelt_out(fields), NOT_JSON)
        if builder.full():
            yield from builder.take()


def is_json_array(beginning: bytes) -> bool:
    """Whether a file of JSON that begins so is one array."""
    return beginning.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _read_docstrings(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    with open_content(piece, config, builder) as reading:
        content = reading.whole()
    are_pairs = config.conversations == "docstring_pairs"
    for name, fields in questions_in(content or b"", piece.id, are_pairs=are_pairs):
        add_conversation(fields, f"{piece.id}:{name}", config, builder)
    return iter(())


def _refuse_text(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    builder.reject(piece.id, "", "conversation: a file of text, where lines of JSON or tables are read")
    return iter(())


def _read_html(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    from megalite.corpus.reading.html import decode, extract

    with open_content(piece, config, builder) as reading:
        content = reading.whole()
        if content is None:
            if not reading.is_damaged:
                builder.reject(piece.id, f"more than {config.max_record_mb:g} MB", TOO_LARGE)
            return iter(())
    page = decode(content)
    try:
        builder.add(piece.id, extract(page).encode())
    except DataError as error:
        builder.reject(piece.id, page, f"no page: {error}")
    return iter(())


def _read_archive(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    from megalite.corpus.reading.warc import Skipped, read_archive

    suffix = PurePosixPath(file_name(piece.path)).suffix.lower()
    if is_compressed(piece.path) and suffix != ".gz":
        builder.reject(piece.id, "", f"archive: packed as {suffix}, where only .gz is read: unpack it")
        return
    skipped = Skipped()
    with local_copy(piece.path) if is_url(piece.path) else nullcontext(Path(piece.path)) as path:
        max_bytes = int(config.max_record_mb * 1e6)
        if is_compressed(piece.path) and not path.stat().st_size:
            builder.reject(piece.id, EMPTY, DAMAGED_FILE)
            builder.lose(damaged_files=1)
        for number, page in enumerate(read_archive(path, skipped, max_bytes), start=1):
            fields = {"url": page.url, "date": page.date, "content_type": page.content_type}
            builder.add(f"{piece.id}:{number}", page.text.encode(errors="replace"), kept_fields(fields, config))
            if builder.full():
                yield from builder.take()
    for reason, count in skipped.items():
        builder.reject(piece.id, f"{count} records", f"archive: {reason}")
    builder.lose(archive_bytes=skipped.lost_bytes)


def _read_dataset(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    assert piece.stop is not None, "of how many shards it is one"
    batches = read_dataset(config, piece.start, piece.stop)
    chosen = (batch.select(choose_columns(batch.schema.names, config.root, config)) for batch in batches)
    yield from read_columns(chosen, piece, config, builder)


READERS: dict[str, Reader] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".html": _read_html,
    ".htm": _read_html,
    ".warc": _read_archive,
    ".wet": _read_archive,
    ".arc": _read_archive,
    ".wat": _refuse_metadata,
}
"""By suffix; any other file is plain text, one document each."""

_CONVERSATION_READERS: dict[str, Reader] = {
    **{suffix: READERS[suffix] for suffix in (".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv")},
    ".json": _read_json,
}
