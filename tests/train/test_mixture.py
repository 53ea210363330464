"""A mixture that changes in mid-run: a new config on resume, with the account of every source exact."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megalite.checkpoint.reader import CheckpointReader
from megalite.cli.data import app
from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.config.sections.data import MixConfig
from megalite.data import audit
from megalite.data.cursor import DataCursor
from megalite.data.ranking import write_ranks
from megalite.data.samples import open_training_samples
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_REQUEUE
from megalite.train.components.component import RollBack
from megalite.train.loop import TrainingLoop
from tests.kit.data import random_documents, write_packed_folder
from tests.kit.runs import events, write_run
from tests.train.forked import launch

BATCH = 4


def config_of(folder: Path, *, steps: int = 8, mix: dict | None = None, **weights: float) -> Config:
    """A run over sources with these weights."""
    sources = []
    for number, (name, weight) in enumerate(weights.items()):
        if not (folder / name).exists():
            write_packed_folder(folder / name, random_documents(100, longest=40, seed=number), seq_len=32)
        sources.append({"path": str(folder / name), "weight": weight})
    data = {"train": sources, "valid": [], "mix": mix or {}}
    return load_config(write_run(folder, data=data, parallel={"tp": 1, "zero_stage": 0}, train={"steps": steps}))


def test_every_source_goes_on_where_it_stood(tmp_path):
    """Weights change and a source is added behind step 4: the run says so, what was consumed stays consumed, every
    source's own samples go on without a repetition, and the chain over all samples is that of this very history."""
    former = config_of(tmp_path, web=1, books=1)
    assert launch(former, 1, stop_after=4) == EXIT_REQUEUE
    now = config_of(tmp_path, web=1, books=4, code=3)
    assert launch(now, 1) == EXIT_DONE

    (event,) = (event for event in events(now.run.dir) if event["event"] == "mixture")
    assert (event["step"], event["consumed"]) == (4, {"web": 8, "books": 8})
    progress = CheckpointReader(now.run.dir / "checkpoints/step-0000008").manifest.progress
    assert sum(progress.consumed.values()) == progress.num_samples == 8 * BATCH
    assert progress.consumed["code"] == 6

    old, new = open_training_samples(former), open_training_samples(now).following(progress.account)
    chain = audit.chain(audit.EMPTY_CHAIN, old, 0, 4 * BATCH)
    assert progress.data_chain == audit.chain(chain, new, 4 * BATCH, 8 * BATCH)
    history = [old.identity(index) for index in range(4 * BATCH)]
    history += [new.identity(index) for index in range(4 * BATCH, 8 * BATCH)]
    for name, count in progress.consumed.items():
        alone = open_training_samples(config_of(tmp_path, **{name: 1}))
        own = [identity for identity in history if identity.source == name]
        assert own == [alone.identity(index) for index in range(count)], name


@pytest.mark.parametrize("begins_ranked", [False, True])
def test_a_source_in_another_order_is_refused(tmp_path, begins_ranked):
    """Its epoch would have samples twice. One that comes new may have any order."""
    config = config_of(tmp_path, web=1, books=1)
    sources = open_training_samples(config).sources
    for source in sources:
        write_ranks(source.layout, np.arange(100, dtype=float), tmp_path / f"{source.name}.npy")

    def ranked(config: Config, **mix: object) -> Config:
        mixed = MixConfig(**mix)
        return config.model_copy(update={"data": config.data.model_copy(update={"mix": mixed})})

    web = {"ranks": {"web": tmp_path / "web.npy"}}
    assert launch(ranked(config, **web) if begins_ranked else config, 1, stop_after=4) == EXIT_REQUEUE
    others: tuple[dict, ...] = ({"ranks": {"books": tmp_path / "books.npy"}}, {**web, "rank_stretches": 3})
    for other in (*others, {} if begins_ranked else web):
        assert launch(ranked(config, **other), 1) == EXIT_BAD_INPUT
    added = config_of(tmp_path, web=1, books=1, code=1)
    write_ranks(open_training_samples(added).sources[2].layout, np.arange(100, dtype=float), tmp_path / "code.npy")
    before = web["ranks"] if begins_ranked else {}
    assert launch(ranked(added, ranks={**before, "code": tmp_path / "code.npy"}), 1) == EXIT_DONE


def test_a_source_with_other_contents_is_refused(tmp_path):
    """Same name and path, packed in another way: not a change of mixture."""
    config = config_of(tmp_path, web=1, books=1)
    assert launch(config, 1, stop_after=4) == EXIT_REQUEUE
    shutil.rmtree(tmp_path / "books")
    write_packed_folder(tmp_path / "books", random_documents(100, longest=40, seed=1), seq_len=32, method="concat")
    assert launch(config, 1) == EXIT_BAD_INPUT


