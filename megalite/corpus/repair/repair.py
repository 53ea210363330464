"""Repair of texts without judging them: the first thing that happens to a raw document.

    fix_encoding   mojibake set right, line by line (ftfy; off by default)
    tidy           one kind of line end, no control characters, no blanks at line ends, at most two empty lines on
                   end, none at the two ends of the document
    compose        Unicode NFC

One pass over the bytes finds the documents that need any of it. Most need nothing and are not touched; when that is
all of them, not even copied.
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.repair.mojibake import encoding_patches
from megalite.corpus.repair.normal_form import mark_table, normal_form_patches
from megalite.texts import Texts, splice


def repair(texts: Texts, *, unicode_nfc: bool = True, fix_encoding: bool = False) -> Texts:
    """Repaired texts, in the same number and order; a second repair changes nothing, but for what it uncovers to ftfy.

    Args:
        texts: not changed; the result may share its memory.
        unicode_nfc: compose characters.
        fix_encoding: set mojibake right; slow, and needs ftfy.

    Raises:
        UnavailableError: fix_encoding without ftfy.
    """
    from megalite.corpus.repair.kernels import UNCOMPOSED, UNTIDY, rewrite, scan

    if fix_encoding:  # first: its bytes of C1 would be removed as control characters
        texts = splice(texts, encoding_patches(texts))
    flags = scan(texts.buffer, texts.offsets, mark_table(), unicode_nfc)
    if np.any(flags & UNTIDY):
        texts = Texts(*rewrite(texts.buffer, texts.offsets, flags))
    return splice(texts, normal_form_patches(texts, np.flatnonzero(flags & UNCOMPOSED)))
