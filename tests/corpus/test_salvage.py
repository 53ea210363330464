"""Damaged and hostile files: what lies before the damage is read, what is lost is counted, and memory stays bounded."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import Document, Rejected
from megalite.corpus.reading.decompression import DECODERS, Content
from megalite.corpus.recipe import CleanConfig, DedupConfig, DocumentSource
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.dedup import dedup
from megalite.errors import DataError
from tests.kit.data import corpus_of, prose, write_json_lines

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
MANY_TEXTS = prose(2000)
MANY_LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in MANY_TEXTS)
LINES = MANY_LINES[: MANY_LINES.index(b"\n", 60_000) + 1]


def unpack(data: bytes, suffix: str, max_expansion: float = 200) -> tuple[bytes, Content]:
    content = Content(io.BytesIO(data), suffix, max_expansion)
    return io.BufferedReader(content, 1 << 16).read(), content


@pytest.mark.parametrize("suffix", DECODERS)
def test_whole_files(suffix, monkeypatch):
    """One member, several, empty ones, none, and padding behind them, however long."""
    pack = PACK[suffix]
    whole = pack(LINES)
    cases = [(whole, 1), (whole + whole, 2), (pack(b"") + whole + pack(b""), 1), (whole + bytes(512), 1)]
    monkeypatch.setattr(DECODERS[suffix], "step", 1 << 10)
    cases += [(whole + bytes(1_100_000), 1), (whole + bytes(1_100_000) + whole + bytes(3), 2)]
    for data, times in cases:
        found, content = unpack(data, suffix)
        assert found == LINES * times
        assert content.damage is None


@pytest.mark.parametrize("suffix", DECODERS)
def test_much_out_of_the_last_bytes(suffix, monkeypatch):
    """More than one step unpacks. What bzip2 held back at the end was lost, and a sound file called damaged."""
    monkeypatch.setattr("megalite.corpus.reading.decompression.MOST_PIECES", 4)
    text = b"a" * 3_000_000
    found, content = unpack(PACK[suffix](text), suffix, max_expansion=1e6)
    assert content.damage is None
    assert found == text


def test_frames_of_zstd_without_content(tmp_path):
    """As pzstd writes them between the others."""
    skippable = b"\x5a\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    found, content = unpack(skippable + PACK[".zst"](LINES), ".zst")
    assert found == LINES
    assert content.damage is None


@pytest.mark.parametrize("suffix", DECODERS)
def test_cut_and_flipped_files(suffix):
    """Whatever comes out of a cut file is how it began, and the damage is told; a flipped bit is told as well."""
    whole, rng = PACK[suffix](LINES), random.Random(1)
    for _ in range(40):
        cut = rng.randrange(1, len(whole))
        found, content = unpack(whole[:cut], suffix)
        assert LINES.startswith(found)
        assert content.damage is not None
        flipped = bytearray(whole)
        flipped[cut] ^= 1 << rng.randrange(8)
        found, content = unpack(bytes(flipped), suffix)
        if content.damage is None:  # a bit of the header that means nothing, or a time or name in it
            assert found == LINES
    found, content = unpack(whole + b"something else", suffix)
    assert found == LINES
    assert content.damage == (len(whole), "something else begins here", False)


def test_gzip_gives_every_byte_before_the_damage():
    """As many as the library gives when it is fed one byte after the other."""
    whole, rng = gzip.compress(LINES), random.Random(2)
    for _ in range(25):
        bad = bytearray(whole)
        at = rng.randrange(20, len(whole))
        bad[at] ^= rng.randrange(1, 256)
        decoder, expected = zlib.decompressobj(wbits=31), b""
        try:
            for byte in bad:
                expected += decoder.decompress(bytes([byte]))
        except zlib.error:
            pass
        assert unpack(bytes(bad), ".gz")[0] == expected


def damaged_lines(folder: Path, suffix: str) -> int:
    """A file of lines of which a part behind the middle was lost; how many bytes it has."""
    data = bytearray(PACK[suffix](MANY_LINES))
    middle = len(data) * 2 // 3
    data[middle : middle + 4096] = bytes(4096)
    folder.mkdir(exist_ok=True)
    (folder / f"a.jsonl{suffix}").write_bytes(bytes(data))
    return len(data)


@pytest.mark.parametrize("suffix", DECODERS)
def test_records_before_the_damage_are_read(tmp_path, suffix):
    """In their order, and no half one, though what is wrong in the middle does not stop every decoder; the file is
    named once, with the bytes that are lost; the files around it are read."""
    write_json_lines(tmp_path / "raw" / "0.jsonl", ["the file before"])
    damaged_lines(tmp_path / "raw", suffix)
    write_json_lines(tmp_path / "raw" / "b.jsonl", ["the next file"])
    records = list(corpus_of(tmp_path / "raw").read())
    first, *texts, last = [record.text for record in records if isinstance(record, Document)]
    assert (first, last) == ("the file before", "the next file")
    assert texts == MANY_TEXTS[: len(texts)]
    if suffix in (".gz", ".xz"):  # the others check blocks of the size of this file
        assert 0.5 * len(MANY_TEXTS) < len(texts) < 0.67 * len(MANY_TEXTS)
    bad = [record for record in records if isinstance(record, Rejected)]
    (named,) = [record for record in bad if record.reason == "damaged file"]
    assert named.id == f"a.jsonl{suffix}"
    assert "bytes from there on are lost" in named.text
    assert len(bad) <= 2  # the line at which it showed


def test_a_bad_record_in_a_cut_file_is_only_a_bad_record(tmp_path):
    """What is cut off is right as far as it goes."""
    lines = LINES[: len(LINES) // 2] + b"\nbroken\n" + LINES
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    records = list(corpus_of(tmp_path).read())
    assert sum(isinstance(record, Document) for record in records) > 1.2 * LINES.count(b"\n")
    reasons = {record.reason for record in records if isinstance(record, Rejected)}
    assert reasons == {"damaged file", "not a JSON object"}


def test_what_is_lost_is_counted(tmp_path):
    """In the manifest of each station that reads raw files, and in the line that sums it up."""
    num_bytes = damaged_lines(tmp_path / "raw", ".gz")
    told = []

    class Listening:
        def start(self, *_):
            pass

        def advance(self, *_):
            pass

        def finish(self, summary):
            told.append(summary)

    for station, config in ((clean, CleanConfig(min_chars=1)), (dedup, DedupConfig())):
        out = tmp_path / station.__name__
        counts = station(corpus_of(tmp_path / "raw"), out, config, progress=Listening()).manifest.counts
        assert counts["documents"] > 1000
        assert counts["rejected"]["damaged file"] == 1
        assert counts["lost"]["damaged_files"] == 1
        assert 0.1 * num_bytes < counts["lost"]["compressed_bytes"] < 0.4 * num_bytes
        assert "compressed bytes, 1 damaged files (see rejected/)" in told[-1]
    with pytest.raises(DataError, match=r"a\.jsonl\.gz.*; set on_error: reject"):
        clean(corpus_of(tmp_path / "raw"), tmp_path / "strict", CleanConfig(on_error="fail"))


def test_whole_documents_and_rows_only(tmp_path):
    """A text file that is cut is no document, and the row at which a table is cut is none."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(LINES)[:-20])
    rows = "id,text\n" + "".join(f'{number},"text {number}\nof two lines"\n' for number in range(2000))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(rows.encode())[:-2000])
    records = list(corpus_of(tmp_path).read())
    texts = [record.text for record in records if isinstance(record, Document)]
    assert texts == [f"text {number}\nof two lines" for number in range(len(texts))]
    assert 100 < len(texts) < 1900
    bad = [(record.id, record.reason) for record in records if isinstance(record, Rejected)]
    assert ("a.txt.gz", "damaged file") in bad
    assert ("b.csv.gz", "damaged file") in bad
    assert len(bad) <= 3  # the row at the end, if it has too few columns


