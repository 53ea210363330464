"""What a Hugging Face folder holds that is to make embeddings: told from its files, before any weight is read.

config.json          kind, hidden size, layers, positions
*.safetensors        the weights; pickles are not read
tokenizer.json ...   the tokenizer's
modules.json         of a sentence encoder: what stands behind the model
1_Pooling/           and how it makes one vector of many
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from megalite.checkpoint.hf.config_json import FILE_NAME
from megalite.errors import ConversionError
from megalite.stations.hashes import hash_file

PoolingKind = Literal["mean", "last", "first"]

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "megalite_tokenizer.json"),
)
"""Files that decide the ids."""

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
"""One of them a tokenizer must have."""

MODULES_FILE, POOLING_FILE = "modules.json", "1_Pooling/config.json"

POOLING_KEYS: dict[str, PoolingKind] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "first",
}
"""As sentence encoders name them."""

UNDERSTOOD_MODULES = ("Transformer", "Pooling", "Normalize")
"""What such a folder may chain: what the others do would be left out."""

DEFAULT_TOKENS = 512
"""Of a document that are read, unless more or less is asked for."""


@dataclass(frozen=True)
class EncoderFacts:
    """What is known of a model without its weights."""

    folder: Path
    kind: str
    """As config.json names it: llama, bert ..."""
    hidden_size: int
    num_layers: int
    max_tokens: int | None
    """Tokens that it can read at once; None where nothing bounds them."""
    fingerprint: str
    """Hash of config and weights."""
    tokenizer_fingerprint: str
    """Hash of the tokenizer's files."""

    def choose_layer(self, layer: int) -> int:
        """The layer from 0 to num_layers, where negative ones count from the end.

        Raises:
            ConversionError: the model has no such layer.
        """
        if not -self.num_layers - 1 <= layer <= self.num_layers:
            raise ConversionError(
                f"{self.folder}: layer={layer}, and the model has layers 0 (its table of embeddings) to "
                f"{self.num_layers}; negative ones count from the end: -1 is the last"
            )
        return layer % (self.num_layers + 1)

    def choose_max_tokens(self, max_tokens: int | None) -> int:
        """How many tokens of a document are read.

        Raises:
            ConversionError: more than the model can read.
        """
        if max_tokens is None:
            return min(DEFAULT_TOKENS, self.max_tokens or DEFAULT_TOKENS)
        if self.max_tokens is not None and max_tokens > self.max_tokens:
            raise ConversionError(
                f"{self.folder}: max_tokens={max_tokens}, and the model has positions for {self.max_tokens}; use that "
                "or less"
            )
        return max_tokens

    def choose_pooling(self, pooling: PoolingKind) -> PoolingKind:
        """The pooling that is asked for.

        Raises:
            ConversionError: the folder is a sentence encoder that was trained with another one.
        """
        trained = _trained_pooling(self.folder)
        if trained is not None and trained != pooling:
            raise ConversionError(
                f"{self.folder}: pooling={pooling}, and {POOLING_FILE} says that it was trained with {trained}; use "
                f"pooling={trained}"
            )
        return pooling


def read_encoder(folder: Path) -> EncoderFacts:
    """Look at a folder.

    Raises:
        ConversionError: there is no model or no tokenizer in it, or one that makes no embeddings.
    """
    if not folder.is_dir():
        raise ConversionError(f"{folder}: no such folder; give one made by `megalite convert to-hf`, or like it")
    if not (folder / FILE_NAME).is_file():
        raise ConversionError(
            f"{folder}: no model: there is no {FILE_NAME} in it; give a folder made by `megalite convert to-hf`, or "
            "like it"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConversionError(f"{folder}: no model: there is no .safetensors in it, and pickles are not read")
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise ConversionError(
            f"{folder}: no tokenizer: none of {', '.join(VOCABULARIES)} is in it; convert again with --tokenizer, or "
            "copy the tokenizer's files there"
        )
    _refuse_other_modules(folder)
    config = _read_config(folder)
    hidden_size, num_layers = (getattr(config, name, None) for name in ("hidden_size", "num_hidden_layers"))
    if config.is_encoder_decoder or hidden_size is None or num_layers is None:
        what = "an encoder with a decoder" if config.is_encoder_decoder else "its config says no hidden_size or layers"
        raise ConversionError(f"{folder}: {config.model_type}: {what}; give a decoder or an encoder of texts alone")
    return EncoderFacts(
        folder,
        config.model_type,
        hidden_size,
        num_layers,
        _max_tokens(folder, config),
        _fingerprint([folder / FILE_NAME, *weights]),
        _fingerprint([folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]),
    )


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{folder}: transformers cannot read {FILE_NAME}: {_first_line(error)}") from error


def _max_tokens(folder: Path, config: Any) -> int | None:
    """The lesser of what the model has positions for and what its tokenizer says."""
    positions = getattr(config, "max_position_embeddings", None)
    says = _read_json(folder / "tokenizer_config.json").get("model_max_length")
    known = [int(each) for each in (positions, says) if isinstance(each, (int, float)) and 0 < each < 2**31]
    return min(known, default=None)


def _trained_pooling(folder: Path) -> PoolingKind | None:
    """How a sentence encoder pools; None where the folder is none."""
    says = _read_json(folder / POOLING_FILE)
    chosen = [name for name, value in says.items() if name.startswith("pooling_mode_") and value is True]
    if not chosen:
        return None
    if len(chosen) > 1 or chosen[0] not in POOLING_KEYS:
        raise ConversionError(
            f"{folder / POOLING_FILE}: {', '.join(chosen)}; one of {', '.join(POOLING_KEYS)} is understood"
        )
    return POOLING_KEYS[chosen[0]]


def _refuse_other_modules(folder: Path) -> None:
    modules = _read_json(folder / MODULES_FILE, expected=list)
    names = [str(each.get("type", "")).rpartition(".")[2] for each in modules if isinstance(each, dict)]
    others = [name for name in names if name not in UNDERSTOOD_MODULES]
    if others:
        raise ConversionError(
            f"{folder / MODULES_FILE}: {', '.join(others)} stands behind the model, and would be left out; give an "
            f"encoder with {', '.join(UNDERSTOOD_MODULES)} alone"
        )


def _read_json(path: Path, expected: type = dict) -> Any:
    """The contents of a file; nothing where there is none."""
    if not path.is_file():
        return expected()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{path}: not JSON: {error}; copy the folder anew") from error
    if not isinstance(found, expected):
        raise ConversionError(f"{path}: a {type(found).__name__} where a {expected.__name__} is expected")
    return found


def _fingerprint(paths: list[Path]) -> str:
    return xxhash.xxh3_128_hexdigest(str([(path.name, hash_file(path)) for path in paths]).encode())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
