"""Stations: keep the documents that a model scores well: an n-gram model's perplexity, a classifier of quality, or a
classifier of harm, whose score is better the lower it is.

    train                   the model, on the samples that the settings name (or load one)        model/
    score     a shard       one number a document                                                 scores/00000.npy
    threshold               as set, or where the wanted fraction of all documents ends
    write     a shard       what stays

Scores stay beside the documents, where a person can look how the threshold falls, and in the metadata of those that are
kept: `near-dedup` can keep the best of a cluster by them, and `rank` order the samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import add_numbers, what_is_kept
from megalite.corpus.scoring.settings import ClassifierConfig, HarmfulConfig, PerplexityConfig
from megalite.corpus.scoring.threshold import Scorer, Threshold, best_fraction, pareto_keeps, write_scores
from megalite.corpus.shards import ShardReading
from megalite.corpus.source import DocumentSource
from megalite.corpus.stations.filtering import Decision, Filtering, FilterStation, write_shard
from megalite.corpus.stations.sampling import SampleReading, account_in_words
from megalite.stations.hashes import hash_inputs
from megalite.stations.tasks import WORK_FOLDER, Report, Task, replacing, run_tasks
from megalite.texts import Texts

if TYPE_CHECKING:
    from megalite.corpus.scoring.classifier import Classifier
    from megalite.corpus.scoring.ngram import NgramModel

SCORES_FOLDER = "scores"

SAMPLES_FILE = "samples.json"
"""In the work folder: an account of what the model was trained on."""

MODEL_NAMES = {"perplexity": "model", "classifier": "model.npz", "harmful": "model.npz"}

SAMPLE_NAMES = {"classifier": ("good", "bad"), "harmful": ("harmful", "harmless")}

SelectConfig = PerplexityConfig | ClassifierConfig | HarmfulConfig


def _select(filtering: Filtering, folder: Path, config: SelectConfig) -> dict[str, Any]:
    kind, model = filtering.station, config.model
    samples: dict[str, Any] = {}
    if model is None:
        model, account = folder / MODEL_NAMES[kind], folder / WORK_FOLDER / SAMPLES_FILE
        if not (_is_whole(kind, model) and account.exists()):
            _train(kind, config, model, account)
        samples = {"trained_on": json.loads(account.read_text(encoding="utf-8"))}
    common = {"kind": kind, **_which(model), "config": config.model_dump_json()}
    tasks: list[Task] = [{**common, "path": path} for path in filtering.paths]
    run_tasks(folder, "score", score_shard, tasks, **filtering.where)
    threshold = _threshold(config, [_scores_file(folder, number) for number in range(len(tasks))])
    value = threshold and threshold.value
    counts = filtering.write(folder, keep_shard, **common, threshold=value)
    return {**counts, "threshold": value, **_model_facts(kind, model), **samples}


def _in_words(counts: dict[str, Any]) -> str:
    """For people: what is kept, and what was not read of the samples."""
    accounts = counts.get("trained_on", {}).items()
    return what_is_kept(counts) + "".join(account_in_words(account, f"the {name} sample") for name, account in accounts)


def score_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: score the documents of a shard."""
    model = _load_once(task["kind"], task["model"], task["hashes"])
    scores, num_bytes = [], 0
    for batch in ShardReading({"station": task["path"]}):
        scores.append(model.score(batch.texts))
        num_bytes += batch.texts.num_bytes
    empty = np.zeros(0, np.float64 if task["kind"] == "perplexity" else np.float32)
    write_scores(_scores_file(folder, number), np.concatenate([empty, *scores]))
    return {"megabytes": num_bytes / 1e6}


