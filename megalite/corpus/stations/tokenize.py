"""Station: documents to a Megatron-compatible pair of token files, one end-of-text token behind each document.

    encode   a shard   texts -> .work/tokens/00000.bin, the length of each document, and its name and metadata if asked
    join               the shards' tokens one behind the other: tokens.bin, tokens.idx (and documents.parquet)

With `chat` conversations become what its template makes of them, and tokens.weights says how much each token weighs as
a label; plain documents among them are learnt whole. With `fim` some documents are taken apart to be filled in.

The shards are joined in their order, so the bytes are the same for any number of workers.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import (
    ARROW_TYPE,
    REJECTED_FOLDER,
    REJECTED_SCHEMA,
    DocumentBatch,
    Rejected,
    ShardWriter,
    read_numbers,
    shard_name,
)
from megalite.corpus.shards import ShardReading, lost_counts, lost_in_words, refuse_unreadable
from megalite.corpus.split import ALL, CorpusSplit
from megalite.corpus.stations.forms import PLAIN, Forms, make_encoder
from megalite.data.indexed import IndexedWriter
from megalite.data.sources import TOKENS_NAME, WEIGHTS_FILE
from megalite.errors import DataError
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.runners import InProcess
from megalite.stations.station import StationResult, run_station
from megalite.stations.tasks import WORK_FOLDER, Report, Runner, Task, add_counts, replacing, run_tasks
from megalite.tokenizer.tokenizer import Tokenizer, fingerprint_files, token_dtype

DESCRIPTIONS_NAME = "documents.parquet"

DESCRIPTION_SCHEMA = pa.schema([(name, ARROW_TYPE) for name in ("id", "source", "metadata")])


def tokenize(
    corpus: Corpus,
    tokenizer_folder: Path,
    out: Path,
    *,
    split: CorpusSplit = ALL,
    describe: bool = False,
    forms: Forms = PLAIN,
    runner: Runner | None = None,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: what to read.
        tokenizer_folder: a tokenizer's folder.
        out: folder to make.
        split: the side of the hold-out that is wanted.
        describe: also write documents.parquet: id, source and metadata of each document, in the order of the index.
        forms: of documents that are more than their text and its end.
        runner: where the tasks run; the result does not depend on it. None is this process.
        progress: told of every shard.

    Raises:
        DataError: the tokenizer cannot be loaded or does not fit, a source cannot be read at all, or all is empty.
    """
    progress, runner = progress or NoProgress(), runner or InProcess()
    tokenizer = _load_once(tokenizer_folder.absolute(), fingerprint_files(tokenizer_folder))
    inputs = [*corpus.inputs, (tokenizer_folder, tokenizer.fingerprint)]
    settings = _settings(tokenizer, len(inputs) - 1, split, describe=describe) | forms.settings(tokenizer_folder)
    forms.check(tokenizer, describe=describe)
    shards = corpus.shards()
    common: Task = {"tokenizer": str(tokenizer_folder.absolute()), "fingerprint": tokenizer.fingerprint}
    common |= {"split": split.settings(), "describe": describe, "forms": forms.task()}

    def build(folder: Path) -> dict[str, Any]:
        title = "tokenize" if split.part == "all" else f"tokenize {split.part}"
        progress.start(title, split.share_of(corpus.text_mb), "MB")
        tasks = [{**common, "shard": shard} for shard in shards]
        reports = run_tasks(folder, "encode", encode_shard, tasks, runner=runner, progress=progress)
        refuse_unreadable([(shard, report["reading"]) for shard, report in zip(shards, reports, strict=True)])
        if split.part == "all" and not add_counts(reports, "text_bytes"):
            raise DataError("there is no document with text to encode; name files with text")
        writer = _join_tokens(folder, len(shards), token_dtype(tokenizer.vocab_size), weighted=forms.chat is not None)
        if describe:
            _join_descriptions(folder, len(shards))
        counts = {
            "documents": writer.num_documents,
            "tokens": writer.num_tokens,
            "text_bytes": add_counts(reports, "text_bytes"),
            "rejected": add_counts(reports, "rejected"),
            **{name: add_counts(reports, name) for name in reports[0].get("formed", ())},
            **(lost_counts(reports, corpus.passed_over) | _unknown_counts(reports)),
        }
        _refuse_mixed(counts, describe=describe)
        forms.refuse_without_effect(counts, split.part)
        progress.finish(in_words(counts) + forms.in_words(counts) + lost_in_words(counts))
        return counts

    return run_station("tokenize", out, inputs=inputs, settings=settings, build=build, resumable=True)