@pytest.mark.parametrize(("end", "is_refused"), [(b"ro", True), (b"row 2,", False), (b'"row 2', True)])
def test_a_table_that_is_cut_in_its_first_column(tmp_path, end, is_refused):
    """The cut row is put aside for its columns, or left out; the whole one before it stays either way."""
    packer = zlib.compressobj(wbits=31)
    content = packer.compress(b"text,x\nbad\nrow 1,1\n" + end) + packer.flush(zlib.Z_FULL_FLUSH)
    (tmp_path / "a.csv.gz").write_bytes(content)
    records = list(corpus_of(tmp_path).read())
    assert [(each.id, each.text) for each in records if isinstance(each, Document)] == [("a.csv.gz:2", "row 1")]
    bad = [each.id for each in records if isinstance(each, Rejected)]
    assert bad == ["a.csv.gz:1", *(["a.csv.gz:3"] if is_refused else []), "a.csv.gz"]


@pytest.mark.parametrize("names", [b"id,te", b"te", b""])
def test_a_table_that_is_cut_in_the_names_of_its_columns(tmp_path, names):
    """Is a damaged file like others: it was a table without the column that is read, which stops a source."""
    packer = zlib.compressobj(wbits=31)
    (tmp_path / "a.csv.gz").write_bytes(packer.compress(names) + packer.flush(zlib.Z_FULL_FLUSH))
    (tmp_path / "b.csv").write_text("id,text\n1,good\n")
    bad, good = corpus_of(tmp_path).read()
    assert (bad.id, bad.reason, good.text) == ("a.csv.gz", "damaged file", "good")


