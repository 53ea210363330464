"""Sources behind URLs: the same documents as from the files, and a service that fails is no damaged file."""

from __future__ import annotations

import functools
import gzip
import http.server
import io
import itertools
import json
import sys
import threading
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import Document, Rejected
from megalite.corpus.reading.remote import list_remote, open_remote
from megalite.corpus.recipe import CleanConfig, DocumentSource
from megalite.corpus.shards import ShardReading
from megalite.corpus.source import file_name, is_url
from megalite.corpus.stations.clean import clean
from megalite.errors import DataError, UnavailableError
from megalite.stations.runners import InProcess, LocalPool
from tests.corpus.test_corpus import FORMATS, TEXTS, as_text_folder, as_zstd
from tests.kit.data import all_bytes, prose, write_json_lines

URL = "memory://bucket/shelf"


class Service(MemoryFileSystem):
    """Another name of the store, with files that have a mind of their own."""

    File = io.BytesIO

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace(f"{cls.protocol}://", "memory://"))

    def _open(self, path, mode="rb", **kwargs):
        return self.File(super()._open(path, mode, **kwargs).getvalue())


class Broken(Exception):
    """An error that no reader has heard of."""


class Flaky(Service):
    """Stops in the middle of a file."""

    protocol = "flaky"

    class File(io.BytesIO):
        good_bytes = 10_000

        def read(self, size=-1):
            if self.tell() > self.good_bytes:
                raise Broken("connection reset")
            return super().read(min(size, 5000))


class OneWay(Service):
    """A web server without ranges: files are read from front to back."""

    protocol = "oneway"

    class File(io.BytesIO):
        def seekable(self):
            return False

        def seek(self, *_):
            raise ValueError("cannot seek")


class Counting(Service):
    """Counts the bytes that are fetched."""

    protocol = "counting"
    fetched = 0

    class File(io.BytesIO):
        def read(self, size=-1):
            content = super().read(size)
            Counting.fetched += len(content)
            return content


@pytest.fixture(autouse=True)
def _services():
    """An empty store, known under each of these protocols."""
    for service in (Flaky, OneWay, Counting):
        fsspec.register_implementation(service.protocol, service, clobber=True)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


