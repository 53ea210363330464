"""The tasks of near-duplicate removal, four kinds in this order; `station.py` draws how they hang together.

Each is a function of its settings, its number and the station's folder, reads files and writes files. Settings that
`match`, `cluster` and `mask` have in common:

    {"config": {...},               of NearDedupConfig
     "index": ["old/index", ...],   index folders, the one of this station last
     "num_new_shards": 16,          shards of that one
     "num_partitions": 8}

`sign` is given its documents as a shard, which nothing but `read_texts` and `read_ids` looks into:

    {"path": "part-00000.parquet",            a Parquet file with a column `text` and, for reports, `id`
     "scores": "part-00000.scores.npy",       a number a document, with keep: best
     "sources": "part-00000.sources.npy"}     a code a document, an index into the names of the sources; optional
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from megalite.corpus.near.index import Index, RowsWriter, save_array, shard_file
from megalite.corpus.near.report import choose_examples, size_histogram
from megalite.corpus.near.settings import NearDedupConfig
from megalite.errors import DataError
from megalite.stations.tasks import WORK_FOLDER, Report, Task
from megalite.texts import Texts

if TYPE_CHECKING:
    from megalite.corpus.near.minhash import MinHasher


INDEX_FOLDER = "index"

MASKS_FOLDER = "masks"


def sign_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: texts of a shard to the files of the index."""
    from megalite.corpus.near.bands import band_entries, sort_entries
    from megalite.corpus.near.minhash import MinHasher

    config = NearDedupConfig(**task["config"])
    hasher = MinHasher(config.num_hashes, config.ngram, config.seed)
    lengths, all_keys, all_rows = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)], [np.zeros(0, np.uint32)]
    num_documents = 0
    with ExitStack() as stack:
        items = _ItemsWriter(stack, folder / INDEX_FOLDER, number, config)
        for texts in read_texts(task["shard"]):
            signatures = hasher.signatures(texts)
            items.write(texts, signatures, hasher)
            keys, rows = band_entries(signatures, config.banding, num_documents)
            all_keys.append(keys)
            all_rows.append(rows)
            lengths.append(texts.lengths)
            num_documents += len(texts)
    keys, rows = sort_entries(np.concatenate(all_keys), np.concatenate(all_rows))
    arrays = {"band_keys": keys, "band_rows": rows, "lengths": np.concatenate(lengths)}
    for name, array in arrays.items():
        save_array(shard_file(folder / INDEX_FOLDER, number, name), array)
    text_bytes = int(arrays["lengths"].sum())
    without_words = num_documents - keys.size // config.banding.bands
    return {
        "documents": num_documents,
        "text_bytes": text_bytes,
        "without_words": without_words,
        "megabytes": text_bytes / 1e6,
    }


def match_partition(task: Task, number: int, folder: Path) -> Report:
    """Task: the checked pairs of a range of band keys."""
    from megalite.corpus.near.edges import find_edges, pair_rule

    config, index = _open(task)
    partitions = task["num_partitions"]
    num_old = _first_new(task, index)
    edges = find_edges(index, task["partition"], partitions, rule=pair_rule(config), num_old=num_old)
    save_array(_edges_file(folder, partitions, number), edges.pairs)
    return {"edges": len(edges.pairs), "entries": edges.num_entries, "comparisons": edges.num_comparisons}


def cluster_documents(task: Task, number: int, folder: Path) -> Report:
    """Task: clusters of all documents that have an edge, and who stays of each."""
    from megalite.corpus.near.clusters import choose_winners, connect, documents_with_edges

    config, index = _open(task)
    partitions = task["num_partitions"]

    def edges() -> Iterator[np.ndarray]:
        """One file after the other: there may be more of them than a process may hold open."""
        for partition in range(partitions):
            yield np.load(_edges_file(folder, partitions, partition), mmap_mode="r")

    documents = documents_with_edges(edges())
    roots = connect(documents, edges())
    num_old = int(np.searchsorted(documents, _first_new(task, index)))
    winners = choose_winners(roots, _scores(documents, index, config, task), num_old)
    for name, array in {"documents": documents, "winners": documents[winners]}.items():
        save_array(_clusters_file(folder, name), array)
    has_new = np.bincount(roots[num_old:], minlength=documents.size) > 0
    sizes = np.where(has_new, np.bincount(roots, minlength=documents.size), 0)
    return {
        "clusters": int(has_new.sum()),
        "largest_cluster": int(sizes.max(initial=0)),
        "cluster_sizes": size_histogram(sizes[sizes > 0]),
        "examples": [documents[places].tolist() for places in choose_examples(roots, sizes, num_old)],
    }


