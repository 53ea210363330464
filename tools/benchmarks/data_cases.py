"""The data stations as cases of the benchmark: `python tools/benchmarks/data_cases.py '{"case": "near", ...}'`.

Runs one case, of these or of `data_peers.py`, as `data_measure.py` says, and prints one JSON line: the amount of work,
CPU seconds (user and system, children too), wall seconds, memory at its peak, and the figures of the case.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data_inputs import Inputs
from data_measure import Job, Outcome, Run, SetUp, measure

from megalite.corpus.corpus import Corpus
from megalite.corpus.recipe import CleanConfig, DedupConfig, DocumentSource
from megalite.data.settings import PackConfig
from megalite.progress import NoProgress
from megalite.stations.runners import InProcess, LocalPool

MICRO_BATCH_SIZE = 8
TOKENS_AT_ONCE = 1 << 16
"""In one call that reads sequences."""

NUM_EPOCHS = 3
"""Passes over the tokens that the cases of loading make."""

MIN_LIKENESS = 0.8
"""Planted pairs that are at least so alike must be found."""


def rules_config(*, repetition: bool) -> CleanConfig:
    """All published rules; C4's about the last character of a line is off, as in FineWeb, for it leaves no text."""
    return CleanConfig(
        c4={"terminal_punctuation": False},
        gopher_quality={},
        gopher_repetition={} if repetition else None,
        fineweb={},
        privacy={},
    )


def rules(inputs: Inputs, setting: str) -> Run:
    """Read documents and judge them. Setting: plain or repetition."""
    from megalite.corpus.reading.readers import read_station_shard
    from megalite.corpus.rules.apply import apply_rules

    config = rules_config(repetition=setting == "repetition")

    def run(_: Path) -> Outcome:
        num_kept = 0
        for path in inputs.shards:
            num_kept += sum(int(apply_rules(batch.texts, config).kept.sum()) for batch in read_station_shard(path))
        return Outcome(inputs.megabytes, {"kept": num_kept})

    return run


def clean(inputs: Inputs, setting: str) -> Run:
    """The station with all it has: repair, redaction, all rules; kept and rejected documents are written.
    Setting: number of workers."""
    from megalite.corpus.stations.clean import clean as station

    config, runner = rules_config(repetition=True), _pool(int(setting))

    def run(out: Path) -> Outcome:
        counts = station(_corpus(inputs), out / "clean", config, runner=runner).manifest.counts
        return Outcome(inputs.megabytes, {"kept": counts["documents"]})

    return run


def exact(inputs: Inputs, setting: str) -> Run:
    """Find equal documents. Setting: bytes for equal texts, blanks for texts equal but for their blanks; station before
    either to have what stays written."""
    from megalite.corpus.shards import station_shard
    from megalite.corpus.stations.dedup import NUM_SLICES, dedup, hash_shard, match_partition
    from megalite.stations.tasks import WORK_FOLDER, run_tasks

    config = DedupConfig(ignore_whitespace=setting.endswith("blanks"))
    shards = [station_shard(path) for path in inputs.shards]
    to_hash = [{"shard": shard, "config": config.model_dump(mode="json")} for shard in shards]
    to_match = [{"slices": [0, NUM_SLICES], "num_shards": len(shards)}]

    def run(out: Path) -> Outcome:
        if setting.startswith("station"):
            counts = dedup(_corpus(inputs), out / "dedup", config).manifest.counts
            return Outcome(inputs.megabytes, {"removed": counts["documents_in"] - counts["documents"]})
        for phase, function, tasks in (("hash", hash_shard, to_hash), ("match", match_partition, to_match)):
            run_tasks(out, phase, function, tasks, runner=InProcess(), progress=NoProgress())
        removed = np.load(out / WORK_FOLDER / "removed" / "00000.npy")
        return Outcome(inputs.megabytes, {"removed": len(removed)})

    return run


