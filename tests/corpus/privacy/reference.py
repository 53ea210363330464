"""The kinds whose checks are written for speed, in plain patterns, which may take the square of a text's length.

A kind is looked for by itself, at every place where a word or a number may begin.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable

from megalite.corpus.privacy.credentials import KEY, MIN_DISTINCT, PREFIX
from megalite.corpus.privacy.telephone import COUNTRY_CODE, NOT_LONGER

KEY_BEGINS = re.compile(
    rb"(?<![A-Za-z0-9_\x80-\xff-])"
    rb"(?:AKIA|ASIA|gh[pousr]_|github_pat_|gl(?:pat|dt|rt)-|xox[bpares]-|xapp-|sk-|[rs]k_live_|hf_|AIza|npm_|pypi-)"
)

JWT_BEGINS = re.compile(rb"(?<![A-Za-z0-9_\x80-\xff])eyJ")

JWT = re.compile(rb"(eyJ[A-Za-z0-9_-]{10,})\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}(?![A-Za-z0-9_])")

PEM_BLOCK = re.compile(
    rb"-----BEGIN ((?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?)-----.{0,16384}?-----END \1-----", re.DOTALL
)

PLUS = re.compile(rb"(?<![A-Za-z0-9\x80-\xff)\]_+~])\+")

INTERNATIONAL = re.compile(
    rb"\+%b[ .-]?(?:\(\d{1,5}\)[ .-]?)?\d{1,5}(?:[ .-]?\d{2,8}){1,5}%b" % (COUNTRY_CODE, NOT_LONGER)
)

Find = Callable[[bytes, int], int | None]
"""Where what begins at a place ends."""


def find_key(text: bytes, place: int) -> int | None:
    match = KEY.match(text, place)
    if match is None:
        return None
    body = PREFIX.sub(b"", match[0], count=1)
    is_word = match[0].startswith(b"sk-") and not (re.search(rb"\d", body) and body.lower() != body)
    return None if is_word or len(set(body)) < MIN_DISTINCT else match.end()


def find_jwt(text: bytes, place: int) -> int | None:
    match = JWT.match(text, place)
    try:
        header = match and json.loads(base64.urlsafe_b64decode(match[1] + b"=" * (-len(match[1]) % 4)))
    except (binascii.Error, ValueError):
        return None
    return match.end() if isinstance(header, dict) and "alg" in header else None


def find_private_key(text: bytes, place: int) -> int | None:
    match = PEM_BLOCK.match(text, place)
    return None if match is None else match.end()


def find_international(text: bytes, place: int) -> int | None:
    match = INTERNATIONAL.match(text, place)
    if match is None:
        return None
    num_digits = len(re.findall(rb"\d", match[0]))
    low, high = (10, 13) if num_digits == len(match[0]) - 1 else (8, 15)
    return match.end() if low <= num_digits <= high else None


KINDS: dict[str, tuple[re.Pattern[bytes], Find]] = {
    "api_key": (KEY_BEGINS, find_key),
    "jwt": (JWT_BEGINS, find_jwt),
    "private_key": (re.compile(rb"-----BEGIN "), find_private_key),
}


def redact(text: str, kind: str, mark: str) -> str:
    """The text with everything of one kind replaced."""
    raw, (begins, find) = text.encode(), KINDS[kind]
    pieces, done = [], 0
    for begin in begins.finditer(raw):
        end = find(raw, begin.start()) if begin.start() >= done else None
        if end is not None:
            pieces += (raw[done : begin.start()], mark.encode())
            done = end
    return b"".join((*pieces, raw[done:])).decode()
