"""Comma- and tab-separated values: what a row holds does not depend on other rows, and no column is guessed."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import Document, Rejected
from megalite.corpus.reading import csv_tables
from megalite.corpus.recipe import DocumentSource
from megalite.corpus.shards import ShardReading
from megalite.errors import DataError

KEPT = ("zip", "note")


def read(path: Path, **settings: object) -> list[Document | Rejected]:
    return list(Corpus([DocumentSource(path=path, **settings)]).read())


def read_kept(path: Path) -> list[tuple[str, dict]]:
    """Texts, and their kept fields."""
    found = read(path, keep_fields=KEPT)
    assert all(isinstance(each, Document) for each in found)
    return [(each.text, json.loads(each.metadata)) for each in found]


def value_of(cell: str, rng: random.Random) -> str:
    drawn = ["0", "007", "7", "-3.25", "1.50", "1e3", "12345678901234567891", "0.1234567890123456789", "true", "n/a"]
    return rng.choice([*drawn, "", " 8", cell, 'a "quoted", cell', "two\nlines", "é\u2028"])


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_that_were_written(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever stands in other rows and columns, by blocks of any size, packed or not."""
    monkeypatch.setattr(csv_tables, "CSV_BLOCK_BYTES", 1 << 12)
    rng, suffix = random.Random(seed), ("csv", "tsv", "csv.gz", "csv")[seed]
    rows = [[value_of(f"c{n}", rng) for _ in range(3)] + [f"text {n}"] for n in range(2000)]
    path = tmp_path / f"a.{suffix}"
    text = io.StringIO(newline="")
    csv.writer(text, delimiter="\t" if suffix == "tsv" else ",").writerows([["zip", "unread", "note", "text"], *rows])
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    for (text, kept), row in zip(read_kept(path), rows, strict=True):
        assert text == row[3]
        for name, cell in (("zip", row[0]), ("note", row[2])):
            found = kept[name]
            assert found == {"": None, "7": 7, "0": 0, "-3.25": -3.25, "1.50": 1.5, "1e3": 1000.0}.get(
                cell, 12345678901234567891 if cell.startswith("12345") else cell
            )


def test_a_column_that_nobody_reads_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its first block holds numbers, a later one a text."""
    monkeypatch.setattr(csv_tables, "CSV_BLOCK_BYTES", 1 << 12)
    path = tmp_path / "a.csv"
    path.write_text("text,score\n" + "a text,1\n" * 2000 + "the odd one,n/a yet\n" + "a text,2\n" * 10)
    assert len(read(path)) == 2011


def test_rows_with_another_number_of_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Count as rows, so that no two records have one name: rows behind them were called like those before."""
    monkeypatch.setattr(csv_tables, "CSV_BLOCK_BYTES", 1 << 10)
    rows = ["bad" if number % 5 == 2 else f'"row {number}\n",x' for number in range(1, 500)]
    (tmp_path / "a.csv").write_text("text,note\n" + "\n\n".join(rows))
    found = read(tmp_path / "a.csv")
    texts = {each.id: each.text.strip() for each in found}
    assert len(texts) == len(found) == 499
    assert texts == {f"a.csv:{n}": "bad" if n % 5 == 2 else f"row {n}" for n in range(1, 500)}


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
@pytest.mark.parametrize("row", ['2,"a text, cut', '2,"a text', '"2', '2,a text,"and more'])
def test_a_quote_that_is_never_closed(row: str, suffix: str, tmp_path: Path):
    """Costs its row, which holds the rest of the file; that is told and counted."""
    pack = gzip.compress if suffix.endswith("gz") else bytes
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(pack(f'id,text\n1,"good ""one"" 5\n"\n{row}\n3,third\n4,fourth\n'.encode()))
    corpus = Corpus([DocumentSource(path=path)])
    (shard,) = corpus.shards()
    reading = ShardReading(shard)
    good, bad = sorted((each for batch in reading for each in batch.records()), key=lambda each: each.id)
    assert (good.text, bad.id) == ('good "one" 5\n', f"a.{suffix}:2")
    assert bad.text.endswith("4,fourth\n")
    assert bad.reason == csv_tables.UNCLOSED
    assert reading.report()["lost"] == {"damaged_files": 1}


