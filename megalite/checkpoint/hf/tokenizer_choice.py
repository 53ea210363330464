"""Which tokenizer goes along with an exported model, and whether it is the one that the model learned with.

A wrong tokenizer of the right size loads without complaint, and the text comes out random.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.format import Manifest
from megalite.errors import ConversionError
from megalite.tokenizer.tokenizer import Tokenizer

NONE = "none"
"""Value of the option for an export without a tokenizer."""


def choose_tokenizer(given: str | Path | None, folder: Path, manifest: Manifest) -> tuple[Path | None, list[str]]:
    """The tokenizer's folder and notes: the one given, else the one recorded, beside the checkpoint or from here.

    Raises:
        ConversionError: the recorded one is not there.
    """
    recorded = manifest.data.get("tokenizer")
    if given is not None and str(given) != NONE:
        return Path(given), []
    if given is not None or recorded is None:
        why = "as asked" if given is not None else "the checkpoint records none; --tokenizer FOLDER adds it"
        return None, [f"Exported without a tokenizer ({why})."]
    if isinstance(recorded, str):
        for candidate in (folder.parent / recorded, Path(recorded)):
            if candidate.is_dir():
                return candidate, []
    raise ConversionError(
        f"{folder}: records the tokenizer {recorded}, which is not there; give its folder with --tokenizer, or "
        f"--tokenizer {NONE} to do without"
    )


def check_tokenizer(tokenizer: Tokenizer, model: Architecture, trained_with: Set[str], *, given: bool) -> list[str]:
    """Whether a tokenizer belongs to a model; notes of what need not be an error.

    Args:
        tokenizer: to go along.
        model: filled.
        trained_with: fingerprints of the tokenizers of the training data; empty when nothing says.
        given: whether the user named it, who may have another folder with equal ids.

    Raises:
        ConversionError: the model has no row for some ids, or the recorded folder now holds another tokenizer.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise ConversionError(
            f"{tokenizer.folder}: {tokenizer.vocab_size} tokens, the model has vocab_size={model.vocab_size}; this is "
            "not the tokenizer it was trained with"
        )
    notes = []
    if trained_with and tokenizer.fingerprint not in trained_with:
        if not given:
            raise ConversionError(
                f"{tokenizer.folder}: holds another tokenizer than the one that the training data was made with "
                f"(fingerprint {tokenizer.fingerprint}, the data has {' and '.join(sorted(trained_with))}); put that "
                "one back, or name a folder that has it with --tokenizer"
            )
        notes.append(
            f"The files in {tokenizer.folder} are not those that the training data was tokenized with: unless both "
            "give equal ids, the model's text will be random."
        )
    spare = model.vocab_size - tokenizer.vocab_size
    return [*notes, f"{spare} rows of the vocabulary have no token in the tokenizer."] if spare else notes
