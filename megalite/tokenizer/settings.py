"""What a recipe may say of its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from megalite.section import Section

TokenizerKind = Literal["sentencepiece-bpe", "sentencepiece-unigram", "byte-bpe"]


class TokenizerConfig(Section):
    """The tokenizer: one to train, or one that exists."""

    path: Path | None = None
    """Folder of an existing tokenizer, ours or a Hugging Face one; null trains one by the settings below."""
    kind: TokenizerKind = "sentencepiece-bpe"
    """SentencePiece with byte fallback (bpe or unigram), or byte-level BPE as GPT-2's."""
    vocab_size: PositiveInt = 32_000
    """Number of tokens, special ones included."""
    train_mb: PositiveFloat = 100.0
    """Train on about this many million bytes of text, chosen evenly over the documents."""
    split_digits: bool = True
    """Every digit is a token of its own."""
    special_tokens: tuple[str, ...] = ()
    """Further control tokens, as in ["<|user|>"]: the last ids of the vocabulary, never made from text."""
    vocab_multiple: PositiveInt = 1
    """Round the vocabulary up to a multiple of this with reserved tokens `<|reserved_0|>` ..., to be used later."""
