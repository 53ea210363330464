"""What a recipe may say of its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megalite.section import FrozenOptions, Options, Problem, Section

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


class ChatConfig(Section):
    """How conversations become tokens, and which of these are learnt."""

    template: Path | None = None
    """A file with a chat template (jinja, as transformers has them); null takes the tokenizer's own. It goes into the
    tokenizer's folder of the recipe, and from there along with every exported model."""
    learn: Literal["answers", "all", "last"] = "answers"
    """Which tokens count in the loss: those of every answer, of all turns, or of the last answer. The token that ends
    an answer is learnt with it."""
    too_long: Literal["drop", "cut"] = "drop"
    """What to do with a conversation of more than `max_tokens`: leave it out, or leave out turns at its end, so that it
    ends with an answer. Both are counted."""
    max_tokens: PositiveInt | None = None
    """Longest conversation; null takes `pack.seq_len`, into which every one then fits whole."""
    on_error: Literal["drop", "fail"] = "drop"
    """What to do with a conversation that the template refuses, that is too long, or of which nothing is learnt: count
    it by its reason and put it aside, or stop."""
    variables: Options = Field(default_factory=FrozenOptions)
    """Further variables of the template, as `enable_thinking: false` or `date_string: 26 Jul 2024`."""

    def problems(self) -> Iterator[Problem]:
        if self.too_long == "cut" and self.learn == "last":
            yield ("too_long",), "cut leaves out the last turns, which `learn: last` is about; use drop"


class FillInTokens(Section):
    """Spellings of the control tokens around the parts of a text with a hole."""

    prefix: str = "<|fim_prefix|>"
    """Before what stands before the hole."""
    suffix: str = "<|fim_suffix|>"
    """Before what stands behind it."""
    middle: str = "<|fim_middle|>"
    """Before what fills it."""

    @property
    def spellings(self) -> tuple[str, str, str]:
        """All three."""
        return self.prefix, self.suffix, self.middle


class FillInConfig(Section):
    """Fill-in-the-middle (Bavarian et al. 2022): which texts are taken apart, and how."""

    rate: float = Field(0.5, gt=0.0, le=1.0)
    """Share of the documents, or contexts, that are taken apart."""
    spm_rate: float = Field(0.5, ge=0.0, le=1.0)
    """Share of these in the order suffix, prefix, middle; the others are prefix, suffix, middle."""
    level: Literal["document", "context"] = "document"
    """What is taken apart: whole documents before they are packed, of which a border of sequences may part the pieces;
    or what fills a sequence, which is whole in one (with `pack.method: best_fit` alone)."""
    tokens: FillInTokens = FillInTokens()
    """Control tokens that the tokenizer must have."""
    valid: bool = False
    """Take held-out documents apart too; otherwise validation reads them as they are."""

    def problems(self) -> Iterator[Problem]:
        if len(set(self.tokens.spellings)) < len(self.tokens.spellings):
            yield ("tokens",), "two of the three are spelt alike; each part needs a token of its own"
