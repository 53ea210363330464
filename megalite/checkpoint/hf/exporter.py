"""A checkpoint as a Hugging Face folder, with proof.

    checkpoint --weights, shard by shard--> OUT.partial --verify--> README.md --rename--> OUT

OUT either is a folder that transformers reads as the same model, or does not exist.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.format import Manifest
from megalite.checkpoint.hf.config_json import FILE_NAME as CONFIG_FILE
from megalite.checkpoint.hf.config_json import write_config
from megalite.checkpoint.hf.families import Family, choose_family
from megalite.checkpoint.hf.folders import building, find_checkpoint, require_room
from megalite.checkpoint.hf.model_card import UNTRAINED, is_untrained, write_card
from megalite.checkpoint.hf.shards import DTYPES, Written, write_weights
from megalite.checkpoint.hf.tokenizer_files import copy_tokenizer, special_ids
from megalite.checkpoint.hf.verify import Verdict, require_memory, verify
from megalite.checkpoint.reader import CheckpointReader
from megalite.config.plan import count_parameters
from megalite.config.schema import ModelConfig
from megalite.data.tokenizer import Tokenizer
from megalite.errors import CheckpointError, ConversionError

GENERATION_FILE = "generation_config.json"
CARD_FILE = "README.md"

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Small enough to fetch again after a broken download."""

NO_TOKENIZER = "none"
"""Value of the tokenizer option for an export without one."""


@dataclass(frozen=True)
class Exported:
    """What an export made and what was checked."""

    checkpoint: Path
    folder: Path
    architecture: str
    written: Written
    verdict: Verdict
    notes: tuple[str, ...]
    """What the user must not overlook."""


def to_hugging_face(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "fp32",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
    verify_blocks: int | None = None,
) -> Exported:
    """Export a checkpoint.

    Args:
        checkpoint: its folder, or a run's for the newest.
        out: folder to make.
        dtype: number format of the weights: fp32, bf16 or fp16.
        max_shard_bytes: no file of weights is larger, unless a single tensor is.
        tokenizer: a tokenizer's folder, or `none`; None takes the one that the checkpoint records.
        overwrite: replace an older model in `out`.
        verify_blocks: compare logits with only the first blocks; None for all of them.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConversionError: no class of transformers represents the model, the weights or the tokenizer do not fit, `out`
            is taken, or what was written does not read back as the same model.
    """
    reader = _open_checkpoint(checkpoint)
    manifest = reader.manifest
    model = ModelConfig.model_validate(manifest.model)
    family = choose_family(model)
    source = reader.source("weight")
    tokenizer_folder, notes = _choose_tokenizer(tokenizer, reader.folder, manifest)
    require_memory(model, verify_blocks)
    require_room(out, count_parameters(model) * DTYPES[dtype].itemsize)
    with building(out, overwrite=overwrite) as partial:
        own_tokenizer = None
        if tokenizer_folder is not None:
            own_tokenizer = copy_tokenizer(tokenizer_folder, partial)
            notes += _check_vocabulary(own_tokenizer, model)
        written = write_weights(source, model, family, partial, dtype=dtype, max_shard_bytes=max_shard_bytes)
        _write_configs(partial, model, family, dtype, own_tokenizer)
        verdict = verify(partial, source, model, dtype=dtype, tokenizer=own_tokenizer, num_blocks=verify_blocks)
        card = write_card(out.name, model, manifest, verdict, dtype=dtype)
        (partial / CARD_FILE).write_text(card, encoding="utf-8")
    if is_untrained(manifest):
        notes.append(UNTRAINED)
    return Exported(reader.folder, out, family.architecture, written, verdict, tuple(notes))


def _open_checkpoint(checkpoint: Path) -> CheckpointReader:
    reader = CheckpointReader(find_checkpoint(checkpoint))
    damage = reader.verify()
    if damage:
        raise CheckpointError(f"{'; '.join(damage)}; export an older checkpoint of the run")
    return reader


def _choose_tokenizer(given: str | Path | None, folder: Path, manifest: Manifest) -> tuple[Path | None, list[str]]:
    """The tokenizer's folder and notes: the one given, else the one recorded, beside the checkpoint or from here."""
    recorded = manifest.data.get("tokenizer")
    if given is not None and str(given) != NO_TOKENIZER:
        return Path(given), []
    if given is not None or recorded is None:
        why = "as asked" if given is not None else "the checkpoint records none; --tokenizer FOLDER adds it"
        return None, [f"Exported without a tokenizer ({why})."]
    for candidate in (folder.parent / recorded, Path(recorded)):
        if candidate.is_dir():
            return candidate, []
    raise ConversionError(
        f"{folder}: records the tokenizer {recorded}, which is not there; give its folder with --tokenizer, or "
        f"--tokenizer {NO_TOKENIZER} to export without"
    )


def _check_vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> list[str]:
    """Refuse ids that the model has no row for; note rows that no id reaches."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ConversionError(
            f"{tokenizer.folder}: {tokenizer.vocab_size} tokens, the model has vocab_size={model.vocab_size}; this is "
            "not the tokenizer it was trained with"
        )
    spare = model.vocab_size - tokenizer.vocab_size
    return [f"{spare} rows of the vocabulary have no token in the tokenizer."] if spare else []


def _write_configs(folder: Path, model: ModelConfig, family: Family, dtype: str, tokenizer: Tokenizer | None) -> None:
    ids = special_ids(tokenizer)
    torch_name = str(DTYPES[dtype]).removeprefix("torch.")
    _write_json(folder / CONFIG_FILE, write_config(model, family, dtype=torch_name, special_ids=ids))
    _write_json(folder / GENERATION_FILE, {name: id for name, id in ids.items() if id is not None})


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
