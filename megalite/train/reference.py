"""The frozen model that pairs of answers are judged beside: the one that the run began with, whatever becomes of the
folder that it began from.

`reference.json` in the run's folder names the very checkpoint, or Hugging Face folder, and a digest of its files; a run
that goes on opens that again, and is refused where it is another.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from megalite.checkpoint import catalog
from megalite.checkpoint.format import MANIFEST
from megalite.config.schema import Config
from megalite.errors import CheckpointError
from megalite.files import write_atomically
from megalite.model.initialize import WeightSource
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import from_all
from megalite.train.preflight import ReadyStage
from megalite.train.start import first_start

RECORD = "reference.json"

SAMPLED_BYTES = 2**20
"""Of each end of a file of weights."""


@dataclass(frozen=True)
class ReferenceRecord:
    """Which model it is."""

    init_from: str
    """As the config named it when the run began."""
    folder: str
    digest: str


def open_reference(config: Config, stages: tuple[ReadyStage, ...], axes: Axes, device: torch.device) -> WeightSource:
    """The weights that a run began with, whether it begins now or goes on. Collective.

    Raises:
        CheckpointError: on all ranks, when they are gone or others.
    """
    found: Any = None
    if axes.global_rank == 0:
        try:
            found = _find(config)
        except CheckpointError as error:
            found = str(error)
    found = from_all(found, axes.world)[0]
    if isinstance(found, str):
        raise CheckpointError(found)
    train = config.train.model_copy(update={"init_from": Path(found.folder)})
    return first_start(config.model_copy(update={"train": train}), stages, axes, device, again=True).weights


def _find(config: Config) -> ReferenceRecord:
    """What was recorded, or is from now on.

    Raises:
        CheckpointError: it is gone, or another than it was.
    """
    path, given = config.run.dir / RECORD, config.train.init_from
    assert given is not None, "refused before"
    if not path.is_file():
        folder = given if (given / MANIFEST).is_file() else catalog.latest(given) or given
        record = ReferenceRecord(str(given), str(folder), _digest(folder))
        write_atomically(path, json.dumps(asdict(record), indent=2) + "\n")
        return record
    record = ReferenceRecord(**json.loads(path.read_text(encoding="utf-8")))
    if str(given) not in (record.init_from, record.folder):
        raise CheckpointError(
            f"train.init_from: this run learns beside {record.folder}, and {given} would be another reference; set "
            f"train.init_from={record.init_from}, or begin a new run: run.dir=NEW"
        )
    if not Path(record.folder).is_dir() or _digest(Path(record.folder)) != record.digest:
        raise CheckpointError(
            f"train.preference: the reference that this run began with, {record.folder}, is "
            f"{'another model now' if Path(record.folder).is_dir() else 'gone'}; put it back, or begin a new run: "
            "run.dir=NEW"
        )
    return record


def _digest(folder: Path) -> str:
    """Of a model's files: names, sizes, and the ends of each, of small ones all."""
    digest = xxhash.xxh3_128()
    for path in sorted(
        each for each in folder.iterdir() if each.is_file() and each.suffix in (".json", ".safetensors")
    ):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(SAMPLED_BYTES))
            file.seek(max(0, size - SAMPLED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()
