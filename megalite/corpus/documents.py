"""Documents on their way through the stations: batches in memory, and the Parquet shards they rest in between.

Documents travel as Arrow record batches, never one by one: a column of texts is two arrays (`texts.Texts`), which the
kernels take as they are. Only what cannot be read is a Python object each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from megalite.corpus.exact_json import with_field
from megalite.stations.tasks import replacing
from megalite.texts import Texts

BATCH_BYTES = 8_000_000
"""Text in one batch, and in one row group of a shard: what a worker holds in memory at once."""

ARROW_TYPE = pa.large_string()
"""Of a column of text: offsets of 64 bits."""

SCHEMA = pa.schema([("id", ARROW_TYPE), ("source", ARROW_TYPE), ("text", ARROW_TYPE), ("metadata", ARROW_TYPE)])
"""Columns of a document. `metadata` is a JSON object of the fields that a source was asked to keep, or empty."""

REJECTED_SCHEMA = pa.schema([("id", ARROW_TYPE), ("source", ARROW_TYPE), ("text", ARROW_TYPE), ("reason", ARROW_TYPE)])

REJECTED_FOLDER = "rejected"


class Document(NamedTuple):
    """A text, what it is called and where it came from."""

    id: str
    source: str
    text: str
    metadata: str = ""


class Rejected(NamedTuple):
    """A document that was put aside, and why. The text is as near to the original as Unicode allows."""

    id: str
    source: str
    text: str
    reason: str


class DocumentBatch(NamedTuple):
    """Some documents of one shard, and the records among them that could not be read."""

    documents: pa.RecordBatch
    """Columns of SCHEMA."""
    rejected: list[Rejected]
    lost: dict[str, int] = {}  # noqa: RUF012  (never changed)
    """What could not even be put aside: damaged files, rows in them, bytes of compressed ones."""

    @property
    def texts(self) -> Texts:
        """The texts of the documents, not copied."""
        return Texts.from_arrow(self.documents.column("text"))

    def records(self) -> Iterator[Document | Rejected]:
        """The documents, then what could not be read, as objects: for small work and for people."""
        yield from map(Document, *(column.to_pylist() for column in self.documents.columns))
        yield from self.rejected


class BatchBuilder:
    """Gathers records one by one into batches.

    Args:
        source: name of the source they come from.
    """

    def __init__(self, source: str):
        self.source = as_utf8(source)
        self._clear()

    def _clear(self) -> None:
        self._ids: list[str] = []
        self._texts: list[bytes] = []
        self._metadata: list[str] = []
        self._rejected: list[Rejected] = []
        self._lost: Counter[str] = Counter()
        self._num_bytes = 0
        self._num_before = 0

    def begin_file(self) -> None:
        """What comes from here on is of another file."""
        self._num_before = len(self._texts)

    def add(self, id: str, text: bytes, metadata: str = "") -> None:
        """Append a document, its text UTF-8."""
        self._ids.append(as_utf8(id))
        self._texts.append(text)
        self._metadata.append(metadata)
        self._num_bytes += len(text)

    def reject(self, id: str, text: str, reason: str) -> None:
        """Append a record that cannot be read."""
        self._rejected.append(Rejected(as_utf8(id), self.source, as_utf8(text), as_utf8(reason)))
        self._num_bytes += len(text)

    def lose(self, **counts: int) -> None:
        """Count what is lost of a file that is in the rejects."""
        self._lost.update(counts)

    def take_back(self, num_bytes: int) -> int:
        """Give up the last documents of this file that are still here, of about so many bytes; returns how many."""
        num_documents = 0
        while len(self._texts) > self._num_before and num_bytes > 0:
            num_bytes -= len(self._texts[-1])
            self._num_bytes -= len(self._texts[-1])
            for column in (self._ids, self._texts, self._metadata):
                column.pop()
            num_documents += 1
        return num_documents

    def full(self) -> bool:
        """Whether it is time to `take`."""
        return self._num_bytes >= BATCH_BYTES

    def take(self) -> Iterator[DocumentBatch]:
        """Yield what was gathered as a batch, if there is anything, and begin anew."""
        if self._ids or self._rejected or any(self._lost.values()):
            texts = Texts.of(self._texts).to_arrow()
            batch = make_documents(self._ids, self.source, texts, self._metadata)
            rejected, lost = self._rejected, dict(self._lost)
            self._clear()
            yield DocumentBatch(batch, rejected, lost)


def as_utf8(text: str) -> str:
    """The text, with what no file can have spelt out: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def make_documents(
    ids: Sequence[str] | pa.Array, source: str, texts: pa.Array, metadata: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Columns of SCHEMA from ids and texts of one source; no metadata means empty ones."""
    count = len(texts)
    columns = [
        ids if isinstance(ids, pa.Array) else pa.array(ids, ARROW_TYPE),
        pa.array([source], ARROW_TYPE).take(pa.array([0] * count, pa.int64())),
        texts,
        pa.array([""] * count if metadata is None else metadata, ARROW_TYPE),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def with_texts(documents: pa.RecordBatch, texts: Texts) -> pa.RecordBatch:
    """The documents with other texts."""
    return with_column(documents, "text", texts.to_arrow())


def with_column(documents: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    """The documents with other values in one column."""
    position = documents.schema.get_field_index(name)
    return documents.set_column(position, documents.schema.field(position), values)


class ShardWriter:
    """Writes one Parquet file, row group by row group; use as a context manager.

    Args:
        path: the file, which appears when the block ends well; with no rows written there is none.
        schema: its columns.
    """

    def __init__(self, path: Path, schema: pa.Schema = SCHEMA):
        self._replacing = replacing(path)
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._bytes_waiting = 0
        self._file: pq.ParquetWriter | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows."""
        if batch.num_rows:
            self._waiting.append(batch)
            self._bytes_waiting += batch.nbytes
            if self._bytes_waiting >= BATCH_BYTES:
                self._flush()

    def write_rejected(self, records: Iterable[Rejected]) -> None:
        """Append rejected records."""
        columns = zip(*records, strict=True)
        arrays = [pa.array(column, ARROW_TYPE) for column in columns]
        if arrays:
            self.write(pa.RecordBatch.from_arrays(arrays, schema=REJECTED_SCHEMA))

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if error_type is None:
            self._flush()
        if self._file is not None:
            self._file.close()
            self._replacing.__exit__(error_type, *error)

    def _flush(self) -> None:
        if not self._waiting:
            return
        if self._file is None:
            self._file = pq.ParquetWriter(
                self._replacing.__enter__(),
                self._schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=[name for name in self._schema.names if name.endswith("source")],
                write_statistics=False,
            )
        rows = pa.Table.from_batches(self._waiting, self._schema)
        self._file.write_table(rows, row_group_size=max(1, rows.num_rows))
        self._waiting, self._bytes_waiting = [], 0


class ShardOutput:
    """Where one task of a station puts its documents: kept ones and rejected ones, each in a shard, and their counts.

    Args:
        folder: the station's folder.
        number: of the task, and so of the shards.
    """

    def __init__(self, folder: Path, number: int):
        name = shard_name(number)
        self._kept = ShardWriter(folder / name)
        self._rejected = ShardWriter(folder / REJECTED_FOLDER / name, REJECTED_SCHEMA)
        self._reasons: Counter[str] = Counter()
        self._counts: Counter[str] = Counter(documents_in=0, documents=0, text_bytes=0)

    def __enter__(self) -> ShardOutput:
        return self

    def keep(self, documents: pa.RecordBatch) -> None:
        """Write documents that go on."""
        self._kept.write(documents)
        num_bytes = Texts.from_arrow(documents.column("text")).num_bytes
        self._counts.update(documents_in=len(documents), documents=len(documents), text_bytes=num_bytes)

    def reject(self, records: Sequence[Rejected]) -> None:
        """Write records that do not."""
        self._rejected.write_rejected(records)
        self._reasons.update(record.reason for record in records)
        self._counts.update(documents_in=len(records))

    def count_removed(self, num_documents: int) -> None:
        """Count documents that are neither kept nor rejected."""
        self._counts.update(documents_in=num_documents)

    def counts(self) -> dict:
        """JSON-ready: documents_in, documents, text_bytes, and the rejected by reason."""
        return {**self._counts, "rejected": dict(sorted(self._reasons.items()))}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.__exit__(kind, error, trace)
        self._rejected.__exit__(kind, error, trace)


def shard_name(number: int) -> str:
    """Name of the Parquet file that task `number` writes."""
    return f"part-{number:05d}.parquet"


def what_is_kept(counts: dict) -> str:
    """For people: how many documents and how much of the text a station has kept; it may drop some and cut others."""
    text, text_in = (f"{counts[name] / 1e6:,.1f}" for name in ("text_bytes", "text_bytes_in"))
    return f"{counts['documents']:,} of {counts['documents_in']:,} documents kept, {text} of {text_in} MB"


def read_numbers(metadata: pa.Array, field: str) -> np.ndarray:
    """A field of each document as float64 [documents]; NaN where it is missing or no number."""
    return np.array(
        [_number(orjson.loads(each).get(field)) if each else np.nan for each in metadata.to_pylist()], float
    )


def add_numbers(metadata: pa.Array, field: str, values: np.ndarray) -> pa.Array:
    """The metadata with one more field, or another value in it.

    Args:
        values: float [documents].
    """
    pairs = zip(metadata.to_pylist(), values.tolist(), strict=True)
    return pa.array([with_field(each, field, value) for each, value in pairs], ARROW_TYPE)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else np.nan
