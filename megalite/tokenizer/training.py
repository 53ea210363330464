"""Train a tokenizer on texts, into a folder.

SentencePiece learns from the text as it is: no normalisation, no dummy blank in front, all blanks kept, bytes for rare
characters. Every text then decodes to itself, and Hugging Face's readers give the same ids; with SentencePiece's own
defaults half of all texts come out different there.

    ids   <unk> <s> </s> <pad> | bytes, pieces | special tokens | reserved ones      (byte-bpe has no <unk>)
                                               | at the end, so the others keep their ids when there are more
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from megalite.errors import DataError
from megalite.tokenizer.encoders.reference import BLANK
from megalite.tokenizer.settings import TokenizerConfig
from megalite.tokenizer.tokenizer import CONFIG_FILE, FAST_FILE, MODEL_FILE, TokenizerInfo, write_info

UNKNOWN, BOS, EOS, PAD = "<unk>", "<s>", "</s>", "<pad>"

RESERVED = "<|reserved_{}|>"
"""Control tokens without a meaning yet: chat formats and tools can take them without a new vocabulary."""

LONGEST_SPECIAL = 64
"""Characters of a special token."""

CHUNK_CHARS = 1000
"""SentencePiece skips sentences over 4192 bytes, so documents are cut at line ends into chunks below that."""

CHARACTER_COVERAGE = 0.9995
"""Share of all characters that get a piece of their own; the rest are spelled in bytes. Google's advice for scripts
with many characters."""

PRINTABLE_ASCII = "".join(map(chr, range(33, 127)))
"""Always in the vocabulary, however rare in the sample: the fast form of a unigram model relies on it. SentencePiece
only requires characters that it has seen, so they are its first sentences, one each."""

NUM_THREADS = 16
"""Fixed, because unigram training adds up in an order that depends on it."""


def write_tokenizer(texts: Iterator[str], folder: Path, config: TokenizerConfig) -> TokenizerInfo:
    """Learn a vocabulary and write the folder of a tokenizer.

    Args:
        texts: what to learn from, read once.
        folder: one that is there.
        config: kind and size.

    Raises:
        DataError: there is too little text for the vocabulary, or a special token cannot be one.
    """
    added = added_tokens(config)
    learned = config.model_copy(update={"vocab_size": config.vocab_size - len(config.special_tokens)})
    train = _train_byte_bpe if config.kind == "byte-bpe" else _train_sentencepiece
    info = train(texts, folder, learned, added)
    ids = range(info.vocab_size - len(added), info.vocab_size)
    info = replace(info, special_tokens=dict(zip(config.special_tokens, ids, strict=False)))
    _write_config(folder, has_unknown=config.kind != "byte-bpe", special_tokens=config.special_tokens)
    write_info(folder, info)
    return info


def added_tokens(config: TokenizerConfig) -> list[str]:
    """The control tokens at the end of a vocabulary: the user's, then reserved ones up to the multiple.

    Raises:
        DataError: a special token is empty, has blanks, is too long, or is there twice.
    """
    reserved = [RESERVED.format(number) for number in range(-config.vocab_size % config.vocab_multiple)]
    seen = {UNKNOWN, BOS, EOS, PAD, *reserved}
    for token in config.special_tokens:
        if not re.fullmatch(rf"[^\s{BLANK}]{{1,{LONGEST_SPECIAL}}}", token):
            raise DataError(
                f"special token {token!r}: expected 1 to {LONGEST_SPECIAL} characters without blanks, such as <|user|>"
            )
        if token in seen:
            raise DataError(f"special token {token!r} is there already; each is named once, and {BOS} {EOS} {PAD} not")
        seen.add(token)
    return [*config.special_tokens, *reserved]


def _train_sentencepiece(
    texts: Iterator[str], folder: Path, config: TokenizerConfig, added: list[str]
) -> TokenizerInfo:
    from sentencepiece import SentencePieceTrainer

    from megalite.tokenizer.fast import add_control_pieces, round_scores, write_fast_tokenizer

    buffer = io.BytesIO()
    chunks = (chunk for text in texts for chunk in cut_in_chunks(text))
    try:
        SentencePieceTrainer.train(
            sentence_iterator=chain(PRINTABLE_ASCII, chunks),
            model_writer=buffer,
            model_type=config.kind.removeprefix("sentencepiece-"),
            vocab_size=config.vocab_size,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            allow_whitespace_only_pieces=True,
            split_digits=config.split_digits,
            character_coverage=CHARACTER_COVERAGE,
            required_chars=PRINTABLE_ASCII,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            unk_piece=UNKNOWN,
            bos_piece=BOS,
            eos_piece=EOS,
            pad_piece=PAD,
            num_threads=NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"SentencePiece cannot make {config.vocab_size} tokens of this text: {_gist(error)}") from error
    model = buffer.getvalue()
    if config.kind == "sentencepiece-unigram":
        model = round_scores(model)
    model = add_control_pieces(model, added)
    (folder / MODEL_FILE).write_bytes(model)
    write_fast_tokenizer(model, folder / FAST_FILE)
    return TokenizerInfo(config.kind, config.vocab_size + len(added), eos_id=2, bos_id=1, pad_id=3)


def _train_byte_bpe(texts: Iterator[str], folder: Path, config: TokenizerConfig, added: list[str]) -> TokenizerInfo:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if config.split_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != config.vocab_size:
        raise DataError(
            f"byte-bpe found {found} tokens in this text, vocab_size={config.vocab_size} is asked for; "
            f"set it to {found} or less, or give more text"
        )
    for token in added:
        if tokenizer.token_to_id(token) is not None:
            raise DataError(f"special token {token!r} is also a token of this text; spell it otherwise, as <|user|>")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in added])
    tokenizer.save(str(folder / FAST_FILE))
    eos_id, bos_id, pad_id = (tokenizer.token_to_id(token) for token in (EOS, BOS, PAD))
    assert eos_id is not None, "it was given"
    return TokenizerInfo(config.kind, found + len(added), eos_id=eos_id, bos_id=bos_id, pad_id=pad_id)


def cut_in_chunks(text: str) -> Iterator[str]:
    """Cut a text into chunks of at most CHUNK_CHARS, before a line end or blank where there is one.

    The line end goes to the following chunk: SentencePiece's reader drops it from the end of a sentence.
    """
    start = 0
    while len(text) - start > CHUNK_CHARS:
        stop = start + CHUNK_CHARS
        line_end, blank = (text.rfind(mark, start + 1, stop) for mark in "\n ")
        cut = next((place for place in (line_end, blank) if place > start), stop)
        yield text[start:cut]
        start = cut
    yield text[start:]


def _write_config(folder: Path, *, has_unknown: bool, special_tokens: tuple[str, ...]) -> None:
    """What transformers needs beside tokenizer.json.

    `split_special_tokens` makes it read a text that spells a control token as text, as SentencePiece does.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    if has_unknown:
        config["unk_token"] = UNKNOWN
    if special_tokens:
        config["additional_special_tokens"] = list(special_tokens)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _gist(error: RuntimeError) -> str:
    """SentencePiece's message without its source line and check expression, and without advice on its own options."""
    return re.sub(r" or decrease character_coverage.*", "", re.sub(r"^.*\[.*?\]\s*", "", str(error).strip()))
