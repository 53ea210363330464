"""The stations that take documents away: what stays, what is named as gone, and the same from any number of workers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megalite.corpus.corpus import Corpus
from megalite.corpus.near.settings import NearDedupConfig
from megalite.corpus.prepare import prepare
from megalite.corpus.recipe import CleanConfig, DataRecipe, DocumentSource
from megalite.corpus.scoring.settings import ClassifierConfig, PerplexityConfig
from megalite.corpus.spans.settings import DecontaminateConfig, LineDedupConfig, SubstringConfig, UrlDedupConfig
from megalite.corpus.stations import select
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.near import near_dedup
from megalite.corpus.stations.spans import decontaminate, line_dedup, substring_dedup, url_dedup
from megalite.errors import DataError
from megalite.progress import NoProgress
from megalite.stations.runners import LocalPool
from megalite.stations.station import StationResult
from tests.kit.data import all_bytes, corpus_of, write_json_lines

WORDS = [first + second + third for first in "bdfghklm" for second in "aeiou" for third in ("ban", "lo", "mir", "set")]


def sentence(seed: int, num_words: int = 60) -> str:
    """Words that no other seed has in this order."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, num_words).tolist())


def cleaned(folder: Path, documents: list[dict]) -> Corpus:
    """A cleaning station over some documents, several shards of it."""
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    for part in range(3):
        lines = "".join(json.dumps(document) + "\n" for document in documents[part::3])
        (folder / "raw" / f"{part}.jsonl").write_text(lines)
    corpus = Corpus([DocumentSource(path=folder / "raw", keep_fields=("url",))])
    clean(corpus, folder / "clean", CleanConfig())
    return corpus_of(folder / "clean")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    """Every file becomes a shard."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 500)


def once(path: Path, texts: list[str]) -> Path:
    """A file that is not touched again: a station goes by the time of change."""
    return path if path.exists() else write_json_lines(path, texts)


def texts_of(folder: Path) -> set[str]:
    return {document.text for document in corpus_of(folder).documents()}


def removed_from(folder: Path) -> list[dict]:
    return [row for path in sorted((folder / "removed").glob("*")) for row in pq.read_table(path).to_pylist()]


def near(corpus: Corpus, out: Path, **options) -> StationResult:
    return near_dedup(corpus, out, NearDedupConfig(), **options)


def lines(corpus: Corpus, out: Path, **options) -> StationResult:
    return line_dedup(corpus, out, LineDedupConfig(min_occurrences=5), **options)


def substring(corpus: Corpus, out: Path, **options) -> StationResult:
    return substring_dedup(corpus, out, SubstringConfig(), **options)


def urls(corpus: Corpus, out: Path, **options) -> StationResult:
    return url_dedup(corpus, out, UrlDedupConfig(), **options)


def contamination(corpus: Corpus, out: Path, **options) -> StationResult:
    exam = once(out.parent / "exam.jsonl", [sentence(3), sentence(999)])
    return decontaminate(corpus, out, DecontaminateConfig(paths=(exam,)), **options)


def perplexity(corpus: Corpus, out: Path, **options) -> StationResult:
    sample = once(out.parent / "sample.jsonl", [sentence(seed) for seed in range(30)])
    return select.perplexity(
        corpus, out, PerplexityConfig(train_on=(sample,), keep_fraction=0.5, min_word_count=1), **options
    )


def classifier(corpus: Corpus, out: Path, **options) -> StationResult:
    good = once(out.parent / "good.jsonl", [sentence(seed) for seed in range(100, 160)])
    bad = once(out.parent / "bad.jsonl", [f"buy now {seed} cheap offer" for seed in range(60)])
    return select.classifier(corpus, out, ClassifierConfig(good=(good,), bad=(bad,), min_score=0.5), **options)


STATIONS = [near, lines, substring, urls, contamination, perplexity, classifier]


def documents() -> list[dict]:
    """Sixty documents: a shared line in six, a near-copy, a shared passage, a repeated address."""
    texts = [sentence(seed) for seed in range(60)]
    for number in range(10, 16):
        texts[number] += "\nclick here to subscribe to our letter"
    texts[20] = texts[21].replace(" ", " changed ", 1) + " more"
    texts[30] = sentence(1000) + " " + sentence(31)[:150]
    addresses = [f"http://example.com/{number}" for number in range(60)]
    addresses[41] = "https://www.example.com/40/"
    return [{"text": text, "url": url} for text, url in zip(texts, addresses, strict=True)]


@pytest.mark.parametrize("station", STATIONS)
def test_workers_change_no_byte(tmp_path, station: Callable[..., StationResult]):
    """This process and two others; nothing of the work is left; a second run finds it done."""
    corpus = cleaned(tmp_path, documents())
    result = station(corpus, tmp_path / "one")
    with LocalPool(2) as runner:
        station(corpus, tmp_path / "two", runner=runner)
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")
    assert not (tmp_path / "one" / ".work").exists()
    assert station(corpus, tmp_path / "one").reused
    counts = result.manifest.counts
    assert counts["documents_in"] == 60
    assert counts["documents"] + len(removed_from(tmp_path / "one")) == 60
    assert sum(counts["removed"].values()) == sum(counts["removed_by_source"].values()) == 60 - counts["documents"]


@pytest.mark.parametrize("station", STATIONS)
def test_raw_files_are_refused(tmp_path, station: Callable[..., StationResult]):
    """With the verb to run first."""
    path = write_json_lines(tmp_path / "a.jsonl", ["a text"])
    with pytest.raises(DataError, match=r"a\.jsonl: raw files.*run `megalite data clean`"):
        station(corpus_of(path), tmp_path / "out")


def test_near_duplicates(tmp_path):
    """The later one of the pair goes; an index of earlier data takes its copies out of new data."""
    given = documents()
    corpus = cleaned(tmp_path, given)
    result = near(corpus, tmp_path / "out", keep_index=True)
    (gone,) = removed_from(tmp_path / "out")
    assert gone["reason"] == "near-duplicate"
    assert (result.manifest.counts["clusters"], result.manifest.counts["largest_cluster"]) == (1, 2)
    fresh = cleaned(tmp_path / "later", [given[5], {"text": sentence(5000)}])
    near(fresh, tmp_path / "later" / "out", older=[tmp_path / "out" / "index"])
    assert texts_of(tmp_path / "later" / "out") == {sentence(5000)}


def test_near_duplicates_name_their_twins(tmp_path):
    """Each with the document that stayed for it: of this corpus, of any shard, and of earlier data that has names."""
    given = documents()
    corpus = cleaned(tmp_path, [*given, *given[:7]])
    near(corpus, tmp_path / "out", keep_index=True)
    kept = {document.text: (document.id, document.source) for document in corpus_of(tmp_path / "out").documents()}
    gone = removed_from(tmp_path / "out")
    assert len(gone) == 8
    assert {(row["kept_id"], row["kept_source"]) for row in gone} == {
        *(kept[given[number]["text"]] for number in range(7)),
        kept.get(given[20]["text"]) or kept[given[21]["text"]],
    }
    assert all(row["detail"] == f"repeats {row['kept_id']}" for row in gone)
    assert not {(row["id"], row["source"]) for row in gone} & set(kept.values())

    index = tmp_path / "out" / "index"
    fresh = cleaned(tmp_path / "later", [given[5], {"text": sentence(5000)}])
    near(fresh, tmp_path / "later" / "named", older=[index])
    (row,) = removed_from(tmp_path / "later" / "named")
    assert (row["kept_id"], row["kept_source"]) == kept[given[5]["text"]]
    for path in index.glob("*.names.arrow"):
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"names\.arrow: damaged, .*make its index anew"):
        near(fresh, tmp_path / "later" / "damaged", older=[index])
    for path in index.glob("*.names.arrow"):
        path.unlink()
    near(fresh, tmp_path / "later" / "unnamed", older=[index])
    (row,) = removed_from(tmp_path / "later" / "unnamed")
    assert (row["kept_id"], row["kept_source"], row["detail"]) == ("", "", "repeats earlier data")


class Summary(NoProgress):
    """What a station says at its end."""

    line = ""

    def finish(self, summary: str) -> None:
        self.line = summary


@pytest.mark.parametrize("station", STATIONS)
def test_the_summary_says_documents_and_text(tmp_path, station: Callable[..., StationResult]):
    """A station that cuts passages drops documents too, and one that drops documents takes their text."""
    said = Summary()
    counts = station(cleaned(tmp_path, documents()), tmp_path / "out", progress=said).manifest.counts
    megabytes = [f"{counts[name] / 1e6:,.1f}" for name in ("text_bytes", "text_bytes_in")]
    line = f"{counts['documents']} of 60 documents kept, {megabytes[0]} of {megabytes[1]} MB"
    assert said.line.startswith(line)


def test_lines_and_passages(tmp_path):
    """The shared line goes from all six; the later copy of the passage goes, the first stays."""
    corpus = cleaned(tmp_path, documents())
    lines(corpus, tmp_path / "lines")
    assert not [text for text in texts_of(tmp_path / "lines") if "subscribe" in text]
    assert len(texts_of(tmp_path / "lines")) == 60
    substring(corpus, tmp_path / "substring")
    passage = sentence(31)[20:140]
    assert len([text for text in texts_of(tmp_path / "substring") if passage in text]) == 1


def test_addresses_and_exams(tmp_path):
    """The repeated address goes, and so does the document with an example of the exam, which is named."""
    corpus = cleaned(tmp_path, documents())
    urls(corpus, tmp_path / "urls")
    assert [row["reason"] for row in removed_from(tmp_path / "urls")] == ["same address"]
    contamination(corpus, tmp_path / "exam")
    (gone,) = removed_from(tmp_path / "exam")
    assert (gone["reason"], gone["detail"]) == ("contaminated", "exam.jsonl:1")
    assert sentence(3) not in texts_of(tmp_path / "exam")


def test_scores_choose(tmp_path):
    """Half of the documents stay under perplexity, those of the sample's text first; spam goes under the classifier."""
    given = documents()
    corpus = cleaned(tmp_path, given)
    counts = perplexity(corpus, tmp_path / "perplexity").manifest.counts
    assert counts["documents"] == 30
    sampled = {sentence(seed) for seed in range(30)} & {each["text"] for each in given}
    assert len(texts_of(tmp_path / "perplexity") & sampled) == len(sampled)
    spam = [{"text": f"buy now {number} cheap offer, " * 4} for number in range(1000, 1010)]
    mixed = cleaned(tmp_path / "mixed", [*given[:20], *spam])
    counts = classifier(mixed, tmp_path / "mixed" / "classifier").manifest.counts
    assert (counts["documents"], counts["removed"]) == (20, {"classifier": 10})
    assert counts["model"]["accuracy"] == 1.0


