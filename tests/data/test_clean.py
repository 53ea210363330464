"""Cleaning: what is repaired, what is rejected and why, the same with any number of workers."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from megalite.data.clean import clean, make_rules, repair
from megalite.data.recipe import CleanConfig
from megalite.errors import DataError
from tests.data.factory import all_bytes, corpus_of, prose, write_json_lines

OFF = {
    "min_chars": None,
    "max_chars": None,
    "min_alphanumeric_share": None,
    "max_repeated_line_share": None,
}


@pytest.mark.parametrize(
    ("raw", "repaired"),
    [
        ("a\r\nb\rc\x85d\u2028e", "a\nb\nc\nd\ne"),
        ("a\x00b\x07c\ufeffd\u200be", "abcde"),
        ("tabs\tstay\n    indents stay", "tabs\tstay\n    indents stay"),
        ("blanks at the end   \t\nof lines\u00a0 ", "blanks at the end\nof lines"),
        ("a\n\n\nb\n\n\n\n\n\nc", "a\n\n\nb\n\n\nc"),
        ("\n\n  first line keeps its indent\n\n", "  first line keeps its indent"),
        ("e\u0301", "\u00e9"),
        ("👨\u200d👩\u200d👧", "👨\u200d👩\u200d👧"),
    ],
)
def test_repair(raw, repaired):
    """Each repair, and what it must leave alone; repairing twice changes nothing."""
    assert repair(raw, unicode_nfc=True) == repaired
    assert repair(repaired, unicode_nfc=True) == repaired


def test_repair_is_linear_in_long_runs_of_blanks():
    """A million blanks inside a line, which would take minutes if each were tried as a beginning."""
    text = "a" + " " * 1_000_000 + "b"
    assert repair(text, unicode_nfc=True) == text


@pytest.mark.parametrize(
    ("setting", "value", "text", "reason"),
    [
        ("min_chars", 5, "four", "too short"),
        ("min_chars", 4, "four", None),
        ("max_chars", 3, "four", "too long"),
        ("max_chars", 4, "four", None),
        ("min_alphanumeric_share", 0.5, "ab--- ", "few letters and digits"),
        ("min_alphanumeric_share", 0.5, "äb1---", None),
        ("max_repeated_line_share", 0.4, "a\nb\na\n a \nb\n\n", "repeated lines"),
        ("max_repeated_line_share", 0.6, "a\nb\na\n a \nb\n\n", None),
        ("max_repeated_line_share", 0.0, "a\na\na\na", None),
    ],
)
def test_rules(setting, value, text, reason):
    """Each rule alone, on both sides of its threshold."""
    rules = make_rules(CleanConfig(**{**OFF, setting: value}))
    assert next((found for rule in rules if (found := rule(text))), None) == reason


def test_the_station_keeps_counts_and_rejects(tmp_path):
    """Kept documents are repaired, rejected ones as they came, and every reason is counted."""
    texts = ["a good and long enough text  ", "short", "!" * 60, "", "\n".join(["the same line again"] * 9)]
    path = write_json_lines(tmp_path / "a.jsonl", texts)
    with open(path, "ab") as file:
        file.write(b'{"text": "caf\xe9"}\n')
    result = clean(corpus_of(path), tmp_path / "out", CleanConfig(min_chars=20))
    kept = pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    assert kept == [{"id": "a.jsonl:1", "source": "a.jsonl", "text": "a good and long enough text"}]
    rejected = pq.read_table(tmp_path / "out" / "rejected" / "part-00000.parquet").to_pylist()
    assert [row["reason"] for row in rejected] == [
        "too short",
        "few letters and digits",
        "empty",
        "repeated lines",
        "not UTF-8",
    ]
    assert [row["text"] for row in rejected[:4]] == texts[1:]
    assert result.manifest.counts == {
        "documents_in": 6,
        "documents": 1,
        "text_bytes": 27,
        "rejected": {row["reason"]: 1 for row in sorted(rejected, key=lambda row: row["reason"])},
    }


def test_unreadable_records_stop_the_station_when_asked(tmp_path):
    """`on_error: fail` names the record and leaves nothing behind."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a good text"}\nbroken\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a JSON object; set on_error: reject"):
        clean(corpus_of(path), tmp_path / "out", CleanConfig(on_error="fail"))
    assert not list(tmp_path.glob("out*"))


def test_workers_change_nothing(tmp_path, monkeypatch):
    """One process and three leave equal bytes, over many batches, row groups and shards."""
    monkeypatch.setattr("megalite.data.documents.BATCH_CHARS", 2_000)
    monkeypatch.setattr("megalite.data.documents.ROW_GROUP_CHARS", 7_000)
    monkeypatch.setattr("megalite.data.documents.SHARD_CHARS", 30_000)
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", [*prose(300), "short", "!" * 99]))
    for num_workers in (1, 3):
        clean(corpus, tmp_path / str(num_workers), CleanConfig(), num_workers=num_workers)
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
