"""Cleaning: what is repaired, what is rejected and why, the same with any number of workers."""

from __future__ import annotations

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megalite.corpus.recipe import CleanConfig, DedupConfig
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.dedup import dedup
from megalite.errors import DataError
from megalite.stations.runners import LocalPool
from tests.corpus.stations.test_filters import Summary
from tests.kit.data import all_bytes, corpus_of, prose, write_json_lines


def test_unknown_languages_are_refused(tmp_path):
    """Three letters, or none of this world: nothing would be kept."""
    path = write_json_lines(tmp_path / "a.jsonl", prose(5))
    with pytest.raises(DataError, match=r"language\.keep: no language is called eng, xx; codes are of two letters"):
        clean(corpus_of(path), tmp_path / "out", CleanConfig(language={"keep": ["eng", "de", "xx"]}))
    assert not list(tmp_path.glob("out*"))


def test_the_language_comes_before_the_rules(tmp_path):
    """A German page is in another language, and has not "few stop words"; what C4 would cut counts for the language."""
    pytest.importorskip("py3langid", reason="py3langid is not installed: pip install 'megalite[data]'")
    german = "Der schnelle braune Fuchs springt über den faulen Hund und läuft dann in den dunklen Wald zurück. " * 9
    english = "The quick brown fox jumps over the lazy dog and then runs back into the dark forest again. " * 9
    texts = [german, english, german.replace(".", ""), ""]
    config = CleanConfig(language={"keep": ["en"]}, gopher_quality={}, c4={})
    result = clean(corpus_of(write_json_lines(tmp_path / "a.jsonl", texts)), tmp_path / "out", config)
    rejected = pq.read_table(tmp_path / "out" / "rejected" / "part-00000.parquet").to_pylist()
    assert [(row["text"][:3], row["reason"]) for row in rejected] == [
        ("Der", "language"),
        ("Der", "language"),
        ("", "c4: too few sentences"),
    ]
    assert result.manifest.counts["documents"] == 1


def test_the_station_keeps_counts_and_rejects(tmp_path):
    """Kept documents are repaired, rejected ones as they came, and every reason is counted."""
    texts = ["a good and long enough text  ", "short", "!" * 60, "", "\n".join(["the same line again"] * 9)]
    path = write_json_lines(tmp_path / "a.jsonl", texts)
    with open(path, "ab") as file:
        file.write(b'{"text": "caf\xe9"}\n')
    result = clean(corpus_of(path), tmp_path / "out", CleanConfig(min_chars=20))
    kept = pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    assert kept == [{"id": "a.jsonl:1", "source": "a.jsonl", "text": "a good and long enough text", "metadata": ""}]
    rejected = pq.read_table(tmp_path / "out" / "rejected" / "part-00000.parquet").to_pylist()
    assert [row["reason"] for row in rejected] == [
        "not UTF-8",
        "too short",
        "few letters and digits",
        "empty",
        "repeated lines",
    ]
    assert [row["text"] for row in rejected[1:]] == texts[1:]
    assert result.manifest.counts == {
        "documents_in": 6,
        "documents": 1,
        "text_bytes_in": sum(map(len, texts)),
        "text_bytes": 27,
        "rejected": {row["reason"]: 1 for row in sorted(rejected, key=lambda row: row["reason"])},
        "redacted": {},
        "languages": {},
        "licenses": {},
    }
    assert not {"code", "license", "custom"} & result.manifest.settings.keys()  # so that older folders are done too


def test_unreadable_records_stop_the_station_when_asked(tmp_path):
    """`on_error: fail` names the record and leaves nothing behind."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a good text"}\nbroken\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a JSON object; set on_error: reject"):
        clean(corpus_of(path), tmp_path / "out", CleanConfig(on_error="fail"))
    assert not list(tmp_path.glob("out*"))


def test_workers_change_nothing(tmp_path, monkeypatch):
    """This process and three others leave equal bytes, over several shards."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 20_000)
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", [*prose(300), "short", "!" * 99]))
    clean(corpus, tmp_path / "1", CleanConfig())
    with LocalPool(3) as runner:
        clean(corpus, tmp_path / "3", CleanConfig(), runner=runner)
    assert all_bytes(tmp_path / "1") == all_bytes(tmp_path / "3")
    assert len(list((tmp_path / "1").glob("part-*.parquet"))) > 2


