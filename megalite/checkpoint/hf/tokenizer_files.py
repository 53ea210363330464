"""The tokenizer's files of a Hugging Face folder: copied, and made readable by transformers 4 and 5 alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megalite.errors import ConversionError
from megalite.tokenizer.chat_template import TEMPLATE_FILE, for_chats
from megalite.tokenizer.tokenizer import CONFIG_FILE, FAST_FILE, MODEL_FILE, RECORD_FILE, Tokenizer

COPIED = (
    FAST_FILE,
    MODEL_FILE,
    RECORD_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE_FILE,
)
"""Files taken as they are; tokenizer_config.json is rewritten."""

FAST_CLASS = "PreTrainedTokenizerFast"
"""The class that both versions read a tokenizer.json with, adding nothing of their own. A class of a model may: version
5 gives `LlamaTokenizer` a leading blank whatever the file says, and saves a class that version 4 does not know."""


def copy_tokenizer(source: Path, folder: Path, *, max_length: int | None = None) -> Tokenizer:
    """Copy a tokenizer into a folder.

    Args:
        source: a folder that `Tokenizer.load` reads.
        folder: an existing one.
        max_length: tokens that the model reads at once; None leaves what the source says. Where neither says it,
            transformers takes 1e30, and truncates nothing.

    Returns:
        The tokenizer of `source`.

    Raises:
        DataError: there is no tokenizer.
        ConversionError: it has no tokenizer.json.
    """
    tokenizer = Tokenizer.load(source)
    if not (source / FAST_FILE).is_file():
        raise ConversionError(
            f"{source}: has no {FAST_FILE}, which transformers reads; take a tokenizer made by `megalite data "
            "train-tokenizer`, or the folder of a fast tokenizer saved by transformers"
        )
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    config = _readable_by_both(source / CONFIG_FILE)
    if "chat_template" in config or (source / TEMPLATE_FILE).is_file():
        config = for_chats(config)
    if max_length is not None:
        config["model_max_length"] = max_length
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return tokenizer


def special_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The ids of config.json and generation_config.json."""
    return {f"{role}_token_id": getattr(tokenizer, f"{role}_id", None) for role in ("bos", "eos", "pad")}


def _readable_by_both(path: Path) -> dict:
    """A tokenizer_config.json that both versions understand, and take to mean what tokenizer.json says.

    Raises:
        ConversionError: it is no JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path}: no JSON ({error}); copy the folder anew") from error
    if not isinstance(config, dict):
        raise ConversionError(f"{path}: found {type(config).__name__}, expected an object; copy the folder anew")
    config["tokenizer_class"] = FAST_CLASS
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config
