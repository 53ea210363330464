"""Where a text may be cut so that its parts can be encoded one by one.

    pieces   def   _def   _foo   (   )   :\\n        (_ is a blank)

    text     def _foo(x):\\n  ->  def | _foo | ( | x | ):\\n
                                    no piece has "f_", "o(", "(x", "x)"; but ":\\n" is inside one

If no piece of the vocabulary has byte a followed by byte b, no token ever reaches across a place between a and b. Then

    BPE       never joins a pair across it, and what it joins on one side does not depend on the other
    unigram   has a best path through it, which is the best path of the left part and then that of the right

so cutting there changes no id. No rule about words or languages is needed: the vocabulary itself says where words end.
SentencePiece trains its pieces inside words, and inside one script, which makes such places frequent.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from megalite.tokenizer.encoders.reference import BLANK
from megalite.tokenizer.encoders.vocabulary import CUT, JOIN

FIRST_CONTINUATION, LAST_CONTINUATION = 0x80, 0xBF
"""Bytes that continue a character of UTF-8."""


def cuts_between(pieces: Iterable[str]) -> np.ndarray:
    """The pairs of bytes between which a text may be cut.

    Args:
        pieces: all pieces that stand for text.

    Returns:
        uint8 [65536]: CUT or JOIN; entry 256 * a + b is of byte a followed by b. Never inside a character.
    """
    pairs = {pair for piece in pieces for pair in pairwise(piece)}
    rules = np.full((256, 256), CUT, np.uint8)
    rules[:, FIRST_CONTINUATION : LAST_CONTINUATION + 1] = JOIN
    for left, right in pairs:
        for last in {form.encode()[-1] for form in _forms(left)}:
            for first in {form.encode()[0] for form in _forms(right)}:
                rules[last, first] = JOIN
    return rules.reshape(-1)


def _forms(char: str) -> str:
    """How a character of a piece may stand in a text."""
    return " " + BLANK if char == BLANK else char
