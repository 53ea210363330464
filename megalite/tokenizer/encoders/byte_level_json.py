"""A byte-level BPE `tokenizer.json` as arrays for compiled code.

Only those are taken that split words by GPT-2's pattern and then do nothing but merge, as `megalite data
train-tokenizer` makes them; GPT-2's own is another.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from megalite.tokenizer.encoders.byte_level import character_classes, pair_rules
from megalite.tokenizer.encoders.reference import Unsupported
from megalite.tokenizer.encoders.vocabulary import BYTE_BPE, VocabularyArrays, make_pieces, make_table


def read_json(text: str) -> VocabularyArrays:
    """Arrays of a `tokenizer.json`.

    Raises:
        Unsupported: its ids depend on more than GPT-2's pattern and its merges.
    """
    content = json.loads(text)
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise Unsupported("it is no byte-level BPE")
    split_digits = splits_digits(content["pre_tokenizer"])
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    if found := [option for option in options if model.get(option)]:
        raise Unsupported(f"its model sets {', '.join(found)}")
    if content["normalizer"] is not None:
        raise Unsupported("it normalises")
    added = {token["id"] for token in content["added_tokens"]}
    if not all(token["special"] for token in content["added_tokens"]):
        raise Unsupported("it has added tokens that are text")
    vocab = model["vocab"]
    letters = byte_letters()
    if missing := [letter for letter in letters if letter not in vocab]:
        raise Unsupported(f"{len(missing)} bytes have no token")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    keys = np.array([vocab[left] << 32 | vocab[right] for left, right in merges], np.int64)
    ids = np.array([vocab[left + right] for left, right in merges], np.int64)
    if np.unique(keys).size != keys.size:
        raise Unsupported("it lists a merge twice")
    if added.intersection(ids.tolist()):
        raise Unsupported("its merges make a control token")
    byte_ids = np.array([vocab[letter] for letter in letters])
    table = make_table(keys, np.arange(keys.size) << 32 | ids)
    classes = character_classes(split_digits=split_digits)
    return make_pieces(BYTE_BPE, pair_rules(classes), byte_ids, merges=table, classes=classes)


def splits_digits(splitter: dict[str, Any] | None) -> bool:
    """Whether GPT-2's pattern comes after a split of digits.

    Raises:
        Unsupported: words are split by something else.
    """
    steps = splitter["pretokenizers"] if splitter and splitter["type"] == "Sequence" else [splitter]
    digits = {"type": "Digits", "individual_digits": True}
    pattern = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    plain = [{name: value for name, value in (step or {}).items() if name != "trim_offsets"} for step in steps]
    if plain == [pattern]:
        return False
    if plain == [digits, pattern]:
        return True
    raise Unsupported("it splits words by another pattern than GPT-2's")


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a vocabulary: itself where it prints, else the next from U+0100 on."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in prints]
    return [chr(byte) if byte in prints else chr(256 + hidden.index(byte)) for byte in range(256)]
