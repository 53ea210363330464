"""What ids are: SentencePiece for its models, Hugging Face `tokenizers` for a `tokenizer.json`.

Every faster encoder is checked against these. Both are asked to take a text that spells a control token as plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megalite.texts import Texts

SCORE_STEP = 2.0**-6
"""Unigram scores are rounded to this, so that their sums are exact: equally good paths then tie wherever the adding
begins. In float64 that holds for any text; SentencePiece before 0.2.2 added in float32, exact up to a sum of
2^24 x 2^-6 = 262144, some 100 kB of text."""

BLANK = "\u2581"
"""How SentencePiece writes a blank inside a piece. A text may have either."""


class Unsupported(Exception):
    """A tokenizer that an encoder cannot encode as its own library does; the message says why."""


class FallbackTokens(NamedTuple):
    """Tokens of characters that a vocabulary lacks."""

    unknown_id: int | None
    """Stands for text that is lost."""
    byte_ids: list[int]
    """Spell such characters byte by byte."""


class Encoder(Protocol):
    """Turns texts into ids."""

    name: str

    def encode_texts(self, texts: Texts, dtype: np.dtype, eos_id: int | None) -> tuple[np.ndarray, np.ndarray]:
        """All ids end to end, behind each text `eos_id` if there is one; the number of each text's.

        Args:
            texts: what to encode.
            dtype: type of the ids.
            eos_id: id that ends each text, counted in its length; None for none.

        Returns:
            dtype [sum of lengths] and int64 [texts].
        """
        ...


class Reference(Encoder, Protocol):
    """A library that says what the ids of a text are."""

    vocab_size: int

    def stopgaps(self) -> FallbackTokens:
        """The tokens of characters that the vocabulary lacks."""
        ...

    def added_spellings(self) -> list[str]:
        """How the control tokens are spelled, and others that are no part of the model."""
        ...

    def control_tokens(self) -> dict[str, int]:
        """Ids of control tokens, by how they are spelled."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SentencePieceEncoder:
    """SentencePiece's own library: the reference for its models.

    Args:
        path: a `tokenizer.model`.
    """

    name = "sentencepiece"

    def __init__(self, path: Path):
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self._processor.vocab_size()
        self.eos_id = self._processor.eos_id()
        self.bos_id = self._processor.bos_id()

    def stopgaps(self) -> FallbackTokens:
        """See `Reference`."""
        is_byte = self._processor.is_byte(list(range(self.vocab_size)))
        return FallbackTokens(self._processor.unk_id(), [id for id, found in enumerate(is_byte) if found])

    def added_spellings(self) -> list[str]:
        """See `Reference`."""
        return list(self.control_tokens())

    def control_tokens(self) -> dict[str, int]:
        """See `Reference`."""
        is_control = self._processor.is_control(list(range(self.vocab_size)))
        return {self._processor.id_to_piece(id): id for id, found in enumerate(is_control) if found}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return self._processor.encode(list(texts), num_threads=1)

    def encode_texts(self, texts: Texts, dtype: np.dtype, eos_id: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Text by text, in this thread."""
        return lay_out((self._processor.encode(text) for text in texts), dtype, eos_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return self._processor.decode(list(ids))


class FastEncoder:
    """Hugging Face `tokenizers`.

    Args:
        path: a `tokenizer.json`.
    """

    name = "tokenizers"

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # their word for: special tokens in a text are plain text
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def stopgaps(self) -> FallbackTokens:
        """See `Reference`."""
        model = json.loads(self._tokenizer.to_str())["model"]
        unknown_id = model["unk_id"] if model["type"] == "Unigram" else self.id_of(model.get("unk_token"))
        spelled = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else []
        return FallbackTokens(unknown_id, [id for token in spelled if (id := self.id_of(token)) is not None])

    def added_spellings(self) -> list[str]:
        """See `Reference`."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def control_tokens(self) -> dict[str, int]:
        """See `Reference`."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {each.content: id for id, each in added if each.special}

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self._encode(text) for text in texts]

    def encode_texts(self, texts: Texts, dtype: np.dtype, eos_id: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Text by text, in this thread."""
        return lay_out(map(self._encode, texts), dtype, eos_id)

    def _encode(self, text: str) -> list[int]:
        # One by one: a batch would start threads of its own inside each of our processes.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens decode to nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def id_of(self, token: str | None) -> int | None:
        """Id of a token by its spelling."""
        return None if token is None else self._tokenizer.token_to_id(token)


def lay_out(encoded: Iterable[list[int]], dtype: np.dtype, eos_id: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Lists of ids as one array, behind each list `eos_id` if there is one; and their lengths."""
    end = [] if eos_id is None else [eos_id]
    arrays = [np.array(ids + end, dtype) for ids in encoded]
    lengths = np.array([array.size for array in arrays], np.int64)
    return np.concatenate([np.zeros(0, dtype), *arrays]), lengths


def end_texts(tokens: np.ndarray, lengths: np.ndarray, eos_id: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Put `eos_id` behind the ids of each text, if there is one."""
    if eos_id is None:
        return tokens, lengths
    ended = np.empty(tokens.size + lengths.size, tokens.dtype)
    ends = np.cumsum(lengths) + np.arange(lengths.size)
    inside = np.ones(ended.size, bool)
    inside[ends] = False
    ended[ends] = eos_id
    ended[inside] = tokens
    return ended, lengths + 1
