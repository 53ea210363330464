"""The best path of a unigram model through one word (Viterbi 1967; Kudo 2018, "Subword regularization").

    best_score[p]   of all ways to cut the bytes before p into pieces, the largest sum of scores
    best_start[p]   where the last piece of that way begins; best_piece[p] which it is

Ties go to the way found first, in SentencePiece's own order: by start, then by length. Scores are whole numbers of
SCORE_STEP (`reference.py`), so that sums are exact and a word has one best path wherever in a text it stands.
"""

from __future__ import annotations

import numpy as np

from megalite.kernel import bare_kernel
from megalite.tokenizer.encoders.utf8 import char_size
from megalite.tokenizer.encoders.vocabulary import NO_PIECE, VocabularyArrays, find

UNIGRAM_ROOM = 4
"""Numbers of room for each place of a word; there is one more than bytes."""

UNSEEN = -1
"""The start of a way to a place that none leads to yet."""


@bare_kernel
def encode_unigram(
    buffer: np.ndarray, start: int, stop: int, pieces: VocabularyArrays, room: np.ndarray, out: np.ndarray, at: int
) -> int:
    """Encode bytes start..stop-1 into out[at:].

    Args:
        room: int64 [UNIGRAM_ROOM * (bytes + 1)], to work in.

    Returns:
        The place behind the last id.
    """
    edges, piece_at, scores = pieces.edges, pieces.piece_at, pieces.scores
    size = stop - start
    best_score, best_start = room[: size + 1], room[size + 1 : 2 * size + 2]
    best_piece, next_end = room[2 * size + 2 : 3 * size + 3], room[3 * size + 3 :]
    best_score[0] = 0
    for place in range(size + 1):
        best_start[place] = UNSEEN
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
            piece = np.int64(piece_at[node])
            if piece != NO_PIECE:
                score = best_score[here] + scores[piece]
                if best_start[end] == UNSEEN or score > best_score[end]:
                    best_score[end], best_start[end], best_piece[end] = score, here, piece
                known = known or end == next_char
        if not known:
            score = best_score[here] + pieces.unknown_score
            if best_start[next_char] == UNSEEN or score > best_score[next_char]:
                best_score[next_char], best_start[next_char], best_piece[next_char] = score, here, NO_PIECE
        here = next_char
    end = size
    while end > 0:  # the best path, from the end
        next_end[best_start[end]] = end
        end = best_start[end]
    while end < size:
        begin, end = end, next_end[end]
        if best_piece[end] != NO_PIECE:
            out[at] = best_piece[end]
            at += 1
        else:
            for place in range(start + begin, start + end):
                out[at] = pieces.byte_ids[buffer[place]]
                at += 1
    return at