def mask_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: the outcome for the documents of one shard."""
    _, index = _open(task)
    shard = index.num_shards - task["num_new_shards"] + number
    begin, end = index.starts[shard : shard + 2].tolist()
    documents, winners = (np.load(_clusters_file(folder, name), mmap_mode="r") for name in ("documents", "winners"))
    part = slice(*np.searchsorted(documents, [begin, end]).tolist())
    rows = documents[part] - begin
    cluster = np.full(end - begin, -1)
    cluster[rows] = winners[part]
    keep = np.ones(end - begin, np.bool_)
    keep[rows] = documents[part] == winners[part]
    for name, array in {"keep": keep, "cluster": cluster}.items():
        save_array(shard_file(folder / MASKS_FOLDER, number, name), array)
    removed_by_code: dict[str, int] = {}
    if task["sources"] is not None:
        codes = _one_a_document(task["sources"], end - begin, "source code")
        removed_by_code = {str(code): int(count) for code, count in enumerate(np.bincount(codes[~keep])) if count}
    kept_bytes = int(index.map(shard, "lengths")[keep].sum())
    return {"kept": int(keep.sum()), "kept_bytes": kept_bytes, "removed_by_code": removed_by_code}


class _ItemsWriter:
    """What later checks need of the documents of a shard, written as they come."""

    def __init__(self, stack: ExitStack, folder: Path, shard: int, config: NearDedupConfig):
        def open_rows(name: str, dtype: Any, row_shape: tuple[int, ...] = ()) -> RowsWriter:
            return stack.enter_context(RowsWriter(shard_file(folder, shard, name), dtype, row_shape))

        self._verify = config.verify
        self._num_values = 0
        if config.verify == "signature":
            self._signatures = open_rows("signatures", np.uint32, (config.num_hashes,))
        if config.verify == "jaccard":
            self._sets, self._borders = open_rows("sets", np.uint32), open_rows("set_borders", np.int64)
            self._borders.write(np.zeros(1, np.int64))

    def write(self, texts: Texts, signatures: np.ndarray, hasher: MinHasher) -> None:
        """Append some documents."""
        if self._verify == "signature":
            self._signatures.write(signatures)
        if self._verify == "jaccard":
            sets = hasher.shingle_sets(texts)
            self._sets.write(sets.values)
            self._borders.write(sets.borders[1:] + self._num_values)
            self._num_values += sets.values.size


def _open(task: Task) -> tuple[NearDedupConfig, Index]:
    config = NearDedupConfig(**task["config"])
    return config, Index([Path(path) for path in task["index"]], config)


def _first_new(task: Task, index: Index) -> int:
    """Number of the first document that is not of earlier data."""
    return int(index.starts[index.num_shards - task["num_new_shards"]])


def _scores(documents: np.ndarray, index: Index, config: NearDedupConfig, task: Task) -> np.ndarray:
    """What the choice of who stays goes by, float64; the higher the better. 0 for earlier data, which needs none."""
    scores = np.zeros(documents.size)
    if config.keep == "first":
        return scores
    first_shard = index.num_shards - task["num_new_shards"]
    for shard, part in index.split(documents):
        if shard < first_shard:
            continue
        begin, end = index.starts[shard : shard + 2].tolist()
        if config.keep == "longest":
            values = index.map(shard, "lengths")
        else:
            values = _one_a_document(task["scores"][shard - first_shard], end - begin, "score")
        scores[part] = values[documents[part] - begin]
    return scores


def _one_a_document(path: str, num_documents: int, what: str) -> np.ndarray:
    """An array of the caller's, mapped."""
    values = np.load(path, mmap_mode="r")
    if values.shape != (num_documents,):
        raise DataError(
            f"{path} has shape {values.shape}; one {what} for each of the {num_documents:,} documents is needed"
        )
    return values


def _edges_file(folder: Path, num_partitions: int, partition: int) -> Path:
    return folder / WORK_FOLDER / f"edges-{num_partitions}" / f"{partition:05d}.npy"


def _clusters_file(folder: Path, name: str) -> Path:
    return folder / WORK_FOLDER / "clusters" / f"{name}.npy"


Shard = dict[str, Any]

TEXT_COLUMN = "text"

ID_COLUMN = "id"


def read_texts(shard: Shard) -> Iterator[Texts]:
    """The texts of a shard in order, a row group at a time.

    Raises:
        DataError: there is no text column, or a text is null.
    """
    with pq.ParquetFile(shard["path"]) as file:
        if TEXT_COLUMN not in file.schema_arrow.names:
            raise DataError(
                f"{shard['path']}: no column {TEXT_COLUMN!r}, only {', '.join(file.schema_arrow.names)}; "
                "run the station that writes documents first"
            )
        for group in range(file.num_row_groups):
            column = file.read_row_group(group, columns=[TEXT_COLUMN], use_threads=False).column(0)
            if column.null_count:
                raise DataError(f"{shard['path']}: {column.null_count} texts are null; remove these rows first")
            if len(column):
                yield Texts.from_arrow(column)


def read_ids(shard: Shard, rows: Sequence[int]) -> list[str]:
    """Names of some documents; file and row where they have none."""
    with pq.ParquetFile(shard["path"]) as file:
        if ID_COLUMN not in file.schema_arrow.names:
            return [f"{shard['path']}:{row}" for row in rows]
        column = file.read(columns=[ID_COLUMN], use_threads=False).column(0)
    return [str(column[row].as_py()) for row in rows]