def _refuse_mixed(counts: dict[str, Any], *, describe: bool) -> None:
    """Pairs of answers are documents two by two, and all of a folder or none.

    Raises:
        DataError: others are among them, or each document is to be described.
    """
    pairs, others = counts.get("pairs", 0), counts["documents"] - 2 * counts.get("pairs", 0)
    if pairs and others:
        raise DataError(
            f"found {pairs:,} pairs of answers among {others:,} other documents; pairs are learnt by a loss of their "
            "own (train.preference), so prepare them apart"
        )
    if pairs and describe:
        raise DataError("found pairs of answers, which are two documents each and have one description; leave it out")


def in_words(counts: dict[str, Any]) -> str:
    """How much came of it, for people."""
    said = f"{counts['tokens']:,} tokens in {counts['documents']:,} documents"
    if unknown := counts.get("unknown_tokens"):
        share = 100 * unknown / counts["tokens"]
        said += f"; {unknown:,} of them ({share:.2g} %) unknown: text that the vocabulary lacks, and that is lost"
    return said


def _unknown_counts(reports: Sequence[Report]) -> dict[str, int]:
    """For the counts: tokens that stand for text the vocabulary lacks; nothing where there are none."""
    found = sum(report.get("unknown_tokens", 0) for report in reports)
    return {"unknown_tokens": found} if found else {}


def _settings(tokenizer: Tokenizer, tokenizer_input: int, split: CorpusSplit, *, describe: bool) -> dict[str, Any]:
    """What decides the tokens of plain texts."""
    settings = {
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "tokenizer_input": tokenizer_input,
        "eos_id": tokenizer.eos_id,
        "split": split.settings(),
    }
    return {**settings, "describe": True} if describe else settings