def test_all_of_them_in_one_recipe(tmp_path):
    """Each reads what the one before left; a changed setting redoes it and what follows."""
    cleaned(tmp_path, documents())
    exam = write_json_lines(tmp_path / "exam.jsonl", [sentence(3)])
    recipe = DataRecipe(
        out=tmp_path / "out",
        sources=[{"path": tmp_path / "raw", "keep_fields": ["url"]}],
        valid_fraction=0,
        url_dedup={},
        near_dedup={},
        line_dedup={"min_occurrences": 5},
        substring_dedup={},
        decontaminate={"paths": [exam]},
        tokenizer={"kind": "byte-bpe", "vocab_size": 262},
        pack={"seq_len": 32},
    )
    done = {station.name: station.result.manifest.counts for station in prepare(recipe)}
    filters = ["clean", "url-dedup", "dedup", "near-dedup", "line-dedup", "substring-dedup", "decontaminate"]
    assert list(done)[:7] == filters
    for before, after in itertools.pairwise(filters):
        assert done[before]["documents"] == done[after]["documents_in"]
    assert done["decontaminate"]["documents"] == 57
    changed = recipe.model_copy(update={"line_dedup": LineDedupConfig(min_occurrences=7)})
    assert [station.name for station in prepare(changed) if station.result.reused] == filters[:4]


def test_documents_without_addresses_are_refused(tmp_path):
    """The field was not carried along, and nothing would be removed."""
    corpus = cleaned(tmp_path, [{"text": sentence(number), "link": "https://a.b/c"} for number in range(6)])
    with pytest.raises(DataError, match=r"url_field='url': none of 6 documents has that in its metadata"):
        urls(corpus, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["missing", "a file"])
def test_an_older_index_that_is_none(tmp_path, name):
    """A path that leads nowhere, and one to a file."""
    (tmp_path / "a file").write_text("")
    corpus = cleaned(tmp_path, [{"text": sentence(number)} for number in range(6)])
    with pytest.raises(DataError, match=r"index\.json is missing; name the index folder"):
        near_dedup(corpus, tmp_path / "out", NearDedupConfig(), older=[tmp_path / name])
