"""Traced steps of whole runs: files a rank, numbers that do not change, restarts, disks that are full."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalite.config.load import load_config
from megalite.config.schema import ProfileConfig
from megalite.config.validate import validate
from megalite.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from megalite.phases import PHASES
from megalite.profile.summary import read_run
from megalite.spans import span
from megalite.train.components.profiler import Profiler
from megalite.train.heartbeat import Heartbeat
from tests.kit.runs import events, metrics, write_run
from tests.train.forked import launch

OF_THE_CLOCK = ("tokens_per_second", "mfu", "seconds", "memory_bytes")


def config_in(folder: Path, profile: dict | None, **sections: dict):
    """A run of six steps on two dp ranks under ZeRO-1, whose weights are gathered while the next step begins."""
    monitor = {"profile": profile, "tensorboard": False, "layers_every": None}
    return load_config(write_run(folder, parallel={"tp": 1, "dp": 2, "zero_stage": 1}, monitor=monitor, **sections))


def numbers(run_dir: Path) -> list[dict]:
    """All that the clock has no part in."""
    return [{key: value for key, value in line.items() if key not in OF_THE_CLOCK} for line in metrics(run_dir)]


def traces(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "profile").glob("*"))


def test_a_run_computes_the_same(tmp_path):
    """Metrics of a traced run are those of one that is not, to the last bit; each rank has a trace of the steps asked
    for, with every phase of training in it, whose parts add up to the time of the steps. A restart among them traces
    those that are left."""
    plain, traced = config_in(tmp_path / "plain", None), config_in(tmp_path, {"steps": "2:5", "memory": True})
    assert launch(plain, 2, backend="gloo") == EXIT_DONE
    assert launch(traced, 2, backend="gloo", stop_after=3) == EXIT_REQUEUE
    assert traces(traced.run.dir) == [f"steps-2-3-rank-{rank}.json.gz" for rank in (0, 1)]
    for each in read_run(traced.run.dir):
        assert (each.num_steps, each.steps) == (2, "2:4")
        times = each.times
        assert times.computing + times.exposed + times.idle == pytest.approx(times.total)
        for phase in ("forward", "backward", "optimizer"):
            assert times.phases[phase].computing > 0
        assert 0 < times.exposed <= times.communication < times.total
        assert each.trace.memory is not None
        if each.rank == 0:  # whose time it is that metrics have, components and votes left out
            assert times.total / 1e6 > sum(line["seconds"] for line in metrics(traced.run.dir)[1:3])
    (noted,) = [event for event in events(traced.run.dir) if event["event"] == "profile"]
    assert (noted["step"], noted["num_bytes"] > 0) == (3, True)

    assert launch(traced, 2, backend="gloo") == EXIT_DONE
    assert traces(traced.run.dir) == [
        f"steps-{steps}-rank-{rank}.json.gz" for steps in ("2-3", "4-4") for rank in (0, 1)
    ]
    assert read_run(traced.run.dir)[0].steps == "4:5"
    assert numbers(traced.run.dir) == numbers(plain.run.dir)


@pytest.mark.parametrize(("first", "begins"), [(1, False), (2, True), (3, True), (4, True), (5, False), (9, False)])
def test_when_a_profiler_begins(first: int, begins: bool):
    """In the step before, to warm up, or among the steps; an attempt that begins behind them traces nothing."""
    quiet = {"recorder": None, "heartbeat": Heartbeat(), "device": torch.device("cpu")}
    profiler = Profiler(ProfileConfig(steps="3:5"), SimpleNamespace(), folder=Path("none"), rank=0, **quiet)
    begun = []
    profiler._begin = lambda step, *, warm_up: begun.append((step, warm_up))
    profiler.before_step(SimpleNamespace(number=first))
    assert begun == ([(first, first == 2)] if begins else [])


def fill_disk() -> None:
    """No room for the first rank's packed file; the second's profiler itself meets a full disk, and does not tell."""
    import gzip

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, os.strerror(28))

    if torch.distributed.get_rank() == 0:
        gzip.open = full  # type: ignore[assignment]
    else:
        torch.profiler.profile.export_chrome_trace = lambda self, path: Path(path).write_text('{"traceEvents": [{"na')


def test_a_full_disk_does_not_end_the_run(tmp_path):
    """It is said, nothing half written stays, and the run goes on to its end."""
    config = config_in(tmp_path, {"steps": "2:3"}, train={"steps": 3})
    assert launch(config, 2, prepare=fill_disk) == EXIT_DONE
    assert traces(config.run.dir) == []
    (noted,) = [event for event in events(config.run.dir) if event["event"] == "profile_failed"]
    assert "No space left on device; the run goes on" in noted["why"]
    assert len(metrics(config.run.dir)) == 3


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"steps": "9:5"}, "write A:B for the steps A to B - 1, with 1 <= A < B"),
        ({"steps": "5:5"}, "write A:B"),
        ({"steps": "0:3"}, "steps are counted from 1"),
        ({"steps": "3"}, "write A:B"),
        ({"steps": 3}, "profile.steps"),
        ({"steps": "4:8"}, "profile.steps: 4:8 ends with step 7, and the run with step 6; use 3:7"),
        ({"steps": "2:4", "ranks": [2]}, "profile.ranks: there is no rank 2, the run has 2; use numbers from 0 to 1"),
        ({"steps": "2:4", "ranks": [1, 1]}, "each once"),
        ({"steps": "2:4", "ranks": []}, "name one or more"),
        ({"steps": "1:5", "most": 7}, "profile.most: 4 steps of 2 ranks are 8 steps to trace, and 7 are allowed"),
    ],
)
def test_wrong_ranges_are_refused(profile: dict, said: str, tmp_path):
    """Reversed, empty, past the end, of ranks that are not there, and many without being asked for."""
    with pytest.raises(ConfigError) as refusal:
        validate(config_in(tmp_path, profile), 2)
    assert said in str(refusal.value)


def test_hundreds_of_steps_must_be_asked_for(tmp_path):
    long = {"train": {"steps": 1000}}
    with pytest.raises(ConfigError, match=r"set most=600"):
        validate(config_in(tmp_path, {"steps": "100:400"}, **long), 2)
    validate(config_in(tmp_path, {"steps": "100:400", "most": 600}, **long), 2)


def test_a_span_is_nothing_without_a_profiler():
    """The same object each time, and a span by its name when one is at work."""
    assert all(span(phase) is span("forward") for phase in PHASES)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found, span("forward"):
        torch.ones(2).sum()
    assert "megalite.forward" in {each.name for each in found.events()}
