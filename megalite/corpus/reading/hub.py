"""Any data set that Hugging Face `datasets` can load, from the hub or from files. The one file that imports it.

    planning   load_dataset -> how many shards there are -> one task for each
    a task     load_dataset -> .shard(num_shards, index) -> Arrow tables, column-wise where the format allows it

Streaming reads the files as they come and stores nothing; its shards are those of the data set, most often its files.
Without streaming the library first downloads everything and turns it into Arrow files in its cache, which takes the
space once more but makes shards of any size, slices (`train[:10%]`), and a second run without the network.

What a data set holds is known to us only by its name. Its fingerprint is over the settings, and over sizes and times of
change where the files are local: pin `revision` for one of the hub, or a newer version of it goes unnoticed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from megalite.corpus.reading.remote import FoundFile, spelt_out
from megalite.corpus.source import DocumentSource
from megalite.errors import DataError, UnavailableError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

BATCH_ROWS = 1024
"""Rows taken at once."""


FORMATS = ("json", "parquet", "csv", "text", "arrow", "xml", "webdataset", "pandas")
"""What `datasets` reads by the name of a format, where it does not say itself."""


@dataclass(frozen=True)
class DatasetPlan:
    """What is known of a data set before its documents are read."""

    num_bytes: int
    """Of its columns; 0 where the data set does not say."""
    num_shards: int | None
    """Its own shards when it is streamed; None when it can be cut between any two rows."""
    num_rows: int = 0
    """Where it can."""


def plan_dataset(config: DocumentSource) -> DatasetPlan:
    """Look up how large a data set is, and in how many parts it comes.

    Raises:
        DataError: there is no such data set, subset, split or revision, or it cannot be reached.
        UnavailableError: the library is not installed.
    """
    _load_once.cache_clear()
    dataset = _load(config)
    if not config.streaming:
        if not dataset.num_rows:
            raise DataError(f"{config.root}: the split {config.split!r} has no rows; choose another one")
        return DatasetPlan(dataset.data.nbytes, None, dataset.num_rows)
    if not dataset.num_shards:
        raise DataError(f"{config.root}: there is nothing to read; set data_files, or choose another subset or split")
    split = (dataset.info.splits or {}).get(config.split)
    return DatasetPlan(split.num_bytes or 0 if split else 0, dataset.num_shards)


def read_dataset(config: DocumentSource, index: int, num_shards: int) -> Iterator[pa.RecordBatch]:
    """The rows of one shard, in batches with all columns.

    Args:
        config: the source.
        index: which shard.
        num_shards: how many there were when the work was planned.

    Raises:
        DataError: the data set has other shards by now.
        UnavailableError: it can no longer be reached, or the library cannot read on.
    """
    dataset = _load_once(config)
    if config.streaming and dataset.num_shards != num_shards:
        raise DataError(
            f"{config.root}: it had {num_shards} shards when this station began and has {dataset.num_shards} now; "
            "pin a revision and run the station again"
        )
    try:
        shard = dataset.shard(num_shards=num_shards, index=index, contiguous=True).with_format("arrow")
        for table in shard.iter(batch_size=BATCH_ROWS):
            yield from table.combine_chunks().to_batches()
    except Exception as error:  # of the library and of everything below it: HTTP, decompression, casts
        raise UnavailableError(
            f"{config.root}: reading shard {index} of {num_shards} broke off ({type(error).__name__}: {error}); run "
            "the same command again, what is done is kept. If it always breaks here, a file is damaged: download the "
            "files and read them with kind: files, which puts aside what it cannot read"
        ) from error


def located(config: DocumentSource) -> DocumentSource:
    """The source with absolute paths where its files are local: tasks may run in another folder."""
    assert config.dataset is not None, config.kind
    if not _is_format(config.dataset) and Path(config.dataset).exists():
        return config.model_copy(update={"dataset": os.path.abspath(config.dataset)})
    names = (name if not glob(name, recursive=True) else os.path.abspath(name) for name in config.data_files)
    return config.model_copy(update={"data_files": tuple(names)})


def _is_format(dataset: str) -> bool:
    """Whether `datasets` takes a name for that of a format, whatever folder of this name there is."""
    try:
        from datasets import packaged_modules
    except ImportError:
        return dataset in FORMATS
    return dataset in getattr(packaged_modules, "_PACKAGED_DATASETS_MODULES", FORMATS)


def local_files(config: DocumentSource) -> list[FoundFile]:
    """The files of a `located` data set that lie on this machine; none when it comes from the hub."""
    assert config.dataset is not None, config.kind
    root = config.dataset if not _is_format(config.dataset) and os.path.isdir(config.dataset) else ""
    patterns = config.data_files or ("**",) * bool(root)
    names = sorted({name for pattern in patterns for name in glob(os.path.join(root, pattern), recursive=True)})
    return [_local_file(name, root) for name in names if os.path.isfile(name)]


def _local_file(name: str, root: str) -> FoundFile:
    stat = os.stat(name)
    id = os.path.relpath(name, root) if root else os.path.basename(name)
    return FoundFile(name, spelt_out(id), stat.st_size, str(stat.st_mtime_ns))


def num_parts(plan: DatasetPlan, size: int) -> int:
    """How many tasks read it: its own shards, or parts of about `size` bytes."""
    return plan.num_shards or min(plan.num_rows, max(1, math.ceil(plan.num_bytes / size)))


@lru_cache(maxsize=1)
def _load_once(config: DocumentSource) -> Dataset | IterableDataset:
    """The data set for all tasks that one worker does. What could be loaded for the plan is there, if not just now."""
    try:
        return _load(config)
    except DataError as error:
        raise UnavailableError(f"{error}; then run the same command again, what is done is kept") from error


def _load(config: DocumentSource) -> Dataset | IterableDataset:
    try:
        import datasets
    except ImportError as error:
        raise UnavailableError(f"{config.root}: kind: datasets needs its library: pip install datasets") from error
    try:
        return datasets.load_dataset(
            config.dataset,
            name=config.subset,
            data_files=list(config.data_files) or None,
            split=config.split,
            revision=config.revision,
            streaming=config.streaming,
        )
    except Exception as error:  # everything that it raises is about what the user asked for, or about the network
        raise DataError(f"{config.root}: {type(error).__name__}: {error}; {_advice(error)}") from error


def _advice(error: Exception) -> str:
    """What to do about an error of the library."""
    if isinstance(error, ConnectionError):
        return "the hub cannot be reached: check the network, or download the data set and give its folder as `dataset`"
    if isinstance(error, FileNotFoundError):
        return "check dataset, data_files and revision; a private data set needs `hf auth login`"
    if isinstance(error, ValueError):
        return "check subset, split and data_files (slices of a split need streaming: false)"
    return "check the settings of this source and the network"