@pytest.mark.parametrize("changes", ["contents", "order"])
def test_a_source_that_was_dropped_comes_back_as_it_was(tmp_path, changes):
    """Or is refused, however many attempts went without it; as it was it goes on where it stood."""
    config, without = config_of(tmp_path, web=1, books=1), config_of(tmp_path, web=1)
    assert launch(config, 1, stop_after=2) == EXIT_REQUEUE
    assert launch(without, 1, stop_after=4) == EXIT_REQUEUE
    assert launch(without, 1, stop_after=5) == EXIT_REQUEUE
    again = config
    if changes == "contents":
        (tmp_path / "books").rename(tmp_path / "as-it-was")
        write_packed_folder(tmp_path / "books", random_documents(100, longest=40, seed=1), seq_len=32, method="concat")
    else:
        write_ranks(open_training_samples(config).sources[1].layout, np.arange(100, dtype=float), tmp_path / "r.npy")
        mix = MixConfig(ranks={"books": tmp_path / "r.npy"})
        again = config.model_copy(update={"data": config.data.model_copy(update={"mix": mix})})
    assert launch(again, 1) == EXIT_BAD_INPUT
    if changes == "contents":
        shutil.rmtree(tmp_path / "books")
        (tmp_path / "as-it-was").rename(tmp_path / "books")
    assert launch(config, 1) == EXIT_DONE


@pytest.mark.parametrize("weights", [{"web": 1, "books": 4}, {"web": 1, "code": 1}])
@pytest.mark.parametrize("skip", [0, 3, None])
def test_going_back_to_before_a_change(tmp_path, skip, weights):
    """The mixture changes behind step 4, and behind step 5 the run goes back to step 2: what was read since is left
    out, under either mixture and of a source that was dropped too, or read again; every source goes on from there."""
    former, now = config_of(tmp_path, web=1, books=1), config_of(tmp_path, **weights)
    for step in (2, 4):
        assert launch(former, 1, stop_after=step) == EXIT_REQUEUE
    assert launch(now, 1, prepare=partial(go_back_in_step_5, skip)) == EXIT_DONE

    old, new = open_training_samples(former), open_training_samples(now)
    progress = CheckpointReader(now.run.dir / "checkpoints/step-0000008").manifest.progress
    history = {"read": [old.identity(index) for index in range(2 * BATCH)], "left out": []}
    if skip is not None:
        before = old.drawn(4 * BATCH)
        shifted = new.following(DataCursor().remix(4 * BATCH, before, new.drawn(4 * BATCH)))
        history["left out"] = [old.identity(index) for index in range(2 * BATCH, 4 * BATCH)]
        history["left out"] += [shifted.identity(index) for index in range(4 * BATCH, 5 * BATCH + skip)]
    after = new.following(progress.account)
    history["later"] = [after.identity(index) for index in range(2 * BATCH, 8 * BATCH)]
    for name in {"web", "books", *weights}:
        own = [identity for part in history.values() for identity in part if identity.source == name]
        alone = open_training_samples(config_of(tmp_path, **{name: 1}))
        assert own == [alone.identity(index) for index in range(len(own))], name
        left_out = sum(identity.source == name for identity in history["left out"])
        assert progress.account.left_out.get(name, 0) == left_out, name
        assert progress.consumed.get(name, 0) == len(own) - left_out, name


def test_passes_of_a_run_that_is_made_longer(tmp_path):
    """From 4 steps to 6, where it goes back to step 2, and to 8: a source is read as often as asked for in all of it,
    and `data mix-plan` knows it."""
    size = open_training_samples(config_of(tmp_path, books=1)).num_samples_per_epoch
    for steps in (4, 6, 8):
        config = config_of(tmp_path, steps=steps, mix={"epochs": {"books": 6 / size}}, web=1, books=1)
        for asked in (6, 8):
            result = CliRunner().invoke(app, ["mix-plan", str(tmp_path / "config.yaml"), f"train.steps={asked}"])
            (row,) = (line for line in result.output.splitlines() if "books" in line and "\u2502" in line)
            assert f" {6 * 32} " in row
        if steps == 4:
            assert launch(config, 1, stop_after=2) == EXIT_REQUEUE
        assert launch(config, 1, prepare=partial(go_back_in_step_5, 0)) == EXIT_DONE
        progress = CheckpointReader(config.run.dir / f"checkpoints/step-{steps:07d}").manifest.progress
        assert progress.consumed == {"web": steps * BATCH - 6, "books": 6}
    assert sum(progress.account.left_out.values()) == 3 * BATCH


def test_more_passes_of_all_sources_are_another_mixture(tmp_path):
    """Though their ratios are the same: what is left of them, once some are read, is not."""
    found = [
        open_training_samples(
            config_of(tmp_path, mix={"epochs": {"books": n, "web": 2 * n}}, web=1, books=1)
        ).fingerprint
        for n in (1, 2, 1)
    ]
    assert found[0] == found[2] != found[1]


def go_back_in_step_5(skip: int | None) -> None:
    """Let a component want it, once."""
    as_usual, times = TrainingLoop._wish, []

    def wish(loop: TrainingLoop, moment, ask, step=None) -> RollBack | None:
        found = as_usual(loop, moment, ask, step)
        if step is None or step.number != 5 or times:
            return found
        times.append(1)
        return RollBack(3, "as the test has it", skip)

    TrainingLoop._wish = wish
