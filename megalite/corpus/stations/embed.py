"""Station: an embedding of each document, by a model of one's own.

    tokens    a shard       texts -> ids, cut to max_tokens; names          .work/tokens/00000.*
    embed     a range       ids -> vectors of length 1                      .work/vectors/00000.npy
    join      once          -> embeddings.npy, documents.parquet

    embeddings.npy       [documents, hidden_size], fp32 or fp16, in the order of the corpus
    documents.parquet    the same order: id, source, text_bytes, tokens, truncated

Ranges are cut by tokens out of all documents, whatever the shards, and a batch lies within a range, so the vectors
depend on the documents and their order alone. A kill costs the range at hand. Memory: the model, a batch's hidden
states, and the ids of a range.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import ARROW_TYPE, ShardWriter
from megalite.corpus.near.index import RowsWriter, save_array
from megalite.corpus.semantic.settings import EmbedConfig
from megalite.corpus.shards import ShardReading, lost_counts, lost_in_words, refuse_unreadable
from megalite.errors import DataError
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.manifest import StationManifest, check_input, find_manifest
from megalite.stations.runners import InProcess
from megalite.stations.station import StationResult, run_station
from megalite.stations.tasks import WORK_FOLDER, Report, Runner, Task, add_counts, run_tasks

if TYPE_CHECKING:
    from megalite.checkpoint.hf.embed import TextEmbedder

STATION = "embed"

VECTORS_NAME, DOCUMENTS_NAME = "embeddings.npy", "documents.parquet"

DOCUMENTS_SCHEMA = pa.schema(
    [
        *((name, ARROW_TYPE) for name in ("id", "source")),
        *((name, pa.int64()) for name in ("text_bytes", "tokens")),
        ("truncated", pa.bool_()),
    ]
)
"""`tokens` are those that the model read."""

FEWEST_TOKENS, MOST_TOKENS = 1 << 16, 1 << 22
"""In one task: of a small corpus so few that all workers have some and a kill costs little, of a large one so many that
there are not millions of tasks."""

TASKS_OF_A_CORPUS = 4096
"""Between these sizes."""

TEXTS_AT_ONCE = 1 << 10
"""Encoded together."""

STORED = {"fp32": np.float32, "fp16": np.float16}


def embed(
    corpus: Corpus,
    out: Path,
    config: EmbedConfig,
    *,
    model: Path,
    runner: Runner | None = None,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: what to read.
        out: folder to make.
        config: how the model makes an embedding.
        model: folder in Hugging Face format.
        runner: where the tasks run; the result does not depend on it. None is this process.
        progress: told of two passes over the text.

    Raises:
        ConversionError: there is no model or tokenizer that can be trusted, or it has no such layer or positions.
        UnavailableError: there is no such device.
        DataError: a source cannot be read at all, or a document has no token, or no embedding.
    """
    progress, runner = progress or NoProgress(), runner or InProcess()
    settings = check_model(model, config, out)
    if not isinstance(runner, InProcess):
        _load_once.cache_clear()
    inputs = [*corpus.inputs, (model, settings["model"]["fingerprint"])]

    def build(folder: Path) -> dict[str, Any]:
        progress.start(STATION, 2 * corpus.text_mb, "MB")
        common: Task = {"model": str(model.absolute()), "config": config.model_dump_json()}
        common |= {"fingerprint": settings["model"]["fingerprint"]}
        shards = corpus.shards()
        tasks = [{**common, "shard": shard} for shard in shards]
        encoded = run_tasks(folder, "tokens", encode_shard, tasks, runner=runner, progress=progress)
        refuse_unreadable([(shard, report["reading"]) for shard, report in zip(shards, encoded, strict=True)])
        _refuse_empty(encoded)
        ranges = _ranges(folder, encoded)
        tasks = [{**common, **each} for each in ranges]
        run_tasks(folder, "embed", embed_range, tasks, runner=runner, progress=progress)
        _join(folder, len(shards), len(tasks), settings["model"]["hidden_size"], config)
        names = ("documents", "text_bytes", "tokens", "truncated", "unreadable")
        counts = {name: add_counts(encoded, name) for name in names} | lost_counts(encoded, corpus.passed_over)
        progress.finish(_in_words(counts) + lost_in_words(counts))
        return counts

    return run_station(STATION, out, inputs=inputs, settings=settings, build=build, resumable=True)


