"""Everything that can be known to be wrong before a process starts: config, data, device, folder, disk.

No torch is imported unless a device must be asked, so a mistake is told within a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megalite.checkpoint.catalog import CHECKPOINTS, check_disk, latest, named
from megalite.checkpoint.format import MANIFEST, read_manifest
from megalite.config.length_stages import LengthStage, length_stages, plan_stage
from megalite.config.pipeline import prove_pipeline
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.data.samples import Samples, open_training_samples, open_validation_sets
from megalite.data.sources import check_pairs
from megalite.errors import ConfigError, DataError, UserError
from megalite.monitor.wandb import check_wandb
from megalite.planner.machines import load_machine
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.train.evaluation.tasks import Task, open_tasks
from megalite.train.place import RENDEZVOUS_VARIABLE
from megalite.train.run_folder import CONFIG, changed_settings, check_run_folder

if TYPE_CHECKING:
    import torch


def preflight(
    config: Config, world_size: int, *, local_rank: int | None = None, has_device: bool = True
) -> tuple[RunPlan, Samples, dict[str, Samples]]:
    """Check a run and return its plan, its open data and its validation sets by name.

    Args:
        local_rank: of the rank that this process is; None for one that starts others, and must not touch a device.
        has_device: whether this is a machine that will train; a login node says nothing about the nodes' devices.

    Raises:
        UserError: one error with every complaint found.
    """
    stages, valid_sets = preflight_stages(config, world_size, local_rank=local_rank, has_device=has_device)
    return stages[0].plan, stages[0].samples, valid_sets


@dataclass(frozen=True)
class ReadyStage:
    """A stage of a run, with all that it takes to begin."""

    config: Config
    """Of the stage by itself."""
    plan: RunPlan
    samples: Samples
    """Of its training mixture."""


def preflight_stages(
    config: Config, world_size: int, *, local_rank: int | None = None, has_device: bool = True
) -> tuple[tuple[ReadyStage, ...], dict[str, Samples]]:
    """`preflight` for every stage of a run (`batch.stages`): one, for a run of one length."""
    validate(config, world_size)
    valid_sets = open_validation(config)
    tokenizer = Tokenizer.load(config.data.tokenizer) if config.data.tokenizer is not None else None
    stages, problems = [], list[str]()
    for stage in length_stages(config):
        samples = _samples_of_stage(stage)
        vocab_size = tokenizer.vocab_size if tokenizer else samples.vocab_size
        plan = plan_stage(config, stage, world_size, vocab_size)
        samples = samples.beginning_at(plan.batch_sizes.first_sample(stage.first_step))
        stages.append(ready := ReadyStage(stage.config, plan, samples))
        _check_stage(problems, ready, tokenizer, is_proven=local_rank is not None and RENDEZVOUS_VARIABLE in os.environ)
    plan, samples = stages[0].plan, stages[0].samples
    for valid_samples in valid_sets.values():
        _gather(problems, partial(valid_samples.check_vocab_size, plan.model.vocab_size))
        are_wanted = config.train.preference is not None
        _gather(problems, partial(check_pairs, valid_samples.sources, are_wanted=are_wanted))
    _gather(problems, lambda: open_run_tasks(config, plan, samples))
    if config.monitor.machine is not None:
        _gather(problems, partial(load_machine, config.monitor.machine, "monitor.machine"))
    _gather(problems, lambda: _check_folder(config, plan))
    if has_device:
        _gather(problems, lambda: check_device(config, local_rank))
    _gather(problems, lambda: _check_init_from(config))
    if config.monitor.wandb is not None:
        _gather(problems, check_wandb)
    _gather(problems, lambda: _check_branch(config, plan))
    if problems:
        raise ConfigError(problems)
    return tuple(stages), valid_sets


def _samples_of_stage(stage: LengthStage) -> Samples:
    """Its training mixture; complaints say of which stage."""
    try:
        return open_samples_of(stage.config)
    except DataError as error:
        if stage.number == 0:
            raise
        raise DataError(f"batch.stages.{stage.number - 1}, which begins at step {stage.first_step}: {error}") from error


def _check_stage(problems: list[str], stage: ReadyStage, tokenizer: Tokenizer | None, *, is_proven: bool) -> None:
    """Gather what is wrong with a stage's pipeline and with its data."""
    if not is_proven:  # by who has started this rank
        _gather(problems, lambda: prove_pipeline(stage.config, stage.plan))
    if tokenizer is not None:
        _gather(problems, lambda: stage.samples.check_tokenizer(tokenizer))
    _gather(problems, lambda: stage.samples.check_vocab_size(stage.plan.model.vocab_size))
    are_wanted = stage.config.train.preference is not None
    _gather(problems, lambda: check_pairs(stage.samples.sources, are_wanted=are_wanted))


