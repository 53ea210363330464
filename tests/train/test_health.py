"""Trouble that was planted: found, named, handled, and survived over restarts to the last bit."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from megalite.checkpoint.reader import CheckpointReader
from megalite.cli.data import app
from megalite.config.schema import Config
from megalite.data.loader import Batch
from megalite.data.samples import open_training_samples
from megalite.engine.protocol import StepResult
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_REQUEUE
from megalite.train.components.component import Step
from megalite.train.components.spikes import MOST_DOCUMENTS
from megalite.train.loop import TrainingLoop
from tests.kit.runs import events, metrics
from tests.train.forked import launch
from tests.train.planted import BATCH, SEQ_LEN, planted_config

SPIKES = {"sigma": 6.0, "window": 8, "cut_after": 2, "cut_steps": 10, "cut_factor": 0.5, "roll_back_after": 2}
HEALTH = {"health": {"spikes": SPIKES}}

NOISE = 0.15
"""Final losses of runs that read other batches on the way differ by up to 0.05 here."""

NAN_STEP = 31

FROM_TO = (30, 34)
"""Batches of garbage, counted from 0: steps 31 to 34."""


def final_loss(config: Config) -> float:
    return float(np.mean([record["loss"] for record in metrics(config.run.dir)[-5:]]))


def of_kind(config: Config, kind: str) -> list[dict]:
    return [event for event in events(config.run.dir) if event["event"] == kind]


def tensors(config: Config, step: int) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(config.run.dir / "checkpoints" / f"step-{step:07d}")
    return {name: torch.cat([slab.flatten() for slab in reader.slabs(name)]) for name in reader.manifest.tensors}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> Config:
    """The same run without garbage: no step of it is a spike."""
    config = planted_config(tmp_path_factory.mktemp("quiet"), range(0), **HEALTH)
    assert launch(config, 2) == EXIT_DONE
    assert not of_kind(config, "spike")
    return config


@pytest.fixture(scope="module")
def garbage(tmp_path_factory) -> Config:
    """Four batches of garbage in a row, in one go."""
    config = planted_config(tmp_path_factory.mktemp("garbage"), range(*FROM_TO), **HEALTH)
    assert launch(config, 2) == EXIT_DONE
    return config


def test_one_spike_is_skipped(quiet, tmp_path):
    """One batch of garbage: left out before the update, with its numbers and documents, and nothing else happens."""
    config = planted_config(tmp_path, range(30, 31), **HEALTH)
    assert launch(config, 2) == EXIT_DONE
    (spike,) = of_kind(config, "spike")
    assert spike["step"] == 31
    assert spike["samples"] == [30 * BATCH, 31 * BATCH]
    assert "sigma above the mean" in spike["why"]
    assert spike["documents"] == open_training_samples(config).document_ids(30 * BATCH, 31 * BATCH)
    assert [record["step"] for record in metrics(config.run.dir) if record["skipped"]] == [31]
    assert not of_kind(config, "rate_cut")
    assert final_loss(config) == pytest.approx(final_loss(quiet), abs=NOISE)


def test_a_batch_without_labels_is_left_out(tmp_path):
    """A step in which no token has a next one: nothing is learned, nothing decays, its loss is null, it is no spike,
    and every line that was written is JSON for any reader."""
    config = planted_config(tmp_path, range(3, 4), steps=6, is_unlabelled=True, health={"spikes": SPIKES})
    assert launch(config, 2) == EXIT_DONE
    (empty,) = of_kind(config, "empty_batch")
    assert (empty["step"], empty["why"]) == (4, "no token of the batch counts in the loss")
    assert (empty["num_documents"], len(empty["documents"])) == (BATCH * SEQ_LEN, min(BATCH * SEQ_LEN, MOST_DOCUMENTS))
    records = metrics(config.run.dir)
    assert [record["step"] for record in records if record["skipped"]] == [4]
    assert [record["step"] for record in records if record["loss"] is None] == [4]
    assert not of_kind(config, "spike")
    for path in config.run.dir.glob("*.jsonl"):
        assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", path.read_text()))
    assert CheckpointReader(config.run.dir / "checkpoints/step-0000006").manifest.progress.num_updates == 5


def test_a_gradient_of_one_rank_that_is_not_a_number_is_skipped(quiet, tmp_path):
    """A loss that is finite everywhere, a NaN in one gradient of one rank: no rank updates, and the run goes on."""
    config = planted_config(tmp_path, range(0), **HEALTH)
    assert launch(config, 2, prepare=plant_nan) == EXIT_DONE
    (skip,) = of_kind(config, "skip")
    assert skip["step"] == NAN_STEP
    assert skip["why"] == "gradient norm is nan"
    assert skip["documents"] == open_training_samples(config).document_ids(30 * BATCH, 31 * BATCH)
    found = metrics(config.run.dir)
    assert [record["step"] for record in found if record["skipped"]] == [NAN_STEP]
    assert all(np.isfinite(record["loss"]) for record in found)
    assert final_loss(config) == pytest.approx(final_loss(quiet), abs=NOISE)


def plant_nan() -> None:
    """Let a gradient of the last rank be NaN in one step."""
    step_as_usual = TrainingLoop._train_step

    def step_with_nan(loop: TrainingLoop, step: int, batches: list[Batch]) -> tuple[Step, StepResult]:
        if step != NAN_STEP or loop.run.axes.global_rank == 0:
            return step_as_usual(loop, step, batches)
        weight = loop.run.engine.stage.final_norm.weight  # of a lookup or a product autograd makes none
        hook = weight.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
        result = step_as_usual(loop, step, batches)
        hook.remove()
        return result

    TrainingLoop._train_step = step_with_nan


def test_repeated_spikes_cut_the_rate_and_roll_back(quiet, garbage):
    """Two spikes halve the rate, two more take the run back to step 30 and leave the four batches out; it ends as well
    as the undisturbed run, and the account says what was read and what was not."""
    assert [event["step"] for event in of_kind(garbage, "spike")] == [31, 32, 33, 34]
    (cut,) = of_kind(garbage, "rate_cut")
    assert (cut["step"], cut["until"]) == (32, 42)
    (rollback,) = of_kind(garbage, "rollback")
    assert (rollback["step"], rollback["to_step"]) == (34, 30)
    assert rollback["left_out"] == [[30 * BATCH, 4 * BATCH]]
    records = metrics(garbage.run.dir)
    assert [record["step"] for record in records] == list(range(1, 51))
    assert not any(record["skipped"] for record in records)
    assert final_loss(garbage) == pytest.approx(final_loss(quiet), abs=NOISE)
    progress = CheckpointReader(garbage.run.dir / "checkpoints/step-0000050").manifest.progress
    assert progress.num_samples == sum(progress.consumed.values()) == 50 * BATCH
    assert sum(progress.account.left_out.values()) == 4 * BATCH
    assert of_kind(garbage, "done")[0]["consumed"]["counting"]["samples"] == 50 * BATCH


@pytest.mark.parametrize("stop_after", [32, 36])
def test_a_restart_in_the_middle_changes_nothing(garbage, tmp_path, stop_after):
    """Stopped while the rate is cut, and after the rollback: every loss, weight, moment and count of the rest of the
    run is equal to the last bit."""
    config = planted_config(tmp_path, range(*FROM_TO), **HEALTH)
    assert launch(config, 2, stop_after=stop_after) == EXIT_REQUEUE
    assert launch(config, 2) == EXIT_DONE
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "skipped")
    want, got = ([[record[key] for key in keys] for record in metrics(each.run.dir)] for each in (garbage, config))
    assert got == want
    want, got = tensors(garbage, 50), tensors(config, 50)
    assert all(torch.equal(want[name], got[name]) for name in want)
    want, got = (
        CheckpointReader(each.run.dir / "checkpoints/step-0000050").manifest.progress for each in (garbage, config)
    )
    assert got == want


def test_data_show_knows_what_was_left_out(garbage, tmp_path):
    """The batch of step 31 is the one behind the garbage; the garbage itself is shown by its numbers in the event."""
    config_file = garbage.run.dir.parent / "config.yaml"
    out = tmp_path / "batches.npz"
    result = CliRunner().invoke(app, ["show", str(config_file), "--steps", "30:32", "--out", str(out)])
    assert result.exit_code == 0, result.output
    samples, tokens = open_training_samples(garbage), np.load(out)["tokens"]
    for step, first in ((0, 29 * BATCH), (1, FROM_TO[1] * BATCH)):
        wanted = np.stack([samples.sample(index).tokens for index in range(first, first + BATCH)])
        np.testing.assert_array_equal(tokens[step], wanted)
    start, stop = of_kind(garbage, "spike")[0]["samples"]
    result = CliRunner().invoke(app, ["show", str(config_file), "--samples", f"{start}:{stop}"])
    assert result.exit_code == 0, result.output
    assert f"global sample {start}: source counting" in result.output
    assert str(samples.sample(start).tokens[:5].tolist())[1:-1] in result.output


def test_the_tries_are_bounded(tmp_path):
    """Garbage without end: after two rollbacks the run ends with exit code 2, and says why on every rank."""
    health = {"health": {"spikes": SPIKES, "max_rollbacks": 2}}
    config = planted_config(tmp_path, range(30, 90), **health)
    assert launch(config, 2) == EXIT_BAD_INPUT
    assert len(of_kind(config, "rollback")) == 2
    assert of_kind(config, "unstable")[0]["rollbacks"] == 2
    message = json.loads((config.run.dir / "logs/error-1.json").read_text())["message"]
    assert "after 2 rollbacks" in message
    assert "events.jsonl" in message
