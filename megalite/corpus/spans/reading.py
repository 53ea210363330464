"""The texts of a shard, a row group at a time: the one place where these stations touch Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq

from megalite.corpus.reading.files import reading_station_file
from megalite.texts import Texts

Shard = str
"""JSON-ready: names what `read_texts` reads."""


def read_texts(shard: Shard) -> Iterator[Texts]:
    """The `text` column of one Parquet file, in order, one `Texts` a row group."""
    with reading_station_file(Path(shard)), pq.ParquetFile(shard) as file:
        for number in range(file.num_row_groups):
            yield Texts.from_arrow(file.read_row_group(number, columns=["text"])["text"])


def slices(texts: Texts, num_bytes: int) -> Iterator[tuple[int, Texts]]:
    """Cut texts into slices of about so many bytes that share their memory: number of the first text, and the slice.

    There is always one, which is empty when there are no texts."""
    begin = 0
    while True:
        end = int(np.searchsorted(texts.offsets, texts.offsets[begin] + num_bytes, side="right")) - 1
        end = min(max(end, begin + 1), len(texts))
        yield begin, Texts(texts.buffer, texts.offsets[begin : end + 1])
        if end == len(texts):
            return
        begin = end


def read_field(shard: Shard, name: str) -> Iterator[list[str | None]]:
    """A field that the source was asked to keep, in order, one list a row group; None where a document has none."""
    with reading_station_file(Path(shard)), pq.ParquetFile(shard) as file:
        for number in range(file.num_row_groups):
            kept = file.read_row_group(number, columns=["metadata"])["metadata"].to_pylist()
            yield [_field(fields, name) for fields in kept]


def _field(metadata: str, name: str) -> str | None:
    value = orjson.loads(metadata).get(name) if metadata else None
    return None if value is None else str(value)