def test_a_stations_folder_is_read_back(tmp_path):
    """Ids, sources and texts survive the Parquet shards; a second cleaning keeps everything."""
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", prose(20)), name="shelf")
    clean(corpus, tmp_path / "once", CleanConfig())
    once = list(corpus_of(tmp_path / "once").read())
    assert [document.text for document in once] == prose(20)
    assert {document.source for document in once} == {"shelf"}
    clean(corpus_of(tmp_path / "once"), tmp_path / "twice", CleanConfig())
    assert list(corpus_of(tmp_path / "twice").read()) == once


def test_settings_that_a_stations_folder_does_not_read(tmp_path):
    """Each is refused by name; what a card says of the source is read."""
    clean(corpus_of(write_json_lines(tmp_path / "a.jsonl", prose(3))), tmp_path / "once", CleanConfig())
    others = {
        "include": ("*.txt",),
        "text_field": "content",
        "id_field": "name",
        "keep_fields": ("zz",),
        "conversations": "auto",
        "max_mb": 0.001,
        "max_record_mb": 1.0,
        "max_expansion": 3.0,
        "name": "other",
    }
    for name, value in others.items():
        with pytest.raises(DataError, match=rf"once: found {name}=.*the folder of a station does not read"):
            corpus_of(tmp_path / "once", **{name: value})
    corpus_of(tmp_path / "once", description="manuals", license="MIT", url="https://a.b")


def test_files_of_other_kinds_are_counted(tmp_path):
    """Those that nobody reads, by suffix; not where patterns say what is read, nor hidden ones."""
    write_json_lines(tmp_path / "raw" / "a.jsonl", prose(3))
    for name in ("b.jsonl.lz4", "c.zip", "d.zip", "LICENSE", ".hidden.zip", "deeper/e.zip"):
        (tmp_path / "raw" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "raw" / name).touch()
    said = Summary()
    counts = clean(corpus_of(tmp_path / "raw"), tmp_path / "out", CleanConfig(), progress=said).manifest.counts
    assert counts["passed_over"] == {".lz4": 1, ".zip": 3, "no suffix": 1}
    assert said.line.endswith("; files of kinds that are not read: 1 with .lz4, 3 with .zip, 1 with no suffix")
    assert corpus_of(f"file://{tmp_path}/raw").passed_over == counts["passed_over"]
    assert not corpus_of(tmp_path / "raw", include=("*.jsonl",)).passed_over


@pytest.mark.parametrize("station", [(clean, CleanConfig()), (dedup, DedupConfig())])
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_a_field_that_no_document_has(tmp_path, station, ending):
    """Told with the documents that were read, whatever stands in their texts; not one that a single document has."""
    records = [{"text": f'{text} "urll": {number}', "url": str(number)} for number, text in enumerate(prose(40))]
    if ending == "jsonl":
        for record in records[1:]:
            del record["url"]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    elif ending == "parquet":
        pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    else:
        with open(tmp_path / "a.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "url"])
            writer.writeheader()
            writer.writerows(records)
    run, config = station
    for fields, absent in ((("url", "urll"), {"urll": 40}), (("url",), None), ((), None)):
        said, corpus = Summary(), corpus_of(tmp_path / f"a.{ending}", keep_fields=fields)
        counts = run(corpus, tmp_path / f"out{len(fields)}", config, progress=said).manifest.counts
        assert counts.get("absent_fields") == absent
        words = "; no document has the field to be kept 'urll' (of 40): is it spelled so?"
        assert said.line.endswith(words) == bool(absent)
