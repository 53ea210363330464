"""The best path of a unigram model through one word (Viterbi 1967; Kudo 2018, "Subword regularization").

    best_score[p]   of all ways to cut the bytes before p into pieces, the largest sum of scores
    best_start[p]   where the last piece of that way begins; best_piece[p] which it is

Ties go to the way found first, in SentencePiece's own order: by start, then by length. It adds in float32, which is
exact for multiples of SCORE_STEP up to EXACT_SUM, so its comparisons are those of this word alone, wherever in a text
the word stands.
"""

from __future__ import annotations

import numpy as np

from megalite.data.encoders.pieces import NO_PIECE, Pieces
from megalite.data.encoders.tables import find
from megalite.data.encoders.utf8 import char_size
from megalite.data.fast_tokenizer import SCORE_STEP
from megalite.data.kernel import kernel

EXACT_SUM = 2**24 * SCORE_STEP
"""float32 has 24 bits: up to here it adds multiples of SCORE_STEP without rounding."""


@kernel
def encode_unigram(buffer: np.ndarray, start: int, stop: int, pieces: Pieces, out: np.ndarray, at: int) -> int:
    """Encode bytes start..stop-1 into out[at:].

    Returns:
        The place behind the last id.
    """
    edges, piece_at, scores = pieces.edges, pieces.piece_at, pieces.scores
    size = stop - start
    best_score = np.zeros(size + 1, np.float64)
    best_start = np.full(size + 1, -1, np.int64)
    best_piece = np.empty(size + 1, np.int64)
    here = 0
    while here < size:
        next_char = here + char_size(buffer[start + here])
        known = False
        node, end = 0, here
        while end < size:
            node = find(edges, node << 8 | np.int64(buffer[start + end]))
            if node < 0:
                break
            end += 1
            piece = piece_at[node]
            if piece != NO_PIECE:
                score = best_score[here] + scores[piece]
                if best_start[end] < 0 or score > best_score[end]:
                    best_score[end], best_start[end], best_piece[end] = score, here, piece
                known = known or end == next_char
        if not known:
            score = best_score[here] + pieces.unknown_score
            if best_start[next_char] < 0 or score > best_score[next_char]:
                best_score[next_char], best_start[next_char], best_piece[next_char] = score, here, NO_PIECE
        here = next_char
    return _write_path(buffer, start, best_start, best_piece, pieces, out, at)


@kernel
def _write_path(
    buffer: np.ndarray,
    start: int,
    best_start: np.ndarray,
    best_piece: np.ndarray,
    pieces: Pieces,
    out: np.ndarray,
    at: int,
) -> int:
    """Follow the best path from the end, then write it from the beginning."""
    next_end = np.empty(best_start.size, np.int64)
    end = best_start.size - 1
    while end > 0:
        next_end[best_start[end]] = end
        end = best_start[end]
    while end < best_start.size - 1:
        begin, end = end, next_end[end]
        if best_piece[end] != NO_PIECE:
            out[at] = best_piece[end]
            at += 1
        else:
            for byte in buffer[start + begin : start + end]:
                out[at] = pieces.byte_ids[byte]
                at += 1
    return at