def check_model(model: Path, config: EmbedConfig, out: Path) -> dict[str, Any]:
    """What decides the embeddings, JSON-ready. Unless they are in `out` already, the model is loaded to learn whether
    it can be used, before there are a folder and workers.

    Raises:
        ConversionError: it cannot be trusted, or has no such layer, positions or pooling.
        UnavailableError: there is no such device.
    """
    from megalite.checkpoint.hf.encoder_files import read_encoder

    facts = read_encoder(model)
    chosen = {
        "layer": facts.choose_layer(config.layer),
        "max_tokens": facts.choose_max_tokens(config.max_tokens),
        "pooling": facts.choose_pooling(config.pooling),
    }
    about = {"kind": facts.kind, "hidden_size": facts.hidden_size, "num_layers": facts.num_layers}
    settings = {
        **config.model_dump(mode="json"),
        **chosen,
        "model": {"fingerprint": facts.fingerprint, **about},
        "tokenizer": {"fingerprint": facts.tokenizer_fingerprint},
    }
    made = find_manifest(out)
    if made is None or made.settings != settings:
        _load_once(model.absolute(), config, facts.fingerprint)
    return settings


def open_embeddings(folder: Path) -> StationManifest:
    """The manifest of a folder that this station has made, its files compared with it.

    Raises:
        DataError: it is none, or has changed.
    """
    return check_input(folder, STATION)


def encode_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: the ids of a shard's documents."""
    embedder = _embedder(task)
    reading = ShardReading(task["shard"])
    lengths, num_cut, num_bytes, empty = [np.zeros(0, np.int64)], 0, 0, []
    with (
        RowsWriter(_tokens_file(folder, number, "ids"), np.int32) as ids_file,
        ShardWriter(_names_file(folder, number), DOCUMENTS_SCHEMA) as names_file,
    ):
        for batch in reading:
            for begin in range(0, len(batch.texts), TEXTS_AT_ONCE):
                some = batch.documents.slice(begin, TEXTS_AT_ONCE)
                ids, cut = embedder.ids(some.column("text").to_pylist())
                sizes = np.array([len(each) for each in ids], np.int64)
                ids_file.write(np.fromiter(itertools.chain.from_iterable(ids), np.int32))
                text_bytes = batch.texts.lengths[begin : begin + len(some)]
                columns = [some.column("id"), some.column("source"), pa.array(text_bytes), pa.array(sizes)]
                names_file.write(pa.RecordBatch.from_arrays([*columns, pa.array(cut)], schema=DOCUMENTS_SCHEMA))
                empty += [columns[0][place].as_py() for place in np.flatnonzero((sizes == 0) | (text_bytes == 0))]
                lengths.append(sizes)
                num_cut += int(cut.sum())
            num_bytes += batch.texts.num_bytes
    of_all = np.concatenate(lengths)
    save_array(_tokens_file(folder, number, "lengths"), of_all)
    read = reading.report()
    counts = {"documents": of_all.size, "tokens": int(of_all.sum()), "truncated": num_cut, "text_bytes": num_bytes}
    lost = {"unreadable": read["unreadable"], "empty": empty[:1], "num_empty": len(empty)}
    return {**counts, **lost, "reading": read, "megabytes": num_bytes / 1e6}


def embed_range(task: Task, number: int, folder: Path) -> Report:
    """Task: the embeddings of a range of documents, which may begin in one shard and end in another."""
    from megalite.checkpoint.hf.embed import EmbeddingError, one_thread

    config, embedder = EmbedConfig.model_validate_json(task["config"]), _embedder(task)
    sequences: list[np.ndarray] = []
    places: list[tuple[int, int]] = []
    for shard, first, last in task["parts"]:
        ids = np.load(_tokens_file(folder, shard, "ids"), mmap_mode="r")
        ends = np.cumsum(np.load(_tokens_file(folder, shard, "lengths")))
        begins = np.concatenate([[0], ends])
        sequences += [ids[begins[row] : begins[row + 1]] for row in range(first, last)]
        places += [(shard, row) for row in range(first, last)]
    try:
        with one_thread():
            vectors = embedder.embed(sequences, config.batch_tokens)
    except EmbeddingError as error:
        shard, row = places[error.place]
        id = pq.read_table(_names_file(folder, shard), columns=["id"]).column(0)[row].as_py()
        raise DataError(f"{id}: {error}; leave the document out, or take another layer") from error
    save_array(_vectors_file(folder, number), vectors.astype(STORED[config.stored_dtype]))
    return {"megabytes": task["text_mb"]}


