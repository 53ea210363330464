"""The run folder: what is where, and whether a config may go on in it.

config.yaml  plan.json  metrics.jsonl  events.jsonl  checkpoints/  tensorboard/  logs/
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.checkpoint.hf.families.registry import exportable
from megalite.config.load import dump_config, load_config
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.errors import ConfigError, UserError

CONFIG = "config.yaml"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"
LOGS = "logs"

FIXED_KEYS = (
    "model",
    "run.seed",
    "batch.global_batch_size",
    "batch.ramp",
    "batch.seq_len",
    "data.document_masks",
    "optimizer.name",
)
"""What may not change between the attempts of one run: the model, and how samples are made. The layout, the length,
rates and everything else may; so may the mixture, which then is another one from there on."""


INTERCHANGEABLE = {"optimizer.name": {"adamw", "adamw8bit"}}
"""Values of fixed keys that may take each other's place: these two have the same moments in checkpoints."""


def check_run_folder(config: Config) -> None:
    """Refuse a run folder that cannot be written or that belongs to another run.

    Raises:
        UserError: the folder cannot be made or written.
        ConfigError: it holds a run whose fixed settings differ; every one of them is named.
    """
    folder = config.run.dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be written ({error}); set run.dir to a folder of yours") from error
    if not (folder / CONFIG).is_file() or not holds_steps(folder):
        return
    changed = changed_settings(folder / CONFIG, config)
    if changed:
        advice = f"{folder} holds another run; set run.dir to a new folder, or take these settings back"
        raise ConfigError([*changed, advice])


def holds_steps(folder: Path) -> bool:
    """Whether a run in a folder has done anything: before its first step it has no claim to the folder."""
    metrics = folder / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or any((folder / CHECKPOINTS).glob("step-*"))


def changed_settings(former_config: Path, config: Config) -> list[str]:
    """Each of `FIXED_KEYS` that differs from a former config's, and how."""
    former, now = (c.model_dump(mode="json") for c in (load_config(former_config), config))
    changed = [
        f"{key}: {_at(former, key)!r} in {former_config}, {_at(now, key)!r} now"
        for key in _leaves(FIXED_KEYS, now)
        if _at(former, key) != _at(now, key)
        and not (key in INTERCHANGEABLE and {_at(former, key), _at(now, key)} <= INTERCHANGEABLE[key])
    ]
    return [*changed, *_moved_sources(former_config, former["data"]["train"], now["data"]["train"])]


def _moved_sources(former_config: Path, former: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterator[str]:
    """Complain about sources that have a former one's name and another path."""
    paths = {_source_name(source): source["path"] for source in former}
    for index, source in enumerate(now):
        path = paths.get(_source_name(source), source["path"])
        if path != source["path"]:
            yield f"data.train.{index}.path: {path!r} in {former_config}, {source['path']!r} now"


def _source_name(source: dict[str, Any]) -> str:
    return source["name"] or Path(source["path"]).name


def write_run_folder(config: Config, plan: RunPlan) -> None:
    """Write the resolved config and the plan, with what the model can be exported as. One rank only."""
    folder = config.run.dir
    write_atomically(folder / CONFIG, dump_config(config))
    described = {**plan.to_dict(), "export": dataclasses.asdict(exportable(plan.model))}
    write_atomically(folder / PLAN, json.dumps(described, indent=1))


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one move, so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _leaves(keys: Sequence[str], config: dict[str, Any]) -> list[str]:
    """The keys themselves, a section among them replaced by its settings, and a section within that by its own."""
    leaves = []
    for key in keys:
        value = _at(config, key)
        leaves += _leaves([f"{key}.{name}" for name in value], config) if isinstance(value, dict) else [key]
    return leaves


def _at(config: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        config = config[name] if config is not None else None
    return config
