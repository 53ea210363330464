"""What a run wrote down that belongs on a model's card: settings, losses, the data and its licences, where it began.

    step-…/manifest.json, config.yaml     the checkpoint itself
    RUN/metrics.jsonl, events.jsonl       two folders up, when the checkpoint still lies in its run
    DATA/card.json                        beside the packed data that config.yaml names, when it is here
    INIT_FROM/manifest.json, README.md    of the model that the run began with

A checkpoint may have been copied away from all of them, so every part may be missing, and then nothing is said of it.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megalite.checkpoint import catalog
from megalite.checkpoint.format import CONFIG, MANIFEST, Manifest, read_manifest
from megalite.config.batch_sizes import steps_for_tokens
from megalite.config.schema import BatchConfig
from megalite.errors import CheckpointError, DataError
from megalite.stations.manifest import find_manifest
from megalite.step_lines import is_finite_number, read_step_lines

IMPORTED_FROM = "imported_from"
"""Key of a manifest's `data` in a checkpoint that `from-hf` made, or that was upcycled from what began as one: name of
the Hugging Face folder."""

LICENCE = "license"
"""Key beside it: the licence that the folder's README.md names."""

UPCYCLED_FROM = "upcycled_from"
"""Key in a checkpoint that `upcycle` made: path of the dense one."""

UPDATES_BEFORE = "updates_before"
"""Key beside it: steps that changed the weights of the dense one."""

TOKENIZER_FINGERPRINT = "tokenizer_fingerprint"
"""Key of a manifest's `data`: the tokenizer that the training data was made with."""

DATA_CARD = "card.json"
"""As `megalite.corpus.card` calls it; importing that would load Arrow for a name."""

WINDOW = 20
"""Steps that a loss is averaged over: one batch alone may be easy or hard."""


@dataclass(frozen=True)
class Losses:
    """The training loss up to a checkpoint."""

    last: float
    """Of the last step."""
    mean: float
    """Of the last WINDOW steps."""
    best: float
    """The lowest mean of WINDOW steps so far."""
    best_step: int
    """The last of those."""
    num_skipped: int


@dataclass(frozen=True)
class DataSource:
    """A source of the training data, as its data card describes it."""

    name: str
    description: str | None
    license: str | None
    url: str | None
    documents: int
    text_bytes: int | None


@dataclass(frozen=True)
class DataSet:
    """One entry of `data.train`."""

    name: str
    weight: float
    sources: tuple[DataSource, ...]
    """Empty without a data card."""


@dataclass(frozen=True)
class Origin:
    """The model that a run began with."""

    name: str
    license: str | None


@dataclass(frozen=True)
class Provenance:
    """What is known of how a checkpoint came about."""

    config: dict[str, Any]
    """The run's resolved config; empty when there was no run."""
    losses: Losses | None
    validation: tuple[int, float] | None
    """Step and loss of the newest one up to the checkpoint."""
    total_steps: int | None
    """Where the run was to end."""
    ended_early: bool
    """Whether it has ended at this very step, for good."""
    origin: Origin | None
    """None for fresh weights."""
    data: tuple[DataSet, ...]
    tokenizers: frozenset[str]
    """Fingerprints of the tokenizers that the training data was made with."""


def trace(folder: Path, manifest: Manifest) -> Provenance:
    """Gather what is known of a checkpoint, from its folder and what lies around."""
    config = _read_config(folder)
    run = folder.absolute().parent.parent if folder.absolute().parent.name == catalog.CHECKPOINTS else None
    step = manifest.progress.step
    train_data, recorded = _train_data(config), _text(manifest.data.get(TOKENIZER_FINGERPRINT))
    tokenizers = [recorded] if recorded else [_tokenizer_of(Path(each["path"])) for each in train_data]
    return Provenance(
        config=config,
        losses=_read_losses(run / "metrics.jsonl", step) if run else None,
        validation=_read_validation(run / "events.jsonl", step) if run else None,
        total_steps=_total_steps(config),
        ended_early=_has_ended_early(run / "events.jsonl", step) if run else False,
        origin=_origin(manifest, _text(_at(config, "train", "init_from"))),
        data=tuple(map(_data_set, train_data)),
        tokenizers=frozenset(filter(None, tokenizers)),
    )


def licence_of(folder: Path) -> str | None:
    """The licence that the README.md of a Hugging Face folder names."""
    try:
        _, front, _ = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
        fields = yaml.safe_load(front)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return _text(fields.get("license_name") or fields.get("license")) if isinstance(fields, dict) else None


def _read_config(folder: Path) -> dict[str, Any]:
    """The resolved config of a run; an imported checkpoint's, which is only a model, is none."""
    try:
        found = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) and "optimizer" in found else {}


