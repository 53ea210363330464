"""Documents on their way through the stations: the record, and the Parquet shards they rest in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

SHARD_CHARS = 256_000_000
"""Text in one Parquet file."""

ROW_GROUP_CHARS = 8_000_000
"""Text in one row group: what a reader holds in memory at once."""

BATCH_CHARS = 2_000_000
"""Text handed to a worker at once."""


class Document(NamedTuple):
    """A text, what it is called and where it came from."""

    id: str
    source: str
    text: str


class Rejected(NamedTuple):
    """A document that was put aside, and why. The text is as near to the original as Unicode allows."""

    id: str
    source: str
    text: str
    reason: str


Record = Document | Rejected
"""What reading yields: most files have a few records that are broken."""

RecordType = TypeVar("RecordType", bound=Record)


def batched(records: Iterable[RecordType]) -> Iterator[list[RecordType]]:
    """Group records into lists of about BATCH_CHARS of text, in order."""
    batch: list[RecordType] = []
    num_chars = 0
    for record in records:
        batch.append(record)
        num_chars += len(record.text)
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


class ShardWriter:
    """Writes records of one type as part-00000.parquet, part-00001.parquet, ... ; use as a context manager.

    Args:
        folder: made when the first record comes; no record, no file.
        record_type: Document or Rejected; its fields are the columns, all text.
    """

    def __init__(self, folder: Path, record_type: type[Document] | type[Rejected]):
        self._folder = folder
        self._schema = pa.schema([(name, pa.large_string()) for name in record_type._fields])
        self._rows: list[Record] = []
        self._chars_waiting = 0
        self._chars_in_shard = 0
        self._num_shards = 0
        self._file: pq.ParquetWriter | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def write(self, records: Iterable[Record]) -> None:
        """Append records."""
        for record in records:
            self._rows.append(record)
            self._chars_waiting += len(record.text)
            if self._chars_waiting >= ROW_GROUP_CHARS:
                self._flush()

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self._flush()
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"part-{self._num_shards:05d}.parquet"
            self._file = pq.ParquetWriter(path, self._schema, compression="zstd")
            self._num_shards += 1
        columns = [pa.array(column, pa.large_string()) for column in zip(*self._rows, strict=True)]
        self._file.write_table(pa.Table.from_arrays(columns, schema=self._schema), row_group_size=len(self._rows))
        self._chars_in_shard += self._chars_waiting
        self._rows, self._chars_waiting = [], 0
        if self._chars_in_shard >= SHARD_CHARS:
            self._file.close()
            self._file, self._chars_in_shard = None, 0


class RejectedPile:
    """Where a station puts documents that it cannot use: `rejected/` in its folder; use as a context manager.

    Args:
        folder: the station's folder.
    """

    def __init__(self, folder: Path):
        self._writer = ShardWriter(folder / "rejected", Rejected)
        self._reasons: Counter[str] = Counter()

    def __enter__(self) -> RejectedPile:
        return self

    def sift(self, records: Iterable[Record]) -> Iterator[Document]:
        """Pass the documents on, and put the rejected ones on the pile."""
        for record in records:
            if isinstance(record, Document):
                yield record
            else:
                self._writer.write([record])
                self._reasons[record.reason] += 1

    @property
    def counts(self) -> dict[str, int]:
        """Documents put aside, by reason."""
        return dict(sorted(self._reasons.items()))

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(*error)
