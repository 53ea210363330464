"""A tokenizer as a folder: text to ids and back, whichever library is behind it.

    megalite_tokenizer.json   kind, vocab_size, bos_id, eos_id, pad_id, special_tokens
    tokenizer.model           SentencePiece's own file, for the sentencepiece kinds: it is what encodes
    tokenizer.json            the same tokenizer for Hugging Face `tokenizers`: equal ids
    tokenizer_config.json     lets transformers load the folder

Encoding documents treats every character as text: one that spells `</s>` gets the ids of those four characters, never
the control token, or anyone whose page we read could end a document in the middle of ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import xxhash
from pydantic import Field, NonNegativeInt, PositiveInt

from megalite.errors import DataError
from megalite.records import Record, read_record
from megalite.texts import Texts
from megalite.tokenizer.encoders.choose import choose_encoder
from megalite.tokenizer.encoders.reference import Encoder, FallbackTokens, FastEncoder, Reference, SentencePieceEncoder
from megalite.tokenizer.settings import TokenizerKind

RECORD_FILE = "megalite_tokenizer.json"
MODEL_FILE = "tokenizer.model"
FAST_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

ADVICE = "train or copy the tokenizer again"

UINT16_BELOW_VOCAB = 65_500
"""Megatron stores vocabularies smaller than this in uint16."""

HUGGING_FACE = "hugging-face"
"""Kind of a folder that someone else made."""


@dataclass(frozen=True)
class TokenizerInfo:
    """What the record file says."""

    kind: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    pad_id: int | None
    special_tokens: dict[str, int] = field(default_factory=dict)
    """Ids of the user's own control tokens."""


class _RecordFile(Record):
    """The record file."""

    kind: TokenizerKind
    vocab_size: PositiveInt
    bos_id: NonNegativeInt | None
    eos_id: NonNegativeInt
    pad_id: NonNegativeInt | None
    special_tokens: dict[str, NonNegativeInt] = Field(default_factory=dict)
    hash: str


