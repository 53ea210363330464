"""What is kept of documents to find their near-duplicates later: a folder of plain arrays, some files a shard.

    index/index.json                settings, and how many documents each shard has
          00000.signatures.npy      uint32 [documents, num_hashes]      with verify: signature
          00000.sets.npy            uint32 [shingles]                   with verify: jaccard
          00000.set_borders.npy     int64  [documents + 1]              with verify: jaccard
          00000.band_keys.npy       uint64 [entries]                    sorted
          00000.band_rows.npy       uint32 [entries]                    the document of each key
          00000.lengths.npy         int64  [documents]                  bytes of text
          00000.names.arrow         id and source                       where the station wrote them

Documents of several folders are numbered through, folder by folder and shard by shard. The files are mapped into
memory a shard at a time, so reading some documents of a large index takes neither its memory nor its open files.
At the usual settings a document takes 1.4 kB: 1 kB for the signature, 12 bytes for each of 32 bands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from pydantic import NonNegativeInt

from megalite.arrays import load_array
from megalite.corpus.near.settings import NearDedupConfig
from megalite.errors import DataError
from megalite.records import OpenRecord, read_record
from megalite.stations.tasks import replacing

INDEX_FILE = "index.json"

FORMAT = 1
"""Version of the files and of the hash functions behind them."""


class Items(NamedTuple):
    """What is compared of some documents, end to end: signatures, or sorted sets of shingles."""

    values: np.ndarray
    """uint32 [values]"""
    borders: np.ndarray
    """int64 [documents + 1]"""


class RowsWriter:
    """Writes an array to a .npy file a few rows at a time; use as a context manager.

    The header has room for any number of rows, so it is written again at the end, when the number is known.

    Args:
        path: the file.
        dtype: of the values.
        row_shape: shape of one row; empty for plain numbers.
    """

    def __init__(self, path: Path, dtype: Any, row_shape: tuple[int, ...] = ()):
        self._path = path
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self._num_rows = 0

    def __enter__(self) -> RowsWriter:
        self._replacing = replacing(self._path)
        self._file = open(self._replacing.__enter__(), "wb")
        self._write_header()
        return self

    def write(self, rows: np.ndarray) -> None:
        """Append rows."""
        assert rows.shape[1:] == self._row_shape
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._num_rows += len(rows)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error_type is None:
                self._file.seek(0)
                self._write_header()
        self._replacing.__exit__(error_type, error, trace)

    def _write_header(self) -> None:
        shape = (self._num_rows, *self._row_shape)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)


def shard_file(folder: Path, shard: int, name: str) -> Path:
    """Path of one array of a shard."""
    return folder / f"{shard:05d}.{name}.npy"


def names_file(folder: Path, shard: int) -> Path:
    """Path of the names of a shard's documents."""
    return folder / f"{shard:05d}.names.arrow"


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array under a name of its own first, so that nobody sees half of it."""
    with replacing(path) as partial, open(partial, "wb") as file:
        np.save(file, array)


def index_settings(config: NearDedupConfig) -> dict[str, Any]:
    """The settings under which two documents can be compared."""
    return {
        "format": FORMAT,
        "ngram": config.ngram,
        "num_hashes": config.num_hashes,
        "bands": config.banding.bands,
        "rows": config.banding.rows,
        "seed": config.seed,
        "verify": config.verify,
    }


def write_index_file(folder: Path, config: NearDedupConfig, num_documents: Sequence[int]) -> None:
    """Complete an index, when all its shards are there.

    Args:
        folder: the index.
        config: under which settings it was made.
        num_documents: of each shard.
    """
    content = {"settings": index_settings(config), "documents": list(num_documents)}
    with replacing(folder / INDEX_FILE) as path:
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")


class Index:
    """The documents of some index folders, numbered through.

    Args:
        folders: the folders, earlier data first.
        config: the settings that they must have been made with.

    Raises:
        DataError: a folder is no index, or was made with other settings.
    """

    def __init__(self, folders: Sequence[Path], config: NearDedupConfig):
        self._config = config
        self._shards: list[tuple[Path, int]] = []
        counts: list[int] = []
        for folder in folders:
            documents = _read_index_file(folder, config)
            self._shards += [(folder, shard) for shard in range(len(documents))]
            counts += documents
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        """int64 [shards + 1]: number of the first document of each shard."""

    @property
    def num_documents(self) -> int:
        """Documents of all shards."""
        return int(self.starts[-1])

    @property
    def num_shards(self) -> int:
        """Shards of all folders."""
        return len(self._shards)

    def map(self, shard: int, name: str) -> np.ndarray:
        """One array of a shard, mapped."""
        folder, number = self._shards[shard]
        path = shard_file(folder, number, name)
        return load_array(path, "the index beside it names it: make the index anew", mapped=True)

    def names_file(self, shard: int) -> Path:
        """Path of the names of a shard's documents, which older indexes have not."""
        return names_file(*self._shards[shard])

    def split(self, documents: np.ndarray) -> Iterator[tuple[int, slice]]:
        """Sorted numbers of documents, shard by shard.

        Yields:
            The shard, and which of the documents are in it.
        """
        borders = np.searchsorted(documents, self.starts)
        for shard in np.flatnonzero(np.diff(borders)).tolist():
            yield shard, slice(int(borders[shard]), int(borders[shard + 1]))

    def item_sizes(self, documents: np.ndarray) -> np.ndarray:
        """How many values are compared of each document, int64; the documents sorted."""
        if self._config.verify != "jaccard":
            return np.full(documents.size, self._config.num_hashes if self._config.verify == "signature" else 0)
        sizes = np.empty(documents.size, np.int64)
        for shard, part in self.split(documents):
            rows = documents[part] - self.starts[shard]
            borders = self.map(shard, "set_borders")
            sizes[part] = borders[rows + 1] - borders[rows]
        return sizes

    def gather(self, documents: np.ndarray) -> Items:
        """What is compared of some documents, copied into memory; the documents sorted."""
        borders = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.item_sizes(documents))])
        values = np.empty(borders[-1], np.uint32)
        for shard, part in self.split(documents) if self._config.verify != "none" else ():
            rows = documents[part] - self.starts[shard]
            there = values[borders[part.start] : borders[part.stop]]
            if self._config.verify == "signature":
                there = there.reshape(rows.size, -1)
                self.map(shard, "signatures").take(rows, axis=0, out=there, mode="clip")  # the default mode copies
            else:
                sets, ends = self.map(shard, "sets"), self.map(shard, "set_borders")
                there[:] = np.concatenate([sets[ends[row] : ends[row + 1]] for row in rows.tolist()])
        return Items(values, borders)


def _read_index_file(folder: Path, config: NearDedupConfig) -> list[int]:
    """Documents of each shard."""
    path = folder / INDEX_FILE
    if not path.is_file():
        raise DataError(f"{path} is missing; name the index folder that an earlier near-dedup has left")
    content = read_record(path, _IndexRecord, "make the index anew")
    wanted = index_settings(config)
    if config.verify == "none":  # then nothing but the bands is looked at
        del wanted["verify"]
    for name, value in wanted.items():
        if (found := content.settings.get(name)) != value:
            raise DataError(
                f"{folder} was made with {name}={found}, and {name}={value} is wanted; "
                "use the settings it was made with, or make it anew"
            )
    return content.documents


class _IndexRecord(OpenRecord):
    """index.json."""

    settings: dict[str, int | float | str | None]
    documents: list[NonNegativeInt]
