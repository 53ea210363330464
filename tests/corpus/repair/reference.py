"""What a repair means, said once more over strings: four regular expressions and the standard library."""

from __future__ import annotations

import re
import unicodedata

CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u200b\u2060\ufeff\ufff9-\ufffc]")

LINE_ENDS = re.compile("\r\n?|\x85|\u2028|\u2029")

TRAILING_BLANKS = " \t\u00a0"

MANY_EMPTY_LINES = re.compile(r"\n{4,}")


def repair_string(text: str, *, unicode_nfc: bool = True) -> str:
    """One kind of line end, no control characters, no blanks at line ends, at most two empty lines on end."""
    text = LINE_ENDS.sub("\n", text)
    text = CONTROL_CHARACTERS.sub("", text)
    text = "\n".join(line.rstrip(TRAILING_BLANKS) for line in text.split("\n"))
    text = MANY_EMPTY_LINES.sub("\n\n\n", text)
    text = text.strip("\n")
    return unicodedata.normalize("NFC", text) if unicode_nfc else text
