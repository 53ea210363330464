"""Records with what JSON, UTF-8 or the readers of later stations cannot hold: kept and spelt out, or put aside."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import Document, Rejected
from megalite.corpus.reading import columns
from megalite.corpus.recipe import CleanConfig, DocumentSource
from megalite.corpus.shards import ShardReading
from megalite.corpus.spans.settings import UrlDedupConfig
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.spans import url_dedup
from megalite.errors import DataError
from megalite.section import Section
from tests.kit.data import corpus_of, prose

ANSWER = '{"role": "assistant", "content": "b"}'
MESSAGES = '"messages": [{"role": "user", "content": "a"}, ' + ANSWER + "]}"
FINE = '{"text": "fine", "id": "f", ' + MESSAGES


def read(folder: Path, line: str, **settings: object) -> list[Document | Rejected]:
    """A record, and a fine one behind it."""
    path = folder / "raw.jsonl"
    path.write_text(f"{line}\n{FINE}\n")
    source: Section = DocumentSource(path=path, **settings)
    *found, fine = sorted(Corpus([source]).read(), key=lambda each: each.id == "f")
    assert isinstance(fine, Document)
    assert fine.id == "f"
    return found


@pytest.mark.parametrize(
    ("line", "id", "metadata"),
    [
        (r'{"text": "x", "id": "a\udc00"}', r"a\udc00", {}),
        (r'{"text": "x", "id": "a", "url": "http://x/\udc00"}', "a", {"url": r"http://x/\udc00"}),
        (r'{"text": "x", "id": "a", "url": {"\ud800": ["\ud800"]}}', "a", {"url": {r"\ud800": [r"\ud800"]}}),
        ('{"text": "x", "id": "a", "url": NaN}', "a", {"url": None}),
        ('{"text": "x", "id": "a", "url": [1, -Infinity, 1e999]}', "a", {"url": [1, None, None]}),
        ('{"text": "x", "id": "a", "url": 1' + 40 * "0" + "}", "a", {"url": 10**40}),
        (
            '{"text": "x", "id": "a", "url": [1' + 400 * "0" + ', -1e5, "1"]}',
            "a",
            {"url": ["1" + 400 * "0", -1e5, "1"]},
        ),
        ('{"text": "x", "id": "a", "url": 9' + 308 * "0" + "}", "a", {"url": "9" + 308 * "0"}),
        ('{"text": "x", "id": "a", "url": "' + 400 * "0" + '"}', "a", {"url": 400 * "0"}),
        ('{"text": "x", "id": 123456789012345678901, "url": 1e40}', "123456789012345678901", {"url": 1e40}),
        ('{"text": "x", "id": -9223372036854775809, "n": 12345678901234567890}', "-9223372036854775809", {}),
        (
            '{"text": "x", "id": "a", "url": {"b": [0, 123456789012345678901]}}',
            "a",
            {"url": {"b": [0, 10**20 + 23456789012345678901]}},
        ),
        ('{"text": "x", "id": "a", "url": ' + 99 * "[" + 99 * "]" + "}", "a", {"url": json.loads(99 * "[" + 99 * "]")}),
    ],
)
def test_what_is_kept_in_other_words(tmp_path: Path, line: str, id: str, metadata: dict):
    (found,) = read(tmp_path, line, keep_fields=("url",))
    assert isinstance(found, Document)
    assert (found.id, found.text) == (id, "x")
    assert json.loads(found.metadata or "{}") == metadata


@pytest.mark.parametrize("depth", [100, 500, 900, 1000])
@pytest.mark.parametrize("inside", ["", "NaN"])
def test_groups_too_deep(tmp_path: Path, depth: int, inside: str):
    (found,) = read(tmp_path, '{"text": "x", "url": ' + depth * "[" + inside + depth * "]" + "}", keep_fields=("url",))
    assert isinstance(found, Rejected)
    assert "groups" in found.reason or "JSON" in found.reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (r'{"id": "\ud800", ' + MESSAGES, None),
        (r'{"messages": [{"role": "user", "content": "a", "name": "\ud800"}, ' + ANSWER + "]}", "JSON cannot hold"),
        (r'{"messages": [{"role": "us\ud800er", "content": "a"}, ' + ANSWER + "]}", r"us\ud800er"),
        ('{"s": NaN, ' + MESSAGES, None),
        (
            '{"s": ' + 300 * "[" + 300 * "]" + ", " + MESSAGES,
            "groups",
        ),
    ],
)
def test_conversations(tmp_path: Path, line: str, reason: str | None):
    (found,) = read(tmp_path, line, conversations="auto", keep_fields=("s",))
    if reason is None:
        assert isinstance(found, Document)
    else:
        assert isinstance(found, Rejected)
        assert reason in found.reason


DEEP = [levels * "[" + levels * "]" for levels in (300, 985, 990, 995, 1000, 1005, 1010, 1015, 1020, 1023, 5000)]


@pytest.mark.parametrize("deep", DEEP, ids=lambda deep: f"{len(deep) // 2} levels")
@pytest.mark.parametrize("before", ['"id": ', '"role": "user", "tool_calls": ', '"other": ', '"url": '])
def test_no_line_is_too_deep_for_a_station(tmp_path: Path, before: str, deep: str):
    """Whatever field it is in: a document, or put aside by name; also as the role of a message, or in what is no
    conversation anyway."""
    for settings in ({}, {"conversations": "auto"}):
        for line in (
            '{"text": "x", ' + before + deep + ', "messages": [{"role": "user", "content": "a"}, ' + ANSWER + "]}",
            '{"messages": [{"role": "user", "content": "a"}, ' + ANSWER[:-1] + ", " + before + deep + "}]}",
            '{"messages": [{"role": ' + deep + "}], " + before + deep + "}",
        ):
            (found,) = read(tmp_path, line, keep_fields=("url",), **settings)
            assert isinstance(found, Document) or len(found.reason) < 100


@pytest.mark.parametrize("weight", [10**400, -(10**400), float("inf")])
def test_weights_beyond_all_numbers(tmp_path: Path, weight: float):
    (found,) = read(tmp_path, '{"weight": ' + json.dumps(weight) + ", " + MESSAGES, conversations="auto")
    assert isinstance(found, Rejected)
    assert found.reason.startswith("conversation: weight ")


def test_one_bad_record_of_an_array_costs_no_other(tmp_path: Path):
    """As in lines: a NaN and a mark at the beginning are forgiven, half of a surrogate pair is one record's fault."""
    good = '{"s": NaN, ' + MESSAGES
    bad = r'{"messages": [{"role": "user", "content": "\ud800"}, ' + ANSWER + "]}"
    path = tmp_path / "raw.json"
    path.write_text(f"\ufeff[{good}, {bad}, [[]], {good}]")
    found = list(Corpus([DocumentSource(path=path, conversations="auto")]).read())
    assert [each.id for each in found] == ["raw.json:1", "raw.json:4", "raw.json:2", "raw.json:3"]
    assert [getattr(each, "reason", "") for each in found[2:]] == [
        "conversation: half of a surrogate pair",
        "not a JSON object",
    ]
    for content in (b"[{", b'[{"messages": "\xff"}]'):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"the first record, raw\.json, was refused \(not (a JSON object|UTF-8)\)"):
            list(Corpus([DocumentSource(path=path, conversations="auto")]).read())


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"caf\xe9.jsonl"])
def test_names_of_files_that_are_no_utf8(tmp_path: Path, name: bytes):
    folder = tmp_path / "raw"
    folder.mkdir()
    (text,) = prose(1)
    text = text if name.endswith(b"txt") else json.dumps({"text": text})
    with open(os.fsencode(folder) + b"/" + name, "w") as file:
        file.write(text + "\n")
    clean(Corpus([DocumentSource(path=folder)]), tmp_path / "clean", CleanConfig())
    (found,) = corpus_of(tmp_path / "clean").read()
    assert found.id.startswith("caf\\xe9.")


