"""The texts in a web archive: WARC, WET or ARC, compressed or not, by warcio. The one file that imports it.

    file --gzip members--> records --by kind--> (url, date, content type, text)
              \\ damaged: on to the next          \\ a page: its main text (html.py)
                                                   \\ WET, plain text: as it is

Archives come from crawls of weeks, and some have holes. A damaged member costs its records, a damaged record in a plain
file all up to the next one that begins with a version; a record of a length that is not there costs all that follows in
its member or plain file. Each is counted, with the bytes that it cost, and nothing stops the reading.

Members are taken apart here, because warcio, at a damaged one, reads the rest of the file as a part of it.
"""

from __future__ import annotations

import io
import re
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

from megalite.corpus.reading.html import decode, extract
from megalite.corpus.reading.http_body import BodyTooLargeError, CodingError, decoded_body
from megalite.errors import DataError, UnavailableError

if TYPE_CHECKING:
    from warcio.archiveiterator import ArchiveIterator
    from warcio.recordloader import ArcWarcRecord

GZIP_MAGIC = b"\x1f\x8b\x08"

ARC_BEGIN = b"filedesc://"

ARC_LINE = re.compile(rb"[a-z][a-z0-9+.-]*:\S* \S+ [0-9]{14} [^\r\n]*[0-9]\r?\n")
"""How a record of ARC begins: address, address of the machine, time, type, length."""

BLOCK_BYTES = 1 << 14

MAX_PAYLOAD_BYTES = 64_000_000

BUFFER_BYTES = 1 << 20
"""Of the file: members are small, and each begins with a step back to where the one before has ended."""

MAX_DAMAGED_PLACES = 100
"""In one stretch of records, after which the rest of it is given up: each costs a layer of reading."""

MAX_READ_AGAIN = 4
"""Times the bytes up to here that may be read again: a member that is damaged is found out some time behind the place
where the next one begins, so the search begins right behind its first byte."""

PAGE_TYPES = ("text/html", "application/xhtml+xml")

PLAIN_TYPE = "text/plain"

DAMAGED_GZIP = "damaged gzip member"
CUT_SHORT = "record cut short"
NOT_A_RECORD = "not a record"
WRONG_LENGTH = "record of another length than it says"
NOT_UTF8 = "not UTF-8"
NOT_TEXT = "neither HTML nor plain text"
NOT_FOUND = "HTTP status other than 200"
BAD_HTTP = "payload that cannot be decoded"
TOO_DEEP = "HTML nested too deeply"
TOO_LARGE = "record too large"
NO_LENGTH = "record without a length"
SEGMENTED = "part of a record, which are not put together"


class Skipped(Counter[str]):
    """How many records were left out, by reason."""

    lost_bytes = 0
    """Uncompressed ones that were passed over to get on, of these records and of those that they hid."""


class Page(NamedTuple):
    """A text from the web."""

    url: str
    date: str
    """As the archive has it: 2024-01-31T23:59:59Z."""
    content_type: str
    """Without parameters, in small letters."""
    text: str


def read_archive(path: Path, skipped: Skipped, max_bytes: int = MAX_PAYLOAD_BYTES) -> Iterator[Page]:
    """Yield the texts of an archive, in order.

    Responses are turned into text, WET records (conversion) are text; requests, metadata and the like are passed over.
    Texts may be empty, when a page has nothing but menus.

    Args:
        path: .warc, .wet or .arc, with or without .gz.
        skipped: counts what was left out.
        max_bytes: of a page, unpacked.

    Raises:
        UnavailableError: warcio, resiliparse, or brotli for a page packed with it, is not installed.
    """
    try:
        import warcio.archiveiterator  # noqa: F401
    except ImportError as error:
        raise UnavailableError("web archives need warcio: pip install 'megalite[data]'") from error
    with open(path, "rb", buffering=BUFFER_BYTES) as file:
        is_arc = None
        for stream in _members(file, skipped):
            head = _behind_blank_lines(stream)
            if not head:
                continue
            is_arc = _tells_arc(head) if is_arc is None else is_arc
            for record, iterator in _records(_Rest(head, stream), skipped, bool(is_arc)):
                found = _found_in(record, iterator, skipped, max_bytes)
                if isinstance(found, Page):
                    yield found
                elif found:
                    skipped[found] += 1


