"""Web archives, made here byte by byte: every kind of record, every kind of damage."""

from __future__ import annotations

import builtins
import gzip
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from megalite.corpus.corpus import Corpus
from megalite.corpus.reading import warc
from megalite.corpus.reading.warc import Page, read_archive
from megalite.corpus.shards import ShardReading
from megalite.corpus.source import DocumentSource
from megalite.errors import UnavailableError

pytest.importorskip("warcio")
pytest.importorskip("resiliparse")

DATE = "2024-01-31T23:59:59Z"


def record(
    kind: str, body: bytes, content_type: str, *, url: str = "https://a.org/", length: int | None = None
) -> bytes:
    lines = [
        "WARC/1.0",
        f"WARC-Type: {kind}",
        f"WARC-Target-URI: {url}",
        f"WARC-Date: {DATE}",
        "WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000000>",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body) if length is None else length}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body + b"\r\n\r\n"


def wet(number: int, text: str | None = None) -> bytes:
    body = (text or f"Text of page {number}, schön.\n").encode()
    return record("conversion", body, "text/plain", url=f"https://a.org/{number}")


def html(number: int) -> str:
    return f"<html><body><nav><a href='/'>menu</a></nav><main><p>Text of page {number}, schön.</p></main></body></html>"


def response(
    number: int,
    body: bytes | None = None,
    *,
    content_type: str = "text/html; charset=utf-8",
    status: str = "200 OK",
    headers: tuple[str, ...] = (),
) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", *headers]
    payload = html(number).encode() if body is None else body
    http = "\r\n".join(lines).encode() + b"\r\n\r\n" + payload
    return record("response", http, "application/http; msgtype=response", url=f"https://a.org/{number}")


def read(path: Path, content: bytes) -> tuple[list[Page], warc.Skipped]:
    path.write_bytes(content)
    skipped = warc.Skipped()
    return list(read_archive(path, skipped)), skipped


def numbers(pages: list[Page]) -> list[int]:
    for page in pages:
        assert page.text.strip() == f"Text of page {page.url.rsplit('/', 1)[1]}, schön."
    return [int(page.url.rsplit("/", 1)[1]) for page in pages]


INFO = record("warcinfo", b"software: by hand\r\n", "application/warc-fields", url="")


@pytest.mark.parametrize("compress", [None, gzip.compress, lambda part: gzip.compress(part, 0)])
def test_wet(tmp_path, compress):
    """Text as it is, in order; other records are passed over, not counted."""
    parts = [INFO, wet(1), record("metadata", b"x: y", "application/warc-fields"), wet(2, "中文\n"), wet(3)]
    content = b"".join(map(compress, parts)) if compress else b"".join(parts)
    pages, skipped = read(tmp_path / "a.wet.gz", content)
    assert pages[0] == Page("https://a.org/1", DATE, "text/plain", "Text of page 1, schön.\n")
    assert [page.text for page in pages] == ["Text of page 1, schön.\n", "中文\n", "Text of page 3, schön.\n"]
    assert skipped == {}


def test_all_records_in_one_gzip_member(tmp_path):
    """As `gzip file.warc` leaves it."""
    pages, skipped = read(tmp_path / "a.warc.gz", gzip.compress(INFO + b"".join(map(response, range(500)))))
    assert numbers(pages) == list(range(500))
    assert skipped == {}