def test_a_damaged_row_group_costs_its_rows(tmp_path):
    """The others are read with their own numbers, and the rows are counted."""
    table = pa.table({"text": [f"{number} {'x' * 200}" for number in range(1000)]})
    path = tmp_path / "a.parquet"
    options = {"write_page_checksum": True, "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, path, row_group_size=100, **options)
    place = pq.ParquetFile(path).metadata.row_group(4).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[place + 60 : place + 90] = bytes(30)
    path.write_bytes(bytes(data))
    records = list(corpus_of(path).read())
    documents = [record for record in records if isinstance(record, Document)]
    assert [record.id for record in documents] == [f"a.parquet:{n}" for n in (*range(1, 401), *range(501, 1001))]
    (bad,) = [record for record in records if isinstance(record, Rejected)]
    assert (bad.id, bad.reason) == ("a.parquet:401", "damaged file")
    assert bad.text.startswith("rows 401 to 500 lost: ")
    counts = clean(corpus_of(path), tmp_path / "out", CleanConfig(min_chars=1)).manifest.counts
    assert counts["lost"] == {"damaged_files": 1, "rows": 100}


def read_unless_no_column(folder: Path) -> list[Document | Rejected] | None:
    """All records; None where the damage hit the name of the column."""
    try:
        return list(corpus_of(folder).read())
    except DataError as error:
        if "no column 'text'" not in str(error):
            raise
        return None


def test_damaged_parquet_of_any_kind(tmp_path):
    """Bytes changed anywhere in a table: documents or rejects, never another error."""
    pq.write_table(pa.table({"text": prose(200), "id": list(range(200))}), tmp_path / "a.parquet", row_group_size=40)
    whole, rng = (tmp_path / "a.parquet").read_bytes(), random.Random(4)
    write_json_lines(tmp_path / "b.jsonl", ["good"])
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 4, 64])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "a.parquet").write_bytes(bytes(data))
        records = read_unless_no_column(tmp_path)
        if records is None:
            continue
        assert Document("b.jsonl:1", tmp_path.name, "good") in records