def _tells_arc(head: bytes) -> bool | None:
    """Whether an archive is ARC, by a beginning in it; None where that tells nothing, as of a damaged one."""
    if head.startswith(ARC_BEGIN) or ARC_LINE.match(head):
        return True
    return False if head.startswith(b"WARC/") else None


def _behind_blank_lines(stream: _Readable) -> bytes:
    """The beginning of a stream from its first character on: warcio takes a blank line there for the end."""
    head = b""
    while len(head) < len(ARC_BEGIN) and (block := stream.read(BLOCK_BYTES)):
        head = (head + block).lstrip()
    return head


def _found_in(record: ArcWarcRecord, iterator: ArchiveIterator, skipped: Skipped, max_bytes: int) -> Page | str:
    """What `_page_of` finds in a record that ends where its header says; it is read up to there whatever it is."""
    stream = record.raw_stream
    if not hasattr(stream, "limit"):  # all that follows in the file, further records too
        return NO_LENGTH
    found = _page_of(record, max_bytes)
    while stream.read(BLOCK_BYTES):
        pass
    if stream.limit > 0:
        skipped.lost_bytes += record.length - stream.limit
        return CUT_SHORT
    iterator.read_to_end()  # looks for the blank line behind it
    if not iterator.err_count:
        return found
    iterator.err_count = 0
    skipped.lost_bytes += record.length
    return WRONG_LENGTH


def _page_of(record: ArcWarcRecord, max_bytes: int) -> Page | str:
    """The text of a record, or the reason why there is none; empty for a record that is passed over."""
    headers, http = record.rec_headers, record.http_headers
    if record.rec_type == "continuation":
        return SEGMENTED
    if record.rec_type not in ("response", "resource", "conversion"):
        return ""
    if headers.get_header("WARC-Segment-Number") is not None:
        return SEGMENTED
    if record.rec_type == "response" and http is not None and http.get_statuscode() != "200":
        return NOT_FOUND
    declared = (http or headers).get_header("Content-Type") or ""
    content_type, encoding = _content_type(declared)
    if record.rec_type == "conversion":
        content_type, encoding = content_type or PLAIN_TYPE, "utf-8"
    if content_type not in (*PAGE_TYPES, PLAIN_TYPE):
        return NOT_TEXT
    payload = _payload(record, max_bytes)
    if isinstance(payload, str):
        return payload
    try:
        if record.rec_type == "conversion":
            text = payload.decode()
        else:
            text = extract(payload, encoding=encoding) if content_type in PAGE_TYPES else decode(payload, encoding)
    except UnicodeDecodeError:
        return NOT_UTF8
    except DataError:
        return TOO_DEEP
    return Page(headers.get_header("WARC-Target-URI") or "", headers.get_header("WARC-Date") or "", content_type, text)


def _content_type(header: str) -> tuple[str, str | None]:
    """The type and the charset of a header `text/html; charset="utf-8"`."""
    kind, *parameters = header.split(";")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return kind.strip().lower(), value.strip().strip("\"'") or None
    return kind.strip().lower(), None


def _payload(record: ArcWarcRecord, max_bytes: int) -> bytes | str:
    """The bytes behind all headers, as the author of a page had them, or the reason why they are not there."""
    stream = record.raw_stream
    body = io.BytesIO()
    while body.tell() <= max_bytes and (block := stream.read(BLOCK_BYTES)):
        body.write(block)
    if body.tell() > max_bytes:
        return TOO_LARGE
    if stream.limit > 0:
        return CUT_SHORT
    try:
        return decoded_body(body.getvalue(), _codings(record), max_bytes)
    except BodyTooLargeError:
        return TOO_LARGE
    except CodingError:
        return BAD_HTTP


def _codings(record: ArcWarcRecord) -> list[str]:
    """What was done to the body, first to last."""
    headers = [] if record.http_headers is None else record.http_headers.headers
    kinds = ("content-encoding", "transfer-encoding")
    return [value for kind in kinds for name, value in headers if name.strip().lower() == kind]


