"""What an exact check sees: a place in the buffer, and the borders of its document, which no look may cross."""

from __future__ import annotations

import re
from typing import NamedTuple

Span = tuple[int, int]
"""Start and end in the buffer."""


class Window(NamedTuple):
    """A candidate's surroundings."""

    memory: memoryview
    place: int
    start: int
    """Where the document begins."""
    end: int

    def before(self, num_bytes: int) -> bytes:
        """The bytes before the place, fewer at the document's beginning."""
        return bytes(self.memory[max(self.start, self.place - num_bytes) : self.place])

    def byte_at(self, place: int) -> bytes:
        """The byte at a place, empty outside the document."""
        return bytes(self.memory[place : place + 1]) if self.start <= place < self.end else b""

    def match(self, pattern: re.Pattern[bytes], shift: int = 0) -> re.Match[bytes] | None:
        """Match a pattern at the place, or `shift` bytes from it; the match ends inside the document.

        Patterns must not look behind their beginning: they would see the document before. And since every byte of a
        text may be such a place, a pattern reads a bounded number of bytes, or, of a run in which the scan names one
        place only, the whole run; and there is one way to read them.
        """
        return pattern.match(self.memory, self.place + shift, self.end)
