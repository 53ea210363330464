"""Corpora for the span finders, and the slow plain ways to say what should be found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megalite.stations.runners import InProcess

ON_THE_SPOT = InProcess()


def write_shards(
    folder: Path, texts: Sequence[str], *, num_shards: int, rows: int = 3, urls: Sequence[str | None] | None = None
) -> list[str]:
    """Spread texts over Parquet files in their order, a few rows to a row group."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"text": pa.array(texts, pa.large_string())}
    if urls is not None:
        kept = [json.dumps({"url": url}) if url is not None else "" for url in urls]
        columns["metadata"] = pa.array(kept, pa.large_string())
    table = pa.table(columns)
    paths = []
    for number, part in enumerate(np.array_split(np.arange(len(texts)), num_shards)):
        paths.append(str(folder / f"part-{number:05d}.parquet"))
        first = part[0] if part.size else 0
        pq.write_table(table.slice(first, part.size), paths[-1], row_group_size=rows)
    return paths


def spans_of_cover(covers: Sequence[np.ndarray]) -> list[tuple[int, int, int]]:
    """The runs of true of a bool array a text, as spans."""
    spans = []
    for text, cover in enumerate(covers):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], cover, [False]]).astype(np.int8)))
        spans += [(text, int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return spans


def as_tuples(spans: np.ndarray) -> list[tuple[int, int, int]]:
    """Spans as plain numbers."""
    return [tuple(row) for row in spans.tolist()]


def remove_spans(texts: Sequence[str], spans: np.ndarray) -> list[bytes]:
    """The bytes of each text outside the spans."""
    left = []
    for number, text in enumerate(texts):
        keep = bytearray(text.encode())
        for _, start, end in reversed([span for span in as_tuples(spans) if span[0] == number]):
            del keep[start:end]
        left.append(bytes(keep))
    return left
