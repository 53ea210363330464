"""The learning-rate finder: what it reads off a sweep, and that a run never notices it."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pytest

from megalite.checkpoint.format import read_manifest
from megalite.checkpoint.sizes_so_far import sizes_at
from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.data.loader import Loader
from megalite.errors import EXIT_DONE, EXIT_REQUEUE, UserError
from megalite.studies import lr_finder
from megalite.studies.aside import aside
from megalite.studies.beside import start_beside
from megalite.studies.lr_finder import Found, SmoothedLoss, Sweep, _sweep, find_rate
from megalite.train.place import Place
from tests.kit.preloaded import preloaded
from tests.kit.runs import COMMAND, RUN_TIMEOUT_SECONDS, clean_environment, megalite, metrics, write_run
from tests.kit.spawn import run_ranks
from tests.train.forked import launch
from tests.train.test_same_run import free_port
from tests.train.test_schedules import assert_equal_checkpoints, numbers

DP2 = {"tp": 1, "dp": 2, "zero_stage": 1}


def files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Every file below a folder, and when it was written."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def assert_swept_anew(config: Config, monkeypatch):
    """A finished run is swept where a new one would begin, its folder untouched, and it is said."""
    asked, finished = [], files(config.run.dir)

    def pretend(config, world_size, module, arguments):
        asked.append(config.train.branch_from)
        Path(arguments[0]).write_text(json.dumps(asdict(Found([1e-3], [5.0], "fresh weights"))))
        return EXIT_DONE

    with monkeypatch.context() as patch:
        patch.setattr(lr_finder, "run_local_ranks", pretend)
        found = find_rate(config, 2, Sweep())
    assert asked == [None]
    assert found.origin.startswith(f"fresh weights (the run in {config.run.dir} has done all its steps")
    assert files(config.run.dir) == finished


def test_a_run_does_not_notice(tmp_path, monkeypatch):
    """A sweep in the middle of a run starts from its checkpoint, shows rates until the loss has blown up, and leaves
    the folder untouched; the run then goes on to the same last bit as one that was never looked at, and a finished
    run is swept anew."""
    config_file = write_run(tmp_path, parallel=DP2, checkpoint={"every": 2}, train={"steps": 6})
    config = load_config(config_file)
    assert launch(config, 2, stop_after=4) == EXIT_REQUEUE
    before = files(config.run.dir)
    out = tmp_path / "sweep.svg"
    done = megalite("lr-find", config_file, "--from", "1e-4", "--to", "1e3", "--steps", "30", "--out", out)
    assert done.returncode == 0, done.stderr
    assert files(config.run.dir) == before
    assert "step-0000004, as a branch" in done.stdout
    assert "suggestion: optimizer.lr=" in done.stdout
    num_updates = int(done.stdout.split(" updates")[0].split()[-1])
    assert 10 < num_updates < 30
    assert out.read_text().startswith("<?xml")
    assert launch(config, 2) == EXIT_DONE
    other = load_config(config_file, [f"run.dir={tmp_path / 'other'}"])
    assert launch(other, 2) == EXIT_DONE
    assert numbers(config.run.dir) == numbers(other.run.dir)
    assert [record["step"] for record in metrics(config.run.dir)] == [1, 2, 3, 4, 5, 6]
    assert_equal_checkpoints(*(c.run.dir / "checkpoints/step-0000006" for c in (config, other)))
    assert_swept_anew(config, monkeypatch)


def test_ranks_that_somebody_else_has_started(tmp_path):
    """Each has a folder of its own, which does not make theirs other runs; the first says what was found."""
    config, port = write_run(tmp_path, parallel=DP2), free_port()
    ranks = [
        subprocess.Popen(
            [*COMMAND, "lr-find", str(config), "--steps", "4"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=preloaded({**clean_environment(), "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}),
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=RUN_TIMEOUT_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [EXIT_DONE, EXIT_DONE], said
    assert ["suggestion: optimizer.lr=" in words for words in said] == [True, False]
    assert not (tmp_path / "run").exists()


def test_reads_on_where_a_grown_batch_ended(tmp_path):
    """A run whose batch has grown by itself is swept with the batch that it has, over samples that it has not read."""
    growing = {"every": 1, "min_measurements": 2, "max_batch_size": 16}
    config = load_config(
        write_run(
            tmp_path,
            parallel={"tp": 1, "zero_stage": 0},
            batch={"micro_batch_size": 2, "global_batch_size": 4, "noise_scale": growing},
            train={"steps": 12},
            checkpoint={"every": 8},
        )
    )
    assert launch(config, 1, stop_after=8) == EXIT_REQUEUE
    progress = read_manifest(config.run.dir / "checkpoints/step-0000008").progress
    sizes = sizes_at(progress)
    assert sizes.size(9) > 4  # or this shows nothing
    assert run_ranks(first_positions, 1, config)[0] == list(range(progress.num_samples, sizes.first_sample(10)))


def first_positions(config: Config) -> list[int]:
    """The samples that the first step of a sweep would read."""
    seen = []

    def note(self, step: int) -> list:
        seen.append(list(range(self._batch_sizes.first_sample(step), self._batch_sizes.first_sample(step + 1))))
        raise KeyboardInterrupt

    Loader.step_batches = note
    with suppress(KeyboardInterrupt):
        _sweep(aside(config, config.run.dir / "aside"), Place(0, 1, 0, ""), Sweep(), config.run.dir / "sweep.json")
    return seen[0]


def test_rates_rise_by_equal_factors():
    sweep = Sweep(1e-5, 1e-1, 5)
    assert [sweep.rate(number) for number in range(5)] == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1])


def test_smoothing_has_no_bias_from_its_start():
    """A constant is its own mean from the first on; after a jump the weights are those of a geometric series."""
    smoothed = SmoothedLoss()
    assert [smoothed.add(3.0) for _ in range(3)] == pytest.approx([3.0] * 3)
    weights = [0.1 * 0.9**age for age in range(4)]
    assert smoothed.add(7.0) == pytest.approx((weights[0] * 7.0 + sum(weights[1:]) * 3.0) / sum(weights))
    assert smoothed.lowest == pytest.approx(3.0)


def test_what_is_read_off():
    """The lowest point, the steepest fall, and as suggestion the middle of the fall; no fall, no rate but the first."""
    found = Found([1e-4, 1e-3, 1e-2, 1e-1, 1.0], [5.0, 4.9, 4.0, 3.9, 8.0], "")
    assert (found.lowest, found.steepest) == (1e-1, 1e-3)
    assert found.suggestion == pytest.approx(1e-2)
    assert [found.rate_by(share) for share in (0.05, 0.9, 1.0)] == [1e-3, 1e-2, 1e-1]
    assert found.around == (1e-2, 1e-2)
    assert found.fell
    assert not Found([1e-4, 1e-3], [5.0, 6.0], "").fell


def test_refused_before_it_starts(tmp_path):
    """Rates that do not rise, and whatever a training would be refused for."""
    config = load_config(write_run(tmp_path))
    with pytest.raises(UserError, match=r"--from 1 --to 0\.1: expected two finite rates above 0, the first the lower"):
        find_rate(config, 2, Sweep(1.0, 0.1))
    with pytest.raises(UserError, match=r"--from 1 --to inf: expected two finite rates above 0"):
        find_rate(config, 2, Sweep(1.0, float("inf")))
    with pytest.raises(UserError, match=r"data\.train"):
        find_rate(config.model_copy(update={"data": config.data.model_copy(update={"train": ()})}), 2, Sweep())
    assert not config.run.dir.exists()


def told(config: Config) -> list[tuple[bool, float, int]]:
    """For the first steps of a study: whether weights are rounded, how much a further prediction weighs, tokens."""
    beside = start_beside(aside(config, config.run.dir / "aside"), Place(0, 1, 0, ""))
    seen = []
    for batches in islice(beside.batches(), 5):
        weight, stage = next(iter(beside.engine.stage.precision.weights.values())), beside.engine.stage
        seen.append((weight.is_on, stage.further.weight, sum(len(each.tokens) for each in batches)))
    beside.engine.close()
    return seen


def test_a_stage_is_told_its_steps(tmp_path):
    """Weights are rounded and further predictions weighed as in the run's own steps; behind the last step of a stage
    its batches keep their size, which the next one's micro-batches alone would divide."""
    config = load_config(
        write_run(
            tmp_path,
            parallel={"tp": 1, "zero_stage": 1},
            model={"mtp": {"num_layers": 1, "loss_weight": 0.5, "loss_weight_steps": [[3, 0.25]]}},
            precision={"qat": {"bits": 4, "group_size": 32, "start_step": 3}},
            batch={
                "micro_batch_size": 2,
                "global_batch_size": 4,
                "stages": [{"from_step": 4, "micro_batch_size": 1, "global_batch_size": 3}],
            },
            train={"steps": 8},
        )
    )
    num_tokens = 4 * config.batch.seq_len
    early, late = (False, 0.5, num_tokens), (True, 0.25, num_tokens)
    assert run_ranks(told, 1, config) == [[early, early, late, late, late]]