class Tokenizer:
    """Encodes documents and decodes ids; make one with `Tokenizer.load`."""

    def __init__(self, folder: Path, info: TokenizerInfo, reference: Reference, fingerprint: str):
        self.folder = folder
        self.kind = info.kind
        self.vocab_size = info.vocab_size
        self.eos_id = info.eos_id
        self.bos_id = info.bos_id
        self.pad_id = info.pad_id
        self.special_tokens = info.special_tokens
        self.fingerprint = fingerprint
        """Hash of the vocabulary files: two tokenizers with equal ones give equal ids."""
        self._reference = reference

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load a folder made by `megalite data train-tokenizer`, or a Hugging Face one.

        Raises:
            DataError: there is no tokenizer, it is damaged, or it has no end-of-text token.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; a tokenizer is a folder with {FAST_FILE} or {MODEL_FILE}")
        try:
            info = read_info(folder)
            reference = _make_reference(folder, info)
            info = info or _guess_info(folder, reference)
        except DataError:
            raise
        except Exception as error:  # the libraries raise bare Exception and RuntimeError for damaged files
            raise DataError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        if reference.vocab_size != info.vocab_size:
            raise DataError(
                f"{folder}: {RECORD_FILE} says vocab_size={info.vocab_size}, the vocabulary has {reference.vocab_size} "
                f"entries; {ADVICE}"
            )
        return cls(folder, info, reference, fingerprint_files(folder))

    def encode(self, text: str) -> list[int]:
        """Ids of a text: no control tokens, neither added nor found in it."""
        return self._reference.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""
        return self._reference.encode_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens decode to nothing."""
        return self._reference.decode(ids)

    def encode_texts(self, texts: Texts, *, with_eos: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """`encode` of many texts, as one array and by the fastest encoder whose ids are equal; one thread at a time.

        Args:
            texts: what to encode.
            with_eos: put `eos_id` behind each text and count it in its length.

        Returns:
            All ids end to end, in `token_dtype(vocab_size)`, and the number of each text's, int64 [texts].
        """
        encoder, _ = self._choice
        return encoder.encode_texts(texts, self._dtype, self.eos_id if with_eos else None)

    def stopgaps(self) -> FallbackTokens:
        """The tokens of characters that the vocabulary lacks."""
        return self._reference.stopgaps()

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Ids of all control tokens, by how they are spelled."""
        return self._reference.control_tokens()

    def decode_all(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens spelled out: for people, who see where turns end."""
        spelt = {id: token for token, id in self.control_tokens.items()}
        parts = groupby(ids, key=spelt.__contains__)
        texts = (
            "".join(spelt[id] for id in own) if is_control else self.decode(list(own)) for is_control, own in parts
        )
        return "".join(texts)

    @property
    def backend(self) -> str:
        """Name of the encoder behind `encode_texts`."""
        return self._choice[0].name

    @property
    def _dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)

    @cached_property
    def _choice(self) -> tuple[Encoder, dict[str, str]]:
        """Made when first needed: most commands load a tokenizer and encode little or nothing."""
        return choose_encoder(self._reference, _vocabulary_path(self.folder, self.kind), self._dtype)


def token_dtype(vocab_size: int) -> np.dtype:
    """The type Megatron picks for a vocabulary: uint16 where it fits, else int32."""
    return np.dtype(np.uint16 if vocab_size < UINT16_BELOW_VOCAB else np.int32)


def fingerprint_files(folder: Path) -> str:
    """xxh3_128 over the vocabulary files of a tokenizer's folder."""
    digest = xxhash.xxh3_128()
    for name in (MODEL_FILE, FAST_FILE):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()


def write_info(folder: Path, info: TokenizerInfo) -> None:
    """Write the record file, for a folder whose other files are there."""
    record = {
        "kind": info.kind,
        "vocab_size": info.vocab_size,
        "bos_id": info.bos_id,
        "eos_id": info.eos_id,
        "pad_id": info.pad_id,
        "special_tokens": info.special_tokens,
        "hash": fingerprint_files(folder),
    }
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_info(folder: Path) -> TokenizerInfo | None:
    """The record of one of our folders, its hash checked; None for a foreign folder.

    Raises:
        DataError: the record is damaged, or of other files.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        return None
    record = read_record(path, _RecordFile, ADVICE)
    if record.hash != fingerprint_files(folder):
        raise DataError(f"{folder}: the vocabulary files are not those that {RECORD_FILE} was written for")
    ids = {"bos_id": record.bos_id, "eos_id": record.eos_id, "pad_id": record.pad_id, **record.special_tokens}
    for name, token in ids.items():
        if token is not None and token >= record.vocab_size:
            raise DataError(f"{path}: damaged: {name} is {token}, of a vocabulary of {record.vocab_size}; {ADVICE}")
    return TokenizerInfo(**record.model_dump(exclude={"hash"}))


def _make_reference(folder: Path, info: TokenizerInfo | None) -> SentencePieceEncoder | FastEncoder:
    path = _vocabulary_path(folder, HUGGING_FACE if info is None else info.kind)
    return FastEncoder(path) if path.name == FAST_FILE else SentencePieceEncoder(path)


def _vocabulary_path(folder: Path, kind: str) -> Path:
    """The file that says what the ids of a text are."""
    preferred = (MODEL_FILE,) if kind.startswith("sentencepiece") else (FAST_FILE, MODEL_FILE)
    for name in preferred:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: neither {FAST_FILE} nor {MODEL_FILE} is there; is it a tokenizer's folder?")


def _guess_info(folder: Path, reference: SentencePieceEncoder | FastEncoder) -> TokenizerInfo:
    """What a foreign folder leaves to be found out."""
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    if isinstance(reference, SentencePieceEncoder):
        eos_id, bos_id, pad_id = reference.eos_id, reference.bos_id, None
    else:
        config_path = folder / CONFIG_FILE
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        eos_id, bos_id, pad_id = (
            reference.id_of(_spelling(config.get(role))) for role in ("eos_token", "bos_token", "pad_token")
        )
    if eos_id is None or eos_id < 0:
        raise DataError(f"{folder}: no end-of-text token: {CONFIG_FILE} must name a known eos_token")
    return TokenizerInfo(HUGGING_FACE, reference.vocab_size, eos_id, bos_id, pad_id)


def _spelling(token: str | dict | None) -> str | None:
    """A token in a config is its text, or a dict that has it."""
    return token["content"] if isinstance(token, dict) else token