@pytest.mark.parametrize("rest", ['2,"closed"', '2,5" pipes', "2,", '2,a "', '2,"closed"\n\n\n'])
def test_a_quote_at_the_end_is_no_fault(rest: str, tmp_path: Path):
    (tmp_path / "a.csv").write_text(f"id,text\n1,one\n{rest}")
    found = read(tmp_path / "a.csv")
    assert [type(each) for each in found] == [Document] * 2


def test_an_empty_id(tmp_path: Path):
    """Is none, so that the row is called by its place; several would have one name."""
    rows = ',one\n"",two\nx,three\n'
    (tmp_path / "a.csv").write_text(f"id,text\n{rows}")
    (tmp_path / "b.csv").write_text(f"id,prompt,completion\n{rows}".replace("one", "one,1").replace("two", "two,2"))
    assert [each.id for each in read(tmp_path / "a.csv")] == ["a.csv:1", "a.csv:2", "x"]
    found = read(tmp_path / "b.csv", conversations="prompt_completion")
    assert sorted(each.id for each in found) == ["b.csv:1", "b.csv:2", "b.csv:3"]


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_names_without_rows(suffix: str, end: str, tmp_path: Path):
    """Are no damage; so did a last line without its end count."""
    pack = gzip.compress if suffix.endswith("gz") else bytes
    (tmp_path / f"a.{suffix}").write_bytes(pack(f"id,text{end}".encode()))
    (tmp_path / "b.csv").write_text("id,text\n1,good")
    assert [each.id for each in read(tmp_path)] == ["1"]


def test_a_file_without_names(tmp_path: Path):
    """What stands in their place is told, short or long; of an empty file, that it is one."""
    path = tmp_path / "a.csv"
    long, empty = (200_000 * "a" + ",b\n", "write the names"), ("", "Empty CSV file")
    for content, said in (("a text,b\n", "no column 'text'"), long, empty):
        path.write_text(content)
        with pytest.raises(DataError, match=said):
            read(path)


@pytest.mark.parametrize("name", ["text", "note"])
def test_two_columns_of_one_name(name: str, tmp_path: Path):
    """Of those that are read are refused, in every kind of table; others are no matter."""
    (tmp_path / "a.csv").write_text(f"text,note,{name}\na,b,c\n")
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["text", "note", name])
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for suffix in ("csv", "parquet", "arrow"):
        with pytest.raises(DataError, match=f"2 columns are called '{name}'"):
            read(tmp_path / f"a.{suffix}", keep_fields=("note",))
    if name != "text":
        assert len(read(tmp_path / "a.csv")) == 1


@pytest.mark.parametrize("role", ["keep_fields", "id_field"])
@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.list_(pa.date32())])
def test_dates_that_python_has_not(role: str, kind: pa.DataType, tmp_path: Path):
    """Of the year 10000 are spelt out; those of other rows are as ever."""
    numbers = [19860 * 86400 * 10**6, 10**18] if pa.types.is_timestamp(kind) else [19860, 10**8]
    values = pa.array([[each] for each in numbers] if pa.types.is_list(kind) else numbers, kind)
    pq.write_table(pa.table({"text": ["a", "b"], "when": values}), tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet", **{role: ("when",) if role == "keep_fields" else "when"})
    assert isinstance(first, Document)
    assert isinstance(second, Document)
    told = [json.loads(each.metadata)["when"] if role == "keep_fields" else each.id for each in (first, second)]
    assert "2024" in str(told[0])
    assert "33658" in str(told[1]) or "out of range" in str(told[1])
