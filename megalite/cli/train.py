"""`megalite train`."""

from __future__ import annotations

from pathlib import Path

import typer


def train(
    config: Path = typer.Argument(..., help="The run's YAML file."),
    overrides: list[str] = typer.Argument(None, help="Settings that replace the file's: section.key=value ..."),
    max_failures: int = typer.Option(
        0,
        "--max-failures",
        min=0,
        help="Watch the ranks and start again after a fault or a hang, until so many have happened in a row without a "
        "new checkpoint.",
    ),
    force: bool = typer.Option(False, "--force", help="Start also what does not fit this machine's memory and cores."),
    no_verify: bool = typer.Option(
        False,
        "--no-verify",
        help="Do not compare the Hugging Face folder of train.init_from with transformers before the first step.",
    ),
) -> int:
    """Train a model, or go on with a run that was stopped.

    Starts pp x dp x tp ranks on this machine; under srun, torchrun or mpirun it is one of the ranks given.
    """
    from megalite.config.load import load_config
    from megalite.config.plan import default_world_size
    from megalite.train.local import train_locally
    from megalite.train.place import given_place
    from megalite.train.worker import run_rank

    overrides = [*(overrides or ()), *(["train.verify_init_from=false"] if no_verify else [])]
    loaded = load_config(config, overrides)
    place = given_place()
    if place is not None:
        return run_rank(loaded, place, is_forced=force)
    return train_locally(loaded, default_world_size(loaded), max_failures=max_failures, is_forced=force)
