"""Passes over the data as the length of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megalite.config.batch_sizes import batch_sizes
from megalite.config.length import derive_samples
from megalite.config.load import load_config
from megalite.config.validate import validate
from megalite.data.run_config import fill_epochs, load_run
from megalite.data.samples import open_training_samples
from megalite.errors import ConfigError, DataError
from tests.kit.data import random_documents, write_packed_folder
from tests.kit.runs import write_run

RAMP = {"start_size": 2, "samples": 10}


def config_of(folder: Path, *overrides: str, **sections: Any) -> Any:
    path = write_run(folder, parallel={"tp": 1}, train={"steps": None}, **sections)
    return load_run(path, overrides)


@pytest.mark.parametrize("epochs", [0.3, 1, 2.5, 3])
@pytest.mark.parametrize("batch", [{}, {"ramp": RAMP}], ids=["fixed", "ramp"])
def test_every_sample_is_read_so_often(tmp_path, epochs, batch):
    """The fewest steps that read so many sequences; over whole passes each sequence is read exactly so often."""
    config = config_of(tmp_path, f"train.epochs={epochs}", batch=batch)
    samples = open_training_samples(config)
    wanted = epochs * samples.num_samples_per_epoch
    sizes, steps = batch_sizes(config.batch), config.train.steps
    assert sizes.first_sample(steps) < wanted <= sizes.first_sample(steps + 1) == derive_samples(config)
    places = samples.identities(0, int(wanted))
    counts = Counter(Counter(places[:, 2].tolist()).values())
    whole = samples.num_samples_per_epoch
    assert counts[int(epochs)] + counts[int(epochs) + 1] == min(whole, int(wanted)) if epochs < 1 else whole
    validate(config, 1)
    assert config.train.epochs is None
    assert fill_epochs(config) is config


def test_refused_by_name(tmp_path):
    """Beside another length, over a mixture, in stages, where batches grow by themselves, without data."""
    write_packed_folder(tmp_path / "more", random_documents(6, longest=40), seq_len=32)
    own = write_run(tmp_path, parallel={"tp": 1}, train={"steps": None})
    first = load_config(own).data.train[0].path
    grown = "batch.noise_scale={every: 1, max_batch_size: 64}"
    cases = {
        "train.epochs: found 2, and train.steps=5 too; set one of them to null": ["train.steps=5"],
        "train.epochs: found 2 sources, mixed by weights, expected one: passes over several are given by "
        "data.mix.epochs, with train.tokens for the whole": [
            f"data.train=[{{path: {first}}}, {{path: {tmp_path}/more}}]"
        ],
        "train.epochs: found no source, expected one": ["data.train=[]"],
        "train.epochs: found beside batch.stages": ["batch.stages=[{from_step: 3, seq_len: 16}]"],
        "train.epochs: found beside batch.noise_scale.max_batch_size": [grown],
    }
    for words, overrides in cases.items():
        with pytest.raises(ConfigError) as caught:
            load_run(own, ["train.epochs=2", *overrides])
        assert words in str(caught.value)
    with pytest.raises(DataError, match=r"data.train.0: .*no/such.*\(train.epochs=2 counts its sequences\)"):
        load_run(own, ["train.epochs=2", "data.train=[{path: no/such}]"])
    with pytest.raises(ConfigError, match="2 passes are a number of steps once the data is there"):
        validate(load_config(own, ["train.epochs=2"]), 1)
