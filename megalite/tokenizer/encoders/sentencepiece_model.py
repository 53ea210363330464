"""A SentencePiece model as arrays for compiled code.

Only models are taken whose text goes into the search as it is: no normalisation, no blank added in front, bytes for
what the vocabulary lacks. That is how `megalite data train-tokenizer` trains them.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from megalite.tokenizer.encoders.cuts import cuts_between
from megalite.tokenizer.encoders.reference import BLANK, SCORE_STEP, Unsupported
from megalite.tokenizer.encoders.vocabulary import BPE, NO_PIECE, UNIGRAM, VocabularyArrays, make_pieces, make_table

UNKNOWN_PENALTY = 10.0
"""SentencePiece scores an unknown character this much below its worst piece."""

FIRST_EXACT = (0, 2, 2)
"""The first SentencePiece that adds up scores in float64. Those before used float32, in which a text of some 100 kB
leaves the exact range, and a word there depends on what stands before it."""


def read_model(model: bytes) -> VocabularyArrays:
    """Arrays of a `tokenizer.model`.

    Raises:
        Unsupported: its ids depend on more than its pieces and their scores.
    """
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # type: ignore[attr-defined]  # made at import

    proto = ModelProto.FromString(model)
    types = ModelProto.SentencePiece.Type
    _check_text_is_taken_as_it_is(proto)
    known = {types.NORMAL, types.UNKNOWN, types.CONTROL, types.BYTE}
    if other := {types.Name(piece.type) for piece in proto.pieces if piece.type not in known}:
        raise Unsupported(f"it has {', '.join(sorted(other))} pieces")
    text = {piece.piece: id for id, piece in enumerate(proto.pieces) if piece.type == types.NORMAL}
    byte_ids = [id for id, piece in enumerate(proto.pieces) if piece.type == types.BYTE]
    if [proto.pieces[id].piece for id in byte_ids] != [f"<0x{byte:02X}>" for byte in range(256)]:
        raise Unsupported("it has no pieces for all 256 bytes")
    scores = np.array([piece.score for piece in proto.pieces], np.float64)
    shared = {"rules": cuts_between(text), "byte_ids": np.array(byte_ids)}
    model_type = proto.trainer_spec.model_type
    if model_type == TrainerSpec.BPE:
        return make_pieces(BPE, **shared, **_bpe_arrays(text, scores))
    if model_type == TrainerSpec.UNIGRAM:
        return make_pieces(UNIGRAM, **shared, **_unigram_arrays(text, scores))
    raise Unsupported("it is neither BPE nor unigram")


def _check_text_is_taken_as_it_is(proto: Any) -> None:
    rules, training = proto.normalizer_spec, proto.trainer_spec
    reasons = {
        "it normalises": rules.precompiled_charsmap or not rules.escape_whitespaces,
        "it adds a blank in front": rules.add_dummy_prefix,
        "it removes blanks": rules.remove_extra_whitespaces,
        "it has no byte fallback": not training.byte_fallback,
        "it puts blanks behind words": training.treat_whitespace_as_suffix,
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise Unsupported(" and ".join(found))


def _bpe_arrays(text: dict[str, int], scores: np.ndarray) -> dict[str, Any]:
    """SentencePiece joins the neighbours whose joint piece scores best, the leftmost first."""
    char_ids = np.full(1 + max(map(ord, "".join(text) + " ")), NO_PIECE, np.int32)
    for piece, id in text.items():
        if len(piece) == 1:
            char_ids[ord(piece)] = id
    if any(char_ids[ord(char)] == NO_PIECE for char in set("".join(text))):
        raise Unsupported("it has pieces with a character that is no piece")
    char_ids[ord(" ")] = char_ids[ord(BLANK)] if ord(BLANK) < char_ids.size else NO_PIECE
    ranks = np.unique(-scores, return_inverse=True)[1]  # equal scores share a rank
    keys, values = [], []
    for piece, id in text.items():
        for cut in range(1, len(piece)):
            left, right = text.get(piece[:cut]), text.get(piece[cut:])
            if left is not None and right is not None:
                keys.append(left << 32 | right)
                values.append(int(ranks[id]) << 32 | id)
    merges = make_table(np.array(keys, np.int64), np.array(values, np.int64))
    return {"char_ids": char_ids, "merges": merges}


def _unigram_arrays(text: dict[str, int], scores: np.ndarray) -> dict[str, Any]:
    """A trie whose sums of scores are exact, so that they compare alike wherever a sum begins."""
    import sentencepiece

    if _version(sentencepiece.__version__) < FIRST_EXACT:
        raise Unsupported(
            f"sentencepiece {sentencepiece.__version__} rounds sums of scores in long texts; "
            "`pip install 'sentencepiece>=0.2.2'` encodes several times faster"
        )
    of_text = scores[list(text.values())]
    if np.any(of_text > 0) or np.any(of_text % SCORE_STEP):
        raise Unsupported(f"its scores are not negative multiples of {SCORE_STEP}")
    edges: dict[int, int] = {}
    piece_at = [NO_PIECE]
    blank = BLANK.encode()
    for piece, id in text.items():
        nodes = [0]
        for char in piece:
            for byte in char.encode():
                child = edges.setdefault(nodes[-1] << 8 | byte, len(piece_at))
                if child == len(piece_at):
                    piece_at.append(NO_PIECE)
                nodes.append(child)
            if char == BLANK:
                edges[nodes[-1 - len(blank)] << 8 | ord(" ")] = nodes[-1]
        piece_at[nodes[-1]] = id
    keys, values = np.array(list(edges), np.int64), np.array(list(edges.values()), np.int64)
    return {
        "edges": make_table(keys, values),
        "piece_at": np.array(piece_at, np.int32),
        "scores": (scores / SCORE_STEP).astype(np.int64),
        "unknown_score": int((of_text.min() - UNKNOWN_PENALTY) / SCORE_STEP),
    }


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
