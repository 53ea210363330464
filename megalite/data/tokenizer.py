"""A tokenizer as a folder: text to ids and back, whichever library is behind it.

    megalite_tokenizer.json   kind, vocab_size, bos_id, eos_id, pad_id
    tokenizer.model           SentencePiece's own file, for the sentencepiece kinds: it is what encodes
    tokenizer.json            the same tokenizer for Hugging Face `tokenizers`: equal ids
    tokenizer_config.json     lets transformers load the folder

Encoding documents treats every character as text: one that spells `</s>` gets the ids of those four characters, never
the control token, or anyone whose page we read could end a document in the middle of ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import xxhash

from megalite.errors import DataError

RECORD_FILE = "megalite_tokenizer.json"
MODEL_FILE = "tokenizer.model"
FAST_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

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


class Encoder(Protocol):
    """The library behind a tokenizer."""

    vocab_size: int

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Tokenizer:
    """Encodes documents and decodes ids; make one with `Tokenizer.load`."""

    def __init__(self, folder: Path, info: TokenizerInfo, encoder: Encoder, fingerprint: str):
        self.folder = folder
        self.kind = info.kind
        self.vocab_size = info.vocab_size
        self.eos_id = info.eos_id
        self.bos_id = info.bos_id
        self.pad_id = info.pad_id
        self.fingerprint = fingerprint
        """Hash of the vocabulary files: two tokenizers with equal ones give equal ids."""
        self._encoder = encoder

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
            info = _read_info(folder)
            encoder = _make_encoder(folder, info)
            info = info or _guess_info(folder, encoder)
        except DataError:
            raise
        except Exception as error:  # the libraries raise bare Exception and RuntimeError for damaged files
            raise DataError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        if encoder.vocab_size != info.vocab_size:
            raise DataError(
                f"{folder}: {RECORD_FILE} says vocab_size={info.vocab_size}, the vocabulary has {encoder.vocab_size} "
                "entries; train or copy the tokenizer again"
            )
        return cls(folder, info, encoder, fingerprint_files(folder))

    def encode(self, text: str) -> list[int]:
        """Ids of a text: no control tokens, neither added nor found in it."""
        return self._encoder.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""
        return self._encoder.encode_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens decode to nothing."""
        return self._encoder.decode(ids)


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
        "hash": fingerprint_files(folder),
    }
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


class SentencePieceEncoder:
    """SentencePiece's own library: the reference for its models.

    Args:
        path: a `tokenizer.model`.
    """

    def __init__(self, path: Path):
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self._processor.vocab_size()
        self.eos_id = self._processor.eos_id()
        self.bos_id = self._processor.bos_id()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))


class FastEncoder:
    """Hugging Face `tokenizers`.

    Args:
        path: a `tokenizer.json`.
    """

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # their word for: special tokens in a text are plain text
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One by one: a batch would start threads of its own inside each of our processes.
        encode = partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
        return [encode([text])[0].ids for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def id_of(self, token: str | None) -> int | None:
        """Id of a token by its spelling."""
        return None if token is None else self._tokenizer.token_to_id(token)


def _read_info(folder: Path) -> TokenizerInfo | None:
    """The record of one of our folders, its hash checked; None for a foreign folder."""
    path = folder / RECORD_FILE
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.pop("hash") != fingerprint_files(folder):
        raise DataError(f"{folder}: the vocabulary files are not those that {RECORD_FILE} was written for")
    return TokenizerInfo(**record)


def _make_encoder(folder: Path, info: TokenizerInfo | None) -> SentencePieceEncoder | FastEncoder:
    is_sentencepiece = info is not None and info.kind.startswith("sentencepiece")
    if (folder / FAST_FILE).is_file() and not is_sentencepiece:
        return FastEncoder(folder / FAST_FILE)
    if (folder / MODEL_FILE).is_file():
        return SentencePieceEncoder(folder / MODEL_FILE)
    raise DataError(f"{folder}: neither {FAST_FILE} nor {MODEL_FILE} is there; is it a tokenizer's folder?")


def _guess_info(folder: Path, encoder: SentencePieceEncoder | FastEncoder) -> TokenizerInfo:
    """What a foreign folder leaves to be found out."""
    if isinstance(encoder, SentencePieceEncoder):
        eos_id, bos_id, pad_id = encoder.eos_id, encoder.bos_id, None
    else:
        config_path = folder / CONFIG_FILE
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        eos_id, bos_id, pad_id = (
            encoder.id_of(_spelling(config.get(role))) for role in ("eos_token", "bos_token", "pad_token")
        )
    if eos_id is None or eos_id < 0:
        raise DataError(f"{folder}: no end-of-text token: {CONFIG_FILE} must name a known eos_token")
    return TokenizerInfo(HUGGING_FACE, encoder.vocab_size, eos_id, bos_id, pad_id)


def _spelling(token: str | dict | None) -> str | None:
    """A token in a config is its text, or a dict that has it."""
    return token["content"] if isinstance(token, dict) else token
