"""A candidate: the kind of place that the scan names, and what an exact check sees of it.

No look may cross the borders of the document."""

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


AT, DOTTED, COLONS, PHONE, PLUS, IBAN, CARD, SSN, KEY, JWT, PEM, ASSIGNMENT, NAME, ADDRESS = range(14)
"""Codes of candidates: an @, four groups of digits with dots, colons between hexadecimal digits, groups of digits like
a national telephone number's, a plus sign before digits, and so on; a capital, and a number that may be a house's."""

KEY_PREFIXES = (
    *(b"AKIA", b"ASIA"),  # AWS, permanent and temporary
    *(b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
    *(b"glpat-", b"gldt-", b"glrt-"),
    *(b"xoxb-", b"xoxp-", b"xoxa-", b"xoxr-", b"xoxs-", b"xoxe-", b"xapp-"),  # Slack
    *(b"sk-", b"sk_live_", b"rk_live_"),  # OpenAI and Anthropic; Stripe
    *(b"hf_", b"AIza", b"npm_", b"pypi-"),  # Hugging Face, Google
)

PREFIXES = (*((prefix, KEY) for prefix in KEY_PREFIXES), (b"eyJ", JWT), (b"BEGIN ", PEM))
"""A JSON object in base64 begins with eyJ; the first line of a PEM block with five hyphens before BEGIN."""

ASSIGNED_NAMES = (
    *(b"password", b"passwd", b"pwd", b"passphrase", b"secret", b"token"),
    *(b"api_key", b"apikey", b"api-key", b"access_key", b"accesskey", b"access-key", b"secret_key", b"secretkey"),
)
"""Ends of names, in small letters, whose value is a secret."""
