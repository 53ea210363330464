"""Whether a candidate is a key, a token, a private key's block, or a password in an assignment."""

from __future__ import annotations

import base64
import binascii
import json
import re

from megalite.corpus.privacy.window import Span, Window

KEY = re.compile(
    rb"(?:"
    rb"(?:AKIA|ASIA)[A-Z2-7]{16}"
    rb"|gh[pousr]_[A-Za-z0-9]{36,251}|github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}"
    rb"|gl(?:pat|dt|rt)-[A-Za-z0-9_-]{20,}"
    rb"|xox[bpares]-[A-Za-z0-9-]{16,}|xapp-\d-[A-Za-z0-9-]{16,}"
    rb"|sk-[A-Za-z0-9_-]{20,}|[rs]k_live_[A-Za-z0-9]{16,}"
    rb"|hf_[A-Za-z0-9]{34,}|AIza[A-Za-z0-9_-]{35}|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,}"
    rb")(?![A-Za-z0-9_])"
)

PREFIX = re.compile(rb"AKIA|ASIA|AIza|github_pat_|[rs]k_live_|[a-z]+[_-]")

MIN_DISTINCT = 10
"""Different characters in a key; `ghp_xxxx...` has fewer."""

PEM_BEGIN = re.compile(rb"BEGIN ((?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?)-----")

HYPHENS = b"-----"

MAX_PEM = 16384
"""Bytes between the first and the last line of a private key."""

JWT_HEADER = re.compile(rb"eyJ[A-Za-z0-9_-]{10,}(?=\.eyJ)")

JWT_BODY = re.compile(rb"\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}")

VALUE = re.compile(
    rb"""=?>?\ {0,4}(?:
        "([^"\s\\]{6,128})"
      | '([^'\s\\]{6,128})'
      | ([A-Za-z0-9!@#%^&*_+=~/.-]{8,128})(?=[\s,;&"'`<)\]}]|\Z)
    )""",
    re.VERBOSE,
)

NAME_OF_AWS_SECRET = re.compile(rb"aws.{0,20}(?:secret|sk|access.?key).{0,20}\Z", re.IGNORECASE | re.DOTALL)

AWS_SECRET = re.compile(rb"[A-Za-z0-9/+]{40}")

MAX_NAME = 48

PLACEHOLDER = re.compile(rb"[$<{%[]|[~.]{0,2}/|.*/.*/|[A-Z][A-Z0-9]*(?:[_-][A-Z0-9]+)+\Z")
"""A variable, `<your password>`, a path, or the name of a constant."""

LETTER = re.compile(rb"[A-Za-z]")

ATTRIBUTE = re.compile(rb"\.[A-Za-z_]")

MIN_DISTINCT_OF_PASSWORD = 4


def find_key(window: Window) -> Span | None:
    """The key that begins here, unless it is a placeholder or a word with hyphens."""
    match = window.match(KEY)
    if match is None:
        return None
    body = PREFIX.sub(b"", match[0], count=1)
    if len(set(body)) < MIN_DISTINCT:
        return None
    if match[0].startswith(b"sk-") and not (_has_digit(body) and body.lower() != body):
        return None
    return match.span()


def find_jwt(window: Window) -> Span | None:
    """The token that begins here: three parts, of which the first is a JSON object that names an algorithm."""
    head = window.match(JWT_HEADER)
    if head is None:
        return None
    try:
        header = json.loads(base64.urlsafe_b64decode(head[0] + b"=" * (-len(head[0]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or "alg" not in header:
        return None
    body = window.match(JWT_BODY, shift=len(head[0]))
    return None if body is None else (head.start(), body.end())


def find_private_key(window: Window) -> Span | None:
    """The block whose first line has its BEGIN here, up to its last line."""
    if window.before(len(HYPHENS)) != HYPHENS:
        return None
    first = window.match(PEM_BEGIN)
    if first is None:
        return None
    last = HYPHENS + b"END " + first[1] + HYPHENS
    rest = bytes(window.memory[first.end() : min(first.end() + MAX_PEM + len(last), window.end)])
    found = rest.find(last)
    return None if found < 0 else (window.place - len(HYPHENS), first.end() + found + len(last))


def find_assigned_aws_secret(window: Window) -> Span | None:
    """The AWS secret key assigned here: 40 characters without a form, known by the name alone."""
    span = _value(window)
    if span is None or not NAME_OF_AWS_SECRET.search(window.before(MAX_NAME)):
        return None
    value = bytes(window.memory[span[0] : span[1]])
    return span if AWS_SECRET.fullmatch(value) and len(set(value)) >= MIN_DISTINCT else None


def find_assigned_password(window: Window) -> Span | None:
    """The value assigned here, without its quotes. Names, calls and placeholders are left alone."""
    span = _value(window)
    if span is None:
        return None
    value = bytes(window.memory[span[0] : span[1]])
    quoted = bytes(window.memory[span[0] - 1 : span[0]]) in (b'"', b"'")
    if PLACEHOLDER.match(value) or len(set(value)) < MIN_DISTINCT_OF_PASSWORD:
        return None
    if quoted:
        return span if not value.isalpha() else None
    looks_like_code = LETTER.search(value) is None or ATTRIBUTE.search(value)
    return span if _has_digit(value) and not looks_like_code else None


def _value(window: Window) -> Span | None:
    if window.byte_at(window.place) == window.byte_at(window.place + 1):
        return None  # == compares, :: is a path
    match = window.match(VALUE, shift=1)
    if match is None:
        return None
    assert match.lastindex is not None, "each form of a value is a group"
    return match.span(match.lastindex)


def _has_digit(text: bytes) -> bool:
    return any(48 <= character <= 57 for character in text)
