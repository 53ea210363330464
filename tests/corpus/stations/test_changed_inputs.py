"""A station whose lists, models and evaluation sets have changed runs again, by the new ones, in one process too."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megalite.corpus.corpus import Corpus
from megalite.corpus.recipe import CleanConfig, DocumentSource
from megalite.corpus.scoring.settings import ClassifierConfig, PerplexityConfig
from megalite.corpus.spans.settings import DecontaminateConfig
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.select import classifier, perplexity
from megalite.corpus.stations.spans import decontaminate
from megalite.errors import DataError
from megalite.stations.station import StationResult
from tests.kit.data import corpus_of, write_json_lines

NATURE = ["river", "mountain", "forest", "lake", "bird", "tree", "valley"]
SHOP = ["price", "buy", "cheap", "offer", "sale", "discount", "shop"]


def documents(words: list[str], count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(words) for _ in range(30)) for _ in range(count)]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Five documents of each kind, by words that no document of the other kind has."""
    raw = write_json_lines(tmp_path / "raw.jsonl", [*documents(NATURE, 5, 0), *documents(SHOP, 5, 1)])
    clean(Corpus([DocumentSource(path=raw)]), tmp_path / "clean", CleanConfig())
    return corpus_of(tmp_path / "clean")


def kinds(folder: Path) -> set[str]:
    """Of the documents that a station kept."""
    texts = [text for path in folder.glob("part-*") for text in pq.read_table(path)["text"].to_pylist()]
    return {"nature" if text.split()[0] in NATURE else "shop" for text in texts}


def samples(tmp_path: Path) -> tuple[Path, Path]:
    nature = write_json_lines(tmp_path / "nature.jsonl", documents(NATURE, 200, 2))
    return nature, write_json_lines(tmp_path / "shop.jsonl", documents(SHOP, 200, 3))


def in_turns(run: Callable[[], StationResult], change: Callable[[], object], out: Path, first: str, then: str) -> None:
    """By one input, again by the same, and by another under the same name."""
    assert not run().reused
    assert kinds(out) == {first}
    assert run().reused
    change()
    assert not run().reused
    assert kinds(out) == {then}


def test_a_list_of_bad_words(tmp_path: Path, corpus: Corpus):
    words, out = tmp_path / "bad.txt", tmp_path / "out"
    words.write_text("\n".join(SHOP))
    in_turns(
        lambda: clean(corpus, out, CleanConfig(bad_words={"file": words})),
        lambda: words.write_text("\n".join(NATURE)),
        out,
        "nature",
        "shop",
    )


def test_a_list_that_is_not_there(tmp_path: Path, corpus: Corpus):
    with pytest.raises(DataError, match="cannot read the list of bad words"):
        clean(corpus, tmp_path / "out", CleanConfig(bad_words={"file": tmp_path / "none.txt"}))
    assert not list(tmp_path.glob("out*"))


def test_an_evaluation_set(tmp_path: Path, corpus: Corpus):
    """Into another folder, which nothing but its own manifest speaks for."""
    tests = tmp_path / "tests.jsonl"
    for words, kept in ((NATURE, "shop"), (SHOP, "nature")):
        write_json_lines(tests, documents(words, 5, NATURE is not words))
        decontaminate(corpus, tmp_path / kept, DecontaminateConfig(paths=(tests,), ngram=5))
        assert kinds(tmp_path / kept) == {kept}


def test_samples_of_a_classifier(tmp_path: Path, corpus: Corpus):
    """Its model has the same name each time, in a folder that is being made."""
    nature, shop = samples(tmp_path)
    for good, bad, kept in ((nature, shop, "nature"), (shop, nature, "shop")):
        classifier(corpus, tmp_path / "out", ClassifierConfig(good=(good,), bad=(bad,), min_score=0.5))
        assert kinds(tmp_path / "out") == {kept}


def test_a_classifier_that_was_trained_again(tmp_path: Path, corpus: Corpus):
    nature, shop = samples(tmp_path)
    for good, bad, name in ((nature, shop, "one"), (shop, nature, "other")):
        classifier(corpus, tmp_path / name, ClassifierConfig(good=(good,), bad=(bad,), min_score=0.5))
    model, out = tmp_path / "model.npz", tmp_path / "out"
    shutil.copy(tmp_path / "one/model.npz", model)
    in_turns(
        lambda: classifier(corpus, out, ClassifierConfig(model=model, min_score=0.5)),
        lambda: shutil.copy(tmp_path / "other/model.npz", model),
        out,
        "nature",
        "shop",
    )


def test_a_language_model_that_was_half_saved(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    """A process that ended between its files leaves a folder that the next one trains anew."""
    from megalite.corpus.scoring import ngram

    nature, _ = samples(tmp_path)
    config, out = PerplexityConfig(train_on=(nature,), keep_fraction=0.5), tmp_path / "out"

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ngram, "asdict", end)
        with pytest.raises(KeyboardInterrupt):
            perplexity(corpus, out, config)
    assert [each.name for each in (tmp_path / "out.partial/model").iterdir()] == [ngram.TABLE_FILE]
    perplexity(corpus, out, config)
    assert kinds(out) == {"nature"}
