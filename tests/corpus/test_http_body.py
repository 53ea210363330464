"""Bodies of HTTP messages, packed as servers pack them, and damaged as crawls damage them."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable

import pytest
import zstandard

from megalite.corpus.reading.http_body import BodyTooLargeError, CodingError, decoded_body

brotli = pytest.importorskip("brotli")

PAGE = ("<html><body><p>" + "A sentence of this page, schön. " * 60 + "</p></body></html>").encode()
TEXT = "Gedanken über Züge, ohne Zeichen von HTML. 中文 ".encode() * 40
ENOUGH = 1_000_000


def chunked(body: bytes, size: int = 100) -> bytes:
    parts = [body[first : first + size] for first in range(0, len(body), size)]
    return b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nExpires: never\r\n\r\n"


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


PACKERS: dict[str, list[Callable[[bytes], bytes]]] = {
    "gzip": [gzip.compress, lambda body: gzip.compress(body[:70]) + gzip.compress(body[70:])],
    "x-gzip": [gzip.compress],
    "deflate": [zlib.compress, raw_deflate],
    "br": [brotli.compress],
    "zstd": [zstandard.compress],
    "chunked": [chunked, lambda body: chunked(body, 7)],
    "identity": [bytes],
    "utf-8": [bytes],
}


def test_any_codings_on_top_of_each_other():
    """Whatever was done is undone from the last to the first, however the names are written."""
    draw = random.Random(1)
    for _ in range(300):
        names = [draw.choice(list(PACKERS)) for _ in range(draw.randint(0, 4))]
        found = content = draw.choice([PAGE, TEXT, b"", b"x"])
        for name in names:
            found = draw.choice(PACKERS[name])(found)
        written = [draw.choice([str.upper, str.title, str.lower])(name) for name in names]
        cut = draw.randint(0, len(names))
        values = [draw.choice([", ", ",", " ,"]).join(part) for part in (written[:cut], written[cut:])]
        assert decoded_body(found, values, ENOUGH) == content, names


@pytest.mark.parametrize("name", [name for name in PACKERS if name not in ("identity", "utf-8")])
@pytest.mark.parametrize("content", [PAGE, TEXT, PAGE.decode().encode("latin-1")])
def test_a_header_that_is_not_true(name, content):
    """Crawlers undo codings and leave the header as it was."""
    assert decoded_body(content, [name], ENOUGH) == content


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "zstd", "chunked"])
def test_what_is_cut_off_or_damaged_is_no_page(name):
    """Half a page is not taken for one: cut anywhere, or with another byte in the middle, where the coding can tell."""
    packed = PACKERS[name][0](PAGE)
    end = len(packed) - (30 if name == "chunked" else 0)  # the chunk of nothing at the end, and what is behind it
    for place in range(12, end):
        with pytest.raises(CodingError):
            decoded_body(packed[:place], [name], ENOUGH)
    if name in ("gzip", "deflate", "zstd"):
        damaged = bytearray(packed)
        damaged[-3] ^= 0xFF
        with pytest.raises(CodingError):
            decoded_body(bytes(damaged), [name], ENOUGH)


def test_an_unknown_coding():
    """Noise is no text; what reads as text is what it is."""
    noise = random.Random(2).randbytes(500)
    with pytest.raises(CodingError, match="unknown coding snappy"):
        decoded_body(noise, ["snappy"], ENOUGH)
    assert decoded_body(PAGE, ["snappy"], ENOUGH) == PAGE


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "zstd"])
def test_what_grows_too_large(name):
    bomb = PACKERS[name][0](bytes(3_000_000))
    with pytest.raises(BodyTooLargeError):
        decoded_body(bomb, [name], 2_000_000)
    assert decoded_body(bomb, [name], 3_000_000) == bytes(3_000_000)


def test_what_stands_behind_the_end_is_no_damage():
    assert decoded_body(gzip.compress(PAGE) + b"\r\n", ["gzip"], ENOUGH) == PAGE
