"""A checkpoint as a Hugging Face folder, with proof.

    checkpoint --weights, shard by shard--> .converting-OUT-… --verify--> README.md --rename--> OUT

OUT either is a folder that transformers reads as the same model, or does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import count_parameters
from megalite.checkpoint import catalog
from megalite.checkpoint.averaged_weights import AveragedSource, model_weights
from megalite.checkpoint.format import stored_model
from megalite.checkpoint.hf.alarms import find_alarms
from megalite.checkpoint.hf.config_json import FILE_NAME as CONFIG_FILE
from megalite.checkpoint.hf.config_json import write_config
from megalite.checkpoint.hf.families.registry import choose_family
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.folders import building, find_checkpoint, require_room
from megalite.checkpoint.hf.memory import require_memory
from megalite.checkpoint.hf.model_card import write_card
from megalite.checkpoint.hf.packed import Packing
from megalite.checkpoint.hf.provenance import trace
from megalite.checkpoint.hf.shards import DTYPES, WrittenShards, write_weights
from megalite.checkpoint.hf.stages import CHECKING_AND_WRITING, Say, silent
from megalite.checkpoint.hf.tokenizer_choice import check_tokenizer, choose_tokenizer
from megalite.checkpoint.hf.tokenizer_files import copy_tokenizer, special_ids
from megalite.checkpoint.hf.verify import Verdict, verify
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.rounded_weights import RoundedSource, rounding_of
from megalite.errors import CheckpointError, ConversionError
from megalite.model.initialize import WeightSource
from megalite.model.lora import WithAdaptersAdded, without_lora
from megalite.model.mup import Folded, without_mup
from megalite.model.scales import without_scales
from megalite.tokenizer.tokenizer import Tokenizer

GENERATION_FILE = "generation_config.json"
CARD_FILE = "README.md"

QUANTIZED = "quantized"
"""A number format: the integers that a run rounds its weights to."""

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Small enough to fetch again after a broken download."""


@dataclass(frozen=True)
class Exported:
    """What an export made and what was checked."""

    checkpoint: Path
    folder: Path
    architecture: str
    dtype: str
    """Number format of the weights, in words."""
    written: WrittenShards
    verdict: Verdict
    alarms: tuple[str, ...]
    """What is wrong with the model; at the top of its card too."""
    notes: tuple[str, ...]
    """What else the user must not overlook."""


def to_hugging_face(
    checkpoint: Path | str,
    out: Path | str,
    *,
    dtype: str = "fp32",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
    verify_blocks: int | None = None,
    say: Say = silent,
) -> Exported:
    """Export a checkpoint.

    Args:
        checkpoint: its folder, or a run's for the newest.
        out: folder to make.
        dtype: number format of the weights: fp32, bf16 or fp16; `quantized` has the integers of a run with
            `precision.qat`, and all else as that run computes with it.
        max_shard_bytes: no file of weights is larger, unless a single tensor is.
        tokenizer: a tokenizer's folder, or `none`; None takes the one that the checkpoint records.
        overwrite: replace an older model in `out`.
        verify_blocks: compare logits with only the first blocks; None for all of them.
        say: is told what begins.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConversionError: no class of transformers represents the model, the weights or the tokenizer do not fit, `out`
            is taken or has one of them in it, or what was written does not read back as the same model.
    """
    out, reader = Path(out), _open_checkpoint(Path(checkpoint), dtype, max_shard_bytes)
    manifest = reader.manifest
    source, model, family, packing, left_out = _choose(reader, dtype)
    dtype, words = (dtype, dtype) if packing is None else (packing.format, packing.describe())
    provenance = trace(reader.folder, manifest)
    alarms = find_alarms(manifest, model, provenance)
    tokenizer_folder, notes = choose_tokenizer(tokenizer, reader.folder, manifest)
    require_memory(model, verify_blocks)
    require_room(out, count_parameters(model) * DTYPES[dtype].itemsize)
    inputs = [reader.folder, *([tokenizer_folder] if tokenizer_folder is not None else [])]
    with building(out, inputs=inputs, overwrite=overwrite) as partial, _still_there(reader.folder):
        own = None
        if tokenizer_folder is not None:
            own = copy_tokenizer(tokenizer_folder, partial, max_length=model.max_positions)
            notes += check_tokenizer(own, model, provenance.tokenizers, given=tokenizer is not None)
        say(CHECKING_AND_WRITING)
        with _checking(reader.folder):
            written = write_weights(
                source, model, family, partial, dtype=dtype, max_shard_bytes=max_shard_bytes, packing=packing
            )
        _write_configs(partial, model, family, dtype, own, packing)
        verdict = verify(
            partial, source, model, dtype=dtype, tokenizer=own, num_blocks=verify_blocks, say=say, packing=packing
        )
        _require_same_ids(verdict, tokenizer_folder, family)
        card = write_card(out.name, model, manifest, provenance, verdict, dtype=words, alarms=alarms)
        (partial / CARD_FILE).write_text(card, encoding="utf-8")
    return Exported(
        reader.folder, out, family.architecture, words, written, verdict, tuple(alarms), (*notes, *left_out)
    )


