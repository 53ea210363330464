"""Samples that models and tokenizers learn from: what of them could not be read is refused or said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.corpus.corpus import Corpus
from megalite.corpus.scoring.settings import ClassifierConfig, PerplexityConfig
from megalite.corpus.source import DocumentSource
from megalite.corpus.stations import select
from megalite.corpus.stations.train_tokenizer import train_tokenizer
from megalite.errors import DataError
from megalite.stations.station import StationResult
from megalite.tokenizer.settings import TokenizerConfig
from tests.corpus.stations.test_filters import Summary, cleaned, documents, sentence
from tests.kit.data import write_json_lines

Learn = Callable[[Path, list[Path], Summary], StationResult]


def perplexity(folder: Path, samples: list[Path], said: Summary, **options: float) -> StationResult:
    config = PerplexityConfig(train_on=tuple(samples), keep_fraction=0.5, min_word_count=1, **options)
    return select.perplexity(cleaned(folder, documents()), folder / "out", config, progress=said)


def classifier(folder: Path, samples: list[Path], said: Summary) -> StationResult:
    bad = write_json_lines(folder / "bad.jsonl", [f"buy now {seed} cheap offer" for seed in range(60)])
    config = ClassifierConfig(good=tuple(samples), bad=(bad,), min_score=0.5)
    return select.classifier(cleaned(folder, documents()), folder / "out", config, progress=said)


def tokenizer(folder: Path, samples: list[Path], said: Summary) -> StationResult:
    corpus = Corpus([DocumentSource(path=path) for path in samples])
    return train_tokenizer(corpus, folder / "out", TokenizerConfig(kind="byte-bpe", vocab_size=270), progress=said)


def good_sample(folder: Path) -> Path:
    return write_json_lines(folder / "good.jsonl", [sentence(seed) for seed in range(60)])


@pytest.mark.parametrize("learn", [perplexity, classifier, tokenizer])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [("", r"other\.jsonl: empty"), ('{"content": "words"}\n' * 3, r"other\.jsonl: no document could be read")],
)
def test_a_source_of_which_nothing_can_be_read(tmp_path: Path, learn: Learn, content: str, complaint: str):
    """Behind a good one: an empty file, and one whose text is in another field."""
    (tmp_path / "other.jsonl").write_text(content)
    with pytest.raises(DataError, match=complaint):
        learn(tmp_path, [good_sample(tmp_path), tmp_path / "other.jsonl"], Summary())
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("learn", [perplexity, classifier, tokenizer])
def test_unreadable_records_are_counted(tmp_path: Path, learn: Learn):
    """In the manifest and in the summary."""
    half = tmp_path / "half.jsonl"
    half.write_text(good_sample(tmp_path).read_text() + "rubbish\n" * 7)
    said = Summary()
    counts = learn(tmp_path, [half], said).manifest.counts
    account = next(iter(counts["trained_on"].values())) if "trained_on" in counts else counts
    assert (account["documents"], account["rejected"]) == (60, {"not a JSON object": 7})
    assert "7 not a JSON object (the first is half.jsonl:61)" in said.line


def test_a_sample_that_was_not_reached(tmp_path: Path):
    """The first file had enough text."""
    second = write_json_lines(tmp_path / "second.jsonl", [sentence(seed) for seed in range(60, 90)])
    said = Summary()
    counts = perplexity(tmp_path, [good_sample(tmp_path), second], said, train_mb=0.001).manifest.counts
    assert counts["trained_on"]["training"]["not_reached"] == ["second.jsonl"]
    assert said.line.endswith("train_mb was full before these files of the training sample: second.jsonl")


def test_a_sample_of_no_document(tmp_path: Path):
    """The documents are larger than what is wanted of them; said before a tokenizer is made of nothing."""
    large = write_json_lines(tmp_path / "large.jsonl", [sentence(seed) for seed in range(3)])
    config = TokenizerConfig(kind="byte-bpe", vocab_size=260, train_mb=1e-9)
    with pytest.raises(DataError, match="train_mb=1e-09 drew none of the documents"):
        train_tokenizer(Corpus([DocumentSource(path=large)]), tmp_path / "out", config)
    assert not list(tmp_path.glob("out*"))
