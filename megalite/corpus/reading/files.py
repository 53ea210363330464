"""The files of a source, here or behind a URL: what tells their kind, and their content as a stream of bytes.

Three things can go wrong with a file, and they are told apart. What its content is (damaged, no UTF-8, too long) goes
to the rejects, and the next file is read. What the machine cannot do (a disk or a share that does not answer, no
memory) stops the station, which keeps what is done. What a service does not deliver does the same (`remote.py`).

A wrong bit in a compressed file seldom stops its decoder: three of four in a gzip file are noticed by the checksum at
the very end, and what comes out behind them is garbled text, much of it still JSON. So at the first record of a
compressed file that cannot be read, the whole file is tried once; if it is damaged, reading ends there.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pyarrow as pa

from megalite.corpus.documents import BatchBuilder
from megalite.corpus.reading.decompression import DECODERS, Content
from megalite.corpus.reading.remote import open_remote
from megalite.corpus.source import DocumentSource, file_name, is_url
from megalite.errors import DataError, UserError

BUFFER_BYTES = 1 << 20

UNREADABLE_FILE = "unreadable file"
DAMAGED_FILE = "damaged file"
TOO_LARGE = "record too large"

SHOWN_BYTES = 1000
"""How much of a record that is too large is kept for a look at it."""

GARBLED_BYTES = 1 << 15
"""Text before the first bad record of a damaged file that is not trusted either: the window of gzip."""

READ_ERRORS = (OSError, pa.ArrowException, UnicodeDecodeError)
"""What Arrow and the system raise about a file."""

MACHINE_FAULTS = frozenset(
    (
        *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO),
        *(errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.EBUSY),
        *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
        *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN),
    )
)
"""System errors that say nothing about a file's content."""


@dataclass(frozen=True)
class FilePiece:
    """A file of a source, or a part of a large one."""

    path: str
    """Absolute, or a URL; the name of a data set."""
    id: str
    """What the file is called in ids."""
    start: int = 0
    stop: int | None = None
    """Bytes of JSON lines, or row groups of a Parquet file, None being the end; of a data set, which shard out of how
    many."""
    first: int = 1
    """Number of the first line or row, for ids."""
    num_bytes: int = 0
    """Of the whole file, as it lies there; 0 when that is not known."""