def keep_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: write the documents of a shard whose scores are good enough."""
    all_scores = np.load(_scores_file(folder, number), mmap_mode="r")
    kind = task["kind"]
    alpha = ClassifierConfig.model_validate_json(task["config"]).pareto_alpha if kind == "classifier" else None

    def decide(documents: pa.RecordBatch, texts: Texts, row: int) -> Decision:
        scores = np.asarray(all_scores[row : row + len(texts)])
        if alpha is not None:
            seed = ClassifierConfig.model_validate_json(task["config"]).seed
            keep = pareto_keeps(scores, texts, alpha=alpha, seed=seed)
        else:
            keep = Threshold(task["threshold"], kind == "classifier").keeps(scores)
        metadata = add_numbers(documents.column("metadata"), kind, scores)
        return Decision(keep, kind, details=[f"{score:.6g}" for score in scores.tolist()], metadata=metadata)

    return write_shard(task["path"], number, folder, decide)


def _samples(config: SelectConfig) -> list[Corpus]:
    """The texts to train on, none for a model that exists."""
    return [Corpus([DocumentSource(path=path) for path in group]) for group in config.samples if group]


def _inputs(kind: str, config: SelectConfig) -> list[tuple[Path | str, str]]:
    of_samples = [each for sample in _samples(config) for each in sample.inputs]
    if config.model is None:
        return of_samples
    _load(kind, config.model)  # or it is refused
    return [*of_samples, *hash_inputs(config.model)]


def _which(model: Path) -> Task:
    """A model as tasks have it: where it is, and which one."""
    return {"model": str(model.absolute()), "hashes": " ".join(found for _, found in hash_inputs(model))}


def _is_whole(kind: str, model: Path) -> bool:
    """Whether a model that this station has trained was saved to its end."""
    if kind == "perplexity":
        from megalite.corpus.scoring.ngram import SETTINGS_FILE

        return (model / SETTINGS_FILE).exists()  # the last of its files
    return model.exists()


def _train(kind: str, config: SelectConfig, path: Path, account: Path) -> None:
    """Train the model and save it, behind an account of the samples for a run that goes on from there."""
    samples = [_FirstTexts(sample, config.train_mb) for sample in _samples(config)]
    model: NgramModel | Classifier
    if isinstance(config, PerplexityConfig):
        from megalite.corpus.scoring.ngram import train_ngram

        order, rare, prune = config.order, config.min_word_count, config.prune
        model = train_ngram(samples[0], order=order, min_word_count=rare, prune=prune)
    else:
        from megalite.corpus.scoring.classifier import train_classifier

        model = train_classifier(*samples, hash_bits=config.hash_bits, l2=config.l2, names=SAMPLE_NAMES[kind])
    names = SAMPLE_NAMES.get(kind, ("training",))
    accounts = {name: sample.account() for name, sample in zip(names, samples, strict=True)}
    with replacing(account) as partial:
        partial.write_text(json.dumps(accounts), encoding="utf-8")
    model.save(path)


class _FirstTexts:
    """Texts of a corpus, batch by batch, up to a number of million bytes; counts what it gives.

    Raises:
        DataError: while iterating: nothing could be read of a source that was reached.
    """

    def __init__(self, corpus: Corpus, max_mb: float):
        self._reading = SampleReading(corpus)
        self._max_bytes = max_mb * 1e6
        self._num_documents = self._num_bytes = 0

    def __iter__(self) -> Iterator[Texts]:
        for batch in self._reading:
            self._num_documents += len(batch.texts)
            self._num_bytes += batch.texts.num_bytes
            yield batch.texts
            if self._num_bytes >= self._max_bytes:
                break
        self.account()

    def account(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"documents": self._num_documents, "text_bytes": self._num_bytes, **self._reading.account()}


def _threshold(config: SelectConfig, paths: Sequence[Path]) -> Threshold | None:
    """The worst score that is kept; None under the Pareto rule, which has none."""
    if isinstance(config, HarmfulConfig):
        return Threshold(config.max_score, higher_is_better=False)
    higher_is_better = isinstance(config, ClassifierConfig)
    fixed = config.min_score if isinstance(config, ClassifierConfig) else config.max_perplexity
    if fixed is not None:
        return Threshold(fixed, higher_is_better)
    if config.keep_fraction is None:
        return None
    return best_fraction(paths, config.keep_fraction, higher_is_better=higher_is_better)


def _model_facts(kind: str, model: Path) -> dict[str, Any]:
    """What there is to say about how well a classifier does on documents that were held out."""
    if kind == "perplexity":
        return {}
    from megalite.corpus.scoring.classifier import Classifier

    return {"model": json.loads(json.dumps(vars(Classifier.load(model).settings.report)))}


def _load(kind: str, path: Path) -> Scorer:
    if kind == "perplexity":
        from megalite.corpus.scoring.ngram import NgramModel

        return NgramModel.load(path)
    from megalite.corpus.scoring.classifier import Classifier

    return Classifier.load(path)


@lru_cache(maxsize=1)
def _load_once(kind: str, path: str, _hashes: str) -> Scorer:
    """A worker keeps the model from shard to shard, as long as it is the same one."""
    return _load(kind, Path(path))


def _scores_file(folder: Path, number: int) -> Path:
    return folder / SCORES_FOLDER / f"{number:05d}.npy"


perplexity = FilterStation[PerplexityConfig](
    "perplexity", _select, num_passes=2, inputs=partial(_inputs, "perplexity"), summary=_in_words
)
classifier = FilterStation[ClassifierConfig](
    "classifier", _select, num_passes=2, inputs=partial(_inputs, "classifier"), summary=_in_words
)
harmful = FilterStation[HarmfulConfig](
    "harmful", _select, num_passes=2, inputs=partial(_inputs, "harmful"), summary=_in_words
)