def near(inputs: Inputs, setting: str) -> Run:
    """Near-duplicates with the defaults, from documents to masks."""
    from megalite.corpus.near.settings import NearDedupConfig
    from megalite.corpus.near.station import find_near_duplicates, read_mask

    shards = [{"path": str(path)} for path in inputs.shards]

    def run(out: Path) -> Outcome:
        report = find_near_duplicates(shards, out, NearDedupConfig(), runner=InProcess(), progress=NoProgress())

        def clusters() -> dict[str, float]:
            labels = [label for shard in range(len(shards)) for label in read_mask(out, shard).cluster.tolist()]
            pairs = zip(inputs.column("id"), labels, strict=True)
            return judge_clusters(inputs, {id: label for id, label in pairs if label >= 0})

        return Outcome(inputs.megabytes, {"removed": report.removed}, clusters)

    return run


def judge_clusters(inputs: Inputs, clusters: dict[str, Any]) -> dict[str, float]:
    """Precision of what is removed, and recall of the planted pairs that are alike enough.

    Args:
        inputs: with the truth.
        clusters: label of each document that is in a cluster.
    """
    from corpus_score import judge

    pairs = [truth for truth in inputs.truth() if truth.get("j5", 0.0) >= MIN_LIKENESS]
    found = sum(clusters.get(pair["a"], "none") == clusters.get(pair["b"], "neither") for pair in pairs)
    verdict = judge(inputs.folder, clusters)
    precision = {f"precision_{threshold}": share for threshold, share in verdict["precision"].items()}
    return {**precision, f"recall_{MIN_LIKENESS}": found / max(1, len(pairs)), "largest_cluster": verdict["largest"]}


def substring(inputs: Inputs, setting: str) -> Run:
    """Passages of 100 bytes that stood earlier. Setting: find for their spans; station for the documents without them;
    memory for the spans of texts that are held in memory."""
    from megalite.corpus.spans.settings import SubstringConfig
    from megalite.corpus.spans.substring import find_repeats, find_repeats_in_shards, load_spans
    from megalite.corpus.stations.spans import substring_dedup

    config, paths = SubstringConfig(), [str(path) for path in inputs.shards]
    texts = inputs.texts() if setting == "memory" else None

    def run(out: Path) -> Outcome:
        if setting == "station":
            counts = substring_dedup(_corpus(inputs), out / "substring", config).manifest.counts
            return Outcome(inputs.megabytes, {"repeated_bytes": counts["repeated_bytes"]})
        if texts is not None:
            spans = find_repeats(texts, config)
            return Outcome(inputs.megabytes, judge=lambda: judge_passages(inputs, spans))
        find_repeats_in_shards(out, paths, config, runner=InProcess(), progress=NoProgress())
        return Outcome(inputs.megabytes, judge=lambda: judge_passages(inputs, _join_spans(inputs, out, load_spans)))

    return run


def _join_spans(inputs: Inputs, folder: Path, load_spans: Callable[[Path, int], np.ndarray]) -> np.ndarray:
    """The spans of all shards, documents counted through."""
    first, joined = 0, [np.zeros((0, 3), np.int64)]
    for shard, path in enumerate(inputs.shards):
        joined.append(load_spans(folder, shard) + np.array([first, 0, 0]))
        first += pq.read_metadata(path).num_rows
    return np.concatenate(joined)


def judge_passages(inputs: Inputs, spans: np.ndarray) -> dict[str, float]:
    """Share of the planted passages, all but the first of each, that lie inside a span.

    Args:
        inputs: with the truth.
        spans: int64 [n, 3]: document, first byte, byte behind the last.
    """
    place = {id: number for number, id in enumerate(inputs.column("id"))}
    by_passage: dict[int, list[tuple[int, int, int]]] = {}
    for truth in inputs.truth():
        if truth["kind"] == "substr":
            where = (place[truth["id"]], truth["start"], truth["end"])
            by_passage.setdefault(truth["passage"], []).append(where)
    later = [where for places in by_passage.values() for where in sorted(places)[1:]]
    found = 0
    for document, start, end in later:
        own = spans[spans[:, 0] == document]
        found += bool(((own[:, 1] <= start) & (end <= own[:, 2])).any())
    return {"passages": len(later), "passages_found": found / max(1, len(later))}


