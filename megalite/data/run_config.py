"""A run's config with its length known: passes over the data become steps once the data is there.

    train.epochs x sequences of data.train -> the steps that read at least so many

A config whose length does not hang on data stays as it is, and no data is opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalite.config.batch_sizes import batch_sizes
from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.errors import ConfigError, DataError


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a run's config, as `config.load.load_config` does, and fill in its length.

    Raises:
        ConfigError: everything that is wrong with the file, the overrides and single values.
        DataError: passes are asked for over data that is not there, or damaged.
    """
    return fill_epochs(load_config(path, overrides))


def fill_epochs(config: Config) -> Config:
    """The config with `train.steps` in place of `train.epochs`.

    Raises:
        ConfigError: passes over this data are not a number of steps.
        DataError: the data is not there, or damaged.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config
    if problems := list(_conflicts(config)):
        raise ConfigError(problems)
    from megalite.data.sources import open_source  # with numpy, which a config without passes has no use for

    (source,) = config.data.train
    try:
        opened = open_source(source, name=source.name or source.path.absolute().name, seq_len=config.batch.seq_len)
    except DataError as error:
        raise DataError(f"data.train.0: {error} (train.epochs={epochs:g} counts its sequences)") from error
    steps = max(1, batch_sizes(config.batch).steps_for(math.ceil(epochs * opened.layout.num_samples)))
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps, "epochs": None})})


def _conflicts(config: Config) -> Iterator[str]:
    for name in ("steps", "tokens"):
        if (value := getattr(config.train, name)) is not None:
            yield f"train.epochs: found {config.train.epochs:g}, and train.{name}={value} too; set one of them to null"
    if len(config.data.train) != 1:
        found = "no source" if not config.data.train else f"{len(config.data.train)} sources, mixed by weights"
        yield (
            f"train.epochs: found {found}, expected one: passes over several are given by data.mix.epochs, with "
            "train.tokens for the whole"
        )
    if config.batch.stages:
        yield "train.epochs: found beside batch.stages, whose sequences have other lengths; set train.tokens"
    noise = config.batch.noise_scale
    if noise is not None and noise.max_batch_size is not None:
        yield (
            "train.epochs: found beside batch.noise_scale.max_batch_size; with growing batches the number of steps is "
            "not known beforehand: set train.steps"
        )