def test_responses(tmp_path):
    """Pages become their main text by the server's encoding; plain text stays; all else is counted by reason."""
    umlaut = html(2).encode("windows-1252")
    pages, skipped = read(
        tmp_path / "a.warc",
        b"".join(
            [
                INFO,
                record("request", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"),
                response(1),
                response(2, umlaut, content_type='TEXT/HTML;charset="windows-1252"'),
                response(3, umlaut.replace(b"page 2", b"page 3"), content_type="text/html"),
                response(4, "Text of page 4, schön.".encode(), content_type="text/plain; charset=utf-8"),
                response(5, html(5).encode(), content_type="application/xhtml+xml"),
                response(6, b"\x89PNG", content_type="image/png"),
                response(7, status="404 Not Found"),
                response(8, b"<div>" * 5000),
                record("revisit", b"", "application/http; msgtype=response"),
                record("resource", html(9).encode(), "text/html; charset=utf-8", url="https://a.org/9"),
                record("conversion", b"caf\xe9", "text/plain"),
                response(10, b"<nav><a href='/'>menu</a></nav>"),
            ]
        ),
    )
    assert numbers(pages[:-1]) == [1, 2, 3, 4, 5, 9]
    assert [page.content_type for page in pages[:4]] == ["text/html", "text/html", "text/html", "text/plain"]
    assert pages[-1].url == "https://a.org/10"
    assert skipped == {warc.NOT_TEXT: 1, warc.NOT_FOUND: 1, warc.TOO_DEEP: 1, warc.NOT_UTF8: 1}


def test_payloads_as_they_went_over_the_wire(tmp_path):
    """Chunks are put together, packed bodies unpacked, whatever names the headers have; damaged ones are counted."""
    brotli = pytest.importorskip("brotli")
    page = html(1).encode()
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (page[:50], page[50:])) + b"0\r\n\r\n"
    zipped = gzip.compress(html(2).encode())
    deflated = zlib.compress(html(3).encode())
    both = gzip.compress(html(4).encode())
    both = b"%x\r\n%b\r\n0\r\n\r\n" % (len(both), both)
    pages, skipped = read(
        tmp_path / "a.warc.gz",
        b"".join(
            map(
                gzip.compress,
                [
                    response(1, chunked, headers=("Transfer-Encoding: chunked",)),
                    response(2, zipped, headers=("Content-Encoding: gzip",)),
                    response(3, deflated, headers=("Content-Encoding: deflate",)),
                    response(4, both, headers=("Content-Encoding: gzip", "Transfer-Encoding: chunked")),
                    response(5, brotli.compress(html(5).encode()), headers=("Content-Encoding: br",)),
                    response(6, both, headers=("content-encoding: X-GZIP", "transfer-encoding: Chunked")),
                    response(7, zipped[:-20], headers=("Content-Encoding: gzip",)),
                    response(8, html(8).encode(), headers=("Content-Encoding: br", "Transfer-Encoding: chunked")),
                ],
            )
        ),
    )
    assert numbers([page for page in pages if page.url[-1] != "6"]) == [1, 2, 3, 4, 5, 8]
    assert "Text of page 4" in pages[5].text
    assert skipped == {warc.BAD_HTTP: 1}


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_arc(tmp_path, compress):
    """The older format, with its file header and short dates."""
    about = b"1 0 Crawler\nURL IP-address Archive-date Content-type Archive-length\n"
    parts = [b"filedesc://a.arc 0.0.0.0 20080131235959 text/plain %d\n%b\n" % (len(about), about)]
    for number in range(3):
        http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + html(number).encode()
        parts.append(b"https://a.org/%d 1.2.3.4 20080131235959 text/html %d\n%b\n" % (number, len(http), http))
    pages, skipped = read(tmp_path / "a.arc.gz", b"".join(map(compress, parts)))
    assert numbers(pages) == [0, 1, 2]
    assert pages[0].date == "2008-01-31T23:59:59Z"
    assert skipped == {}


@pytest.mark.parametrize("missing", [1, 9, 40, 120])
def test_a_truncated_gzip_tail(tmp_path, missing):
    """A download that broke off: all whole pages before are there, and the loss is counted."""
    members = [gzip.compress(response(number)) for number in range(20)]
    pages, skipped = read(tmp_path / "a.warc.gz", b"".join(members)[:-missing])
    assert numbers(pages)[:19] == list(range(19))
    assert len(pages) in (19, 20)  # a tail without its checksum has all of the text
    assert skipped[warc.DAMAGED_GZIP] == 1


@pytest.mark.parametrize("missing", [1, 60, 300], ids=["line end", "payload", "header"])
def test_a_truncated_plain_tail(tmp_path, missing):
    """The same in a file without compression."""
    content = b"".join(map(response, range(20)))[:-missing]
    pages, skipped = read(tmp_path / "a.warc", content)
    assert numbers(pages)[:19] == list(range(19))
    assert len(pages) == (20 if missing == 1 else 19)
    assert skipped == ({} if missing == 1 else {warc.CUT_SHORT: 1})


def test_damaged_gzip_members(tmp_path):
    """Bytes overwritten anywhere in a member cost that member, and no other."""
    rng = np.random.default_rng(0)
    for trial in range(30):
        members = [bytearray(gzip.compress(response(number))) for number in range(8)]
        place = int(rng.integers(0, len(members[4]) - 12))
        members[4][place : place + 12] = rng.bytes(12)
        pages, skipped = read(tmp_path / f"{trial}.warc.gz", b"".join(members))
        kept = [page for page in pages if page.url != "https://a.org/4"]
        assert numbers(kept) == [0, 1, 2, 3, 5, 6, 7], trial
        assert len(kept) < len(pages) or sum(skipped.values()) >= 1