def is_machine_fault(error: Exception) -> bool:
    """Whether an error is about the machine, not about a file."""
    if isinstance(error, MemoryError):  # Arrow's is one of Arrow's own errors, too
        return True
    return isinstance(error, OSError) and error.errno in MACHINE_FAULTS


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, which leaves out the folders that it cannot list; here they are errors.

    Raises:
        DataError: a folder is closed to this user.
        OSError: this machine cannot read.
    """

    def refuse(error: OSError) -> None:
        if is_machine_fault(error):
            raise error
        raise DataError(
            f"{error.filename}: cannot be listed ({error.strerror}); open this folder to the user who runs this, or "
            "leave it out of the source"
        ) from error

    return os.walk(root, onerror=refuse)


def data_suffix(path: str) -> str:
    """The suffix of a path or URL that tells the format, that of a compression (`.gz`, `.zst`, `.bz2`, `.xz`) taken
    off."""
    name = PurePosixPath(file_name(path))
    inner = name.with_suffix("") if is_compressed(path) else name
    return inner.suffix.lower()


def is_compressed(path: str) -> bool:
    """Whether a path or URL ends in the suffix of a compression."""
    return _suffix(path) in DECODERS


@contextmanager
def open_content(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[Reading]:
    """A file as a stream of its content, uncompressed on the way. Where a damaged one ended early, that is told to the
    builder behind the block."""
    content = None
    with ExitStack() as stack:
        file = stack.enter_context(_open(piece.path))
        if is_compressed(piece.path):
            content = Content(file, _suffix(piece.path), config.max_expansion)
            file = stack.enter_context(io.BufferedReader(content, BUFFER_BYTES))
        yield Reading(piece, file, content, config)
    if content is not None and content.damage is not None:
        place = content.damage.place
        _lose_rest(piece, builder, place, f"{content.damage.why}, at byte {place}")


def _lose_rest(piece: FilePiece, builder: BatchBuilder, place: int, what: str) -> None:
    """Put the name of a compressed file aside of which what lies behind a byte is lost."""
    num_lost = max(piece.num_bytes - place, 0)
    of = f" of {piece.num_bytes}; the {num_lost} bytes from there on are lost" if piece.num_bytes else ""
    builder.reject(piece.id, what + of, DAMAGED_FILE)
    builder.lose(damaged_files=1, compressed_bytes=num_lost)


def _suffix(path: str) -> str:
    """The last one, of a compression, in small letters."""
    return PurePosixPath(file_name(path)).suffix.lower()


def _open(path: str) -> BinaryIO:
    return open_remote(path) if is_url(path) else open(path, "rb", BUFFER_BYTES)


class Reading:
    """An open file.

    Args:
        piece: what it is.
        file: its content.
        content: what knows whether that ended early; None for a file that is not compressed.
        config: limits.
    """

    def __init__(self, piece: FilePiece, file: BinaryIO, content: Content | None, config: DocumentSource):
        self.file = file
        self.max_bytes = int(config.max_record_mb * 1e6)
        self._piece = piece
        self._content = content
        self._max_expansion = config.max_expansion
        self._is_tried = False

    @property
    def is_damaged(self) -> bool:
        """Whether the content ended before the file; known at its end."""
        return self._content is not None and self._content.damage is not None

    def ends_at_bad_record(self, record: str, builder: BatchBuilder) -> bool:
        """Whether a record that cannot be read shows that the file is damaged, and nothing behind it can be trusted.

        Args:
            record: its name.
            builder: is told, and gives up what it holds of the text just before.
        """
        if self._content is None or self._is_tried:
            return False
        self._is_tried = True
        with Content(_open(self._piece.path), _suffix(self._piece.path), self._max_expansion) as again:
            while again.read(BUFFER_BYTES):
                pass
        if again.damage is None or not again.damage.is_wrong:
            return False
        self._content.damage = None  # told here
        num_doubtful = builder.take_back(GARBLED_BYTES)
        what = f"{again.damage.why}, at byte {again.damage.place}; left out from {record} on"
        what += f", and {num_doubtful} documents before it, which may be garbled" if num_doubtful else ""
        _lose_rest(self._piece, builder, self._content.place, f"{what}, at about byte {self._content.place}")
        return True

    def whole(self) -> bytes | None:
        """All of the file; None if that is more than a record may have, or damaged."""
        content = self.file.read(self.max_bytes + 1)
        return None if len(content) > self.max_bytes or self.is_damaged else content

    def lines(self) -> Iterator[tuple[bytes, int, bool]]:
        """Yield each line, how many bytes it has, and whether it is whole: ended by a line end, or by the end of a
        file that is not damaged. Of one that is too long only its beginning is in memory."""
        while line := self.file.readline(self.max_bytes + 1):
            last, num_bytes = line, len(line)
            if num_bytes > self.max_bytes:
                line = line[:SHOWN_BYTES]
                while not last.endswith(b"\n") and (last := self.file.readline(BUFFER_BYTES)):
                    num_bytes += len(last)
            yield line, num_bytes, last.endswith(b"\n") or not self.is_damaged


@contextmanager
def reading_station_file(path: Path) -> Iterator[None]:
    """Read a Parquet file that a station wrote within the block.

    Raises:
        UserError: it is not what was written.
    """
    try:
        yield
    except READ_ERRORS as error:
        if is_machine_fault(error):
            raise
        raise UserError(
            f"{path}: damaged ({error}); `megalite data verify {path.parent}` names all that is: run its station again"
        ) from error


def shown(content: bytes) -> str:
    """The beginning of something that is too large, as text."""
    return content[:SHOWN_BYTES].decode(errors="backslashreplace")
