"""What manifests do not say: lengths of documents, and documents and bytes by source after each station.

A Parquet column of texts is bytes and offsets, so the lengths are differences of offsets: no text becomes a Python
string. Shards are read by threads, for decompression needs no interpreter; a thread holds one row group, about 8 MB of
text. Lengths of documents in tokens stand in the .idx file.

Lengths are counted in classes that double (0, 1, 2-3, 4-7, ...), so the memory does not grow with the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megalite.corpus.documents import REJECTED_FOLDER
from megalite.data.indexed import IndexedTokens
from megalite.data.sources import TOKENS_NAME
from megalite.errors import DataError
from megalite.stations.manifest import StationManifest
from megalite.stations.runners import default_workers
from megalite.texts import Texts

MOST_THREADS = 8

NUM_CLASSES = 64
"""Every length that fits in 63 bits has its class."""

IDX_DOCUMENTS = 1 << 20
"""Documents of an .idx file looked at in one go."""


@dataclass(frozen=True)
class Bin:
    """Lengths from `least` to `most`."""

    least: int
    most: int
    documents: int
    total: int
    """Sum of their lengths."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of documents, in bytes or tokens."""

    documents: int
    total: int
    shortest: int
    longest: int
    bins: tuple[Bin, ...]
    """Side by side, from the class of the shortest to that of the longest."""

    @property
    def mean(self) -> float:
        """Average length; 0 without documents."""
        return self.total / self.documents if self.documents else 0.0


class LengthTally:
    """A running count of lengths."""

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_CLASSES, np.int64)
        self._totals = np.zeros(NUM_CLASSES, np.int64)
        self._shortest = np.iinfo(np.int64).max
        self._longest = 0

    def add(self, lengths: np.ndarray) -> None:
        """Count some documents.

        Args:
            lengths: int64 [documents].
        """
        if lengths.size == 0:
            return
        classes = np.frexp(lengths.astype(np.float64))[1]  # n is below 2^class, and not below half of that
        self._counts += np.bincount(classes, minlength=NUM_CLASSES)
        np.add.at(self._totals, classes, lengths)
        self._shortest = min(self._shortest, int(lengths.min()))
        self._longest = max(self._longest, int(lengths.max()))

    def merge(self, other: LengthTally) -> None:
        """Count what another one counted."""
        self._counts += other._counts
        self._totals += other._totals
        self._shortest = min(self._shortest, other._shortest)
        self._longest = max(self._longest, other._longest)

    @property
    def documents(self) -> int:
        """How many were counted."""
        return int(self._counts.sum())

    @property
    def total(self) -> int:
        """Sum of their lengths."""
        return int(self._totals.sum())

    def lengths(self) -> Lengths:
        """The result."""
        found = np.flatnonzero(self._counts)
        classes = range(found[0], found[-1] + 1) if found.size else range(0)
        bins = tuple(Bin((1 << c) >> 1, (1 << c) - 1, int(self._counts[c]), int(self._totals[c])) for c in classes)
        return Lengths(self.documents, self.total, int(self._shortest) if found.size else 0, self._longest, bins)


BySource = dict[str, LengthTally]
"""Lengths in bytes of the documents of each source."""


def measure_kept(manifest: StationManifest) -> BySource:
    """Documents that a station left.

    Raises:
        DataError: they are not those that the manifest counted.
    """
    found = _measure(manifest, "part-")
    for name, count in (("documents", "documents"), ("text_bytes", "total")):
        measured = sum(getattr(tally, count) for tally in found.values())
        if measured != manifest.counts[name]:
            raise DataError(
                f"{manifest.folder}: {measured:,} {name} found, its manifest.json counts {manifest.counts[name]:,}; "
                "remove the folder and run `megalite data prepare RECIPE` again"
            )
    return found


def measure_rejected(manifest: StationManifest) -> BySource:
    """Documents that a station put aside with their texts, as they came."""
    return _measure(manifest, f"{REJECTED_FOLDER}/part-")


def measure_tokens(manifest: StationManifest) -> Lengths:
    """Lengths in tokens of the documents of a tokenized folder, end-of-text tokens included."""
    tokens = IndexedTokens(manifest.folder / TOKENS_NAME)
    tally = LengthTally()
    for first in range(0, tokens.num_documents, IDX_DOCUMENTS):
        stop = min(first + IDX_DOCUMENTS, tokens.num_documents)
        tally.add(np.diff(tokens.document_starts(first, stop + 1)))
    return tally.lengths()


def merge(parts: Iterator[BySource] | list[BySource]) -> BySource:
    """The sum of some counts, sources in the order of their names."""
    merged: BySource = {}
    for part in parts:
        for source, tally in part.items():
            merged.setdefault(source, LengthTally()).merge(tally)
    return dict(sorted(merged.items()))


def _measure(manifest: StationManifest, prefix: str) -> BySource:
    paths = [manifest.folder / output.path for output in manifest.outputs if output.path.startswith(prefix)]
    with ThreadPoolExecutor(min(MOST_THREADS, default_workers())) as threads:
        return merge(threads.map(_measure_shard, paths))


def _measure_shard(path: Path) -> BySource:
    found: BySource = {}
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group, columns=["source", "text"])
                lengths = Texts.from_arrow(rows.column("text")).lengths
                sources = rows.column("source").combine_chunks().dictionary_encode()
                codes = sources.indices.to_numpy()
                for code, source in enumerate(sources.dictionary.to_pylist()):
                    found.setdefault(source, LengthTally()).add(lengths[codes == code])
    except pa.ArrowMemoryError:  # nothing is wrong with the file
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}; remove its folder and run the recipe again") from error
    return found
