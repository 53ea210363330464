"""A compressed file as a stream of its content, up to where it is damaged: gzip, zstd, bzip2, xz.

    .jsonl.gz   |##########################x------|       the bytes before x come out, then the stream ends
                                          damage: where, why, and how much lies behind it

Libraries raise an error at a damaged place and keep to themselves what they had unpacked up to there. So they are fed
in small bits, and what the last bit held before the damage is taken out byte by byte, where a library can go back
(gzip); elsewhere some kilobytes before the damage are lost.

What comes out of a few bytes may be gigabytes. No step unpacks more than some tens of MB at once, and a file that grows
beyond a ratio that no text reaches is given up.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from typing import Any, BinaryIO, NamedTuple, Protocol

EMPTY = "it is empty, as after a failed download"

UNPACKED_AT_ONCE = 1 << 18
MOST_PIECES = 64
"""Of so many bytes each, in one step."""

EXPANSION_FROM = 1 << 28
"""Bytes of content from which on the ratio counts: a small file of equal lines is no attack."""

XZ_MEMORY = 1 << 28
"""Bytes of window that an xz file may ask for; the others' libraries have such limits of their own."""


class Damage(NamedTuple):
    """Why a stream has ended before its file."""

    place: int
    """Byte of the compressed file."""
    why: str
    is_wrong: bool = False
    """Whether something in it is wrong: what came before may be garbled. A file that is cut off is not wrong."""


class BadContentError(Exception):
    """What a decoder cannot unpack."""

    def __init__(self, why: str, output: bytes = b"", num_good: int = 0):
        super().__init__(why)
        self.why = why
        self.output = output
        """What it unpacked before."""
        self.num_good = num_good
        """Bytes of what it was fed that were good."""


