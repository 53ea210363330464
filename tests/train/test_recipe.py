"""Every override in the tables of docs/recipe.md is a config that runs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from megalite.config.plan import default_world_size
from megalite.config.schema import SourceConfig
from megalite.config.validate import validate
from megalite.data.ranking import write_ranks
from megalite.data.run_config import load_run
from megalite.data.samples import open_training_samples
from megalite.data.sources import open_source
from megalite.errors import EXIT_DONE
from megalite.optim.schedules import learning_rate
from tests.kit.batches import micro_batch
from tests.kit.data import random_documents, write_packed_folder
from tests.kit.paths import ROOT
from tests.kit.runs import events, write_run
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank
from tests.train.forked import launch

STEPS = 6
MIXTURE_STEPS = 12
MIXTURE = "data.mix."
ROW = re.compile(r"^\|.*?`([a-z_]+\.[^`]*=[^`]*)`", re.MULTILINE)


def overrides() -> list[list[str]]:
    """Of each row of a table."""
    text = (ROOT / "docs/recipe.md").read_text(encoding="utf-8")
    return [re.split(r" (?=[a-z_]+\.[a-z_.]+=)", found) for found in ROW.findall(text)]


def test_every_override_is_valid_and_trains(tmp_path):
    """Some steps of a tiny run with each: finite losses, the rates and the batch sizes that the config says."""
    rows = [row for row in overrides() if not row[0].startswith(MIXTURE)]
    assert len(rows) > 30
    own = {"schedule": {"warmup_steps": 0}, "model": {"vocab_size": 101}, "batch": {"micro_batch_size": 1}}
    base = write_run(tmp_path, parallel={"tp": 1}, **own)
    for row in rows:
        config = load_run(base, row)
        validate(config, default_world_size(config))
    for row, losses in zip(rows, run_ranks(train_each, 1, base, rows)[0], strict=True):
        assert len(losses) == STEPS, row
        assert all(math.isfinite(loss) for loss in losses), (row, losses)


def test_every_mixture_trains(tmp_path, monkeypatch):
    """Whole runs over two sources: both are read, each as often as the order says before the run."""
    monkeypatch.chdir(tmp_path)
    write_packed_folder(tmp_path / "web", random_documents(100, longest=40), seq_len=32)
    write_packed_folder(tmp_path / "books", random_documents(6, longest=40, seed=1), seq_len=32)
    train = [{"path": str(tmp_path / name)} for name in ("web", "books")]
    write_ranks_of(tmp_path / "web", tmp_path / "ranks.npy")
    rows = [row for row in overrides() if row[0].startswith(MIXTURE)]
    assert len(rows) == 5
    data = {"train": train, "valid": []}
    base = write_run(tmp_path, parallel={"tp": 1}, data=data, train={"steps": MIXTURE_STEPS})
    for number, row in enumerate(rows):
        config = load_run(base, [*row, f"run.dir={tmp_path / str(number)}"])
        assert launch(config, 1) == EXIT_DONE, row
        (done,) = (event for event in events(config.run.dir) if event["event"] == "done")
        samples = {name: each["samples"] for name, each in done["consumed"].items()}
        planned = open_training_samples(config).count(0, MIXTURE_STEPS * 4)
        assert samples == dict(planned), row
        assert min(samples.values()) > 0, row
        assert sum(samples.values()) == MIXTURE_STEPS * 4, row


def write_ranks_of(folder: Path, out: Path) -> None:
    """An order of a source's samples, by document number."""
    source = open_source(SourceConfig(path=folder), name="", seq_len=32)
    write_ranks(source.layout, np.arange(100, dtype=float), out)


def train_each(base: Path, rows: list[list[str]]) -> list[list[float]]:
    """The losses of each config, one after the other in one process."""
    curves = []
    for row in rows:
        config = load_run(base, row)
        rank = start_rank(config)
        sizes, losses = rank.plan.batch_sizes, []
        for step in range(1, STEPS + 1):
            samples = range(sizes.first_sample(step), sizes.first_sample(step + 1))
            batches = [micro_batch(range(each, each + 1), seq_len=32, vocab_size=101) for each in samples]
            rate = learning_rate(step, rank.plan.total_steps, config.optimizer, rank.plan.schedule)
            losses.append(rank.engine.train_step(batches, rate).loss)
        rank.engine.close()
        curves.append(losses)
    return curves