def test_garbage_between_members(tmp_path):
    """Zeros and noise, with something in it that looks like a member, and an empty member."""
    noise = bytes(1000) + warc.GZIP_MAGIC + b"no member" + np.random.default_rng(0).bytes(100_000)
    content = (
        gzip.compress(wet(1)) + noise + gzip.compress(b"") + gzip.compress(b"not a record\r\n") + gzip.compress(wet(2))
    )
    pages, skipped = read(tmp_path / "a.wet.gz", content)
    assert numbers(pages) == [1, 2]
    assert skipped[warc.DAMAGED_GZIP] >= 1
    assert skipped[warc.NOT_A_RECORD] == 1


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_damaged_records(tmp_path, compress):
    """Lengths that are too short or too long, and lines that are none, in one stretch of records."""
    parts = [
        wet(1),
        b"noise\r\nthat is no record\r\n\r\n",
        wet(2),
        record("conversion", "Text of page 3, schön.".encode() + b"\nbehind its length", "text/plain", length=23),
        wet(4),
        wet(5),
    ]
    pages, skipped = read(tmp_path / "a.wet", compress(b"".join(parts)))
    assert [page.url[-1] for page in pages if page.url[-1].isdigit()] == ["1", "2", "4", "5"]
    assert sum(skipped.values()) >= 2
    too_long = record("conversion", b"short", "text/plain", length=10_000)
    pages, skipped = read(tmp_path / "b.wet", compress(wet(1) + too_long))
    assert numbers(pages) == [1]
    assert skipped == {warc.CUT_SHORT: 1}


def test_many_damaged_places_end(tmp_path):
    """A file of noise between records is given up after a while, without an error."""
    content = b"".join(wet(number) + b"noise\r\n\r\nnoise\r\n\r\n" for number in range(3 * warc.MAX_DAMAGED_PLACES))
    pages, skipped = read(tmp_path / "a.wet", content)
    assert numbers(pages) == list(range(len(pages)))
    assert skipped[warc.NOT_A_RECORD] == warc.MAX_DAMAGED_PLACES
    assert skipped.lost_bytes > len(content) / 2


@pytest.mark.parametrize("content", [b"", b"\n", b"hello", warc.GZIP_MAGIC, bytes(100), gzip.compress(b"")])
def test_files_that_are_no_archives(tmp_path, content):
    """No page, no crash."""
    assert read(tmp_path / "a.warc.gz", content)[0] == []


def test_large_records_pass_in_blocks(tmp_path):
    """Over many blocks, of the file and of what it uncompresses to."""
    text = "".join(f"line {number} of a long text\n" for number in range(100_000))
    pages, skipped = read(tmp_path / "a.wet.gz", gzip.compress(wet(1, text)) + gzip.compress(wet(2)))
    assert pages[0].text == text
    assert numbers(pages[1:]) == [2]
    assert skipped == {}


def test_without_warcio(tmp_path, monkeypatch):
    """What is missing is named, with the way to get it."""
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "warcio":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnavailableError, match=r"need warcio: pip install 'megalite\[data\]'"):
        read(tmp_path / "a.warc", b"")


@pytest.mark.parametrize("compress", [False, True])
def test_a_page_that_grows_too_large(tmp_path, compress):
    """However small it is on the way; the pages around it are read."""
    bomb = response(2, gzip.compress(b"<p>" + bytes(3_000_000)), headers=("Content-Encoding: gzip",))
    parts = [response(1), bomb, response(3, b"<p>" + b"x" * 2_000_000), response(4)]
    path = tmp_path / "a.warc"
    path.write_bytes(b"".join(map(gzip.compress, parts)) if compress else b"".join(parts))
    skipped = warc.Skipped()
    assert numbers(list(read_archive(path, skipped, 1_000_000))) == [1, 4]
    assert skipped == {warc.TOO_LARGE: 2}


def test_a_record_without_a_length(tmp_path):
    """Put aside: its text would be all that follows in the file. What follows is read, whatever the record was."""
    for kind in ("conversion", "request", "metadata", "response"):
        bad = record(kind, b"HTTP/1.1 301 Moved\r\n\r\ntext", "text/plain")
        bad = re.sub(rb"Content-Length: \d+\r\n", b"", bad)
        pages, skipped = read(tmp_path / "a.warc", wet(1) + bad + wet(2))
        assert numbers(pages) == [1, 2]
        assert skipped == {"record without a length": 1}
        assert 4 <= skipped.lost_bytes < len(bad)