def open_data(config: Config) -> tuple[Samples, dict[str, Samples]]:
    """Open the training mixture, of the first stage where there are several, and the validation sets of a config.

    Raises:
        UserError: there is none, or it is damaged or does not fit.
    """
    return open_samples_of(config), open_validation(config)


def open_samples_of(config: Config) -> Samples:
    """Open the training mixture of a config.

    Raises:
        UserError: there is none, or it is damaged or does not fit.
    """
    if not config.data.train:
        raise ConfigError(
            ["data.train: empty; list at least one source, e.g. `data: {train: [{path: data/demo/packed}]}`"]
        )
    return open_training_samples(config)


def open_validation(config: Config) -> dict[str, Samples]:
    """Open the validation sets of a config, in sequences of the length that its run begins with.

    Raises:
        UserError: one is damaged or does not fit.
    """
    return open_validation_sets(
        config.data.valid, seq_len=config.batch.seq_len, document_masks=config.data.document_masks
    )


def open_run_tasks(config: Config, plan: RunPlan, samples: Samples) -> list[Task]:
    """Open the tasks of a config with the tokenizer of its data.

    Raises:
        DataError: a file is not one of questions, or no tokenizer is known.
    """
    folder = config.data.tokenizer or samples.tokenizer_path
    return open_tasks(config.train.tasks, folder, seq_len=config.batch.seq_len, vocab_size=plan.model.vocab_size)


def _gather(problems: list[str], check: Callable[[], object]) -> None:
    try:
        check()
    except ConfigError as error:
        problems += error.problems
    except UserError as error:
        problems.append(str(error))


def _check_folder(config: Config, plan: RunPlan) -> None:
    check_run_folder(config)
    check_disk(config.run.dir / CHECKPOINTS, plan.num_parameters)


def check_device(config: Config, local_rank: int | None = None) -> None:
    """Refuse a device or a format that this machine does not have.

    Args:
        local_rank: of the rank that this process is; None for one that must not touch a device.

    Raises:
        UnavailableError: there is no CUDA device.
        UserError: FP8 cannot run on the device.
    """
    if config.train.device == "cuda":
        _device(config, local_rank)
    _check_fp8(config, local_rank)


def _device(config: Config, local_rank: int | None) -> torch.device:
    """The device to ask what it can do: a rank's own, which it chooses first, or else the first one, untouched."""
    from megalite.train.device import choose_device, find_device

    wanted = config.train.device
    return find_device(wanted, 0) if local_rank is None else choose_device(wanted, local_rank)


def _check_branch(config: Config, plan: RunPlan) -> None:
    """That a checkpoint to branch off is there, is of this run's kind, and lies before its end."""
    path = config.train.branch_from
    if path is None:
        return
    checkpoint = path if (path / MANIFEST).is_file() else latest(path)
    if checkpoint is None:
        left = ", ".join(folder.name for folder in named(path.parent)) if path.parent.is_dir() else ""
        raise UserError(
            f"train.branch_from: {path} is no checkpoint; give a step-… folder, or a run for its newest"
            + (f" (of this run there are {left})" if left else "")
        )
    step = read_manifest(checkpoint).progress.step
    changed = changed_settings(checkpoint / CONFIG, config, step)
    if changed:
        advice = (
            "a branch goes on with its run's model, data and batches; take these settings back, or start a new run "
            f"from the weights alone: train.branch_from=null train.init_from={checkpoint}"
        )
        raise ConfigError([*changed, advice])
    if step >= plan.total_steps:
        raise UserError(
            f"train.branch_from: {checkpoint} is at step {step}, and the run ends at {plan.total_steps}; steps count "
            f"on: raise train.steps above {step}, by the length of the branch"
        )


def _check_fp8(config: Config, local_rank: int | None) -> None:
    fp8 = config.precision.fp8
    if fp8 is None or fp8.backend == "emulate":
        return
    from megalite.layers.fp8.available import why_unavailable

    reason = why_unavailable(fp8, _device(config, local_rank))
    if reason:
        raise UserError(
            f"precision.fp8: backend={fp8.backend} with recipe={fp8.recipe} cannot run here: {reason}; use "
            "precision.fp8=null for bf16, or backend=emulate to study FP8 on any device"
        )


def _check_init_from(config: Config) -> None:
    path = config.train.init_from
    if path is not None and not path.is_dir():
        raise UserError(f"train.init_from: {path} is not a folder; give a checkpoint (step-…) or a Hugging Face folder")