def test_damaged_arrow_files(tmp_path):
    """A batch that cannot be read does not cost the others."""
    path = tmp_path / "a.arrow"
    batches = [pa.record_batch({"text": [f"batch {number}, row {row}" for row in range(50)]}) for number in range(6)]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    whole, rng = path.read_bytes(), random.Random(5)
    write_json_lines(tmp_path / "b.jsonl", ["good"])
    found = set()
    for _ in range(60):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))
        records = read_unless_no_column(tmp_path)
        if records is None:
            continue
        assert records[-1 if isinstance(records[-1], Document) else -2].text is not None
        found.add(sum(isinstance(record, Document) for record in records))
    assert 251 in found  # one of the six batches lost


def test_a_record_that_is_too_large_before_the_damage(tmp_path):
    """Costs itself alone: lines behind it, unpacked with it before the damage was met, are as good as others."""
    packer = zlib.compressobj(0, zlib.DEFLATED, 31)
    long = json.dumps({"text": "x" * 5000}).encode() + b"\n"
    whole = packer.compress(long + LINES) + packer.flush(zlib.Z_FULL_FLUSH)
    (tmp_path / "a.jsonl.gz").write_bytes(whole + b"\x07" + b"\xff" * 100)
    records = list(corpus_of(tmp_path / "a.jsonl.gz", max_record_mb=0.002).read())
    assert [record.reason for record in records if isinstance(record, Rejected)] == ["record too large", "damaged file"]
    assert sum(isinstance(record, Document) for record in records) == LINES.count(b"\n")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_record_that_is_too_large(tmp_path, suffix):
    """Its beginning is put aside; the lines before and behind it are read, with their own numbers."""
    huge = json.dumps({"text": "x" * 3_000_000})
    lines = "\n".join([json.dumps({"text": "before"}), huge, json.dumps({"text": "behind"})]).encode()
    (tmp_path / f"a.jsonl{suffix}").write_bytes(gzip.compress(lines) if suffix else lines)
    (tmp_path / "b.txt").write_text("y" * 1_500_000)
    pq.write_table(pa.table({"text": ["short", "z" * 2_000_000]}), tmp_path / "c.parquet")
    records = list(corpus_of(tmp_path, max_record_mb=1).read())
    assert [record.text for record in records if isinstance(record, Document)] == ["before", "behind", "short"]
    bad = [record for record in records if isinstance(record, Rejected)]
    assert [record.id for record in bad] == [f"a.jsonl{suffix}:2", "b.txt", "c.parquet:2"]
    assert {record.reason for record in bad} == {"record too large"}
    assert bad[0].text.startswith(f"{len(huge) + 1} bytes: " + huge[:900])
    assert all(len(record.text) < 1100 for record in bad)


