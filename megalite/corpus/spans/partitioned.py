"""Rows sorted by partition, so that one task can fetch its part of every shard's.

    shard 0: NAME.rows   [rows of part 0 | part 1 | part 2 ]      NAME.borders.npy   where each part begins
    shard 1: NAME.rows   [rows of part 0 | part 1 | part 2 ]
                                         ^^^^^^^^ the task of part 1 reads these, from every shard

It is the shuffle between two phases of a station whose tasks share nothing but a disk. Equal keys fall into one
partition, so a task sees all rows that it must compare, and needs memory for its partition only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megalite.stations.tasks import replacing


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array under its name only when it is whole."""
    with replacing(path) as partial, open(partial, "wb") as file:
        np.save(file, array)


class Partitions:
    """Rows gathered in memory, each once, by partition.

    Args:
        dtype: of a row.
        num_partitions: how many.
    """

    def __init__(self, dtype: np.dtype, num_partitions: int):
        self._empty = np.empty(0, dtype)
        self._parts: list[list[np.ndarray]] = [[] for _ in range(num_partitions)]

    def add(self, rows: np.ndarray, keys: np.ndarray) -> None:
        """Append rows.

        Args:
            rows: [rows].
            keys: uint64 [rows]; the remainder by num_partitions is the partition.
        """
        num_partitions = len(self._parts)
        narrow = np.min_scalar_type(num_partitions - 1)  # up to 16 bits are sorted by radix
        partition = (keys % np.uint64(num_partitions)).astype(narrow)
        borders = np.cumsum(np.bincount(partition, minlength=num_partitions))
        rows = rows[np.argsort(partition, kind="stable")]
        for part, slice_of in zip(self._parts, np.split(rows, borders[:-1]), strict=True):
            part.append(slice_of)

    def rows(self, partition: int) -> np.ndarray:
        """All rows of one partition, in the order in which they came."""
        return np.concatenate([self._empty, *self._parts[partition]])

    def save(self, path: Path) -> None:
        """Write the rows to a file, for `read_partition`."""
        sizes = [sum(len(rows) for rows in part) for part in self._parts]
        save_array(_borders_path(path), np.cumsum([0, *sizes]))
        with replacing(path) as partial, open(partial, "wb") as file:
            for part in self._parts:
                for rows in part:
                    rows.tofile(file)


def read_partition(paths: Iterable[Path], dtype: np.dtype, partition: int) -> np.ndarray:
    """The rows of one partition out of several files, one file after the other."""
    found = [np.empty(0, dtype)]
    for path in paths:
        begin, end = np.load(_borders_path(path), mmap_mode="r")[partition : partition + 2].tolist()
        found.append(np.fromfile(path, dtype, count=end - begin, offset=begin * dtype.itemsize))
    return np.concatenate(found)


def _borders_path(path: Path) -> Path:
    return path.with_suffix(".borders.npy")
