"""Byte-level BPE by the optional package `gigatoken`: Rust with SIMD, and a cache of words of its own.

It knows the patterns that published tokenizers split words by (GPT-2's, GPT-4's, Llama 3's, Qwen's and so on), but not
GPT-2's behind a split of digits, which is what `train-tokenizer` makes by default.

It reads a text that spells a control token as that token and cannot be asked not to. So it gets the tokenizer without
its control tokens: what is not in the vocabulary is not found in a text.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from megalite.texts import Texts
from megalite.tokenizer.encoders.reference import Unsupported, end_texts

PACKAGE = "gigatoken"


class GigatokenEncoder:
    """Encodes by gigatoken; ids equal those of Hugging Face `tokenizers`.

    Args:
        text: contents of a `tokenizer.json`.

    Raises:
        Unsupported: the package is not installed, or it is another kind of tokenizer than the package knows.
    """

    name = PACKAGE

    def __init__(self, text: str):
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
        content |= {"added_tokens": added, "pre_tokenizer": _unwrapped(content["pre_tokenizer"])}
        content["model"] |= {"vocab": vocab}
        try:
            self._tokenizer = gigatoken.Tokenizer.from_json(json.dumps(content))
        except Exception as error:  # it raises bare exceptions for tokenizers that it does not know
            raise Unsupported(str(error).splitlines()[0]) from error

    def encode_texts(self, texts: Texts, dtype: np.dtype, eos_id: int | None) -> tuple[np.ndarray, np.ndarray]:
        """See `Encoder`."""
        import awkward

        if not len(texts):
            return np.zeros(0, dtype), np.zeros(0, np.int64)
        rows = self._tokenizer.encode_batch([texts.bytes_of(text) for text in range(len(texts))], parallel=False)
        lengths = awkward.to_numpy(awkward.num(rows)).astype(np.int64)
        tokens = awkward.to_numpy(awkward.flatten(rows)).astype(dtype)
        return end_texts(tokens, lengths, eos_id)


def _unwrapped(splitter: dict[str, Any] | None) -> dict[str, Any] | None:
    """A sequence of one step is that step; the package only knows it bare."""
    if splitter and splitter["type"] == "Sequence" and len(splitter["pretokenizers"]) == 1:
        return splitter["pretokenizers"][0]
    return splitter