def _records(stream: _Readable, skipped: Skipped, is_arc: bool) -> Iterator[tuple[ArcWarcRecord, ArchiveIterator]]:
    """The records of a stream, with what has read each. Behind one that is damaged, from the next line that begins
    one."""
    from warcio.archiveiterator import ArchiveIterator, WARCIterator
    from warcio.exceptions import ArchiveLoadFailed

    whole, readers, line = stream, [], b""
    for _ in range(MAX_DAMAGED_PLACES):
        iterator = ArchiveIterator(stream, arc2warc=True) if is_arc else WARCIterator(stream)
        iterator.INC_RECORD = ""  # it would print what err_count counts
        reader = iterator.reader
        readers.append(reader)
        try:
            if (yield from _sound_records(iterator)):
                return
        except EOFError:
            skipped[CUT_SHORT] += 1
            return
        except (ArchiveLoadFailed, ValueError, AttributeError, IndexError):  # what its parsers raise on odd headers
            skipped[NOT_A_RECORD] += 1
        while not (line := reader.readline()).startswith(b"WARC/1."):
            if not line:
                return
            skipped.lost_bytes += len(line)
        stream = _Rest(line, reader)
    skipped.lost_bytes += len(line) + sum(reader.rem_length() for reader in readers)
    while block := whole.read(BLOCK_BYTES):
        skipped.lost_bytes += len(block)


def _sound_records(iterator: ArchiveIterator) -> Generator[tuple[ArcWarcRecord, ArchiveIterator], None, bool]:
    """The records up to the end of a stream, or to one that does not say where it ends; whether it was the end.

    Raises:
        EOFError: the stream ends inside of a record's header.
    """
    record = None
    for record in iterator:
        yield record, iterator
        if not hasattr(record.raw_stream, "limit"):
            return False
    if record is None or iterator.next_line:  # warcio began one more
        raise EOFError
    return True


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Rest:
    """A line that was read to see what it is, and what comes behind it."""

    def __init__(self, line: bytes, behind: _Readable):
        self._line = line
        self._behind = behind

    def read(self, size: int) -> bytes:
        if self._line:
            line, self._line = self._line, b""
            return line
        return self._behind.read(size)


def _members(file: BinaryIO, skipped: Skipped) -> Iterator[_Readable]:
    """The uncompressed content of each gzip member, or the file itself when it is plain."""
    start = file.read(len(GZIP_MAGIC))
    file.seek(0)
    if start != GZIP_MAGIC:
        yield file
        return
    place = read_again = 0
    while True:
        member = _Member(file, place)
        yield member
        member.drain()
        if member.ended:
            place = member.end
        else:
            skipped[DAMAGED_GZIP] += 1
            read_again += member.end - place
            if read_again > MAX_READ_AGAIN * (place + BUFFER_BYTES):
                place = member.end  # bytes made so that each of them begins a member that never ends
            place = _next_member(file, place + 1)
        file.seek(place)
        if not file.read(1):
            return


def _next_member(file: BinaryIO, place: int) -> int:
    """Where the next gzip member begins, or the file ends."""
    file.seek(place)
    before = b""
    while block := file.read(BLOCK_BYTES):
        found = (before + block).find(GZIP_MAGIC)
        if found >= 0:
            return place - len(before) + found
        place += len(block)
        before = (before + block)[-len(GZIP_MAGIC) + 1 :]
    return place


class _Member:
    """A gzip member as a stream that ends where it ends, is cut off or cannot be uncompressed."""

    def __init__(self, file: BinaryIO, place: int):
        self._file = file
        self._decompressor = zlib.decompressobj(wbits=31)
        self._damaged = False
        self.end = place
        """Where it ends in the file, once it has ended."""

    @property
    def ended(self) -> bool:
        """Whether it has come to its regular end."""
        return self._decompressor.eof

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; none at the end."""
        pieces = io.BytesIO()
        while not self.ended and not self._damaged and (size < 0 or pieces.tell() < size):
            block = self._decompressor.unconsumed_tail or self._next_block()
            try:
                piece = self._decompressor.decompress(block, max(size - pieces.tell(), 0))
            except zlib.error:
                self._damaged = True
                break
            pieces.write(piece)
            self._damaged = not (block or piece or self.ended)  # the file ends before the member does
            if self.ended:
                self.end -= len(self._decompressor.unused_data)
        return pieces.getvalue()

    def _next_block(self) -> bytes:
        self._file.seek(self.end)
        block = self._file.read(BLOCK_BYTES)
        self.end += len(block)
        return block

    def drain(self) -> None:
        """Read to the end."""
        while self.read(BLOCK_BYTES):
            pass
