"""The body of an HTTP message as it went over the wire, with what was done to it on the way undone.

    Content-Encoding: gzip            what the server packed, first to last
    Transfer-Encoding: gzip, chunked  what was done for the way, behind it
        --undone from the last to the first--> the body

Crawlers write down what a server said, and some have undone it already: a body that does not begin as its header says,
and reads as text, is taken as it is. What cannot be undone, to its end, is an error: half a page is none.
"""

from __future__ import annotations

import codecs
import io
import re
import zlib
from collections.abc import Callable, Sequence

from megalite.corpus.reading.decompression import DECODERS, Content
from megalite.errors import UnavailableError

HEAD_BYTES = 4096
"""Looked at to see whether a body is text."""

CHUNK_LINE = re.compile(rb"[ \t]*([0-9a-fA-F]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n")

NAMES_OF_NOTHING = ("", "identity", "none", "binary")

Undo = Callable[[bytes, int], bytes]
"""Takes the bytes and how many may come out of them."""


class CodingError(Exception):
    """A body that is not what its headers say, cannot be undone, or ends too early."""


class BodyTooLargeError(Exception):
    """More comes out than may."""


def decoded_body(body: bytes, codings: Sequence[str], max_bytes: int) -> bytes:
    """A body as its author had it.

    Args:
        codings: values of `Content-Encoding`, then those of `Transfer-Encoding`; each may name several, with commas.
        max_bytes: that may come out, at any stage.

    Raises:
        CodingError: a coding is not known, or the body is damaged or cut off.
        BodyTooLargeError: more than that comes out.
        UnavailableError: brotli is not installed.
    """
    names = [name.strip().lower() for value in codings for name in value.split(",")]
    for name in reversed(names):
        if name not in NAMES_OF_NOTHING and not _is_charset(name):
            body = _undone(name, body, max_bytes)
    return body


def _undone(name: str, body: bytes, max_bytes: int) -> bytes:
    """One coding less, where the body has it."""
    begins = BEGINNINGS.get(name)
    if begins is not None and not begins(body):
        return body
    undo = CODINGS.get(name)
    try:
        if undo is None:
            raise CodingError(f"unknown coding {name}")
        return undo(body, max_bytes)
    except CodingError:
        if begins is None and _is_text(body):
            return body
        raise


def _is_charset(name: str) -> bool:
    """Some servers say there how the text is encoded."""
    try:
        return codecs.lookup(name)._is_text_encoding
    except (LookupError, ValueError):
        return False


def _is_text(body: bytes) -> bool:
    """Whether it reads as a page or as a text, so that nothing was done to it, or all is undone."""
    head = body[:HEAD_BYTES]
    if head.lstrip().startswith(b"<"):
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _unchunked(body: bytes, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    place = 0
    while place < len(body):
        line = CHUNK_LINE.match(body, place)
        if line is None:
            raise CodingError("a chunk without its size")
        size = int(line[1], 16)
        if not size:
            return b"".join(pieces)
        end = line.end() + size
        if end > len(body):
            raise CodingError("the last chunk is cut off")
        pieces.append(body[line.end() : end])
        place = end + (2 if body.startswith(b"\r\n", end) else 1 if body.startswith(b"\n", end) else 0)
    raise CodingError("the last chunk is missing")


def _unpacked(suffix: str) -> Undo:
    """As a file of such a suffix: several members, and what stands behind them, are no damage."""

    def undo(body: bytes, max_bytes: int) -> bytes:
        content = Content(io.BytesIO(body), suffix, max_expansion=float("inf"))
        found = _bounded(content.readall_up_to(max_bytes + 1), max_bytes)
        if not content.is_between_members:
            raise CodingError("damaged, or cut off" if content.damage is None else content.damage.why)
        return found

    return undo


def _inflated(body: bytes, max_bytes: int) -> bytes:
    """Deflate, within zlib's header as it should be, or without it as some servers have it."""
    for window in (zlib.MAX_WBITS, -zlib.MAX_WBITS):
        decoder = zlib.decompressobj(window)
        try:
            found = decoder.decompress(body, max_bytes + 1)
        except zlib.error:
            continue
        _bounded(found, max_bytes)
        if decoder.eof:
            return found
    raise CodingError("damaged, or cut off")


def _unbrotlied(body: bytes, max_bytes: int) -> bytes:
    try:
        import brotli
    except ImportError as error:
        raise UnavailableError("pages of this archive need brotli: pip install 'megalite[data]'") from error
    decoder = brotli.Decompressor()
    try:
        pieces = [decoder.process(body, output_buffer_limit=max_bytes + 1)]
        while not decoder.is_finished() and pieces[-1] and sum(map(len, pieces)) <= max_bytes:
            pieces.append(decoder.process(b"", output_buffer_limit=max_bytes + 1))
    except brotli.error as error:
        raise CodingError(str(error)) from error
    found = _bounded(b"".join(pieces), max_bytes)
    if not decoder.is_finished():
        raise CodingError("cut off")
    return found


def _bounded(found: bytes, max_bytes: int) -> bytes:
    if len(found) > max_bytes:
        raise BodyTooLargeError
    return found


CODINGS: dict[str, Undo] = {
    "chunked": _unchunked,
    "gzip": _unpacked(".gz"),
    "x-gzip": _unpacked(".gz"),
    "zstd": _unpacked(".zst"),
    "deflate": _inflated,
    "br": _unbrotlied,
}


def _begins_with_size(body: bytes) -> bool:
    return CHUNK_LINE.match(body) is not None


def _begins_as(suffix: str) -> Callable[[bytes], bool]:
    return lambda body: body.startswith(DECODERS[suffix].magic)


BEGINNINGS: dict[str, Callable[[bytes], bool]] = {
    "chunked": _begins_with_size,
    "gzip": _begins_as(".gz"),
    "x-gzip": _begins_as(".gz"),
    "zstd": _begins_as(".zst"),
}
"""How a body begins that has a coding, where that can be told."""
