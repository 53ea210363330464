"""Samples of a source in the order of a score: a curriculum inside the source.

    a score for each document --write_ranks--> sample numbers, lowest score first, in a file
                                               --RankedOrder--> each epoch in that order, shuffled in stretches

The score of a sample is the mean over its tokens of their documents' scores. Scores rise through the epoch: give a
difficulty, to begin with easy text, or a quality, to end with the best. The order takes 8 bytes of disk for each
sample, mapped and shared by all ranks of a machine; a plain shuffle takes none. Its hash lies beside it, in
FILE.npy.json: a damaged order is a good one to look at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash
from pydantic import NonNegativeInt

from megalite.arrays import load_array
from megalite.data.layout import Layout, map_column
from megalite.data.order import KeyedPermutation
from megalite.errors import DataError
from megalite.records import NO_CHECKSUM, Record, is_sealed, parse_record, seal
from megalite.stations.tasks import replacing

SAMPLES_AT_ONCE = 1 << 16

MOST_COUNTED = 1 << 26
"""Samples of an order of which every rank sees to it that each is named once; a byte of memory each, for a moment."""


class RankedOrder:
    """An epoch in rising order of a score, shuffled within stretches: a bijection of [0, size).

    A curriculum reads easy text first and the best text last, but neighbours of equal score often come from one place,
    and a batch of them is a poor sample. So the ranking is cut into stretches of equal size, and each is shuffled.

    Args:
        ranks: int64 [size], mapped or in memory: the elements in their order.
        key: as for `order.KeyedPermutation`.
        num_stretches: 1 shuffles everything; as many as there are elements, nothing.
    """

    def __init__(self, ranks: np.ndarray, key: str, num_stretches: int):
        num_stretches = min(num_stretches, ranks.size)
        self._ranks = ranks
        self._starts = np.array([ranks.size * number // num_stretches for number in range(num_stretches)])
        self._sizes = np.diff(np.append(self._starts, ranks.size)).tolist()
        self._key = key

    def __call__(self, index: int) -> int:
        """Where `index` goes."""
        return int(self.many(np.array([index]))[0])

    def many(self, indices: np.ndarray) -> np.ndarray:
        """Where each of `indices`, int64 [n], goes."""
        stretches = np.searchsorted(self._starts, indices, side="right") - 1
        places = np.empty(indices.size, np.int64)
        for stretch in np.unique(stretches).tolist():
            own = stretches == stretch
            start = self._starts[stretch]
            shuffle = KeyedPermutation(self._sizes[stretch], f"{self._key}/stretch {stretch}")
            places[own] = start + shuffle.many(indices[own] - start)
        return self._ranks[places]


def load_scores(path: Path, num_documents: int) -> np.ndarray:
    """A .npy file of scores.

    Args:
        path: the file.
        num_documents: of the stream.

    Raises:
        DataError: it cannot be read, or does not hold a real number for each document.
    """
    scores = load_array(path, "write the scores with numpy.save")
    if scores.ndim != 1 or scores.dtype.kind not in "biuf" or scores.size != num_documents:
        raise DataError(
            f"{path}: found shape {scores.shape} of {scores.dtype}, expected {num_documents} real numbers: one for "
            "each document of the tokens, in their order"
        )
    return scores


def write_ranks(layout: Layout, document_scores: np.ndarray, out: Path) -> None:
    """Write the order of a source's samples to a .npy file.

    Args:
        layout: of the source.
        document_scores: a finite number for each document of the stream.
        out: the file.

    Raises:
        DataError: a score is not a finite number, a document has none, or the file cannot be written.
    """
    if not np.isfinite(document_scores).all():
        bad = int(np.flatnonzero(~np.isfinite(document_scores))[0])
        raise DataError(f"scores: document {bad} has {document_scores[bad]}; give every document a finite number")
    scores = np.empty(layout.num_samples, np.float64)
    for first in range(0, layout.num_samples, SAMPLES_AT_ONCE):
        stop = min(first + SAMPLES_AT_ONCE, layout.num_samples)
        cut = layout.stretch(first, stop)
        if cut.documents.max() >= document_scores.size:
            raise DataError(
                f"scores: {document_scores.size} found, but there is a document {cut.documents.max()}; give one for "
                "each document of the tokens, in their order"
            )
        weighted = np.add.reduceat(document_scores[cut.documents] * cut.lengths, cut.borders[:-1])
        scores[first:stop] = weighted / np.add.reduceat(cut.lengths, cut.borders[:-1])
    order = np.argsort(scores, kind="stable").astype(np.int64)
    record = {"checksum": NO_CHECKSUM, "samples": order.size, "xxh3": xxhash.xxh3_128_hexdigest(order.data)}
    try:
        with replacing(out, make_folder=False) as partial, open(partial, "wb") as file:
            np.save(file, order)
        with replacing(_record_path(out), make_folder=False) as partial:
            partial.write_text(seal(json.dumps(record)), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror or error}") from error


def open_ranks(files: Mapping[str, Path], num_samples: Mapping[str, int]) -> dict[int, np.ndarray]:
    """The orders that a mixture asks for, by number of the source, mapped.

    Args:
        files: of each source that has one, by its name.
        num_samples: of every source, in their order.

    Raises:
        DataError: a name is unknown, or a file is missing or made for other samples.
    """
    numbers = {name: number for number, name in enumerate(num_samples)}
    opened = {}
    for name, path in files.items():
        if name not in numbers:
            raise DataError(f"data.mix.ranks.{name}: no such source; there are {', '.join(numbers)}")
        again = "rank the source again as it is now packed"
        try:
            ranks = map_column(path, np.int64, again)
        except DataError as error:
            raise DataError(f"data.mix.ranks.{name}: {error}") from error
        size = num_samples[name]
        if ranks.size != size:
            raise DataError(
                f"data.mix.ranks.{name}: {path} holds {ranks.size} numbers, {size} expected: one for each sample; "
                f"{again}"
            )
        if problem := _damage(path, ranks, everything=ranks.size <= MOST_COUNTED):
            raise DataError(f"data.mix.ranks.{name}: {path} is damaged: {problem}; {again}")
        opened[numbers[name]] = ranks
    return opened


def damage_of_ranks(path: Path) -> str:
    """What is wrong with an order of samples; empty when nothing is."""
    again = "rank its source again"
    try:
        problem = _damage(path, map_column(path, np.int64, again), everything=True)
    except DataError as error:
        return str(error)
    return problem and f"{path}: damaged: {problem}; {again}"


def has_record(path: Path) -> bool:
    """Whether the hash of an order lies beside it; orders that were made before have none."""
    return _record_path(path).is_file()


class _RanksRecord(Record):
    """What is written down of an order."""

    checksum: str
    samples: NonNegativeInt
    xxh3: str


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _damage(path: Path, ranks: np.ndarray, *, everything: bool) -> str:
    """Whether an order is what was written, has each sample once, or at least no others."""
    if has_record(path):
        text = _record_path(path).read_text(encoding="utf-8", errors="replace")
        record = parse_record(text, _RanksRecord, _record_path(path), "rank its source again")
        if not is_sealed(text) or record.xxh3 != xxhash.xxh3_128_hexdigest(ranks.data):
            return f"its contents are not those that {_record_path(path).name} was written for"
    seen = np.zeros(ranks.size if everything else 0, bool)
    for first in range(0, ranks.size, SAMPLES_AT_ONCE):
        part = ranks[first : first + SAMPLES_AT_ONCE]
        if part.min() < 0 or part.max() >= ranks.size:
            return "it names a sample that is not there"
        if everything:
            seen[part] = True
    return "" if seen.all() else "it names a sample twice and another one not at all"
