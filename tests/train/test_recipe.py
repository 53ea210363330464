"""Every override in the tables of docs/recipe.md is a config that runs."""

from __future__ import annotations

import math
import re
from pathlib import Path

from megalite.config.load import load_config
from megalite.config.plan import default_world_size
from megalite.config.validate import validate
from megalite.optim.schedules import learning_rate
from tests.kit.batches import micro_batch
from tests.kit.paths import ROOT
from tests.kit.runs import write_run
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank

STEPS = 6
ROW = re.compile(r"^\|.*?`([a-z_]+\.[^`]*=[^`]*)`", re.MULTILINE)


def overrides() -> list[list[str]]:
    """Of each row of a table; a list in brackets has no blank that would part it."""
    text = (ROOT / "docs/recipe.md").read_text(encoding="utf-8")
    return [re.split(r" (?=[a-z_]+\.)", found) for found in ROW.findall(text)]


def test_every_override_is_valid_and_trains(tmp_path):
    """Some steps of a tiny run with each: finite losses, the rates and the batch sizes that the config says."""
    rows = overrides()
    assert len(rows) > 20
    own = {"schedule": {"warmup_steps": 0}, "model": {"vocab_size": 101}, "batch": {"micro_batch_size": 1}}
    base = write_run(tmp_path, parallel={"tp": 1}, **own)
    for row in rows:
        config = load_config(base, row)
        validate(config, default_world_size(config))
    for row, losses in zip(rows, run_ranks(train_each, 1, base, rows)[0], strict=True):
        assert len(losses) == STEPS, row
        assert all(math.isfinite(loss) for loss in losses), (row, losses)


def train_each(base: Path, rows: list[list[str]]) -> list[list[float]]:
    """The losses of each config, one after the other in one process."""
    curves = []
    for row in rows:
        config = load_config(base, row)
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