def encode_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: encode the wanted documents of a shard."""
    tokenizer = _load_once(Path(task["tokenizer"]), task["fingerprint"])
    split = CorpusSplit(**task["split"])
    reading = ShardReading(task["shard"])
    lengths = [np.zeros(0, np.int32)]
    reasons: Counter[str] = Counter()
    num_bytes = num_unknown = 0
    unknown_id = _unknown_id(Path(task["tokenizer"]), task["fingerprint"])
    encoder = make_encoder(Path(task["tokenizer"]), tokenizer, task.get("forms", {}))
    with (
        replacing(_tokens_file(folder, number)) as path,
        replacing(_weights_file(folder, number)) as weights_path,
        open(path, "wb") as file,
        open(weights_path, "wb") as weights_file,
        ShardWriter(folder / REJECTED_FOLDER / shard_name(number), REJECTED_SCHEMA) as rejects,
        ShardWriter(_descriptions_file(folder, number), DESCRIPTION_SCHEMA) as descriptions,
    ):
        for batch in reading:
            empty = batch.texts.lengths == 0
            wanted = split.mask(batch.texts) & ~empty
            tokens, weights, sizes = encoder.encode(batch, wanted)  # which are fewer then, perhaps
            num_unknown += 0 if unknown_id is None else int(np.count_nonzero(tokens == unknown_id))
            rejected = [*batch.rejected, *_empty_documents(batch, empty), *encoder.rejected]
            rejects.write_rejected(rejected)
            reasons.update(record.reason for record in rejected)
            file.write(np.ascontiguousarray(tokens, token_dtype(tokenizer.vocab_size)).data)
            weights_file.write(weights.data)
            lengths.append(sizes.astype(np.int32))
            if task["describe"]:
                chosen = batch.documents.filter(pa.array(wanted))
                descriptions.write(chosen.select(DESCRIPTION_SCHEMA.names))
            num_bytes += int(batch.texts.lengths[wanted].sum())
    with replacing(_lengths_file(folder, number)) as path, open(path, "wb") as file:
        np.save(file, np.concatenate(lengths))
    return {
        "text_bytes": num_bytes,
        "unknown_tokens": num_unknown,
        "rejected": dict(sorted(reasons.items())),
        **encoder.counts(),
        "formed": sorted(encoder.counts()),
        "reading": reading.report(),
        "megabytes": num_bytes / 1e6,
    }


@lru_cache(maxsize=1)
def _load_once(folder: Path, _fingerprint: str) -> Tokenizer:
    """A process keeps its tokenizer from shard to shard, as long as it is the same one."""
    return Tokenizer.load(folder)


@lru_cache(maxsize=1)
def _unknown_id(folder: Path, fingerprint: str) -> int | None:
    """The token of text that the vocabulary lacks, if there is one, and it does not end documents as well."""
    tokenizer = _load_once(folder, fingerprint)
    found = tokenizer.stopgaps().unknown_id
    return None if found == tokenizer.eos_id else found


def _empty_documents(batch: DocumentBatch, empty: np.ndarray) -> list[Rejected]:
    if not empty.any():
        return []
    chosen = batch.documents.filter(pa.array(empty))
    names = zip(chosen.column("id").to_pylist(), chosen.column("source").to_pylist(), strict=True)
    return [Rejected(id, source, "", "empty") for id, source in names]


def read_scores(folder: Path, field: str) -> np.ndarray:
    """A number of each document's metadata, in the order of the index; NaN where it is missing.

    Args:
        folder: a tokenized folder.
        field: its name.

    Raises:
        DataError: the folder was tokenized without descriptions, or no document has the field.
    """
    path = folder / DESCRIPTIONS_NAME
    if not path.is_file():
        raise DataError(f"{folder}: no {DESCRIPTIONS_NAME}; tokenize again with --describe, which keeps the metadata")
    scores = read_numbers(pq.read_table(path, columns=["metadata"]).column(0), field)
    if scores.size and np.isnan(scores).all():
        raise DataError(
            f"{path}: none of {scores.size:,} documents has a number {field!r} in its metadata; carry it along with "
            "keep_fields where the documents are read, or add it with `megalite data classifier` or `perplexity`"
        )
    return scores


def _join_tokens(folder: Path, num_shards: int, dtype: np.dtype, *, weighted: bool) -> IndexedWriter:
    """The shards' tokens one behind the other, and their weights; returns what has written them."""
    if weighted:
        with open(folder / WEIGHTS_FILE, "wb") as weights:
            for number in range(num_shards):
                with open(_weights_file(folder, number), "rb") as file:
                    shutil.copyfileobj(file, weights)
    with IndexedWriter(folder / TOKENS_NAME, dtype) as writer:
        for number in range(num_shards):
            writer.add_file(_tokens_file(folder, number), np.load(_lengths_file(folder, number)))
    return writer


def _join_descriptions(folder: Path, num_shards: int) -> None:
    with ShardWriter(folder / DESCRIPTIONS_NAME, DESCRIPTION_SCHEMA) as writer:
        for number in range(num_shards):
            path = _descriptions_file(folder, number)
            if path.exists():  # a shard without documents has none
                for batch in pq.ParquetFile(path).iter_batches():
                    writer.write(batch.cast(DESCRIPTION_SCHEMA))


def _descriptions_file(folder: Path, number: int) -> Path:
    return folder / WORK_FOLDER / "tokens" / f"{number:05d}.parquet"


def _tokens_file(folder: Path, number: int) -> Path:
    return folder / WORK_FOLDER / "tokens" / f"{number:05d}.bin"


def _weights_file(folder: Path, number: int) -> Path:
    return folder / WORK_FOLDER / "tokens" / f"{number:05d}.weights"


def _lengths_file(folder: Path, number: int) -> Path:
    return folder / WORK_FOLDER / "tokens" / f"{number:05d}.npy"
