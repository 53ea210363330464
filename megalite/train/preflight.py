"""Everything that can be known to be wrong before a process starts: config, data, device, folder, disk.

No torch is imported unless a device must be asked, so a mistake is told within a second.
"""

from __future__ import annotations

from collections.abc import Callable

from megalite.checkpoint.catalog import CHECKPOINTS, check_disk
from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.data.samples import Samples, open_training_samples, open_validation_samples
from megalite.data.tokenizer import Tokenizer
from megalite.errors import ConfigError, UserError
from megalite.train.run_folder import check_run_folder


def preflight(config: Config, world_size: int) -> tuple[RunPlan, Samples, Samples | None]:
    """Check a run and return its plan and its open data.

    Raises:
        UserError: one error with every complaint found.
    """
    validate(config, world_size)
    samples, valid_samples = open_data(config)
    tokenizer = Tokenizer.load(config.data.tokenizer) if config.data.tokenizer is not None else None
    plan = make_plan(config, world_size, tokenizer.vocab_size if tokenizer else samples.vocab_size)
    problems: list[str] = []
    if tokenizer is not None:
        _gather(problems, lambda: samples.check_tokenizer(tokenizer))
    _gather(problems, lambda: samples.check_vocab_size(plan.model.vocab_size))
    if valid_samples is not None:
        _gather(problems, lambda: valid_samples.check_vocab_size(plan.model.vocab_size))
    _gather(problems, lambda: _check_folder(config, plan))
    _gather(problems, lambda: _check_device(config))
    _gather(problems, lambda: _check_init_from(config))
    if problems:
        raise ConfigError(problems)
    return plan, samples, valid_samples


def open_data(config: Config) -> tuple[Samples, Samples | None]:
    """Open the training mixture and the validation data of a config.

    Raises:
        UserError: there is none, or it is damaged or does not fit.
    """
    if not config.data.train:
        raise ConfigError(
            ["data.train: empty; list at least one source, e.g. `data: {train: [{path: data/demo/packed}]}`"]
        )
    options = {"seq_len": config.batch.seq_len, "document_masks": config.data.document_masks}
    samples = open_training_samples(config)
    valid_samples = open_validation_samples(config.data.valid, **options) if config.data.valid else None
    return samples, valid_samples


def _gather(problems: list[str], check: Callable[[], None]) -> None:
    try:
        check()
    except ConfigError as error:
        problems += error.problems
    except UserError as error:
        problems.append(str(error))


def _check_folder(config: Config, plan: RunPlan) -> None:
    check_run_folder(config)
    check_disk(config.run.dir / CHECKPOINTS, plan.num_parameters)


def _check_device(config: Config) -> None:
    if config.train.device == "cuda":
        from megalite.train.device import choose_device

        choose_device("cuda", 0)


def _check_init_from(config: Config) -> None:
    path = config.train.init_from
    if path is not None and not path.is_dir():
        raise UserError(f"train.init_from: {path} is not a folder; give a checkpoint (step-…) or a Hugging Face folder")
