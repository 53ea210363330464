"""A vocabulary as arrays for compiled code: what the three algorithms search."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megalite.tokenizer.encoders.tables import make_table

BPE, UNIGRAM, BYTE_BPE = range(3)

JOIN, CUT, HARD = range(3)
"""Of two bytes: no word ends between them, one does, or it takes more than them to know."""

NO_PIECE = -1


class VocabularyArrays(NamedTuple):
    """Arrays that an algorithm does not need are empty."""

    algorithm: int
    """BPE or UNIGRAM of SentencePiece, or BYTE_BPE."""
    rules: np.ndarray
    """uint8 [65536]: JOIN, CUT or HARD at 256 * a + b for byte a before byte b; see `cuts.py` and `byte_level.py`."""
    classes: np.ndarray
    """BYTE_BPE: uint8 [code points]: where the HARD words end."""
    byte_ids: np.ndarray
    """int32 [256]: the pieces of single bytes."""
    char_ids: np.ndarray
    """BPE: int32 [code points]: the piece of a single character, or NO_PIECE. A blank has that of U+2581."""
    merges: np.ndarray
    """BPE, BYTE_BPE: table of left id << 32 | right id -> rank << 32 | id of both together."""
    edges: np.ndarray
    """UNIGRAM: table of node << 8 | byte -> node of a trie over the pieces. A blank leads where U+2581 does."""
    piece_at: np.ndarray
    """UNIGRAM: int32 [nodes]: the piece that ends there, or NO_PIECE."""
    scores: np.ndarray
    """UNIGRAM: int64 [vocab], in units of SCORE_STEP."""
    unknown_score: int
    """UNIGRAM: that of a character without a piece."""


def make_pieces(algorithm: int, rules: np.ndarray, byte_ids: np.ndarray, **arrays: Any) -> VocabularyArrays:
    """Pieces, with empty arrays for what is not given."""
    no_table = make_table(*np.zeros((2, 0), np.int64))
    without = VocabularyArrays(
        algorithm=algorithm,
        rules=rules,
        classes=np.zeros(0, np.uint8),
        byte_ids=byte_ids.astype(np.int32),
        char_ids=np.zeros(0, np.int32),
        merges=no_table,
        edges=no_table,
        piece_at=np.zeros(0, np.int32),
        scores=np.zeros(0, np.int64),
        unknown_score=0,
    )
    return without._replace(**arrays)
