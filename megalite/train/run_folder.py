"""The run folder: what is where, and whether a config may go on in it.

config.yaml  plan.json  metrics.jsonl  events.jsonl  checkpoints/  tensorboard/  logs/
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.checkpoint.catalog import latest, step_of
from megalite.checkpoint.hf.families.registry import exportable
from megalite.config.batch_sizes import longest_sequence, stage_starts
from megalite.config.fill import scales_in_words, trained_scales
from megalite.config.load import dump_config
from megalite.config.plan import RunPlan
from megalite.config.schema import BatchConfig, Config, QatConfig
from megalite.config.yaml_source import read_source
from megalite.errors import ConfigError, UserError
from megalite.files import write_atomically
from megalite.train.optimizer_change import changed_optimizer

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
    "train.loss",
)
"""What may not change between the attempts of one run: the model, how samples are made, and what is minimised. The
optimizer may where its state goes on (`optimizer_change`); the layout, the length, rates and everything else may; so
may the mixture, which then is another one from there on."""


def check_run_folder(config: Config) -> None:
    """Refuse a run folder that cannot be written or that belongs to another run.

    Raises:
        UserError: the folder cannot be made or written.
        ConfigError: it holds a run whose fixed settings differ; every one of them is named.
    """
    folder = config.run.dir
    for path in (folder, folder / CHECKPOINTS, folder / LOGS):
        nearest = next(each for each in (path, *path.parents) if os.path.lexists(each))
        try:
            probe = nearest / f".write-test-{os.getpid()}"  # nothing is made yet: something else may be wrong
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise UserError(f"run.dir: {path} cannot be written ({error}); set run.dir to a folder of yours") from error
    if not (folder / CONFIG).is_file() or not holds_steps(folder):
        return
    newest = latest(folder / CHECKPOINTS)
    changed = changed_settings(folder / CONFIG, config, 0 if newest is None else step_of(newest))
    changed += [*changed_scales(folder / CONFIG, config), *changed_optimizer(folder / CONFIG, config)]
    if changed:
        advice = f"{folder} holds another run; set run.dir to a new folder, or take these settings back"
        raise ConfigError([*changed, advice])


def changed_scales(former_config: Path, config: Config) -> Iterator[str]:
    """Whether a run would train other scales of rounded weights than by a former config, in a sentence."""
    former = _at(read_source(former_config).data, "precision.qat")
    try:
        before = None if former is None else QatConfig.model_validate(former)
    except ValidationError:  # of another version, as the checkpoint will say
        return
    had, has = (trained_scales(each, config.model.num_layers) for each in (before, config.precision.qat))
    if had != has:
        yield f"precision.qat: {scales_in_words(had)} in {former_config}, {scales_in_words(has)} now"


def holds_steps(folder: Path) -> bool:
    """Whether a run in a folder has done anything: before its first step it has no claim to the folder."""
    metrics = folder / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or any((folder / CHECKPOINTS).glob("step-*"))


def changed_settings(former_config: Path, config: Config, step: int) -> list[str]:
    """Each of `FIXED_KEYS` that differs from a former config's, and how; and stages that had begun by a step.

    The former one is read as plain data: plug-ins that it names may have moved, and what they brought may be gone.
    """
    former = _filled(read_source(former_config).data, Config().model_dump(mode="json"))
    now = config.model_dump(mode="json")
    changed = [
        f"{key}: {before!r} in {former_config}, {after!r} now"
        for fixed in FIXED_KEYS
        for key, before, after in _differences(fixed, _at(former, fixed), _at(now, fixed))
    ]
    former_batch = BatchConfig.model_validate(_at(former, "batch"))
    changed += _changed_stages(former_config, former_batch, config.batch, step)
    before, after = longest_sequence(former_batch), longest_sequence(config.batch)
    if config.model.positions == "learned" and config.model.max_positions is None and before != after:
        changed.append(
            f"model.max_positions: null, which stood for {before} in {former_config} and stands for {after} now, with "
            f"another batch.stages; a learned table keeps its size: set max_positions={before}"
        )
    return [*changed, *_moved_sources(former_config, _at(former, "data.train") or [], now["data"]["train"])]


def _changed_stages(former_config: Path, former: BatchConfig, now: BatchConfig, step: int) -> Iterator[str]:
    """Complain about stages that had begun by a step, or should have, and are others now. Those to come may be, and how
    a rank takes its samples; whether the data is another is seen when it is opened."""
    before, after = (_begun(batch, step) for batch in (former, now))
    for number in range(max(len(before), len(after))):
        if number >= min(len(before), len(after)):
            had, has = (
                f"a stage that begins at step {each[number]['from_step']}" if number < len(each) else "none"
                for each in (before, after)
            )
            yield f"batch.stages.{number}: step {step} is done, and {former_config} has {had} by then, {has} now"
            return
        for key, one, other in _differences(f"batch.stages.{number}", before[number], after[number]):
            yield f"{key}: {one!r} in {former_config}, {other!r} now"


def _begun(batch: BatchConfig, step: int) -> list[dict[str, Any]]:
    starts = stage_starts(batch)[1:]
    left_out = {"from_step", "from_tokens", "micro_batch_size", "train"}
    return [
        {"from_step": start.first_step, **stage.model_dump(mode="json", exclude=left_out)}
        for start, stage in zip(starts, batch.stages, strict=True)
        if start.first_step <= step
    ]


def _filled(given: Any, defaults: Any) -> Any:
    """Plain data of a config, with the defaults of what it does not name: it may be older than a setting."""
    if not isinstance(given, dict) or not isinstance(defaults, dict):
        return given
    return {**given, **{name: _filled(given.get(name, value), value) for name, value in defaults.items()}}


def _differences(key: str, former: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """The settings below a key that differ, with both values; options of plug-ins are one."""
    if isinstance(now, dict) and not key.endswith(".options"):
        for name, value in now.items():
            yield from _differences(f"{key}.{name}", former.get(name) if isinstance(former, dict) else None, value)
    elif former != now:
        yield key, former, now


def _moved_sources(former_config: Path, former: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterator[str]:
    """Complain about sources that have a former one's name and another path."""
    paths = {_source_name(source): source["path"] for source in former if "path" in source}
    for index, source in enumerate(now):
        path = paths.get(_source_name(source), source["path"])
        if path != source["path"]:
            yield f"data.train.{index}.path: {path!r} in {former_config}, {source['path']!r} now"


def _source_name(source: dict[str, Any]) -> str:
    return source.get("name") or Path(source["path"]).name


def write_run_folder(config: Config, plan: RunPlan) -> None:
    """Write the resolved config and the plan, with what the model can be exported as. One rank only."""
    folder = config.run.dir
    write_atomically(folder / CONFIG, dump_config(config))
    described = {**plan.to_dict(), "export": dataclasses.asdict(exportable(plan.model))}
    write_atomically(folder / PLAN, json.dumps(described, indent=1))


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config
