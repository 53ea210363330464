"""A Hugging Face folder as a checkpoint to continue from.

    HF folder --weights, file by file--> .converting-OUT-…/OUT/step-0000000 --verify--> rename to OUT

    OUT/step-0000000/    weights in fp32, no optimizer state: a run that starts from it begins with fresh moments
    OUT/tokenizer/       the folder's tokenizer

Training can also start from the Hugging Face folder itself (`train.init_from`). A checkpoint is checked once, here, and
then needs neither transformers nor the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megalite import __version__
from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import count_parameters
from megalite.architecture.weights import Weight, stored_table
from megalite.checkpoint.format import (
    CONFIG,
    FileRecord,
    Manifest,
    Piece,
    Progress,
    TensorRecord,
    folder_name,
    hash_file,
    tensor_name,
    write_manifest,
)
from megalite.checkpoint.hf.families.registry import exportable
from megalite.checkpoint.hf.folders import building, require_room
from megalite.checkpoint.hf.importer import HuggingFaceWeights
from megalite.checkpoint.hf.layout import row_blocks
from megalite.checkpoint.hf.memory import require_memory
from megalite.checkpoint.hf.provenance import IMPORTED_FROM, LICENCE, licence_of
from megalite.checkpoint.hf.stages import WRITING, Say, silent
from megalite.checkpoint.hf.stream import write_stream
from megalite.checkpoint.hf.tokenizer_files import copy_tokenizer
from megalite.checkpoint.hf.verify import Verdict, verify
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.tensor_file import Entry, group_by_size
from megalite.config.sections.model import ModelConfig
from megalite.config.yaml_source import dump_yaml
from megalite.errors import ConversionError, DataError
from megalite.model.initialize import WeightSource
from megalite.tokenizer.tokenizer import FAST_FILE, Tokenizer

TOKENIZER_FOLDER = "tokenizer"
FILE_BYTES = 2 * 10**9
"""Weights in a file."""

BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Imported:
    """What an import made and what was checked."""

    folder: Path
    checkpoint: Path
    architecture: str
    model: Architecture
    verdict: Verdict
    notes: tuple[str, ...]


def from_hugging_face(
    folder: Path | str,
    out: Path | str,
    *,
    overwrite: bool = False,
    verify_blocks: int | None = None,
    say: Say = silent,
) -> Imported:
    """Import a Hugging Face folder.

    Args:
        folder: with config.json and safetensors.
        out: folder to make.
        overwrite: replace an older checkpoint in `out`.
        verify_blocks: compare logits with only the first blocks; None for all of them.
        say: is told what begins.

    Raises:
        ConversionError: megalite has no such model, there are only pickles, `out` is taken or has the folder in
            it, or megalite computes other logits than transformers.
        CheckpointError: weights are missing or damaged.
    """
    folder, out = Path(folder), Path(out)
    source = HuggingFaceWeights(folder)
    model = source.model
    require_memory(model, verify_blocks)
    require_room(out, count_parameters(model) * BYTES_PER_PARAMETER)
    with building(out, inputs=[folder], overwrite=overwrite) as partial:
        tokenizer, notes = _take_tokenizer(folder, partial)
        recorded = {"tokenizer": TOKENIZER_FOLDER} if tokenizer else {}
        step = partial / folder_name(0)
        step.mkdir()
        origin = {IMPORTED_FROM: Path(folder).resolve().name, LICENCE: licence_of(Path(folder))}
        say(WRITING)
        write_weights_only(step, source, model, data={**origin, **recorded})
        written = CheckpointReader(step).source("weight")
        verdict = verify(Path(folder), written, model, tokenizer=tokenizer, num_blocks=verify_blocks, say=say)
        if verdict.tokenizer_problem:
            notes.append(
                f"{verdict.tokenizer_problem} by its {FAST_FILE}: find out which of them the model learned before you "
                f"tokenize data with {out / TOKENIZER_FOLDER}."
            )
        why_not = exportable(model).why_not
        if why_not:
            notes.append(f"It trains, but cannot be exported again: {why_not}.")
    architecture = source.description.family.architecture
    return Imported(out, out / folder_name(0), architecture, model, verdict, tuple(notes))


def _take_tokenizer(folder: Path, partial: Path) -> tuple[Tokenizer | None, list[str]]:
    """Copy the tokenizer when there is a usable one; the one of the folder, and notes."""
    target = partial / TOKENIZER_FOLDER
    target.mkdir()
    try:
        return copy_tokenizer(folder, target), []
    except (DataError, ConversionError) as error:
        shutil.rmtree(target)
        return None, [f"Imported without a tokenizer: {error}"]


def write_weights_only(
    step: Path, source: WeightSource, model: Architecture, *, data: Mapping[str, str | int | None]
) -> None:
    """Write the files of a checkpoint that has weights and no moments.

    Args:
        step: an existing folder.
        source: of the canonical weights.
        model: filled.
        data: what the manifest's `data` records.
    """
    table = stored_table(model)
    sizes = {name: BYTES_PER_PARAMETER * prod(weight.shape) for name, weight in table.items()}
    manifest = Manifest(
        progress=Progress(), model=model.model_dump(mode="json"), layout={}, tensors={}, files={}, data=dict(data)
    )
    manifest.megalite = __version__
    for number, names in enumerate(group_by_size(sizes, FILE_BYTES)):
        file = f"weights-{number:05d}.safetensors"
        weights = {table[name].state or tensor_name("weight", name): table[name] for name in names}
        manifest.files[file] = _write_file(step / file, source, weights)
        for key, weight in weights.items():
            start = (0,) * len(weight.shape)
            manifest.tensors[key] = TensorRecord(weight.shape, [Piece(file, key, start, weight.shape)])
    section = {name: value for name, value in manifest.model.items() if name in ModelConfig.model_fields}
    (step / CONFIG).write_text(dump_yaml({"model": section}), encoding="utf-8")
    manifest.files[CONFIG] = hash_file(step / CONFIG)
    write_manifest(step, manifest)


def _write_file(path: Path, source: WeightSource, weights: dict[str, Weight]) -> FileRecord:
    """Write whole weights in fp32, block by block."""

    def read(key: str) -> Iterator[Tensor]:
        return (source.read(weights[key], rows) for rows in row_blocks(weights[key].shape))

    return write_stream(path, [Entry(key, weight.shape, torch.float32) for key, weight in weights.items()], read)