BAD_LENGTHS = {
    "request": record("request", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request", length=10_000),
    "metadata": record("metadata", b"a: b\r\n", "application/warc-fields", length=10_000),
    "moved": record("response", b"HTTP/1.1 301 Moved\r\n\r\nmoved", "application/http", length=10_000),
    "image": record("resource", b"\x89PNG", "image/png", length=10_000),
}


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("kind", BAD_LENGTHS)
def test_lengths_of_records_that_are_passed_over(tmp_path, kind, compress):
    """One that is too long takes all that follows with it, which was counted for pages alone."""
    pages, skipped = read(tmp_path / "a.warc", compress(wet(1) + BAD_LENGTHS[kind] + wet(2)))
    assert numbers(pages) == [1]
    assert skipped == {warc.CUT_SHORT: 1}
    assert len(wet(2)) < skipped.lost_bytes < len(wet(2)) + 100
    pages, skipped = read(tmp_path / "b.warc.gz", b"".join(map(gzip.compress, (wet(1), BAD_LENGTHS[kind], wet(2)))))
    assert numbers(pages) == [1, 2]
    assert skipped == {warc.CUT_SHORT: 1}


def test_a_length_that_is_too_long_in_arc(tmp_path):
    """The same, and how much it costs stands in the counts of a station."""
    about = b"1 0 Crawler\nURL IP-address Archive-date Content-type Archive-length\n"
    line = b"https://a.org/%d 1.2.3.4 20080131235959 text/html %d\n%b\n"
    page, moved = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\ntext", b"HTTP/1.1 301 Moved\r\n\r\n"
    path = tmp_path / "a.arc"
    path.write_bytes(
        b"filedesc://a.arc 0.0.0.0 20080131235959 text/plain %d\n%b\n" % (len(about), about)
        + line % (1, len(page), page)
        + line % (2, 90_000, moved)
        + line % (3, len(page), page)
    )
    (shard,) = Corpus([DocumentSource(path=path)]).shards()
    reading = ShardReading(shard)
    assert [batch.rejected[0].reason for batch in reading] == ["archive: record cut short"]
    report = reading.report()
    assert report["readable"] == 1
    assert 100 < report["lost"]["archive_bytes"] < 200


def test_blank_lines_before_records(tmp_path):
    """In front of a file or a gzip member; warcio takes them there for its end."""
    parts = [b"\r\n\r\n" + wet(1), b"\n" + wet(2), b" \n" * 10_000 + wet(3), b"\r\n"]
    for content in (b"".join(parts), b"".join(map(gzip.compress, parts))):
        pages, skipped = read(tmp_path / "a.wet", content)
        assert numbers(pages) == [1, 2, 3]
        assert skipped == {}


@pytest.mark.parametrize("length", [0, 100, 150])
@pytest.mark.parametrize("in_members", [True, False])
def test_a_length_that_is_too_short(tmp_path, length, in_members):
    """Costs the record: half of its page was taken for a page. Behind it reading goes on."""
    bad = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % length, response(2))
    parts = [response(1), bad, response(3)]
    content = b"".join(map(gzip.compress, parts)) if in_members else b"".join(parts)
    pages, skipped = read(tmp_path / "a.warc", content)
    assert numbers(pages) == [1, 3]
    assert skipped[warc.WRONG_LENGTH] == 1
    assert skipped.lost_bytes >= length


@pytest.mark.parametrize("kind", ["response", "continuation"])
def test_parts_of_a_record(tmp_path, kind):
    """Are no records: a page that was cut in two gave its beginning as a page, and the rest was not spoken of."""
    part = re.sub(rb"WARC-Type: \w+", b"WARC-Type: %b\r\nWARC-Segment-Number: 1" % kind.encode(), response(2))
    pages, skipped = read(tmp_path / "a.warc", response(1) + part + response(3))
    assert numbers(pages) == [1, 3]
    assert skipped == {warc.SEGMENTED: 1}


@pytest.mark.parametrize("damage", [lambda first: b"", lambda first: first[:30] + b"\xff" * 9 + first[39:]])
def test_arc_without_its_first_member(tmp_path, damage):
    """Is told by any other one."""
    about = b"1 0 Crawler\nURL IP-address Archive-date Content-type Archive-length\n"
    first = gzip.compress(b"filedesc://a.arc 0.0.0.0 20080131235959 text/plain %d\n%b\n" % (len(about), about))
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
    parts = [http + html(number).encode() for number in range(3)]
    line = b"https://a.org/%d 1.2.3.4 20080131235959 text/html %d\n%b\n"
    members = [gzip.compress(line % (number, len(part), part)) for number, part in enumerate(parts)]
    pages, _ = read(tmp_path / "a.arc.gz", damage(first) + b"".join(members))
    assert numbers(pages) == [0, 1, 2]