def test_later_stations_read_what_is_no_number(tmp_path: Path):
    record = {"text": prose(1)[0], "url": "http://a/b", "score": float("nan"), "size": 10**400}
    (tmp_path / "raw.jsonl").write_text(json.dumps(record) + "\n")
    source = DocumentSource(path=tmp_path / "raw.jsonl", keep_fields=("url", "score", "size"))
    clean(Corpus([source]), tmp_path / "clean", CleanConfig())
    url_dedup(corpus_of(tmp_path / "clean"), tmp_path / "urls", UrlDedupConfig())
    (found,) = corpus_of(tmp_path / "urls").read()
    assert json.loads(found.metadata) == {"url": "http://a/b", "score": None, "size": str(10**400)}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_dictionary_with_a_long_text(tmp_path, monkeypatch, suffix):
    """Which many rows share: it was written out for all of them at once."""
    monkeypatch.setattr(columns, "BATCH_BYTES", 10_000)
    texts = ["x" * 4000, None, "y"] * 100
    table = pa.table({"text": pa.array(texts).dictionary_encode(), "id": [str(row) for row in range(300)]})
    if suffix == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    (shard,) = corpus_of(tmp_path).shards()
    batches = list(ShardReading(shard))
    assert max(batch.texts.num_bytes for batch in batches) <= 10_000
    found = {each.id: each.text for batch in batches for each in batch.records() if isinstance(each, Document)}
    assert found == {str(number): text for number, text in enumerate(texts) if text is not None}


ODD_COLUMNS = {
    "lists": pa.array([["a text"], [], None]),
    "structs": pa.array([{"de": "ein Text"}, {"de": None}, None]),
    "maps": pa.array([[("de", "ein Text")], [], None], pa.map_(pa.string(), pa.string())),
    "bytes that are no UTF-8, in lists": pa.array([[b"\xff"], [], None])
    .cast(pa.list_(pa.binary()))
    .view(pa.list_(pa.string())),
    "dates": pa.array([10**8, 1, None], pa.date32()),
}


@pytest.mark.parametrize("kind", ODD_COLUMNS)
def test_a_column_of_texts_that_holds_none(tmp_path, kind):
    """Its rows are put aside one by one, as of any other type; the file counted as damaged."""
    pq.write_table(pa.table({"text": ODD_COLUMNS[kind], "id": ["a", "b", "c"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["fine"]}), tmp_path / "b.parquet")
    records = list(corpus_of(tmp_path).read())
    assert [each.text for each in records if isinstance(each, Document)] == ["fine"]
    bad = [(each.id, each.reason) for each in records if isinstance(each, Rejected)]
    assert bad == [(name, "no text field, or not a string") for name in "abc"]
