"""Runs that learn something within thirty steps, over data in which chosen batches are garbage."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megalite.config.load import load_config
from megalite.config.schema import Config, SourceConfig
from megalite.data.samples import open_samples
from tests.kit.data import VOCAB_SIZE, write_pair
from tests.kit.runs import write_run

SEQ_LEN = 16
BATCH = 8
SEED = 1234
NUM_SAMPLES = 800


def plant_garbage(folder: Path, batches: range, *, is_unlabelled: bool = False) -> Path:
    """A source of counting sequences, random ones in the batches given (counted from 0, as the data comes).

    With `is_unlabelled` every token in these batches is a document of its own, so that none has a next one.
    """
    prefix = folder / "counting"
    rng = np.random.default_rng(0)
    documents = [(np.arange(SEQ_LEN) + rng.integers(0, 40)) % 50 + 3 for _ in range(NUM_SAMPLES + 1)]
    write_pair(prefix, documents)
    samples = open_samples([SourceConfig(path=prefix)], seq_len=SEQ_LEN, seed=SEED, document_masks=False)
    for _, _, position in samples.identities(batches.start * BATCH, batches.stop * BATCH).tolist():
        documents[position] = rng.integers(3, VOCAB_SIZE, SEQ_LEN)
        if is_unlabelled:
            documents[position] = documents[position].reshape(SEQ_LEN, 1)
    for path in folder.glob("counting.*"):
        path.unlink()
    write_pair(prefix, [part for document in documents for part in (document if document.ndim > 1 else [document])])
    return prefix


def planted_config(
    folder: Path, garbage: range, *, steps: int = 50, is_unlabelled: bool = False, **sections: dict
) -> Config:
    """A run of `steps` steps over `plant_garbage`, with a checkpoint every ten."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "run": {"dir": str(folder / "run"), "seed": SEED},
        "parallel": {"tp": 1, "dp": 2, "zero_stage": 1},
        "batch": {"micro_batch_size": 2, "global_batch_size": BATCH, "seq_len": SEQ_LEN},
        "data": {
            "train": [{"path": str(plant_garbage(folder, garbage, is_unlabelled=is_unlabelled))}],
            "valid": [],
            "document_masks": is_unlabelled,
        },
        "optimizer": {"lr": 1e-2},
        "train": {"steps": steps, "device": "cpu"},
        "checkpoint": {"every": 10},
        "monitor": {"tensorboard": False},
    }
    (folder / "packed").mkdir(exist_ok=True)  # `write_run` need not make its own data
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return load_config(write_run(folder, **settings))
