"""Station 2: exact deduplication. Of documents with the same normalised text the first is kept.

    pass 1   text -> normalise -> xxh3_128, 16 bytes a document
    sort     equal hashes side by side; the first of each run stays
    pass 2   kept -> part-*.parquet; removed -> clusters.parquet with the id of the document it repeats

Memory is some 60 bytes a document, whatever their length. Two texts that differ collide with probability
n^2 / 2^129: about 1e-19 for ten billion documents.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from megalite.data.corpus import Corpus
from megalite.data.documents import Document, ShardWriter
from megalite.data.manifest import StationResult, run_station
from megalite.data.progress import Progress, Silent
from megalite.data.recipe import DedupConfig

CLUSTERS_FILE = "clusters.parquet"

CLUSTER_COLUMNS = ("removed_id", "removed_source", "kept_id", "kept_source")

EVERY_DOCUMENTS = 1000
"""Documents between two reports of progress."""


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
        progress.start("dedup", None, "k documents")
        first_of = first_occurrences(_hash_documents(corpus, config, progress))
        counts, removed_from = _write_kept(corpus, folder, first_of, progress)
        sizes = np.bincount(first_of) if first_of.size else np.zeros(0, np.int64)
        progress.finish(f"{counts['documents']:,} of {first_of.size:,} documents kept")
        return {
            **counts,
            "documents_in": int(first_of.size),
            "clusters": int((sizes > 1).sum()),
            "largest_cluster": int(sizes.max(initial=0)),
            "removed_by_source": dict(sorted(removed_from.items())),
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


def _hash_documents(corpus: Corpus, config: DedupConfig, progress: Progress) -> np.ndarray:
    """uint64 [documents, 2]"""
    digests = bytearray()
    for number, document in enumerate(corpus.documents(), start=1):
        digests += xxhash.xxh3_128_digest(normalise(document.text, config).encode())
        if number % EVERY_DOCUMENTS == 0:
            progress.advance(EVERY_DOCUMENTS / 1000)
    return np.frombuffer(bytes(digests), dtype=np.uint64).reshape(-1, 2)


def _write_kept(
    corpus: Corpus, folder: Path, first_of: np.ndarray, progress: Progress
) -> tuple[dict[str, int], Counter[str]]:
    """Second pass; returns counts of what is kept, and documents removed by source."""
    heads_with_copies = set(first_of[first_of != np.arange(first_of.size)].tolist())
    names: dict[int, tuple[str, str]] = {}
    clusters: list[tuple[str, str, str, str]] = []
    num_bytes = 0
    with ShardWriter(folder, Document) as kept:
        for number, (document, first) in enumerate(zip(corpus.documents(), first_of.tolist(), strict=True)):
            if number in heads_with_copies:
                names[number] = document.id, document.source
            if number == first:
                kept.write([document])
                num_bytes += len(document.text.encode())
            else:
                clusters.append((document.id, document.source, *names[first]))
            if number % EVERY_DOCUMENTS == 0:
                progress.advance(0)
    schema = pa.schema([(name, pa.large_string()) for name in CLUSTER_COLUMNS])
    rows = [dict(zip(CLUSTER_COLUMNS, cluster, strict=True)) for cluster in clusters]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / CLUSTERS_FILE, compression="zstd")
    counts = {"documents": int(first_of.size) - len(clusters), "text_bytes": num_bytes}
    return counts, Counter(source for _, source, _, _ in clusters)
