"""Texts to hold encoders against: real ones that every machine has, and random ones that nobody would write."""

from __future__ import annotations

import random
import sysconfig
from functools import cache
from pathlib import Path

PIECES = (
    "the", " of", "'s", "'LL", "'", "''", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c",
    "\x00", "7", "42", "\u0663", "\u00bd", "\u00b2", "\u2167", "\u4e8c", "(", ")", "->", "_", "\u2581", "\u2581a",
    "<s>", "</s>", "<pad>", "<unk>", "<0x0A>", "<|endoftext|>", "é", "e\u0301", "ß", "\u0130", "я", "же", "日本", "の",
    "한", "ไท", "\u094d", "😀", "\u200d", "\ufeff", "\ue000", "\uffff", "\U0010ffff", "\U0002a6d6", "\u1c89", "\ua7cb",
    "x", "Q",
)  # fmt: skip


@cache
def library_texts(num_texts: int = 2000, most_chars: int = 1500) -> list[str]:
    """Slices of the sources of Python's library, some from inside a line."""
    rng = random.Random(7)
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(root.glob("*.py"))]
    sources += [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(root.glob("encodings/*.py"))[:20]]
    texts = []
    while len(texts) < num_texts:
        source = rng.choice(sources)
        start = rng.randrange(max(1, len(source)))
        texts.append(source[start : start + rng.randrange(most_chars)])
    return texts


@cache
def scrambled_texts(num_texts: int = 3000, most_pieces: int = 25) -> list[str]:
    """Random chains of PIECES: every kind of character next to every other."""
    rng = random.Random(8)
    return ["".join(rng.choices(PIECES, k=rng.randrange(most_pieces))) for _ in range(num_texts)]


@cache
def texts_of_numbers(num_texts: int = 3000, most_chars: int = 14) -> list[str]:
    """Random chains of digits, blanks of several kinds, other numbers, and a letter or a sign here and there."""
    rng, choices = random.Random(9), "0123456789  \t\n\u00a0\u3000½Ⅷ٣²a-.'é"
    return ["".join(rng.choices(choices, k=rng.randrange(most_chars))) for _ in range(num_texts)]