def bomb(folder: Path, line: bytes, num_bytes: int) -> Path:
    """A small gzip of `num_bytes` that repeat a line: the compressed blocks of some MB, again and again."""
    block = line * ((1 << 24) // len(line))
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    path = folder / "a.jsonl.gz"
    path.write_bytes(head + again * (num_bytes // len(block)))
    return path


def test_bombs_are_given_up(tmp_path):
    """3 GB in 3 MB, as one line and as many: some hundred MB are unpacked, no more than the limit is in memory."""
    script = """
import resource, sys
from megalite.corpus.corpus import Corpus
from megalite.corpus.recipe import DocumentSource
from megalite.corpus.shards import ShardReading
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
before = peak()
num_documents, reasons = 0, []
for shard in Corpus([DocumentSource(path=sys.argv[1])]).shards():
    for batch in ShardReading(shard):
        num_documents += len(batch.documents)
        reasons += [(record.reason, record.text) for record in batch.rejected]
print(num_documents, round(peak() - before), reasons)
"""
    for name, line in (("one line", b" "), ("many lines", json.dumps({"text": "x" * 4000}).encode() + b"\n")):
        (tmp_path / name).mkdir()
        path = bomb(tmp_path / name, line, 3 << 30)
        assert path.stat().st_size < 13e6
        write_json_lines(tmp_path / name / "b.jsonl", ["the next file"])
        done = subprocess.run(
            [sys.executable, "-c", script, str(path.parent)], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        num_documents, megabytes, reasons = done.stdout.split(" ", 2)
        assert "it grows to more than 200 times its size" in reasons
        assert int(megabytes) < 500, done.stdout[:300]
        assert (int(num_documents) == 1) == (name == "one line")


def test_a_table_that_grows_too_much_is_not_unpacked(tmp_path, monkeypatch):
    """By what its own footer says of a row group."""
    monkeypatch.setattr("megalite.corpus.reading.columns.EXPANSION_FROM", 1 << 20)
    table = pa.table({"text": ["x" * 1_000_000] * 5})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    write_json_lines(tmp_path / "b.jsonl", ["good"])
    records = list(corpus_of(tmp_path).read())
    assert sorted(record.text for record in records) == [
        "good",
        "rows 1 to 5 lost: its texts grow to more than 200 times their size",
    ]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_does_not_answer_is_no_damaged_file(tmp_path, monkeypatch, suffix, number):
    """The station stops and keeps what is done: such a file was left out as `unreadable` without a word."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 4_000)
    for name in ("a", "b"):
        write_json_lines(tmp_path / "raw" / f"{name}.jsonl", prose(20))
    bad = tmp_path / "raw" / f"c.jsonl{suffix}"
    bad.write_bytes(PACK[".gz"](LINES) if suffix else LINES)
    from megalite.corpus.reading import files

    class Broken(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            raise OSError(number, "no answer")

    real = files._open
    monkeypatch.setattr(files, "_open", lambda path: io.BufferedReader(Broken()) if "c.jsonl" in path else real(path))
    corpus = Corpus([DocumentSource(path=tmp_path / "raw")])
    with pytest.raises(OSError, match="no answer"):
        clean(corpus, tmp_path / "out", CleanConfig())
    monkeypatch.setattr(files, "_open", real)
    assert len(list((tmp_path / "out.partial" / ".work" / "clean").glob("0*.json"))) == 2
    assert clean(corpus, tmp_path / "out", CleanConfig()).manifest.counts["documents"] == 40 + LINES.count(b"\n")


def test_numbers_of_rows_are_those_of_the_table(tmp_path):
    """However many rows are read at a time."""
    texts = [("x" * int(size)) + str(n) for n, size in enumerate(np.random.default_rng(0).integers(0, 40_000, 700))]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=300)
    records = list(corpus_of(tmp_path / "a.parquet").read())
    assert [(record.id, record.text) for record in records] == [(f"a.parquet:{n + 1}", t) for n, t in enumerate(texts)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.bz2", "a.txt.xz", "a.jsonl.zst", "a.warc.gz"])
def test_a_compressed_file_without_a_byte_is_damaged(tmp_path, name):
    """Any compression of nothing has some; a failed download has none."""
    (tmp_path / name).write_bytes(b"")
    write_json_lines(tmp_path / "b.jsonl", ["a text"])
    bad = [each for each in corpus_of(tmp_path).read() if isinstance(each, Rejected)]
    assert [(each.id, each.reason) for each in bad] == [(name, "damaged file")]
    assert "it is empty" in bad[0].text


def test_compressed_nothing_is_whole(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b""))
    write_json_lines(tmp_path / "b.jsonl", ["a text"])
    assert [each.id for each in corpus_of(tmp_path).read()] == ["b.jsonl:1"]


def test_metadata_of_archives_are_refused(tmp_path):
    """By name and in a folder: their records look like text, and are none."""
    (tmp_path / "x.wat.gz").write_bytes(gzip.compress(b"WARC/1.0\r\n\r\n{}"))
    write_json_lines(tmp_path / "b.jsonl", ["a text"])
    bad = [each for each in corpus_of(tmp_path).read() if isinstance(each, Rejected)]
    assert [each.id for each in bad] == ["x.wat.gz"]
    with pytest.raises(DataError, match="metadata of a web archive"):
        list(corpus_of(tmp_path / "x.wat.gz").read())
