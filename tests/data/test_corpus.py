"""Reading documents: every format gives the same texts, and a bad record never stops the good ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megalite.data.corpus import Corpus
from megalite.data.documents import Document, Rejected
from megalite.data.recipe import DocumentSource
from megalite.errors import DataError
from tests.data.factory import corpus_of, write_json_lines

TEXTS = ["plain", "zwölf Bücher", "日本語\nsecond line", "tab\there", "🙂"]


def as_json_lines(folder: Path) -> Path:
    return write_json_lines(folder / "a.jsonl", TEXTS)


def as_gzip(folder: Path) -> Path:
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress(as_json_lines(folder).read_bytes()))
    return path


def as_zstd(folder: Path) -> Path:
    path = folder / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(as_json_lines(folder).read_bytes()))
    return path


def as_parquet(folder: Path) -> Path:
    pq.write_table(pa.table({"text": TEXTS, "stars": range(len(TEXTS))}), folder / "a.parquet")
    return folder / "a.parquet"


def as_arrow_stream(folder: Path) -> Path:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return folder / "a.arrow"


def as_arrow_file(folder: Path) -> Path:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return folder / "a.arrow"


def as_text_folder(folder: Path) -> Path:
    (folder / "deep" / "er").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / "deep" / "er" / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "deep" / "picture.png").write_bytes(b"\x89PNG")
    (folder / "deep" / ".hidden.txt").write_text("not read")
    return folder / "deep"


def as_dataset(folder: Path) -> Path:
    import datasets

    halves = {"train": TEXTS[:3], "test": TEXTS[3:]}
    splits = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in halves.items()}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "dataset"))
    return folder / "dataset"


FORMATS = [
    as_json_lines,
    as_gzip,
    as_zstd,
    as_parquet,
    as_arrow_stream,
    as_arrow_file,
    as_text_folder,
    as_dataset,
]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_texts(tmp_path, form):
    """In the same order, with distinct ids, under the name of the source."""
    documents = list(corpus_of(form(tmp_path), name="shelf").read())
    assert [document.text for document in documents] == TEXTS
    assert len({document.id for document in documents}) == len(TEXTS)
    assert {document.source for document in documents} == {"shelf"}


def test_ids_and_fields_can_be_named(tmp_path):
    """Given ids are kept, missing ones become file and line."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one", "key": 7}\n\n{"body": "two"}\n')
    documents = list(corpus_of(path, text_field="body", id_field="key").read())
    assert documents == [Document("7", "a.jsonl", "one"), Document("a.jsonl:3", "a.jsonl", "two")]


