"""A Hugging Face folder as a checkpoint to continue from.

    HF folder --weights, file by file--> OUT.partial/step-0000000 --verify--> rename to OUT

    OUT/step-0000000/    weights in fp32, no optimizer state: a run that starts from it begins with fresh moments
    OUT/tokenizer/       the folder's tokenizer

Training can also start from the Hugging Face folder itself (`train.init_from`). A checkpoint is checked once, here, and
then needs neither transformers nor the folder.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megalite import __version__
from megalite.checkpoint.format import (
    CONFIG,
    Manifest,
    Piece,
    Progress,
    TensorRecord,
    folder_name,
    hash_file,
    tensor_name,
    write_manifest,
)
from megalite.checkpoint.hf.folders import building, require_room
from megalite.checkpoint.hf.importer import HuggingFaceWeights
from megalite.checkpoint.hf.layout import whole
from megalite.checkpoint.hf.model_card import IMPORTED_FROM
from megalite.checkpoint.hf.shards import group_by_size, save_tensors
from megalite.checkpoint.hf.tokenizer_files import copy_tokenizer
from megalite.checkpoint.hf.verify import Verdict, require_memory, verify
from megalite.checkpoint.reader import CheckpointReader
from megalite.config.plan import count_parameters
from megalite.config.schema import ModelConfig
from megalite.config.yaml_source import dump_yaml
from megalite.errors import ConversionError, DataError
from megalite.model.initialize import WeightSource
from megalite.model.weights import weight_table

TOKENIZER_FOLDER = "tokenizer"
FILE_BYTES = 2 * 10**9
"""Weights in a file; one file is in memory at a time."""

BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Imported:
    """What an import made and what was checked."""

    folder: Path
    checkpoint: Path
    architecture: str
    model: ModelConfig
    verdict: Verdict
    notes: tuple[str, ...]


def from_hugging_face(
    folder: Path, out: Path, *, overwrite: bool = False, verify_blocks: int | None = None
) -> Imported:
    """Import a Hugging Face folder.

    Args:
        folder: with config.json and safetensors.
        out: folder to make.
        overwrite: replace an older checkpoint in `out`.
        verify_blocks: compare logits with only the first blocks; None for all of them.

    Raises:
        ConversionError: megalite has no such model, there are only pickles, `out` is taken, or megalite computes other
            logits than transformers.
        CheckpointError: weights are missing or damaged.
    """
    source = HuggingFaceWeights(folder)
    model = source.model
    require_memory(model, verify_blocks)
    require_room(out, count_parameters(model) * BYTES_PER_PARAMETER)
    with building(out, overwrite=overwrite) as partial:
        tokenizer, notes = _take_tokenizer(Path(folder), partial)
        step = partial / folder_name(0)
        step.mkdir()
        _write_checkpoint(step, source, model, data={IMPORTED_FROM: Path(folder).resolve().name, **tokenizer})
        verdict = verify(Path(folder), CheckpointReader(step).source("weight"), model, num_blocks=verify_blocks)
    architecture = source.description.family.architecture
    return Imported(out, out / folder_name(0), architecture, model, verdict, tuple(notes))


def _take_tokenizer(folder: Path, partial: Path) -> tuple[dict[str, str], list[str]]:
    """Copy the tokenizer when there is a usable one; what the manifest records of it, relative to OUT, and notes."""
    target = partial / TOKENIZER_FOLDER
    target.mkdir()
    try:
        copy_tokenizer(folder, target)
    except (DataError, ConversionError) as error:
        shutil.rmtree(target)
        return {}, [f"Imported without a tokenizer: {error}"]
    return {"tokenizer": TOKENIZER_FOLDER}, []


def _write_checkpoint(step: Path, source: WeightSource, model: ModelConfig, *, data: dict[str, str]) -> None:
    """Write the files of a checkpoint that has weights only."""
    table = weight_table(model)
    sizes = {name: BYTES_PER_PARAMETER * prod(weight.shape) for name, weight in table.items()}
    manifest = Manifest(
        progress=Progress(), model=model.model_dump(mode="json"), layout={}, tensors={}, files={}, data=data
    )
    manifest.megalite = __version__
    for number, names in enumerate(group_by_size(sizes, FILE_BYTES)):
        file = f"weights-{number:05d}.safetensors"
        tensors = {}
        for name in names:
            key, all_of_it = tensor_name("weight", name), whole(table[name])
            tensors[key] = source.read(table[name], all_of_it)
            manifest.tensors[key] = TensorRecord(all_of_it.shape, [Piece(file, key, all_of_it.start, all_of_it.shape)])
        save_tensors(tensors, step / file)
        manifest.files[file] = hash_file(step / file)
    (step / CONFIG).write_text(dump_yaml({"model": manifest.model}), encoding="utf-8")
    manifest.files[CONFIG] = hash_file(step / CONFIG)
    write_manifest(step, manifest)