def tokenize(inputs: Inputs, setting: str) -> Run:
    """Documents to a pair of token files. Setting: kind of tokenizer."""
    from megalite.corpus.stations.tokenize import tokenize as station

    def run(out: Path) -> Outcome:
        counts = station(_corpus(inputs), inputs.tokenizer(setting), out / "tokens").manifest.counts
        return Outcome(inputs.megabytes, {"tokens": counts["tokens"]})

    return run


def pack(inputs: Inputs, setting: str) -> Run:
    """Best-fit packing: the station, which checks the tokens' hash first and writes the pieces. Setting: seq_len."""
    from megalite.data.pack import pack as station

    def run(out: Path) -> Outcome:
        counts = station(inputs.tokens, out / "packed", PackConfig(seq_len=int(setting))).manifest.counts
        split = 100 * counts["documents_split"] / counts["documents"]
        facts = {"padding_percent": counts["padding_percent"], "split_percent": split, "dropped_percent": 0.0}
        return Outcome(counts["tokens"] / 1e6, facts)

    return run


def pack_and_read(inputs: Inputs, setting: str) -> Run:
    """The same, and then every sequence read once: trl's packing copies the tokens, ours refers to them."""
    from megalite.config.schema import SourceConfig
    from megalite.data.samples import open_validation_samples

    pack_only, seq_len = pack(inputs, setting), int(setting)

    def run(out: Path) -> Outcome:
        outcome = pack_only(out)
        sources = [SourceConfig(path=out / "packed")]
        samples = open_validation_samples(sources, seq_len=seq_len, document_masks=True)
        at_once = TOKENS_AT_ONCE // seq_len
        for first in range(0, samples.num_samples_per_epoch, at_once):
            last = min(first + at_once, samples.num_samples_per_epoch)
            samples.read(samples.identities(first, last))
        return outcome

    return run


def load(inputs: Inputs, setting: str) -> Run:
    """Every micro-batch of some epochs, shuffled: tokens, labels, masks, positions, borders. Setting: packed or concat,
    and seq_len."""
    from megalite.config.batch_sizes import BatchSizes
    from megalite.config.schema import SourceConfig
    from megalite.data.loader import Loader
    from megalite.data.samples import open_samples

    layout, seq_len = setting.split()
    path = inputs.packed(int(seq_len)) if layout == "packed" else inputs.tokens
    samples = open_samples([SourceConfig(path=path)], seq_len=int(seq_len), seed=0, document_masks=True)
    num_steps = NUM_EPOCHS * samples.num_samples_per_epoch // MICRO_BATCH_SIZE
    sizes = {"micro_batch_size": MICRO_BATCH_SIZE, "batch_sizes": BatchSizes.fixed(MICRO_BATCH_SIZE)}

    def run(_: Path) -> Outcome:
        loader = Loader(samples, **sizes, dp_size=1, dp_rank=0, prefetch=2)
        num_tokens = 0
        for _, batches in loader.steps(1, num_steps):
            num_tokens += sum(batch.tokens.numel() for batch in batches)
        return Outcome(num_tokens / 1e6)

    return run


CASES: dict[str, SetUp] = {
    "rules": rules,
    "clean": clean,
    "exact": exact,
    "near": near,
    "substring": substring,
    "tokenize": tokenize,
    "pack": pack,
    "pack-and-read": pack_and_read,
    "load": load,
}


def find_case(name: str) -> SetUp:
    """One of ours, or one of `data_peers.py`."""
    if name in CASES:
        return CASES[name]
    return importlib.import_module("data_peers").PEERS[name]


@lru_cache(maxsize=1)
def _pool(num_workers: int) -> LocalPool:
    """Kept from the warm-up to the run; its processes end with this one."""
    return LocalPool(num_workers)


def _corpus(inputs: Inputs) -> Corpus:
    return Corpus([DocumentSource(path=inputs.documents)])


def main() -> None:
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    job = Job(**json.loads(sys.argv[1]))
    print(json.dumps(measure(job, find_case(job.case))), flush=True)


if __name__ == "__main__":
    main()