def test_bad_lines_are_put_aside_with_a_reason(tmp_path):
    """Each kind of bad record between good ones."""
    lines = [
        b'{"text": "good"}',
        b"not json",
        b'["a", "list"]',
        b"[" * 100_000,
        b'{"content": "wrong field"}',
        b'{"text": 5}',
        b'{"text": "caf\xe9"}',
        b'{"text": "half \\ud83d pair"}',
        b'{"text": "good too"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    records = list(corpus_of(path).read())
    assert [record.text for record in records if isinstance(record, Document)] == ["good", "good too"]
    assert [(record.id, record.reason) for record in records if isinstance(record, Rejected)] == [
        ("a.jsonl:2", "not a JSON object"),
        ("a.jsonl:3", "not a JSON object"),
        ("a.jsonl:4", "not a JSON object"),
        ("a.jsonl:5", "no text field, or not a string"),
        ("a.jsonl:6", "no text field, or not a string"),
        ("a.jsonl:7", "not UTF-8"),
        ("a.jsonl:8", "half of a surrogate pair"),
    ]
    assert r"caf\xe9" in records[6].text


def test_text_that_is_not_utf8(tmp_path):
    """Latin-1 files are put aside, readable as far as possible; the others are read."""
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes("été".encode("latin-1"))
    good, bad = corpus_of(tmp_path).read()
    assert good.text == "good"
    assert (bad.id, bad.reason, bad.text) == ("latin.txt", "not UTF-8", r"\xe9t\xe9")


@pytest.mark.parametrize(("name", "damage"), [("b.jsonl.gz", gzip.compress), ("b.jsonl.zst", zstandard.compress)])
def test_damaged_files_do_not_stop_the_others(tmp_path, name, damage):
    """A compressed file cut in the middle counts as one bad record."""
    write_json_lines(tmp_path / "a.jsonl", ["before"])
    whole = damage(json.dumps({"text": "x" * 100}).encode())
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and then nothing")
    write_json_lines(tmp_path / "d.jsonl", ["after"])
    records = list(corpus_of(tmp_path).read())
    assert [record.text for record in records if isinstance(record, Document)] == ["before", "after"]
    assert [record.reason for record in records if isinstance(record, Rejected)][-2:] == ["unreadable file"] * 2


def test_nulls_in_a_table_are_put_aside(tmp_path):
    """A missing text is no document."""
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    kinds = [type(record) for record in corpus_of(tmp_path / "a.parquet").read()]
    assert kinds == [Document, Rejected, Document]


def test_patterns_choose_files(tmp_path):
    """Given patterns replace the known suffixes; the order is that of the sorted paths."""
    for name in ("b.py", "a.cfg", "sub/c.cfg", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [d.text for d in corpus_of(tmp_path, include=("*.cfg",)).read()] == ["a.cfg", "sub/c.cfg"]
    assert [d.text for d in corpus_of(tmp_path).read()] == ["b.py", "d.txt"]


def test_max_mb_caps_the_text(tmp_path):
    """Whole documents up to the cap, counted in bytes."""
    path = write_json_lines(tmp_path / "a.jsonl", ["é" * 100] * 10)
    assert len(list(corpus_of(path, max_mb=0.0007).read())) == 3


def test_pythons_own_library_is_a_source():
    """Some known module is there, twice the same, no larger than asked for."""
    corpus = Corpus([DocumentSource(kind="python", max_mb=2)])
    documents = list(corpus.documents())
    assert documents == list(Corpus([DocumentSource(kind="python", max_mb=2)]).documents())
    assert "library/argparse.py" in {document.id for document in documents}
    assert 1e6 < sum(len(document.text.encode()) for document in documents) <= 2e6


def test_all_missing_sources_are_named(tmp_path):
    """Every path that is not there, and a folder without anything to read."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        corpus_of(tmp_path / "gone", tmp_path / "empty", tmp_path / "lost")
    message = str(caught.value)
    assert "gone: no such file or folder" in message
    assert "empty: no file to read; looked for *.jsonl" in message
    assert "lost: no such file or folder" in message


def test_a_table_without_the_column_names_its_columns(tmp_path):
    """With the nearest name."""
    pq.write_table(pa.table({"texts": ["a"], "url": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"no column 'text' \(did you mean 'texts'\?\); it has texts, url: set text_field"
    ):
        list(corpus_of(tmp_path / "a.parquet").read())


def test_a_source_without_one_readable_record_is_a_mistake(tmp_path):
    """The wrong field for a whole file is said at once, with what the first record looks like."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "wrong field"}\n' * 3)
    with pytest.raises(DataError, match=r"no document could be read; the first record, a\.jsonl:1.*wrong field"):
        list(corpus_of(path).read())


def test_fingerprints_follow_files_and_settings(tmp_path):
    """A changed file, another field: another fingerprint; the same files: the same."""
    path = write_json_lines(tmp_path / "a.jsonl", ["a", "b"])
    prints = [corpus_of(path).inputs[0][1], corpus_of(path).inputs[0][1], corpus_of(path, max_mb=1).inputs[0][1]]
    write_json_lines(path, ["a", "b", "c"])
    prints.append(corpus_of(path).inputs[0][1])
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
