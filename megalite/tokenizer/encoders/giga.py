"""Byte-level BPE by the optional package `gigatoken`: Rust with SIMD, and a cache of words of its own.

It knows the patterns that published tokenizers split words by (GPT-2's, GPT-4's, Llama 3's, Qwen's and so on), but not
GPT-2's behind a split of digits, which is what `train-tokenizer` makes by default. There it gets GPT-2's alone, and the
texts in pieces, cut where the two differ (`byte_level.cut_at_numbers`).

Its version of Unicode is another one than the reference's, which gets the few texts with a character that is not the
same in both (`giga_unicode.py`).

It reads a text that spells a control token as that token and cannot be asked not to. So it gets the tokenizer without
its control tokens: what is not in the vocabulary is not found in a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from megalite.texts import Texts
from megalite.tokenizer.encoders.byte_level import character_classes, cut_at_numbers
from megalite.tokenizer.encoders.byte_level_json import splits_digits
from megalite.tokenizer.encoders.giga_unicode import doubtful_characters, doubtful_texts, probe_json
from megalite.tokenizer.encoders.reference import Encoder, Unsupported, end_texts

PACKAGE = "gigatoken"

DIGIT = re.compile("[0-9]")

RENEWED_AFTER = 64 * 10**6
"""Bytes of text, behind which the package begins anew: it remembers every word, for ever. Words of random letters take
it 6 bytes a byte."""

BYTES_A_PIECE = 256
"""Room for pieces; texts full of numbers in columns get more."""


class GigatokenEncoder:
    """Encodes by gigatoken; ids equal those of Hugging Face `tokenizers`.

    Args:
        text: contents of a `tokenizer.json`.
        reference: gets texts with characters that gigatoken knows otherwise.

    Raises:
        Unsupported: the package is not installed, or it is another kind of tokenizer than the package knows.
    """

    name = PACKAGE

    def __init__(self, text: str, reference: Encoder):
        content = json.loads(text)
        if content["model"].get("type", "BPE") != "BPE" or content["model"].get("byte_fallback"):
            raise Unsupported("it is no byte-level BPE")
        try:
            import gigatoken
        except ImportError as error:
            raise Unsupported(f"the package {PACKAGE} is not installed (pip install {PACKAGE})") from error
        control = {token["id"] for token in content["added_tokens"] if token["special"]}
        vocab = {token: id for token, id in content["model"]["vocab"].items() if id not in control}
        added = [token for token in content["added_tokens"] if not token["special"]]
        content["model"] |= {"vocab": vocab}
        splitter = content["pre_tokenizer"]
        self._classes = character_classes(split_digits=True) if _is_cut_at_numbers(content) else None
        if self._classes is not None:
            splitter = splitter["pretokenizers"][-1]
        content |= {"added_tokens": added, "pre_tokenizer": _unwrapped(splitter)}
        self._make: Callable[[], Any] = lambda: gigatoken.Tokenizer.from_json(json.dumps(content))
        try:
            self._tokenizer: Any = self._make()
        except Exception as error:  # it raises bare exceptions for tokenizers that it does not know
            raise Unsupported(str(error).splitlines()[0]) from error
        probe = gigatoken.Tokenizer.from_json(probe_json())
        self._doubtful = doubtful_characters(lambda texts: _encode(probe, texts)[1])
        self._reference = reference
        self._num_bytes = 0

    def encode_texts(self, texts: Texts, dtype: np.dtype, eos_id: int | None) -> tuple[np.ndarray, np.ndarray]:
        """See `Encoder`."""
        if not len(texts):
            return np.zeros(0, dtype), np.zeros(0, np.int64)
        doubtful = doubtful_texts(texts, self._doubtful)
        if doubtful is None:
            return end_texts(*self._encode_texts(texts, dtype), eos_id)
        parts = {False: self._encode_texts(texts.take(~doubtful), dtype)}
        parts[True] = self._reference.encode_texts(texts.take(doubtful), dtype, None)
        rows = {which: iter(np.split(tokens, np.cumsum(lengths)[:-1])) for which, (tokens, lengths) in parts.items()}
        lengths = np.empty(len(texts), np.int64)
        for which, (_, each) in parts.items():
            lengths[doubtful == which] = each
        return end_texts(np.concatenate([next(rows[which]) for which in doubtful.tolist()]), lengths, eos_id)

    def _encode_texts(self, texts: Texts, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """By gigatoken alone: ids end to end, and the number of each text's."""
        self._num_bytes += texts.num_bytes
        if self._num_bytes > RENEWED_AFTER:
            self._tokenizer, self._num_bytes = None, texts.num_bytes  # before there is another
            self._tokenizer = self._make()
        pieces, counts = (texts, None) if self._classes is None else _cut(texts, self._classes)
        tokens, lengths = _encode(self._tokenizer, [pieces.bytes_of(piece) for piece in range(len(pieces))])
        if counts is not None and counts.size:
            lengths = np.add.reduceat(lengths, np.cumsum(counts) - counts)
        return tokens.astype(dtype), lengths


def _encode(tokenizer: Any, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    import awkward

    if not texts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows = tokenizer.encode_batch(texts, parallel=False)
    return awkward.to_numpy(awkward.flatten(rows)), awkward.to_numpy(awkward.num(rows)).astype(np.int64)


def _is_cut_at_numbers(content: dict[str, Any]) -> bool:
    """Whether digits are split before GPT-2's pattern, in a vocabulary whose texts may be cut at them."""
    try:
        if not splits_digits(content["pre_tokenizer"]):
            return False
    except Unsupported:  # another pattern, which the package may know
        return False
    joined = any(len(token) > 1 and DIGIT.search(token) for token in content["model"]["vocab"])
    is_text_added = not all(token["special"] for token in content["added_tokens"])
    if joined or is_text_added or content["normalizer"] is not None:
        raise Unsupported("it splits digits, but joins them, normalises or has added tokens that are text")
    return True


def _cut(texts: Texts, classes: np.ndarray) -> tuple[Texts, np.ndarray]:
    """Texts in pieces, and the number of pieces of each, int64 [texts]."""
    counts = np.empty(len(texts), np.int64)
    starts = np.empty(len(texts) + texts.num_bytes // BYTES_A_PIECE, np.int64)
    while (found := cut_at_numbers(texts.buffer, texts.offsets, classes, starts, counts)) > starts.size:
        starts = np.empty(found, np.int64)
    return Texts(texts.buffer, np.append(starts[:found], texts.offsets[-1])), counts


def _unwrapped(splitter: dict[str, Any] | None) -> dict[str, Any] | None:
    """A sequence of one step is that step; the package only knows it bare."""
    if splitter and splitter["type"] == "Sequence" and len(splitter["pretokenizers"]) == 1:
        return splitter["pretokenizers"][0]
    return splitter
