"""Station 2: exact deduplication. Of documents with the same normalised text the first is kept.

    pass 1   text -> normalise -> xxh3_128, 16 bytes a document
    sort     equal hashes side by side; the first of each run stays
    pass 2   kept -> part-*.parquet; removed -> clusters.parquet with the id of the document it repeats

Memory is some 60 bytes a document, whatever their length, and the names of the removed ones. Among n documents two that
differ get one hash with probability n^2 / 2^129: about 1e-19 for ten billion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from megalite.data.corpus import Corpus
from megalite.data.documents import Document, RejectedPile, ShardWriter
from megalite.data.manifest import StationResult, run_station
from megalite.data.progress import Progress, Silent
from megalite.data.recipe import DedupConfig

CLUSTERS_FILE = "clusters.parquet"

REPORT_CHARS = 10_000_000
"""Text between two reports of progress."""


class Removed(NamedTuple):
    """A document that was removed, and the one it repeats: a row of clusters.parquet."""

    removed_id: str
    removed_source: str
    kept_id: str
    kept_source: str


def dedup(corpus: Corpus, out: Path, config: DedupConfig, *, progress: Progress | None = None) -> StationResult:
    """Run the station.

    Args:
        corpus: what to read.
        out: folder to make.
        config: what counts as the same.
        progress: told of both passes.
    """
    progress = progress or Silent()

    def build(folder: Path) -> dict[str, Any]:
        progress.start("dedup", corpus.text_mb and 2 * corpus.text_mb, "MB")
        first_of = first_occurrences(_hash_documents(_counting(corpus.documents(), progress), config))
        with RejectedPile(folder) as rejected:
            documents = rejected.sift(corpus.read())
            num_bytes, removed = _write_kept(_counting(documents, progress), folder, first_of)
        _write_clusters(folder / CLUSTERS_FILE, removed)
        num_kept = int(first_of.size) - len(removed)
        sizes = np.bincount(first_of)
        progress.finish(f"{num_kept:,} of {first_of.size:,} documents kept")
        return {
            "documents_in": int(first_of.size),
            "documents": num_kept,
            "text_bytes": num_bytes,
            "clusters": int((sizes > 1).sum()),
            "largest_cluster": int(sizes.max(initial=0)),
            "rejected": rejected.counts,
            "removed_by_source": dict(sorted(Counter(row.removed_source for row in removed).items())),
        }

    return run_station("dedup", out, inputs=corpus.inputs, settings=config.model_dump(mode="json"), build=build)


def normalise(text: str, config: DedupConfig) -> str:
    """The form of a text that is compared."""
    if config.ignore_whitespace:
        text = " ".join(text.split())
    return text.casefold() if config.ignore_case else text


def first_occurrences(hashes: np.ndarray) -> np.ndarray:
    """For each document the index of the first one with its hash.

    Args:
        hashes: uint64 [documents, 2].
    """
    order = np.lexsort((hashes[:, 0], hashes[:, 1]))
    in_order = hashes[order]
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    heads = order[begins]
    first_of = np.empty(len(order), dtype=np.int64)
    first_of[order] = heads[np.cumsum(begins) - 1]
    return first_of


def _hash_documents(documents: Iterable[Document], config: DedupConfig) -> np.ndarray:
    """uint64 [documents, 2]"""
    digests = bytearray()
    for document in documents:
        digests += xxhash.xxh3_128_digest(normalise(document.text, config).encode())
    return np.frombuffer(bytes(digests), dtype=np.uint64).reshape(-1, 2)


def _write_kept(documents: Iterable[Document], folder: Path, first_of: np.ndarray) -> tuple[int, list[Removed]]:
    """Second pass: write what is kept; returns its bytes of text, and what is removed."""
    heads_with_copies = set(first_of[first_of != np.arange(first_of.size)].tolist())
    names: dict[int, tuple[str, str]] = {}
    removed: list[Removed] = []
    num_bytes = 0
    with ShardWriter(folder, Document) as kept:
        for number, (document, first) in enumerate(zip(documents, first_of.tolist(), strict=True)):
            if number in heads_with_copies:
                names[number] = document.id, document.source
            if number == first:
                kept.write([document])
                num_bytes += len(document.text.encode())
            else:
                removed.append(Removed(document.id, document.source, *names[first]))
    return num_bytes, removed


def _write_clusters(path: Path, removed: list[Removed]) -> None:
    schema = pa.schema([(name, pa.large_string()) for name in Removed._fields])
    rows = [row._asdict() for row in removed]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd")


def _counting(documents: Iterable[Document], progress: Progress) -> Iterator[Document]:
    """Pass documents on, telling of their text now and then."""
    num_chars = 0
    for document in documents:
        yield document
        num_chars += len(document.text)
        if num_chars >= REPORT_CHARS:
            progress.advance(num_chars / 1e6)
            num_chars = 0
    progress.advance(num_chars / 1e6)
