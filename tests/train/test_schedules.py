"""Schedules and batch sizes in whole runs: exact over restarts, branches off a checkpoint, what the files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.format import folder_name
from megalite.checkpoint.merge import merge
from megalite.checkpoint.reader import CheckpointReader
from megalite.cli.main import app
from megalite.config.load import load_config
from megalite.config.plan import default_world_size
from megalite.config.validate import validate
from megalite.errors import EXIT_DONE, ConfigError
from megalite.studies.verify_resume import METRIC_KEYS, verify_resume
from tests.kit.runs import events, metrics, write_run
from tests.train.forked import launch

DP2 = {"tp": 1, "dp": 2, "zero_stage": 1}
RAMP = {"global_batch_size": 12, "ramp": {"start_size": 4, "samples": 16}}
WSD = {"name": "wsd", "warmup_steps": 2, "decay_shape": "sqrt"}


def train(config_file: Path, *overrides: str) -> Path:
    """Train to the end on two ranks; returns the run's folder."""
    config = load_config(config_file, overrides)
    assert launch(config, 2) == EXIT_DONE
    return config.run.dir


def numbers(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The metrics that are no matter of time, by step."""
    return {record["step"]: {key: record[key] for key in METRIC_KEYS} for record in metrics(run_dir)}


def assert_equal_checkpoints(one: Path, other: Path) -> None:
    """Same progress, same weights and moments, to the last bit."""
    a, b = CheckpointReader(one), CheckpointReader(other)
    assert a.manifest.progress == b.manifest.progress
    assert a.manifest.tensors.keys() == b.manifest.tensors.keys()
    assert any(name.startswith("exp_avg/") for name in a.manifest.tensors)
    for name in a.manifest.tensors:
        assert all(torch.equal(x, y) for x, y in zip(a.slabs(name), b.slabs(name), strict=True)), name


class TestBranch:
    """A trunk with wsd is trained to step 8, decays on the way being branched off its stable checkpoints."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory) -> Path:
        """A run of eight steps in its stable phase, with checkpoints at 2, 4, 6 and 8."""
        folder = tmp_path_factory.mktemp("branch")
        settings = {"every": 2, "keep_last": 9}
        config = write_run(folder, parallel=DP2, schedule=WSD, checkpoint=settings, train={"steps": 100})
        config = load_config(config)
        launch(config, 2, stop_after=8)
        return folder

    def branch(self, folder: Path, step: int, length: int, *overrides: str) -> Path:
        """A decay over `length` steps from the trunk's checkpoint of a step."""
        return train(
            folder / "config.yaml",
            f"run.dir={folder}/decay-{step}-{len(overrides)}",
            f"train.branch_from={folder}/run/checkpoints/{folder_name(step)}",
            f"train.steps={step + length}",
            f"schedule.decay_steps={length}",
            *overrides,
        )

    def test_a_branch_is_the_run_that_was_to_end_there(self, folder, tmp_path):
        """Trunk to step 4 and a decay of 3 steps equal a run that was planned for 7 steps: rates, losses, data, weights
        and moments, to the last bit. So nothing of the optimizer, the step or the place in the data is lost."""
        planned = train(
            write_run(tmp_path, parallel=DP2, schedule={**WSD, "decay_steps": 3}, train={"steps": 7}),
            f"data.train=[{{path: {folder}/packed}}]",
        )
        assert {"step-0000004", "step-0000007"} <= {path.name for path in (planned / "checkpoints").iterdir()}
        branch = self.branch(folder, 4, 3)
        assert numbers(branch) == {step: record for step, record in numbers(planned).items() if step > 4}
        assert numbers(branch)[7]["lr"] == 0.0
        assert_equal_checkpoints(branch / "checkpoints/step-0000007", planned / "checkpoints/step-0000007")
        (start,) = (event for event in events(branch) if event["event"] == "start")
        assert (start["step"], start["origin"].endswith("step-0000004, as a branch")) == (4, True)

    def test_the_trunk_goes_on_as_if_nothing_had_been(self, folder, tmp_path):
        """The trunk, resumed after its branches, equals one that was never interrupted; its folder was left alone."""
        before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
        self.branch(folder, 6, 2)
        assert before == {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
        length = ("train.steps=10", "schedule.decay_steps=1", "schedule.min_lr=0.0003")
        trunk = train(folder / "config.yaml", *length)
        straight = train(folder / "config.yaml", *length, f"run.dir={tmp_path / 'straight'}")
        assert numbers(trunk) == numbers(straight)
        assert_equal_checkpoints(trunk / "checkpoints/step-0000010", straight / "checkpoints/step-0000010")

    def test_a_branch_may_have_another_rate_and_layout(self, folder):
        """What is not fixed within a run may differ in a branch."""
        branch = self.branch(folder, 4, 2, "optimizer.lr=1e-4", "parallel.zero_stage=3", "parallel.engine=deepspeed")
        assert [record["step"] for record in metrics(branch)] == [5, 6]
        assert metrics(branch)[0]["lr"] == pytest.approx(1e-4 * (1 - 0.5**0.5))

    def test_a_branch_may_have_another_optimizer(self, folder):
        """Its first step sees the trunk's weights and data, with an optimizer that has made no update before."""
        names = ("muon", "adamw")
        branch, same = (self.branch(folder, 4, 2, f"run.dir={folder / it}", f"optimizer.name={it}") for it in names)
        assert metrics(branch)[0]["loss"] == metrics(same)[0]["loss"]
        assert metrics(branch)[1]["loss"] != metrics(same)[1]["loss"]
        ends = (CheckpointReader(each / "checkpoints/step-0000006") for each in (branch, same))
        assert [end.manifest.progress.num_updates for end in ends] == [2, 6]
        (start,) = (event for event in events(branch) if event["event"] == "start")
        assert start["origin"].endswith("as a branch, with optimizer muon from its beginning")

    def test_a_branch_off_a_merged_checkpoint(self, folder):
        """Which may be called anything: the same losses as off the original."""
        merge(folder / "run/checkpoints/step-0000004", folder / "archive")
        merged = self.branch(folder, 4, 1, f"train.branch_from={folder / 'archive'}")
        original = self.branch(folder, 4, 1, f"run.dir={folder / 'off-the-original'}")
        assert numbers(merged)[5] == numbers(original)[5]

    @pytest.mark.parametrize(
        ("overrides", "words"),
        [
            (("train.steps=4", "schedule.decay_steps=1"), "at step 4, and the run ends at 4"),
            (("batch.global_batch_size=8", "model.num_layers=1"), "model.num_layers: 2 in"),
            (("model.rope.theta=5",), r"model\.rope\.theta: 10000\.0 in .*, 5\.0 now"),
            (("model.mup={base_hidden_size: 16}",), r"model\.mup\.base_hidden_size: None in .*, 16 now"),
            (
                ("batch.global_batch_size=8", "batch.ramp={start_size: 4, samples: 8}"),
                r"batch\.ramp\.start_size: None in",
            ),
            (("train.branch_from=no/such",), "no/such is no checkpoint"),
            (("train.init_from=.",), "train.branch_from: found beside train.init_from"),
        ],
    )
    def test_refused_before_it_starts(self, folder, overrides, words):
        """A branch that ends before it begins, of another model, of nothing."""
        with pytest.raises(ConfigError, match=words):
            self.branch(folder, 4, 3, *overrides, "run.dir=" + str(folder / "refused"))


class TestRamp:
    def test_resumes_exactly(self, tmp_path):
        """In the middle of a ramp, over a change of the batch size: metrics, weights, counters and the data's chain."""
        config = write_run(tmp_path, parallel=DP2, batch=RAMP, train={"steps": 8})
        report = verify_resume(config, (), 3, tmp_path, launch=launch)
        assert report.is_equal, report.findings
        assert [record["tokens"] // 32 for record in metrics(tmp_path / "whole")] == [4, 8, 16, 28, 40, 52]

    def test_data_show_is_what_training_saw(self, tmp_path):
        """`data show` of each step's batch holds as many sequences as the step used, and they follow on each other
        without a gap: put end to end, they are the batches of a run without a ramp."""
        config = write_run(tmp_path, parallel=DP2, batch=RAMP, train={"steps": 6})

        def shown(steps: str, *overrides: str) -> np.ndarray:
            out = tmp_path / "shown.npz"
            app(["data", "show", str(config), "--steps", steps, "--out", str(out), *overrides], standalone_mode=False)
            return np.load(out)["tokens"].reshape(-1, 32)

        parts = [shown(f"{step}:{step + 1}") for step in range(1, 7)]
        assert [len(part) for part in parts] == [4, 4, 8, 12, 12, 12]
        whole = shown("1:14", "batch.ramp=null", "batch.global_batch_size=4")
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        with pytest.raises(Exception, match=r"batches of 4 and of 8 sequences do not fit into one array; use 1:3"):
            shown("1:4")

    def test_a_budget_of_tokens(self, tmp_path):
        """Training ends with the first step that reaches the budget, counting small batches as small."""
        config = write_run(tmp_path, parallel=DP2, batch=RAMP, train={"steps": None, "tokens": 32 * 41})
        run = train(config)
        assert [record["tokens"] // 32 for record in metrics(run)] == [4, 8, 16, 28, 40, 52]
        assert json.loads((run / "plan.json").read_text())["total_tokens"] == 52 * 32


def test_plateau_lowers_the_rate_and_remembers(tmp_path):
    """With a threshold that no loss meets, every second validation cuts the rate by gamma, and a restart in between
    changes nothing. The events say why."""
    schedule = {"name": "plateau", "gamma": 0.5, "plateau": {"patience": 1, "threshold": 0.9}, "warmup_steps": 0}
    length = {"steps": 8, "eval_every": 1, "eval_batches": 1}
    config = write_run(tmp_path, parallel=DP2, schedule=schedule, train=length, checkpoint={"every": 3})
    whole = train(config, f"run.dir={tmp_path / 'whole'}")
    parts = load_config(config)
    for stop in (3, 5, None):
        launch(parts, 2, stop_after=stop)
    rates = [record["lr"] / 3e-4 for record in metrics(whole)]
    assert rates == pytest.approx([1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125])
    assert numbers(whole) == numbers(parts.run.dir)
    cuts = [event for event in events(parts.run.dir) if event["event"] == "rate_lowered"]
    assert [(event["step"], event["lr"]) for event in cuts][:2] == [(3, 1.5e-4), (5, 7.5e-5)]
    assert "2 validations without a new best" in cuts[0]["why"]
    assert_equal_checkpoints(whole / "checkpoints/step-0000008", parts.run.dir / "checkpoints/step-0000008")


class TestNoiseScale:
    GROWING = {"every": 1, "max_batch_size": 12, "min_measurements": 2, "smoothing": 0.5}  # noqa: RUF012

    def test_the_batch_grows_and_resumes_exactly(self, tmp_path):
        """Measured at every step, the batch doubles when the noise is above it and stops below its bound; the events
        say by what numbers. A restart in the middle is exact, and `data show` of the run shows what it used."""
        batch = {"global_batch_size": 4, "noise_scale": self.GROWING}
        config = write_run(tmp_path, parallel=DP2, batch=batch, train={"steps": 8})
        report = verify_resume(config, (), 4, tmp_path, launch=launch)
        assert report.is_equal, report.findings
        whole = tmp_path / "whole"
        sizes = np.diff([0, *(record["tokens"] // 32 for record in metrics(whole))]).tolist()
        assert sizes == [4, 4, 8, 8, 8, 8, 8, 8]
        assert all(record.get("noise_scale", 1.0) > 0 for record in metrics(whole))
        (grown,) = (event for event in events(whole) if event["event"] == "batch_grown")
        assert (grown["step"], grown["batch_size"]) == (2, 8)
        assert grown["noise_scale"] is None or grown["noise_scale"] > 4 * 32
        assert "above the batch of 128 tokens" in grown["why"]
        out = tmp_path / "shown.npz"
        arguments = ["data", "show", str(config), f"run.dir={whole}", "--steps", "3:9", "--out", str(out)]
        app(arguments, standalone_mode=False)
        assert np.load(out)["tokens"].shape == (6, 8, 32)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (("batch.noise_scale.max_batch_size=7",), "max_batch_size: 7 leaves no room to double 4; use 8 or more"),
            (("batch.micro_batch_size=4", "parallel.dp=1"), "a step of 4 sequences is one micro-batch"),
            (
                ("model.tie_embeddings=true", "parallel.pp=2", "parallel.dp=1"),
                "an embedding that the stage of the head has too",
            ),
            (("train.steps=null", "train.tokens=1000"), "set train.steps"),
        ],
    )
    def test_refused(self, tmp_path, changes, words):
        """What cannot be measured, or cannot be steered."""
        batch = {"global_batch_size": 4, "noise_scale": self.GROWING}
        config = load_config(write_run(tmp_path, parallel=DP2, batch=batch), changes)
        with pytest.raises(ConfigError, match=words):
            validate(config, default_world_size(config))