class Decoder(Protocol):
    """One member of a file (gzip, xz), frame (zstd) or stream (bzip2)."""

    magic: bytes
    """How it begins."""
    step: int
    """Bytes to feed at once."""
    ended: bool

    @property
    def holds_more(self) -> bool:
        """Whether more comes out of it with nothing fed."""
        ...

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Unpack some.

        Returns:
            What came out, and what is left of the data: for the next call, or, when the member has ended, behind it.

        Raises:
            BadContentError: it cannot be unpacked.
        """
        ...


class _Gzip:
    magic = b"\x1f\x8b"
    step = 1 << 16
    holds_more = False

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)
        self._rest = b""
        self.ended = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        if data is not self._rest:  # new bytes: remember how it was before them
            self._before, self._data, self._num_out = self._decoder.copy(), data, 0
        try:
            output = self._decoder.decompress(data, UNPACKED_AT_ONCE)
        except zlib.error as error:
            raise self._one_by_one(str(error)) from error
        self._num_out += len(output)
        self.ended = self._decoder.eof
        self._rest = self._decoder.unused_data if self.ended else self._decoder.unconsumed_tail
        return output, self._rest

    def _one_by_one(self, why: str) -> BadContentError:
        """Go back to before the last bytes, and take out what comes before the bad one."""
        pieces, num_good = [], 0
        try:
            for byte in self._data:
                pieces.append(self._before.decompress(bytes([byte])))
                num_good += 1
        except zlib.error:
            pass
        return BadContentError(why, b"".join(pieces)[self._num_out :], num_good)


class _Zstd:
    magic = b"\x28\xb5\x2f\xfd"
    step = 1 << 11  # of which 64 MB can come at most
    holds_more = False

    def __init__(self) -> None:
        import zstandard

        self._decoder, self._error = zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
        self.ended = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        try:
            output = self._decoder.decompress(data)
        except self._error as error:
            raise BadContentError(str(error)) from error
        self.ended = self._decoder.eof
        return output, self._decoder.unused_data if self.ended else b""


class _Stdlib:
    """bz2's and lzma's decompressors, which are of one kind."""

    step = 1 << 10

    def __init__(self, decoder: Any):
        self._decoder = decoder
        self.ended = False

    @property
    def holds_more(self) -> bool:
        return not self._decoder.needs_input and not self._decoder.eof

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        pieces = []
        try:
            pieces.append(self._decoder.decompress(data, UNPACKED_AT_ONCE))
            while self.holds_more and len(pieces) < MOST_PIECES:
                pieces.append(self._decoder.decompress(b"", UNPACKED_AT_ONCE))
        except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
            raise BadContentError(str(error), b"".join(pieces)) from error
        self.ended = self._decoder.eof
        return b"".join(pieces), self._decoder.unused_data if self.ended else b""


class _Bzip2(_Stdlib):
    magic = b"BZh"

    def __init__(self) -> None:
        super().__init__(bz2.BZ2Decompressor())


class _Xz(_Stdlib):
    magic = b"\xfd7zXZ\x00"

    def __init__(self) -> None:
        super().__init__(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY))


DECODERS: dict[str, type[Decoder]] = {".gz": _Gzip, ".zst": _Zstd, ".bz2": _Bzip2, ".xz": _Xz}
"""By suffix."""


class Content(io.RawIOBase):
    """The content of a compressed file, as far as it can be unpacked.

    Args:
        file: the compressed bytes; closed with this.
        suffix: of DECODERS.
        max_expansion: times its size that it may grow to.
    """

    def __init__(self, file: BinaryIO, suffix: str, max_expansion: float):
        self.damage: Damage | None = None
        """Why it ended early; known when it has ended."""
        self._file = file
        self._kind = DECODERS[suffix]
        self._max_expansion = max_expansion
        self._decoder: Decoder | None = None
        self._input = b""
        self._num_read = self._num_unpacked = 0
        self._ready = memoryview(b"")

    @property
    def place(self) -> int:
        """Bytes of the compressed file that were needed so far."""
        return self._num_read - len(self._input)

    @property
    def is_between_members(self) -> bool:
        """Whether all that has begun has come to its end."""
        return self._decoder is None

    def readall_up_to(self, num_bytes: int) -> bytes:
        """The content, or so many bytes of it."""
        pieces, left = [], num_bytes
        while left and (piece := self.read(min(left, UNPACKED_AT_ONCE))):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._advance():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _advance(self) -> bool:
        """Unpack some more; False at the end."""
        if self.damage is not None:
            return False
        if self._decoder is None and not self._begin():
            return False
        decoder = self._decoder
        assert decoder is not None
        if not self._input and not decoder.holds_more and not self._fill(decoder.step):
            self.damage = Damage(self._num_read, "it ends in the middle")
            return False
        before = self.place
        try:
            output, self._input = decoder.feed(self._input)
        except BadContentError as error:
            output, self.damage = error.output, Damage(before + error.num_good, error.why, is_wrong=True)
        if decoder.ended:
            self._decoder = None
        self._num_unpacked += len(output)
        self._ready = memoryview(output)
        limit = self._max_expansion * self.place
        if self._num_unpacked > max(limit, EXPANSION_FROM):
            self.damage = Damage(before, f"it grows to more than {self._max_expansion:g} times its size")
        return True

    def _begin(self) -> bool:
        """Begin the next member, if there is one."""
        while True:
            if self._num_unpacked:  # padding, as tapes and xz have it
                self._input = self._input.lstrip(b"\0")
            if len(self._input) >= len(self._kind.magic) or not self._fill(self._kind.step):
                break
        start = self._input[: len(self._kind.magic)]
        if not start:
            if not self._num_read:
                self.damage = Damage(0, EMPTY)
            return False
        if not self._begins_member(start):
            self.damage = Damage(self.place, "something else begins here")
            return False
        self._decoder = self._kind()
        return True

    def _begins_member(self, start: bytes) -> bool:
        """Whether a member begins so; zstd has frames without content, with numbers of their own."""
        is_skippable = self._kind is _Zstd and start[1:] == b"\x2a\x4d\x18" and start[0] & 0xF0 == 0x50
        return start == self._kind.magic or is_skippable

    def _fill(self, num_bytes: int) -> bool:
        data = self._file.read(num_bytes)
        self._num_read += len(data)
        self._input += data
        return bool(data)
