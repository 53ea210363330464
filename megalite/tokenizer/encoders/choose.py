"""Which encoder a tokenizer gets: the fastest that gives the ids of its reference.

SentencePiece    word-cache, else SentencePiece
tokenizer.json   gigatoken, else word-cache, else Hugging Face tokenizers
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megalite.tokenizer.encoders.check import first_difference
from megalite.tokenizer.encoders.reference import Encoder, FastEncoder, Reference, SentencePieceEncoder, Unsupported


def choose_encoder(reference: Reference, path: Path, dtype: np.dtype) -> tuple[Encoder, dict[str, str]]:
    """The fastest encoder that agrees with a reference.

    Args:
        reference: the library that says what ids are.
        path: the file it was made from.
        dtype: type of ids.

    Returns:
        The encoder, and of each faster one why it is not taken.
    """
    refused: dict[str, str] = {}
    for name, make in _CANDIDATES[type(reference)].items():
        try:
            encoder = make(path, reference)
        except Unsupported as error:
            refused[name] = str(error)
            continue
        difference = first_difference(encoder, reference, dtype)
        if difference is None:
            return encoder, refused
        refused[name] = f"other ids than {reference.name} for {difference}"
    return reference, refused


def _word_cache_of_model(path: Path, reference: Encoder) -> Encoder:
    from megalite.tokenizer.encoders.sentencepiece_model import read_model
    from megalite.tokenizer.encoders.word_cache import WordCacheEncoder

    return WordCacheEncoder(read_model(path.read_bytes()))


def _word_cache_of_json(path: Path, reference: Encoder) -> Encoder:
    from megalite.tokenizer.encoders.byte_level_json import read_json
    from megalite.tokenizer.encoders.word_cache import WordCacheEncoder

    return WordCacheEncoder(read_json(path.read_text(encoding="utf-8")))


def _gigatoken(path: Path, reference: Encoder) -> Encoder:
    from megalite.tokenizer.encoders.giga import GigatokenEncoder

    return GigatokenEncoder(path.read_text(encoding="utf-8"), reference)


_CANDIDATES: dict[type, dict[str, Callable[[Path, Encoder], Encoder]]] = {
    SentencePieceEncoder: {"word-cache": _word_cache_of_model},
    FastEncoder: {"gigatoken": _gigatoken, "word-cache": _word_cache_of_json},
}
"""Faster encoders by reference, fastest first."""
