"""Everything that can be known to be wrong before a process starts: config, data, device, folder, disk.

No torch is imported unless a device must be asked, so a mistake is told within a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from megalite.checkpoint.catalog import CHECKPOINTS, check_disk, latest, named
from megalite.checkpoint.format import MANIFEST, read_manifest
from megalite.config.pipeline import prove_pipeline
from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.data.samples import Samples, open_training_samples, open_validation_sets
from megalite.errors import ConfigError, UserError
from megalite.monitor.wandb import check_wandb
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
    validate(config, world_size)
    samples, valid_sets = open_data(config)
    tokenizer = Tokenizer.load(config.data.tokenizer) if config.data.tokenizer is not None else None
    plan = make_plan(config, world_size, tokenizer.vocab_size if tokenizer else samples.vocab_size)
    problems: list[str] = []
    if local_rank is None or RENDEZVOUS_VARIABLE not in os.environ:  # ours has proven it for the ranks it starts
        _gather(problems, lambda: prove_pipeline(config, plan))
    if tokenizer is not None:
        _gather(problems, lambda: samples.check_tokenizer(tokenizer))
    _gather(problems, lambda: samples.check_vocab_size(plan.model.vocab_size))
    for valid_samples in valid_sets.values():
        _gather(problems, partial(valid_samples.check_vocab_size, plan.model.vocab_size))
    _gather(problems, lambda: open_run_tasks(config, plan, samples))
    _gather(problems, lambda: _check_folder(config, plan))
    if has_device:
        _gather(problems, lambda: check_device(config, local_rank))
    _gather(problems, lambda: _check_init_from(config))
    if config.monitor.wandb is not None:
        _gather(problems, check_wandb)
    _gather(problems, lambda: _check_branch(config, plan))
    if problems:
        raise ConfigError(problems)
    return plan, samples, valid_sets


def open_data(config: Config) -> tuple[Samples, dict[str, Samples]]:
    """Open the training mixture and the validation sets of a config.

    Raises:
        UserError: there is none, or it is damaged or does not fit.
    """
    if not config.data.train:
        raise ConfigError(
            ["data.train: empty; list at least one source, e.g. `data: {train: [{path: data/demo/packed}]}`"]
        )
    samples = open_training_samples(config)
    valid_sets = open_validation_sets(
        config.data.valid, seq_len=config.batch.seq_len, document_masks=config.data.document_masks
    )
    return samples, valid_sets


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
    changed = changed_settings(checkpoint / CONFIG, config)
    if changed:
        advice = (
            "a branch goes on with its run's model, data and batches; take these settings back, or start a new run "
            f"from the weights alone: train.branch_from=null train.init_from={checkpoint}"
        )
        raise ConfigError([*changed, advice])
    step = read_manifest(checkpoint).progress.step
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