class _Chosen(NamedTuple):
    """What of a checkpoint is written, and as what."""

    source: WeightSource
    model: Architecture
    family: Family
    packing: Packing | None
    notes: list[str]


def _choose(reader: CheckpointReader, dtype: str) -> _Chosen:
    """The model that a checkpoint's run computes: averaged and rounded where the run does so, adapters added, and
    without muP.

    Raises:
        ConversionError: no class represents it, or there are no integers where these are asked for.
    """
    trained, rounding = model_weights(reader), rounding_of(reader)
    source: WeightSource = trained if rounding is None else RoundedSource(trained, rounding)
    whole, packing = without_scales(stored_model(reader.folder, reader.manifest)), None
    if whole.lora is not None:
        source, whole = WithAdaptersAdded(source, whole), without_lora(whole)
    model, family, notes = _choose_class(whole if whole.mup is None else without_mup(whole))
    if isinstance(trained, AveragedSource):
        notes.append("Weights are the averages that the run's optimizer makes, by which it is evaluated")
    if dtype == QUANTIZED:
        if not isinstance(source, RoundedSource):
            raise ConversionError(
                f"--quantized: {reader.folder.name} is of a run that rounds no weights, or not yet (precision.qat); "
                "export without it"
            )
        packing = Packing(source, whole, family)
        notes.append("whoever loads these integers needs compressed-tensors, as transformers does")
    elif isinstance(source, RoundedSource):
        notes.append(
            f"Weights are those that the run computes with, int{source.rounding.qat.bits} times their scales; "
            "--quantized writes the integers"
        )
    return _Chosen(source if whole.mup is None else Folded(source, whole), model, family, packing, notes)


def _require_same_ids(verdict: Verdict, tokenizer_folder: Path | None, family: Family) -> None:
    """Raises ConversionError: transformers reads the tokenizer otherwise."""
    if verdict.tokenizer_problem:
        raise ConversionError(
            f"{verdict.tokenizer_problem}: transformers reads the tokenizer in {tokenizer_folder} otherwise in a "
            f"folder of {family.architecture}; export with --tokenizer none, and load it from its own folder"
        )


def _choose_class(model: Architecture) -> tuple[Architecture, Family, list[str]]:
    """The class that represents a model, or else one for it without layers that predict further, which it computes the
    same without; and what is to be said of that.

    Raises:
        ConversionError: there is none.
    """
    without = model.model_copy(update={"mtp": None})
    try:
        return model, choose_family(model), []
    except ConversionError:
        family = choose_family(without)
    return (
        without,
        family,
        [f"{family.architecture} has no layers that predict further: those of model.mtp stay behind"],
    )


def _open_checkpoint(checkpoint: Path, dtype: str, max_shard_bytes: int) -> CheckpointReader:
    """A checkpoint that is to be exported, in what can be written."""
    if dtype not in (*DTYPES, QUANTIZED):
        raise ConversionError(f"found dtype={dtype!r}, expected {', '.join(DTYPES)} or {QUANTIZED}")
    if max_shard_bytes < 1:
        raise ConversionError(f"found max_shard_bytes={max_shard_bytes}, expected 1 or more")
    folder = find_checkpoint(checkpoint)
    with _still_there(folder):
        return CheckpointReader(folder)


@contextmanager
def _checking(folder: Path) -> Iterator[None]:
    """Check the checksums of a checkpoint's files meanwhile: both read the same bytes, the disk gives them once.

    Raises:
        CheckpointError: a file is damaged, whatever else went wrong because of it.
    """
    with ThreadPoolExecutor(1) as thread:
        damage = thread.submit(CheckpointReader(folder).verify)
        try:
            yield
        except (CheckpointError, ConversionError):
            _refuse_damaged(folder, damage.result())
            raise
        _refuse_damaged(folder, damage.result())


def _refuse_damaged(folder: Path, damage: list[str]) -> None:
    if damage:
        older = [path.name for path in catalog.complete(folder.parent) if path.name < folder.name]
        advice = f"an older checkpoint, {older[-1]}," if older else "another checkpoint"
        raise CheckpointError(f"{'; '.join(damage)}; export {advice} of the run")


@contextmanager
def _still_there(folder: Path) -> Iterator[None]:
    """Say so when a run that goes on has removed the checkpoint in the meantime, not that a file is damaged."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        if folder.is_dir():
            raise
        raise CheckpointError(
            f"{folder}: the run has removed it in the meantime (checkpoint.keep_last); export its newest one, or stop "
            "the run first"
        ) from error


def _write_configs(
    folder: Path, model: Architecture, family: Family, dtype: str, tokenizer: Tokenizer | None, packing: Packing | None
) -> None:
    ids = special_ids(tokenizer)
    torch_name = str(DTYPES[dtype]).removeprefix("torch.")
    config = write_config(model, family, dtype=torch_name, special_ids=ids)
    if packing is not None:
        config["quantization_config"] = packing.settings()
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_FILE, {name: id for name, id in ids.items() if id is not None})


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