def _ranges(folder: Path, encoded: Sequence[Report]) -> list[Task]:
    """Runs of documents of about as many tokens: parts of shards as [shard, first, last]."""
    size = min(max(add_counts(encoded, "tokens") // TASKS_OF_A_CORPUS, FEWEST_TOKENS), MOST_TOKENS)
    tasks: list[Task] = []
    parts: list[list[int]] = []
    held, text_mb = 0, 0.0
    for shard, report in enumerate(encoded):
        ends = np.cumsum(np.load(_tokens_file(folder, shard, "lengths")))
        mb_per_token = report["megabytes"] / max(1, report["tokens"])
        first = done = 0
        while first < ends.size:
            last = min(int(np.searchsorted(ends, done + size - held)) + 1, ends.size)
            tokens = int(ends[last - 1]) - done
            parts.append([shard, first, last])
            held, text_mb = held + tokens, text_mb + mb_per_token * tokens
            first, done = last, int(ends[last - 1])
            if held >= size:
                tasks.append({"parts": parts, "text_mb": text_mb})
                parts, held, text_mb = [], 0, 0.0
    return [*tasks, {"parts": parts, "text_mb": text_mb}] if parts else tasks


def _join(folder: Path, num_shards: int, num_ranges: int, width: int, config: EmbedConfig) -> None:
    with RowsWriter(folder / VECTORS_NAME, STORED[config.stored_dtype], (width,)) as vectors:
        for number in range(num_ranges):
            vectors.write(np.load(_vectors_file(folder, number), mmap_mode="r"))
    with ShardWriter(folder / DOCUMENTS_NAME, DOCUMENTS_SCHEMA) as documents:
        for number in range(num_shards):
            if _names_file(folder, number).exists():  # a shard without documents has none
                for batch in pq.ParquetFile(_names_file(folder, number)).iter_batches():
                    documents.write(batch.cast(DOCUMENTS_SCHEMA))


def _refuse_empty(encoded: Sequence[Report]) -> None:
    count = add_counts(encoded, "num_empty")
    if count:
        first = next(report["empty"][0] for report in encoded if report["num_empty"])
        raise DataError(
            f"{first}: an empty document, which means nothing (there are {count:,} such): leave them out, or give "
            "what `megalite data clean` makes of the corpus, which puts them aside"
        )


def _in_words(counts: dict[str, Any]) -> str:
    cut = f", {counts['truncated']:,} of them cut" if counts["truncated"] else ""
    return f"{counts['documents']:,} documents{cut}, {counts['tokens']:,} tokens"


def _embedder(task: Task) -> TextEmbedder:
    return _load_once(Path(task["model"]), EmbedConfig.model_validate_json(task["config"]), task["fingerprint"])


@lru_cache(maxsize=1)
def _load_once(model: Path, config: EmbedConfig, _fingerprint: str) -> TextEmbedder:
    """A worker keeps its model from task to task, as long as it is the same one."""
    from megalite.checkpoint.hf.embed import TextEmbedder

    given = config.model_dump(include={"pooling", "layer", "max_tokens", "dtype", "device"})
    return TextEmbedder(model, **given)


def _tokens_file(folder: Path, number: int, name: str) -> Path:
    return folder / WORK_FOLDER / "tokens" / f"{number:05d}.{name}.npy"


def _names_file(folder: Path, number: int) -> Path:
    return folder / WORK_FOLDER / "tokens" / f"{number:05d}.parquet"


def _vectors_file(folder: Path, number: int) -> Path:
    return folder / WORK_FOLDER / "vectors" / f"{number:06d}.npy"