def upload(path: Path, url: str) -> str:
    """The contents of a file or folder, below a URL."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            fsspec.filesystem("memory").pipe(
                f"{url.partition(':/')[2]}/{file.relative_to(path.parent)}", file.read_bytes()
            )
    return f"{url}/{path.name}"


def corpus_at(url: str, **settings: object) -> Corpus:
    return Corpus([DocumentSource.model_validate({"path": url, **settings})])


def test_urls_stay_as_they_are_written():
    """Paths become Paths, URLs stay strings, through JSON and back."""
    source = DocumentSource.model_validate({"path": "s3://bucket//folder/"})
    assert source.path == "s3://bucket//folder/"
    assert DocumentSource.model_validate(source.model_dump(mode="json")) == source
    assert source.label == "folder"
    for path in ("raw/a.jsonl", "/raw", Path("raw")):
        assert DocumentSource.model_validate({"path": path}).path == Path(path)
    assert [is_url(path) for path in ("https://host/a.jsonl", "a/b", "c:/b", Path("s3://b"))] == [True, *[False] * 3]
    assert file_name("https://host/a.jsonl.zst?download=true#x") == "/a.jsonl.zst"
    assert file_name("s3://b/what?.txt") == "s3://b/what?.txt"


@pytest.mark.parametrize("service", ["memory", "oneway"])
@pytest.mark.parametrize("form", [form for form in FORMATS if form.__name__ != "as_dataset"])
def test_every_format_gives_the_same_documents(tmp_path, form, service):
    """As from the local file or folder: texts, ids and name; also when nothing but whole files can be had."""
    path = form(tmp_path)
    local = list(Corpus([DocumentSource(path=path)]).read())
    assert list(corpus_at(upload(path, f"{service}://bucket/shelf")).read()) == local
    assert [document.text for document in local] == TEXTS


def test_file_urls_are_read_too(tmp_path):
    """Local files behind `file://`, by several processes as by one."""
    folder = tmp_path / "raw"
    for number in range(3):
        write_json_lines(folder / f"{number}.jsonl", prose(5, seed=number))
    corpus = corpus_at(f"file://{folder}")
    assert list(corpus.read()) == list(Corpus([DocumentSource(path=folder)]).read())
    clean(corpus, tmp_path / "one", CleanConfig(), runner=InProcess())
    with LocalPool(2) as pool:
        clean(corpus, tmp_path / "two", CleanConfig(), runner=pool)
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")


def test_listing_is_as_of_a_local_folder(tmp_path):
    """Sorted, without hidden files and unknown kinds; given patterns replace the known suffixes."""
    url = upload(as_text_folder(tmp_path), URL)
    assert [file.id for file in list_remote(url)] == [*(f"er/{number}.txt" for number in range(5)), "picture.png"]
    assert [document.id for document in corpus_at(url).read()] == [f"er/{number}.txt" for number in range(5)]
    assert [document.id for document in corpus_at(url, include=("[12].*",)).read()] == ["er/1.txt", "er/2.txt"]
    with pytest.raises(DataError, match=r"memory://bucket/shelf/deep: no file to read; looked for \*\.pdf"):
        corpus_at(url, include=("*.pdf",))
    with pytest.raises(DataError, match=r"memory://bucket/lost: no such file or folder"):
        corpus_at("memory://bucket/lost")


def test_large_files_of_lines_are_cut_without_reading_them(tmp_path, monkeypatch):
    """Every line once and in order, wherever the cuts fall; ids are distinct, and name the byte a part begins at."""
    lengths = np.random.default_rng(5).integers(0, 300, 800)
    texts = [f"{number}: {'é' * length}" for number, length in enumerate(lengths.tolist())]
    url = upload(write_json_lines(tmp_path / "a.jsonl", texts), "counting://bucket")
    for size in (700, 5_000, 50_000):
        monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", size)
        monkeypatch.setattr("megalite.corpus.shards.LARGEST_SHARD", size)
        corpus = corpus_at(url)
        pieces = [piece for shard in corpus.shards() for piece in shard["pieces"]]
        assert len(pieces) > 3
        content = (tmp_path / "a.jsonl").read_bytes()
        for piece, after in itertools.pairwise(pieces):
            assert piece["stop"] == after["start"]
            assert content[after["start"] - 1 : after["start"]] == b"\n"
            assert after["id"] == f"a.jsonl@{after['start']}"
        documents = list(corpus.documents())
        assert [document.text for document in documents] == texts
        assert len({document.id for document in documents}) == len(texts)


def test_an_array_of_json_is_not_cut(tmp_path, monkeypatch):
    """It has no lines of its own, however it is laid out; a part of one that was cut when it had is refused."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 500)
    answer = {"role": "assistant", "content": "a"}
    records = [{"messages": [{"role": "user", "content": text}, answer]} for text in prose(20)]
    lines = [json.dumps(each) for each in records]
    (tmp_path / "array.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    (tmp_path / "lines.json").write_text("\n".join(lines) + "\n")
    for name, fewest, most in (("array.json", 1, 1), ("lines.json", 3, 20)):
        for path in (tmp_path / name, upload(tmp_path / name, "counting://bucket")):
            corpus = Corpus([DocumentSource(path=path, conversations="messages")])
            assert fewest <= len(corpus.shards()) <= most
            assert [each.text for each in corpus.documents()] == [f"user: {t}\n\nassistant: a" for t in prose(20)]
    shards = Corpus([DocumentSource(path=tmp_path / "lines.json", conversations="messages")]).shards()
    (tmp_path / "lines.json").write_bytes((tmp_path / "array.json").read_bytes())
    for shard in shards:
        ((rejected,),) = [batch.rejected for batch in ShardReading(shard)]
        assert "it has changed" in rejected.reason


def test_a_service_without_ranges_is_read_from_front_to_back(tmp_path, monkeypatch):
    """No cuts, the same lines."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 500)
    texts = prose(50, seed=2)
    corpus = corpus_at(upload(write_json_lines(tmp_path / "a.jsonl", texts), "oneway://bucket"))
    assert len(corpus.shards()) == 1
    assert [document.text for document in corpus.documents()] == texts


def test_of_parquet_only_the_columns_that_count_are_fetched(tmp_path, monkeypatch):
    """Row groups make shards, and a large column beside the texts stays where it is."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 4_000)
    texts = prose(200, seed=1)
    noise = [np.random.default_rng(number).bytes(20_000) for number in range(len(texts))]
    pq.write_table(pa.table({"text": texts, "noise": noise}), tmp_path / "a.parquet", row_group_size=20)
    corpus = corpus_at(upload(tmp_path / "a.parquet", "counting://bucket"))
    Counting.fetched = 0
    assert len(corpus.shards()) == 10
    assert [document.text for document in corpus.documents()] == texts
    assert 0 < Counting.fetched < (tmp_path / "a.parquet").stat().st_size / 2


def test_fingerprints_follow_the_files(tmp_path):
    """A file that was put there anew may be another one."""
    path = write_json_lines(tmp_path / "a.jsonl", ["a", "b"])
    url = upload(path, URL)
    prints = [corpus_at(url).inputs[0][1], corpus_at(url).inputs[0][1]]
    upload(path, URL)
    prints.append(corpus_at(url).inputs[0][1])
    assert prints[0] == prints[1]
    assert len(set(prints)) == 2


@pytest.mark.parametrize("squeeze", [None, gzip.compress, zstandard.compress])
def test_a_service_that_breaks_off_is_not_a_damaged_file(tmp_path, squeeze):
    """Its error stops the work, whether the file is compressed or not, and is not one of the reasons to put aside."""
    noise = np.random.default_rng(0).integers(33, 127, 100_000).astype(np.uint8).tobytes().decode()
    content = (json.dumps({"text": noise}) + "\n").encode()
    name = {None: "a.jsonl", gzip.compress: "a.jsonl.gz", zstandard.compress: "a.jsonl.zst"}[squeeze]
    (tmp_path / name).write_bytes(content if squeeze is None else squeeze(content))
    corpus = corpus_at(upload(tmp_path / name, "flaky://bucket"))
    with pytest.raises(UnavailableError, match=r"Broken: connection reset.*run the same command again"):
        list(corpus.read())


def test_a_damaged_file_is_put_aside(tmp_path):
    """What arrives whole and cannot be uncompressed is a bad record, as it is from the disk."""
    whole = as_zstd(tmp_path).read_bytes()
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "raw" / "b.parquet").write_bytes(b"PAR1 and then nothing")
    write_json_lines(tmp_path / "raw" / "c.jsonl", ["good"])
    records = list(corpus_at(upload(tmp_path / "raw", URL)).read())
    assert [record.text for record in records if isinstance(record, Document)] == ["good"]
    assert [record.reason for record in records if isinstance(record, Rejected)] == ["damaged file", "unreadable file"]


