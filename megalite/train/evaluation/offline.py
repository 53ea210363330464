"""Scores of a saved model, in one process and without DeepSpeed: a checkpoint of any layout, or a Hugging Face folder.

The model is megalite's own either way, so both formats are scored by the code that trained, and a checkpoint needs no
export first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.format import stored_model
from megalite.checkpoint.hf.config_json import FILE_NAME as CONFIG_FILE
from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.hf.folders import find_checkpoint
from megalite.checkpoint.hf.importer import HuggingFaceWeights, model_config
from megalite.checkpoint.hf.tokenizer_choice import choose_tokenizer
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.rounded_weights import computing_weights
from megalite.config.schema import TaskConfig
from megalite.data.loader import Batch
from megalite.errors import ConversionError, DataError
from megalite.layers.documents import Documents, Targets
from megalite.layers.parts import choose_parts
from megalite.model.initialize import WeightSource
from megalite.model.scales import without_scales
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage
from megalite.train.device import choose_device
from megalite.train.evaluation import harness
from megalite.train.evaluation.scoring import Score, Shape, log_likelihoods, score
from megalite.train.evaluation.tasks import open_tasks

QUESTIONS = ".jsonl"
HARNESS = (".yaml", ".yml")
"""Endings of the two kinds of tasks."""

LONGEST_STREAM = 2048
"""Tokens read at once, where the longest sequence is not longer itself."""

GRANULE = 64
"""Tokens that the length of a sequence is a multiple of, where the model has so many positions."""


@dataclass(frozen=True)
class SavedModel:
    """Where a model's weights and tokenizer lie."""

    folder: Path
    model: Architecture
    weights: WeightSource
    tokenizer: Path | None
    is_checkpoint: bool


def open_model(folder: Path, tokenizer: Path | None = None) -> SavedModel:
    """Find a model.

    Args:
        folder: a checkpoint's, a run's for its newest checkpoint, or one in Hugging Face format.
        tokenizer: a tokenizer's folder; None takes the one that the folder has or records.

    Raises:
        UserError: there is no model, or it is none that megalite knows.
    """
    if (folder / CONFIG_FILE).is_file():
        model = model_config(folder)
        return SavedModel(folder, model, HuggingFaceWeights(folder, model), tokenizer or folder, is_checkpoint=False)
    reader = CheckpointReader(find_checkpoint(folder))
    found, _ = choose_tokenizer(tokenizer, reader.folder, reader.manifest)
    model = without_scales(stored_model(reader.folder, reader.manifest))
    return SavedModel(reader.folder, model, computing_weights(reader), found, is_checkpoint=True)


def score_all(
    saved: SavedModel, files: Sequence[Path], limit: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Score a model on files of questions and on tasks of lm-evaluation-harness, by their names.

    Yields:
        A task's name, and its scores with `num`, the number of questions, and `by`, who scored.

    Raises:
        UserError: a file is of neither kind or cannot be used, two have one name, or no tokenizer fits.
    """
    for path in files:
        if path.suffix not in (QUESTIONS, *HARNESS) or not path.is_file():
            what = "is no file" if not path.is_file() else f"ends in {path.suffix or 'nothing'}"
            raise DataError(f"{path}: {what}; give a .jsonl of questions or a .yaml of lm-evaluation-harness")
    _refuse_equal_names(files)
    questions = [TaskConfig(path=path, limit=limit) for path in files if path.suffix == QUESTIONS]
    harness_tasks = [path for path in files if path.suffix in HARNESS]
    if harness_tasks:
        harness.require()
    for name, found in score_tasks(saved, questions) if questions else ():
        yield name, {**found.record(), "by": "megalite"}
    if harness_tasks:
        with _as_hugging_face(saved) as folder:
            yield from harness.score(folder, harness_tasks, limit)


def _refuse_equal_names(files: Sequence[Path]) -> None:
    """Scores go by the names of tasks: of two with one name, one would be lost."""
    known: dict[str, Path] = {}
    for path in files:
        name = harness.task_name(path) if path.suffix in HARNESS else path.stem
        if name is not None and name in known:
            raise DataError(f"{path}: its task is called {name!r}, as that of {known[name]} is; give one another name")
        known[name or str(path)] = path


def score_tasks(saved: SavedModel, tasks: Sequence[TaskConfig]) -> Iterator[tuple[str, Score]]:
    """Score a model on tasks, one by one; all files are read before the weights are.

    Raises:
        DataError: a file is not one of questions, or no tokenizer fits.
        ConversionError: no tokenizer is known.
    """
    if saved.tokenizer is None:
        raise ConversionError(f"{saved.folder}: records no tokenizer; give its folder with --tokenizer")
    most = saved.model.max_positions
    opened = open_tasks(tasks, saved.tokenizer, seq_len=most, vocab_size=saved.model.vocab_size)
    device = choose_device("auto", 0)
    seq_len = sequence_for((request.length for task in opened for request in task.requests), most)
    shape = Shape(seq_len, max(1, LONGEST_STREAM // seq_len), device=device)
    stage = build_stage(saved, device)
    for task in opened:
        found = log_likelihoods(task.requests, lambda batches: [token_losses(stage, b) for b in batches], shape)
        yield task.name, score(task.questions, found)


def sequence_for(lengths: Iterable[int], most: int) -> int:
    """Tokens of a sequence that holds each request: what fills one up costs the square of its length."""
    return min(most, -(-max(lengths) // GRANULE) * GRANULE)


@contextmanager
def _as_hugging_face(saved: SavedModel) -> Iterator[Path]:
    """The model's folder in Hugging Face format, a temporary one for a checkpoint."""
    if not saved.is_checkpoint:
        yield saved.folder
        return
    with tempfile.TemporaryDirectory(prefix="megalite-eval-") as folder:
        yield to_hugging_face(saved.folder, Path(folder) / "hf", tokenizer=saved.tokenizer).folder


def build_stage(saved: SavedModel, device: torch.device) -> Stage:
    """The whole model in fp32."""
    parts = choose_parts(saved.model, device.type, torch.float32)
    spec = StageSpec(model=saved.model, parts=parts)
    return Stage(spec, saved.weights).eval().to(device)


@torch.inference_mode()
def token_losses(stage: Stage, batch: Batch) -> Tensor:
    """The cross-entropy of every token, `[t]`."""
    losses = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    documents = Documents(batch.positions, batch.cu_seqlens, batch.max_seqlen, batch.keys)
    stage(batch.tokens, documents, Targets(batch.labels, batch.loss_mask.float(), losses))
    return losses