def _at(config: dict[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(value: object) -> str | None:
    """What has the place of a text, in a file that another version, or a hand, may have written."""
    return value if isinstance(value, str) and value else None


def _train_data(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of `data.train` that name a path."""
    found = _at(config, "data", "train")
    entries = found if isinstance(found, list) else []
    return [each for each in entries if isinstance(each, dict) and _text(each.get("path"))]


def _total_steps(config: dict[str, Any]) -> int | None:
    steps, tokens = _at(config, "train", "steps"), _at(config, "train", "tokens")
    if type(steps) is int and steps > 0:
        return steps
    if not is_finite_number(tokens) or tokens <= 0:
        return None
    try:
        return steps_for_tokens(BatchConfig.model_validate(config["batch"]), math.ceil(tokens))
    except (KeyError, ValueError):
        return None


def _read_losses(path: Path, last_step: int) -> Losses | None:
    window: deque[float] = deque(maxlen=WINDOW)
    best, best_step, num_skipped = math.inf, 0, 0
    for record in _lines(path, last_step):
        num_skipped += bool(record.get("skipped"))
        if record.get("valid_tokens") == 0:  # nothing was learned from it
            continue
        loss = record.get("loss", "")
        if not (loss is None or type(loss) is float or is_finite_number(loss)):  # a damaged line
            continue
        window.append(math.nan if loss is None else loss)
        mean = sum(window) / len(window)
        if mean < best:
            best, best_step = mean, record["step"]
    if not window:
        return None
    return Losses(window[-1], sum(window) / len(window), best, best_step, num_skipped)


def _read_validation(path: Path, last_step: int) -> tuple[int, float] | None:
    """The last one that has a loss: some have the scores of tasks alone, and where training went wrong it is none."""
    validations = (record for record in _lines(path, last_step) if record.get("event") == "validation")
    found = [(each["step"], each["loss"]) for each in validations if is_finite_number(each.get("loss"))]
    return found[-1] if found else None


def _has_ended_early(path: Path, step: int) -> bool:
    """Whether early stopping has ended the run at a step, and it was not gone on with."""
    records = [record for record in _lines(path, math.inf) if record["step"] >= step]
    stopped = any(record.get("event") == "early_stop" and record["step"] == step for record in records)
    return stopped and all(record["step"] == step for record in records)


def _lines(path: Path, last_step: float) -> Iterator[dict[str, Any]]:
    """The records of steps up to one; a line that a crash cut short is passed over."""
    return (record for record in read_step_lines(path) if record["step"] <= last_step)


def _origin(manifest: Manifest, init_from: str | None) -> Origin | None:
    """Where the weights came from: what the checkpoint was made from, or what its run began with."""
    if imported := _text(manifest.data.get(IMPORTED_FROM)):
        return Origin(imported, _text(manifest.data.get(LICENCE)))
    if dense := _text(manifest.data.get(UPCYCLED_FROM)):
        return Origin(_name_of(Path(dense)), None)
    if init_from is None:
        return None
    folder = Path(init_from)
    began = folder if (folder / MANIFEST).is_file() else catalog.latest(folder) if folder.is_dir() else None
    if began is None:
        return Origin(folder.name, licence_of(folder))
    try:
        before = _origin(read_manifest(began), None)
    except CheckpointError:
        before = None
    return before or Origin(folder.name, None)


def _name_of(checkpoint: Path) -> str:
    """What people call a checkpoint: its run's name, where it lies in one."""
    folder = checkpoint.parent
    return folder.parent.name if folder.name == catalog.CHECKPOINTS else checkpoint.name


def _data_set(source: dict[str, Any]) -> DataSet:
    path, given = Path(source["path"]), _text(source.get("name"))
    weight = source.get("weight", 1.0)
    weight = weight if is_finite_number(weight) else 1.0
    for folder in path.absolute().parents[:2]:  # OUT/packed/train, OUT/tokens/train
        try:
            raw = json.loads((folder / DATA_CARD).read_text(encoding="utf-8"))
            fields = DataSource.__dataclass_fields__.keys() - {"documents", "text_bytes"}
            sources = tuple(
                DataSource(**{field: each[field] for field in fields}, **each["kept"]) for each in raw["sources"]
            )
            return DataSet(given or raw["name"], weight, sources)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return DataSet(given or path.name, weight, ())


def _tokenizer_of(path: Path) -> str | None:
    """Fingerprint of the tokenizer that a packed or tokenized folder was made with, where it still says."""
    try:
        found = find_manifest(path) if path.is_dir() else None
        if found is not None and found.station == "pack":
            found = find_manifest(found.input_path())
        return found.settings["tokenizer"]["fingerprint"] if found is not None else None
    except (DataError, OSError, KeyError, TypeError):
        return None
