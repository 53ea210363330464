"""Reading documents: every format gives the same texts, and a bad record never stops the good ones."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import Document, Rejected
from megalite.corpus.recipe import DocumentSource
from megalite.errors import DataError
from tests.kit.data import corpus_of, write_json_lines

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


def as_views(folder: Path) -> Path:
    table = pa.table({"text": pa.array(TEXTS, pa.string_view()), "stars": range(len(TEXTS))})
    pq.write_table(table, folder / "a.parquet")
    return folder / "a.parquet"


def as_dictionary(folder: Path) -> Path:
    table = pa.table({"text": pa.array(TEXTS).dictionary_encode(), "stars": range(len(TEXTS))})
    pq.write_table(table, folder / "a.parquet")
    return folder / "a.parquet"


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


def as_csv(folder: Path) -> Path:
    """Quoted texts with commas and line ends, compressed."""
    rows = "".join('{},"{}"\n'.format(number, text.replace('"', '""')) for number, text in enumerate(TEXTS))
    (folder / "a.csv.gz").write_bytes(gzip.compress(f"number,text\n{rows}".encode()))
    return folder / "a.csv.gz"


def as_wet(folder: Path) -> Path:
    """Plain text as a crawl delivers it."""
    records = []
    for number, text in enumerate(TEXTS):
        body = text.encode()
        head = (
            f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://example.com/{number}\r\n"
            f"WARC-Date: 2026-01-01T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:{number}>\r\nContent-Type: text/plain\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        records.append(gzip.compress(head.encode() + body + b"\r\n\r\n"))
    (folder / "a.wet.gz").write_bytes(b"".join(records))
    return folder / "a.wet.gz"


FORMATS = [
    as_csv,
    as_wet,
    as_json_lines,
    as_gzip,
    as_zstd,
    as_parquet,
    as_views,
    as_dictionary,
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


def test_fields_are_kept_where_asked(tmp_path):
    """As a JSON object beside the text, from lines, columns and web archives."""
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one", "url": "http://a", "n": 1, "other": 2}\n{"text": "two"}\n')
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one"], "url": ["http://a"], "n": [1]}), table)
    found = [json.loads(d.metadata) for d in corpus_of(lines, table, keep_fields=("url", "n")).read()]
    assert found == [{"url": "http://a", "n": 1}, {}, {"url": "http://a", "n": 1}]
    (page,) = list(corpus_of(as_wet(tmp_path), keep_fields=("url",)).read())[:1]
    assert json.loads(page.metadata) == {"url": "http://example.com/0"}


def test_rows_of_a_csv_file_with_other_columns_are_put_aside(tmp_path):
    """Too few or too many fields, with the number of the row."""
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,good\n2,too,many\n3\n4,good too\n")
    records = list(corpus_of(path).read())
    assert [(r.id, r.text) for r in records if isinstance(r, Document)] == [("1", "good"), ("4", "good too")]
    assert {r.reason for r in records if isinstance(r, Rejected)} == {"row with another number of columns"}


def test_web_pages_become_their_text(tmp_path):
    """An HTML file gives its main text, without tags, scripts and menus."""
    page = "<html><head><script>var x;</script></head><body><nav>menu</nav><p>" + "A sentence. " * 30 + "</p></body>"
    (tmp_path / "a.html").write_text(page)
    (document,) = corpus_of(tmp_path).read()
    assert "A sentence." in document.text
    assert "<p>" not in document.text
    assert "var x" not in document.text


def test_large_files_are_cut_at_line_ends(tmp_path, monkeypatch):
    """Every shard of a large file reads its own lines, and ids count from the beginning of the file."""
    path = write_json_lines(tmp_path / "a.jsonl", [f"{number}: {'x' * (number % 37)}" for number in range(2000)])
    whole = list(corpus_of(path).read())
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 5_000)
    assert len(corpus_of(path).shards()) > 10
    assert list(corpus_of(path).read()) == whole
    pq.write_table(pa.table({"text": [record.text for record in whole]}), tmp_path / "b.parquet", row_group_size=50)
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 500)
    assert len(corpus_of(tmp_path / "b.parquet").shards()) > 3
    rows = list(corpus_of(tmp_path / "b.parquet").read())
    assert [row.text for row in rows] == [record.text for record in whole]
    assert [row.id for row in rows] == [f"b.parquet:{number}" for number in range(1, 2001)]


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
    assert any(r"caf\xe9" in record.text for record in records)


@pytest.mark.parametrize(("suffix", "pack"), [(".GZ", gzip.compress), (".Zst", zstandard.compress)])
def test_a_suffix_in_capital_letters(tmp_path, suffix, pack):
    """Of a compression as of a format; in a folder and by itself."""
    (tmp_path / f"a.JSONL{suffix}").write_bytes(pack(b'{"text": "packed"}\n'))
    for path in (tmp_path, tmp_path / f"a.JSONL{suffix}"):
        (record,) = corpus_of(path).read()
        assert record.text == "packed"


def test_text_that_is_not_utf8(tmp_path):
    """Latin-1 files are put aside, readable as far as possible; the others are read."""
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes("été".encode("latin-1"))
    good, bad = corpus_of(tmp_path).read()
    assert good.text == "good"
    assert (bad.id, bad.reason, bad.text) == ("latin.txt", "not UTF-8", r"\xe9t\xe9")


@pytest.mark.parametrize(("name", "damage"), [("b.jsonl.gz", gzip.compress), ("b.jsonl.zst", zstandard.compress)])
def test_damaged_files_do_not_stop_the_others(tmp_path, name, damage):
    """A compressed file cut in the middle, and one that is no table, count as one bad record each."""
    write_json_lines(tmp_path / "a.jsonl", ["before"])
    whole = damage(json.dumps({"text": "x" * 100}).encode())
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and then nothing")
    write_json_lines(tmp_path / "d.jsonl", ["after"])
    records = list(corpus_of(tmp_path).read())
    assert [record.text for record in records if isinstance(record, Document)] == ["before", "after"]
    assert [record.reason for record in records if isinstance(record, Rejected)][-2:] == [
        "damaged file",
        "unreadable file",
    ]


def test_nulls_in_a_table_are_put_aside(tmp_path):
    """A missing text is no document."""
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    records = [(record.id, type(record)) for record in corpus_of(tmp_path / "a.parquet").read()]
    assert records == [("a.parquet:1", Document), ("a.parquet:3", Document), ("a.parquet:2", Rejected)]


def test_patterns_choose_files(tmp_path):
    """Given patterns replace the known suffixes; the order is that of the sorted paths."""
    for name in ("b.py", "a.cfg", "sub/c.cfg", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [d.text for d in corpus_of(tmp_path, include=("*.cfg",)).read()] == ["a.cfg", "sub/c.cfg"]
    assert [d.text for d in corpus_of(tmp_path).read()] == ["b.py", "d.txt"]


def test_links_to_folders_are_followed(tmp_path):
    """Each folder is read once, by its own name where it has one in the source; circles and hidden links do no harm."""
    raw, other = tmp_path / "raw", tmp_path / "other"
    for folder in (raw / "real", other / "inner"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(folder.name)
    (tmp_path / "elsewhere").symlink_to(other)
    for link, target in {
        "a": raw / "real",
        "b": tmp_path / "elsewhere",
        "c": other / "inner",
        "real/up": raw,
        ".hidden": tmp_path,
        "gone": tmp_path / "nowhere",
    }.items():
        (raw / link).symlink_to(target)
    (other / "back").symlink_to(raw)
    found = {record.id: record.text for record in corpus_of(raw).read()}
    assert found == {"b/inner/a.txt": "inner", "real/a.txt": "real"}


@pytest.mark.parametrize(
    ("name", "said"),
    [("a.tar", "tar archive"), ("a.tar.gz", "tar archive"), ("a.warc.zst", "only .gz"), ("a.wet.bz2", "only .gz")],
)
def test_packed_files_that_are_not_read(tmp_path, name, said):
    """Are refused with what to do: a tar became one document, its headers between the texts."""
    file = tarfile.TarInfo("text.txt")
    file.size = 4
    with tarfile.open(tmp_path / name, "w:gz" if name.endswith(".gz") else "w") as archive:
        archive.addfile(file, io.BytesIO(b"text"))
    with pytest.raises(DataError, match=f"{said}.*: unpack it"):
        list(corpus_of(tmp_path / name).read())


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


def test_what_is_no_file_is_named(tmp_path):
    """Below a folder or by itself: a pipe, which nobody may ever write to, and a link to nothing."""
    (tmp_path / "text.txt").write_text("a")
    pipe, link = tmp_path / "pipe.txt", tmp_path / "link.txt"
    os.mkfifo(pipe)
    for root in (tmp_path, pipe):
        with pytest.raises(DataError, match=r"pipe\.txt: not a file; a pipe"):
            corpus_of(root)
    pipe.unlink()
    link.symlink_to("nothing")
    with pytest.raises(DataError, match=r"link\.txt: No such file or directory; remove it"):
        corpus_of(tmp_path)


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


def test_an_empty_path_is_no_folder():
    """It would be the current one."""
    with pytest.raises(ValueError, match="empty; name a file or folder"):
        DocumentSource(path="")
