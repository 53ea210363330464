"""Whether a candidate is a bank account or a payment card: both carry check digits, so both are sure."""

from __future__ import annotations

import re

from megalite.corpus.privacy.window import Span, Window

_COUNTRIES_AND_LENGTHS = """
AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28
EE20 EG29 ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20
LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25
QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30
"""

IBAN_LENGTHS = {entry[:2].encode(): int(entry[2:]) for entry in _COUNTRIES_AND_LENGTHS.split()}
"""Characters of an account of each country (SWIFT's IBAN registry)."""

IBAN = re.compile(rb"[A-Z]{2}\d\d(?: ?[0-9A-Z]){11,30}")

CARD = re.compile(
    rb"(?:\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}|\d{4}([ -])\d{6}\2\d{4,5})(?![0-9A-Za-z_]|[ .,:/-][0-9])"
)

CARD_FORMS = re.compile(
    rb"(?:4(?:\d{12}|\d{15}|\d{18})"  # Visa
    rb"|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}"  # Mastercard
    rb"|3[47]\d{13}"  # American Express
    rb"|(?:6011|64[4-9]\d|65\d\d)\d{12,15}"  # Discover
    rb"|35(?:2[89]|[3-8]\d)\d{12,15}"  # JCB
    rb"|3(?:0[0-5]|[68]\d)\d{11}"  # Diners Club
    rb"|62\d{14,17})\Z"  # UnionPay
)
"""Known prefixes, each with the lengths it comes in."""

MIN_DISTINCT_DIGITS = 2


def find_iban(window: Window) -> Span | None:
    """The account that begins here: of its country's length, written in one piece or in fours, and true modulo 97."""
    length = IBAN_LENGTHS.get(bytes(window.memory[window.place : window.place + 2]))
    match = window.match(IBAN)
    if length is None or match is None:
        return None
    end = _end_of_characters(match[0], length)
    if end is None or (window.byte_at(match.start() + end)).isalnum():
        return None
    text = match[0][:end]
    compact = text.replace(b" ", b"")
    in_fours = b" ".join(compact[place : place + 4] for place in range(0, length, 4))
    if text not in (compact, in_fours):
        return None
    digits = "".join(str(int(chr(character), 36)) for character in compact[4:] + compact[:4])
    return (match.start(), match.start() + end) if int(digits) % 97 == 1 else None


def find_card(window: Window) -> Span | None:
    """The card that begins here. Unbroken numbers inside of paths and names are left alone."""
    match = window.match(CARD)
    if match is None:
        return None
    digits = bytes(character for character in match[0] if 48 <= character <= 57)
    if digits == match[0] and window.before(1) in (b"/", b"_", b"#", b"-", b"."):
        return None
    if CARD_FORMS.match(digits) is None or len(set(digits)) < MIN_DISTINCT_DIGITS or not _passes_luhn(digits):
        return None
    return match.span()


def _passes_luhn(digits: bytes) -> bool:
    """ISO/IEC 7812: every second digit from the right doubled, its own digits added, the sum divisible by ten."""
    total = 0
    for number, character in enumerate(reversed(digits)):
        digit = (character - 48) * (1 + number % 2)
        total += digit - 9 if digit > 9 else digit
    return total % 10 == 0


def _end_of_characters(text: bytes, count: int) -> int | None:
    """Where the first `count` characters other than blanks end."""
    for place, character in enumerate(text):
        count -= character != 32
        if count == 0:
            return place + 1
    return None
