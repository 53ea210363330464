"""Station 3: train a tokenizer on an even sample of the documents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.corpus.corpus import Corpus
from megalite.corpus.split import ALL, CorpusSplit, chosen
from megalite.corpus.stations.sampling import SampleReading, account_in_words
from megalite.errors import DataError
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.station import StationResult, run_station
from megalite.tokenizer.settings import TokenizerConfig
from megalite.tokenizer.training import added_tokens, write_tokenizer

SAMPLE_SEED = 1
"""Keeps the choice of the sample apart from that of the hold-out."""


def train_tokenizer(
    corpus: Corpus,
    out: Path,
    config: TokenizerConfig,
    *,
    split: CorpusSplit = ALL,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: what to learn from.
        out: folder to make.
        config: kind and size.
        split: documents to leave out.
        progress: told of the text as it is read.

    Raises:
        DataError: there is too little text for the vocabulary, or a special token cannot be one.
    """
    progress = progress or NoProgress()
    added_tokens(config)  # refuses bad ones before anything is read

    def build(folder: Path) -> dict[str, Any]:
        available = split.share_of(corpus.text_mb)
        progress.start("train-tokenizer", available and min(available, config.train_mb), "MB")
        sample = _TextSample(corpus, split, config.train_mb, progress)
        texts = iter(sample)
        if (first := next(texts, None)) is None:
            raise DataError(
                f"train_mb={config.train_mb:g} drew none of the documents, which are few and large; set more"
            )
        info = write_tokenizer(itertools.chain([first], texts), folder, config)
        summary = f"{info.vocab_size:,} tokens from {sample.num_bytes / 1e6:,.1f} MB of text"
        progress.finish(summary + account_in_words(sample.account))
        sizes = {"documents": sample.num_documents, "text_bytes": sample.num_bytes, "vocab_size": info.vocab_size}
        return sizes | sample.account

    settings = config.model_dump(mode="json", exclude={"path"}) | {"split": split.settings()}
    return run_station("train-tokenizer", out, inputs=corpus.inputs, settings=settings, build=build)


class _TextSample:
    """About train_mb of text, drawn by hash over all documents; counts what it gives, and what could not be read."""

    def __init__(self, corpus: Corpus, split: CorpusSplit, train_mb: float, progress: ProgressReporter):
        self._corpus = corpus
        self._split = split
        self._progress = progress
        reading = SampleReading(corpus)
        available = sum(len(text) for text in self._texts(reading))
        self.account = reading.account()
        if not available:
            raise DataError("there is no text to train a tokenizer on: the documents are empty or all held out")
        self._fraction = min(1.0, train_mb * 1e6 / available)
        self.num_documents = 0
        self.num_bytes = 0

    def _texts(self, reading: SampleReading) -> Iterator[str]:
        return (text for batch in reading for text in batch.texts if self._split.keeps(text))

    def __iter__(self) -> Iterator[str]:
        for text in self._texts(SampleReading(self._corpus)):
            if chosen(text, self._fraction, SAMPLE_SEED):
                num_bytes = len(text.encode())
                self.num_documents += 1
                self.num_bytes += num_bytes
                self._progress.advance(num_bytes / 1e6)
                yield text
