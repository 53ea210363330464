"""Scores on their way: from a source's field or a station into the metadata, and out of it where they choose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megalite.cli.main import main
from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import add_numbers, read_numbers
from megalite.corpus.exact_json import with_field
from megalite.corpus.near.settings import NearDedupConfig
from megalite.corpus.recipe import CleanConfig, DocumentSource
from megalite.corpus.scoring.settings import PerplexityConfig
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.near import near_dedup
from megalite.corpus.stations.select import perplexity
from megalite.corpus.stations.tokenize import read_scores, tokenize
from megalite.data.pack import pack
from megalite.data.settings import PackConfig
from megalite.errors import DataError
from megalite.stations.runners import LocalPool
from tests.kit.data import all_bytes, corpus_of, prose, write_json_lines


def scored(folder: Path, texts: list[str], scores: list[float | None]) -> Corpus:
    """A cleaning station over documents whose source gave them a score, or none."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"text": text} | ({} if score is None else {"score": score}) for text, score in zip(texts, scores, strict=True)
    ]
    (folder / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = Corpus([DocumentSource(path=folder / "raw.jsonl", keep_fields=("score",))])
    clean(corpus, folder / "clean", CleanConfig())
    return corpus_of(folder / "clean")


def test_numbers_in_and_out():
    """Other fields stay; what is missing or no number is NaN."""
    metadata = pa.array(["", '{"a": 1, "b": "x"}', '{"a": null}', "{}", '{"b": 123456789012345678901, "c": 1}'])
    assert read_numbers(metadata, "a").tolist()[1] == 1.0
    assert np.isnan(read_numbers(metadata, "a")[[0, 2, 3]]).all()
    assert np.isnan(read_numbers(metadata, "b")[:4]).all()
    added = add_numbers(metadata, "c", np.array([0.5, 1.5, 2.5, 3.5, 4.5], np.float32))
    assert [json.loads(each) for each in added.to_pylist()] == [
        {"c": 0.5},
        {"a": 1, "b": "x", "c": 1.5},
        {"a": None, "c": 2.5},
        {"c": 3.5},
        {"b": 123456789012345678901, "c": 4.5},
    ]
    assert add_numbers(metadata, "d", np.zeros(5)).to_pylist()[4] == '{"b": 123456789012345678901, "c": 1,"d":0.0}'


@pytest.mark.parametrize(("field", "kept"), [("score", [1, 4]), ("-score", [0, 3])])
def test_the_best_of_a_cluster_stays(tmp_path, field, kept, monkeypatch):
    """By the highest score or the lowest; a document without one loses; any number of workers."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 500)
    first, second = prose(2, seed=5)
    texts = [first, first + " more", first + " words", second, second + " here"]
    corpus = scored(tmp_path, texts, [1.0, 7.0, None, 2.0, 2.5])
    config = NearDedupConfig(keep="best", score_field=field)
    near_dedup(corpus, tmp_path / "near", config)
    assert {each.text for each in corpus_of(tmp_path / "near").documents()} == {texts[number] for number in kept}
    with LocalPool(2) as runner:
        near_dedup(corpus, tmp_path / "two", config, runner=runner)
    assert all_bytes(tmp_path / "near") == all_bytes(tmp_path / "two")


def test_nobody_has_a_score(tmp_path):
    """Said before the work, with what to do."""
    corpus = scored(tmp_path, prose(3), [None, None, None])
    with pytest.raises(
        DataError, match=r"score_field='score', and none of 3 documents has that in its metadata; carry"
    ):
        near_dedup(corpus, tmp_path / "near", NearDedupConfig(keep="best"))


def test_scores_of_a_station_order_samples(tmp_path, tokenizer_folder):
    """perplexity -> metadata -> documents.parquet -> rank: against the scores that the station left beside."""
    texts = prose(40)
    corpus = scored(tmp_path, texts, [None] * len(texts))
    sample = write_json_lines(tmp_path / "sample.jsonl", prose(20, seed=9))
    perplexity(corpus, tmp_path / "all", PerplexityConfig(train_on=(sample,), keep_fraction=1.0))
    tokenize(corpus_of(tmp_path / "all"), tokenizer_folder, tmp_path / "tokens", describe=True)
    expected = np.load(tmp_path / "all" / "scores" / "00000.npy")
    assert read_scores(tmp_path / "tokens", "perplexity").tolist() == expected.tolist()
    rows = pq.read_table(tmp_path / "tokens" / "documents.parquet").to_pylist()
    assert [row["id"] for row in rows] == [each.id for each in corpus_of(tmp_path / "all").documents()]

    pack(tmp_path / "tokens", tmp_path / "packed", PackConfig(seq_len=64))
    np.save(tmp_path / "scores.npy", expected)
    for source, scores, out in (("packed", "perplexity", "a"), ("packed", str(tmp_path / "scores.npy"), "b")):
        arguments = [
            str(tmp_path / source),
            "--scores",
            scores,
            "--seq-len",
            "64",
            "--out",
            str(tmp_path / f"{out}.npy"),
        ]
        with pytest.raises(SystemExit) as ended:
            main(["data", "rank", *arguments])
        assert ended.value.code == 0
    assert np.load(tmp_path / "a.npy").tolist() == np.load(tmp_path / "b.npy").tolist()
    with pytest.raises(DataError, match="none of 40 documents has a number 'speed'"):
        read_scores(tmp_path / "tokens", "speed")
    tokenize(corpus_of(tmp_path / "all"), tokenizer_folder, tmp_path / "plain")
    with pytest.raises(DataError, match="tokenize again with --describe"):
        read_scores(tmp_path / "plain", "perplexity")


def test_languages_are_counted(tmp_path):
    """With a list of wanted ones or without, also of documents that a rule refuses; what is empty has none."""
    pytest.importorskip("py3langid", reason="py3langid is not installed: pip install 'megalite[data]'")
    german = "Der schnelle braune Fuchs springt über den faulen Hund und läuft dann in den dunklen Wald zurück. " * 3
    english = "The quick brown fox jumps over the lazy dog and then runs back into the dark forest again. " * 3
    path = write_json_lines(tmp_path / "a.jsonl", [german, english, english + "Again.", english[:40], ""])
    counted = clean(corpus_of(path), tmp_path / "all", CleanConfig(language={})).manifest.counts
    assert (counted["languages"], counted["documents"]) == ({"de": 1, "en": 3}, 3)
    kept = clean(corpus_of(path), tmp_path / "de", CleanConfig(language={"keep": ["de"]})).manifest.counts
    assert (kept["languages"], kept["documents"]) == ({"de": 1, "en": 3}, 1)
    assert kept["rejected"] == {"empty": 1, "language": 3}


@pytest.mark.parametrize("content", ['{"a":1}\n', " {}", "{ }", '{"a": 1} ', '{"\\u0061":1}', '{"a":1}', "{}", ""])
def test_a_field_is_added_to_any_object(content):
    """Also to one that somebody else has written."""
    found = json.loads(with_field(content, "a", 2))
    assert found == {"a": 2}
    assert json.loads(with_field(content, "b", 2)) == {**json.loads(content or "{}"), "b": 2}