def test_an_interrupted_station_goes_on(tmp_path, monkeypatch):
    """What was done before the service stopped is kept, and the result is as without the stop."""
    write_json_lines(tmp_path / "raw" / "a.jsonl", prose(20, seed=1))
    write_json_lines(tmp_path / "raw" / "b.jsonl", prose(30, seed=2))
    first, second = (file.num_bytes for file in list_remote(upload(tmp_path / "raw", "flaky://bucket")))
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", first)
    monkeypatch.setattr(Flaky.File, "good_bytes", first)
    assert first < second < 2 * first
    corpus = corpus_at("flaky://bucket/raw")
    with pytest.raises(UnavailableError):
        clean(corpus, tmp_path / "out", CleanConfig())
    done = tmp_path / "out.partial" / "part-00000.parquet"
    before = done.stat().st_mtime_ns
    monkeypatch.setattr(Flaky.File, "good_bytes", 2 * first)
    clean(corpus, tmp_path / "out", CleanConfig())
    assert (tmp_path / "out" / "part-00000.parquet").stat().st_mtime_ns == before
    assert [d.text for d in Corpus([DocumentSource(path=tmp_path / "out")]).documents()] == [
        *prose(20, seed=1),
        *prose(30, seed=2),
    ]


def test_the_folder_of_a_station_is_refused(tmp_path):
    """Its rejected/ would be read with it."""
    write_json_lines(tmp_path / "a.jsonl", ["a"])
    clean(Corpus([DocumentSource(path=tmp_path / "a.jsonl")]), tmp_path / "clean", CleanConfig())
    with pytest.raises(DataError, match=r"the folder of a station.*copy it here first"):
        corpus_at(upload(tmp_path / "clean", URL))


@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("https", "aiohttp")])
def test_a_missing_package_is_named(monkeypatch, protocol, package):
    """With what to install."""
    for module in (package, "fsspec.implementations.http"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    with pytest.raises(
        UnavailableError, match=rf"{protocol}:// needs a package that is not here: pip install {package}"
    ):
        corpus_at(f"{protocol}://bucket/a.jsonl")


def test_an_unknown_protocol_is_a_mistake():
    """With the ones there are."""
    with pytest.raises(DataError, match=r"s4://b: no such kind of address .*there are s3://"):
        corpus_at("s4://b")


def test_streams_can_seek(tmp_path):
    """A stream of a URL is a stream of the file, at any place."""
    content = np.random.default_rng(1).bytes(5000)
    (tmp_path / "a.bin").write_bytes(content)
    with open_remote(upload(tmp_path / "a.bin", URL)) as file:
        for place, size in np.random.default_rng(2).integers(0, 5000, (50, 2)).tolist():
            file.seek(place)
            assert file.tell() == place
            assert file.read(size) == content[place : place + size]


def test_a_web_server_that_sends_whole_files_only(tmp_path, monkeypatch):
    """Python's own knows no ranges and does not say so; lines and tables are read all the same."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 1_000)
    texts = prose(100, seed=4)
    write_json_lines(tmp_path / "a.jsonl", texts)
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=10)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("a.jsonl?download=true", "a.parquet"):
            corpus = corpus_at(f"http://127.0.0.1:{server.server_port}/{name}")
            assert [document.text for document in corpus.documents()] == texts
        with pytest.raises(DataError, match=r"b\.jsonl: no such file or folder \(.*404"):
            corpus_at(f"http://127.0.0.1:{server.server_port}/b.jsonl")
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (403, DataError, "access is refused"),
        (404, DataError, "no such file or folder"),
        (429, UnavailableError, "cannot be listed .*429.*; try again"),
        (500, UnavailableError, "cannot be listed .*500.*; try again"),
        (None, UnavailableError, "cannot be listed .*; try again"),
    ],
)
def test_what_a_web_server_says(status, kind, said):
    """Is told: whatever it was, and were there no server, a file was said not to be there."""
    pytest.importorskip("aiohttp")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(status)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if status is not None:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        else:
            server.server_close()
        with pytest.raises(kind, match=rf"a\.jsonl: {said}"):
            corpus_at(f"http://127.0.0.1:{server.server_port}/a.jsonl")
        if status is not None:
            server.shutdown()
