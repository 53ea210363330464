"""Sweeps at work, with runs that are pretended: who runs, what is written down, what is done again."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.cli.main import main
from megalite.errors import ConfigError, DataError, UserError
from megalite.sweeps.halving import beginning_of
from megalite.sweeps.outcome import TrialOutcome, read_outcome
from megalite.sweeps.page import render_sweep
from megalite.sweeps.record import SweepBook
from megalite.sweeps.settings import SweepConfig
from megalite.sweeps.sweep import SweepRun, open_book, prepare
from megalite.sweeps.table import in_order
from megalite.sweeps.trials import Trial
from tests.kit.runs import write_run
from tests.report.conftest import make_run

FLAT = {"parallel": {"tp": 1}, "schedule": {"name": "constant", "warmup_steps": 0}, "train": {"steps": 90}}


class PretendedRunner:
    """Runs that end at once, the newest first, with what a function says."""

    def __init__(self, value: Callable[[Trial], float | TrialOutcome], jobs: int = 3, stop_after: int | None = None):
        self._value, self._jobs, self._stop_after = value, jobs, stop_after
        self.started: list[tuple[str, int]] = []
        self._live: list[Trial] = []

    @property
    def has_room(self) -> bool:
        return len(self._live) < self._jobs

    @property
    def is_idle(self) -> bool:
        return not self._live

    def start(self, trial: Trial) -> None:
        self.started.append((trial.name, trial.config.train.steps))
        self._live.append(trial)
        if len(self.started) == self._stop_after:
            signal.raise_signal(signal.SIGINT)

    def ended(self) -> list[tuple[Trial, TrialOutcome]]:
        over, self._live = self._live[::-1], []
        return [(trial, self._outcome(trial)) for trial in over]

    def _outcome(self, trial: Trial) -> TrialOutcome:
        found = self._value(trial)
        return (
            found if isinstance(found, TrialOutcome) else TrialOutcome("done", found, trial.config.train.steps, 1.0, 10)
        )

    def stop(self, *, at_once: bool) -> None:
        self._value = lambda trial: TrialOutcome("stopped", why="not at its end")


def sweep(tmp_path: Path, **settings) -> SweepConfig:
    config = write_run(tmp_path, **FLAT)
    given = {"config": config, "dir": tmp_path / "sweep", "space": {"optimizer.lr": [1e-4, 1e-3, 1e-2, 1e-1]}}
    return SweepConfig(**{**given, **settings})


def run(settings: SweepConfig, runner: PretendedRunner, **options) -> SweepBook:
    return SweepRun(prepare(settings), runner, lambda line: None, **options).run()


def by_rate(trial: Trial) -> float:
    """Best at 1e-2, and better the longer."""
    return {1e-4: 4.0, 1e-3: 3.0, 1e-2: 1.0, 1e-1: 2.0}[trial.config.optimizer.lr] - trial.config.train.steps / 1000


def test_a_grid(tmp_path):
    """Every trial once, in a folder of its own below the sweep's; the best first; the page and the table have all."""
    settings = sweep(tmp_path)
    runner = PretendedRunner(by_rate)
    book = run(settings, runner)
    assert [name for name, _ in runner.started] == [f"trial-000{number}" for number in range(1, 5)]
    assert [each.number for each in in_order(settings, book)] == [3, 4, 2, 1]
    page = render_sweep(settings, book, 0.0)
    assert "optimizer.lr=0.01" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    for name in ("again", "killed"):
        runner = PretendedRunner(by_rate)
        if name == "killed":  # in the middle of its second trial
            record = json.loads((settings.dir / "sweep.json").read_text())
            record["trials"][1] |= {"state": "waiting", "value": None}
            (settings.dir / "sweep.json").write_text(json.dumps(record))
        assert run(settings, runner).trials.keys() == book.trials.keys()
        assert [each for each, _ in runner.started] == ([] if name == "again" else ["trial-0002"])


@pytest.mark.parametrize("name", ["sweep #2", "lr: 3", "{x}", "*a", "0x10", "'", "\U0001f642"])
def test_a_folder_with_a_name_that_yaml_reads_otherwise(tmp_path, monkeypatch, name):
    """Each trial has a folder of its own in it: cut at a comment's sign, all of them had one."""
    monkeypatch.chdir(tmp_path)
    settings = sweep(tmp_path, dir=Path(name), halving={"min_steps": 30}, overrides=("schedule.name=cosine",))
    runner = PretendedRunner(by_rate)
    seen: set[Path] = set()
    runner.start = lambda trial, start=runner.start: (seen.add(trial.folder), start(trial))[1]
    run(settings, runner)
    assert seen == {Path(name, each) for each, _ in runner.started}
    assert len(seen) == 5


def test_what_fails_does_not_end_a_sweep(tmp_path):
    """A loss that blew up and a fault are written down as such; only the fault is tried again, and only when asked."""

    def value(trial: Trial) -> float | TrialOutcome:
        if trial.config.optimizer.lr == 1e-1:
            return TrialOutcome("diverged", why="the loss is nan")
        return TrialOutcome("failed", why="out of memory") if trial.config.optimizer.lr == 1e-3 else by_rate(trial)

    settings = sweep(tmp_path)
    book = run(settings, PretendedRunner(value))
    assert [book.trials[n].state for n in (1, 2, 3, 4)] == ["done", "failed", "done", "diverged"]
    assert book.trials[2].why == "out of memory"
    runner = PretendedRunner(by_rate)
    run(settings, runner)
    assert runner.started == []
    book = run(settings, runner, retry_failed=True)
    assert [name for name, _ in runner.started] == ["trial-0002"]
    assert book.trials[2].state == "done"


def test_a_trial_that_stopped_by_itself(tmp_path):
    """The sweep is not done: who repeats it while it says so goes on with that trial."""
    settings = sweep(tmp_path)

    def value(trial):
        return TrialOutcome("stopped", why="ended with 3") if trial.name == "trial-0002" else by_rate(trial)

    work = SweepRun(prepare(settings), PretendedRunner(value), lambda line: None)
    book = work.run()
    assert work.was_stopped
    assert book.trials[2].state == "stopped"
    again = SweepRun(prepare(settings), runner := PretendedRunner(by_rate), lambda line: None)
    assert again.run().trials[2].state == "done"
    assert not again.was_stopped
    assert [name for name, _ in runner.started] == ["trial-0002"]


def test_a_request_to_stop(tmp_path):
    """No more trials begin, those that run are asked to save; the next call finishes them before it starts others."""
    settings = sweep(tmp_path)
    work = SweepRun(prepare(settings), PretendedRunner(by_rate, jobs=1, stop_after=2), lambda line: None)
    book = work.run()
    assert work.was_stopped
    assert [book.trials[n].state for n in (1, 2, 3)] == ["done", "stopped", "waiting"]
    runner = PretendedRunner(by_rate)
    run(settings, runner)
    assert [name for name, _ in runner.started] == ["trial-0002", "trial-0003", "trial-0004"]


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_halving(tmp_path, jobs):
    """Of four the best two go on, of two the best one, whatever order trials end in and however many run at once;
    each goes on in its own folder, for the rates of a constant schedule do not know where the run ends."""
    settings = sweep(tmp_path, halving={"min_steps": 30, "factor": 2})
    runner = PretendedRunner(by_rate, jobs)
    book = run(settings, runner)
    assert sorted(runner.started) == sorted(
        [*((f"trial-000{n}", 30) for n in (1, 2, 3, 4)), ("trial-0003", 60), ("trial-0004", 60), ("trial-0003", 90)]
    )
    assert [book.trials[n].state for n in (1, 2, 3, 4)] == ["pruned", "pruned", "done", "pruned"]
    assert [rung.steps for rung in book.trials[3].rungs] == [30, 60, 90]
    assert "Successive halving" in render_sweep(settings, book, 0.0)


def test_halving_goes_on_in_the_middle_of_a_rung(tmp_path):
    """Stopped in its second rung it does again nothing that it has done, and ends with the same."""
    settings = sweep(tmp_path, halving={"min_steps": 30, "factor": 2})
    run(settings, PretendedRunner(by_rate, jobs=1, stop_after=6))
    runner = PretendedRunner(by_rate)
    book = run(settings, runner)
    assert runner.started == [("trial-0004", 60), ("trial-0003", 90)]
    assert [book.trials[n].state for n in (1, 2, 3, 4)] == ["pruned", "pruned", "done", "pruned"]


def test_halving_with_more_trials_than_before(tmp_path):
    """What was pruned among four is kept among eight, and goes on."""
    values = (0.1, 0.2, 0.3, 0.4, 0.9, 0.9, 0.9, 0.9)

    def by_number(trial: Trial) -> float:
        return values[int(trial.name.removeprefix("trial-")) - 1]

    random = {"method": "random", "space": {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}}}
    ended = []
    for folder, numbers in (("grown", (4, 8)), ("whole", (8,))):
        for trials in numbers:
            halved = {"trials": trials, "halving": {"min_steps": 30, "factor": 2}, "dir": tmp_path / folder}
            book = run(sweep(tmp_path, **random, **halved), PretendedRunner(by_number))
        ended.append({each.number: (each.state, [rung.steps for rung in each.rungs]) for each in book.trials.values()})
    assert ended[0] == ended[1]
    assert ended[0][2] == ("done", [30, 60, 90])


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (3, "stopped"), (1, "failed"), (-9, "failed")])
def test_a_trial_that_ends_before_it_begins_has_not_come_further(tmp_path, code, state):
    """The last event of its folder is the end of its shorter run."""
    folder = make_run(tmp_path / "run", 40, end="done")
    assert read_outcome(folder, "loss", code=code).state == state


@pytest.mark.parametrize(("steps", "state"), [(30, "failed"), (40, "done"), (50, "stopped"), (None, "done")])
def test_a_value_of_another_step_is_none(tmp_path, steps, state):
    """A run that has come further has no value of the step at which it is to be compared, one that has not come so far
    goes on, but where early stopping has ended it."""
    folder = make_run(tmp_path / "run", 40, end="done")
    found = read_outcome(folder, "loss", code=0, wanted_steps=steps)
    assert (found.state, found.value is None) == (state, state != "done")
    assert found.why == ("" if state == "done" else f"stands at step 40, and was to be judged at step {steps}")
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": "early_stop", "time": 2e9, "step": 40, "why": "no progress"}) + "\n")
    found = read_outcome(folder, "loss", code=0, wanted_steps=steps)
    assert found.state == ("done" if state == "stopped" else state)


def test_what_failed_in_the_middle_of_halving_is_compared_where_it_was(tmp_path):
    """Tried again it goes on with the rung that it failed in: its values of those before stand."""
    settings = sweep(tmp_path, halving={"min_steps": 30, "factor": 2})

    def value(trial: Trial) -> float | TrialOutcome:
        fails = trial.config.train.steps == 60 and trial.name == "trial-0003"
        return TrialOutcome("failed", None, 50, why="out of memory") if fails else by_rate(trial)

    book = run(settings, PretendedRunner(value))
    assert (book.trials[3].state, book.trials[4].state) == ("failed", "done")
    runner = PretendedRunner(by_rate)
    book = run(settings, runner, retry_failed=True)
    assert runner.started == [("trial-0003", 60), ("trial-0003", 90)]
    assert [rung.steps for rung in book.trials[3].rungs] == [30, 60, 90]


def test_halving_waits_for_a_trial_that_was_stopped(tmp_path):
    """By a file in its folder, say: nothing goes on before its value is known, and it may be the best."""
    settings = sweep(tmp_path, halving={"min_steps": 30, "factor": 2})

    def value(trial: Trial) -> float | TrialOutcome:
        return TrialOutcome("stopped", None, 20, why="ended with 3") if trial.name == "trial-0003" else by_rate(trial)

    told: list[str] = []
    work = SweepRun(prepare(settings), PretendedRunner(value), told.append)
    book = work.run()
    assert work.was_stopped
    assert told[-1] == "not yet at step 30: trial 3; run the sweep again to go on with it"
    assert [book.trials[n].state for n in (1, 2, 3, 4)] == ["waiting", "waiting", "stopped", "waiting"]
    runner = PretendedRunner(by_rate)
    book = run(settings, runner)
    assert runner.started[0] == ("trial-0003", 30)
    assert [book.trials[n].state for n in (1, 2, 3, 4)] == ["pruned", "pruned", "done", "pruned"]


def test_halving_where_the_schedule_knows_its_end(tmp_path):
    """With a cosine a rung is a run anew, in a folder of its own; with wsd its beginning, without the decay."""
    settings = sweep(tmp_path, halving={"min_steps": 30, "factor": 3}, overrides=("schedule.name=cosine",))
    runner = PretendedRunner(by_rate)
    run(settings, runner)
    assert {name for name, steps in runner.started if steps == 30} == {f"trial-000{n}-at-30" for n in (1, 2, 3, 4)}
    assert [each for each in runner.started if each[1] == 90] == [("trial-0003", 90)]
    wsd = sweep(
        tmp_path,
        dir=tmp_path / "wsd",
        halving={"min_steps": 30},
        overrides=("schedule.name=wsd", "schedule.min_lr=1e-5"),
    )
    seen = []
    run(wsd, PretendedRunner(lambda trial: seen.append((trial.name, trial.config.schedule.name)) or by_rate(trial)))
    assert ("trial-0001", "constant") in seen
    assert seen[-1] == ("trial-0003", "wsd")


GROUP = "{{match: '*norm*', schedule: {{name: {}, warmup_steps: 2}}}}"


@pytest.mark.parametrize(
    ("override", "goes_on"),
    [
        ("optimizer.decay={end_scale: 0.1}", False),
        ("optimizer.decay={follows_rate: true}", True),
        (f"optimizer.groups=[{GROUP.format('cosine')}]", False),
        (f"optimizer.groups=[{GROUP.format('wsd')}]", True),
    ],
)
def test_a_rung_is_the_beginning_where_every_pace_is_the_same(tmp_path, override, goes_on):
    """The rates of a group and the weight decay may know the run's end too."""
    (trial, *_) = prepare(sweep(tmp_path, halving={"min_steps": 30}, overrides=(override,))).trials
    part = beginning_of(trial.config, 30)
    assert (part is not None) == goes_on
    if part is not None and part.optimizer.groups:
        assert [group.schedule.name for group in part.optimizer.groups] == ["constant"]


@pytest.mark.parametrize(
    "override", ["schedule={name: plateau, warmup_steps: 0}", "train.early_stopping={patience: 2}"]
)
@pytest.mark.parametrize(("eval_every", "goes_on"), [(10, True), (20, False)])
def test_a_rung_that_has_one_validation_more_is_no_beginning(tmp_path, override, eval_every, goes_on):
    """Where the rate, or the end, goes by how many there were."""
    overrides = (override, f"train.eval_every={eval_every}")
    (trial, *_) = prepare(sweep(tmp_path, halving={"min_steps": 30}, overrides=overrides)).trials
    assert (beginning_of(trial.config, 30) is not None) == goes_on


def test_what_halving_cannot_be(tmp_path):
    """Rungs of runs of different lengths, or a first rung that is the whole run."""
    with pytest.raises(ConfigError, match="min_steps: 90 is not below the 90 steps of a trial; use 45 or less"):
        prepare(sweep(tmp_path, halving={"min_steps": 90}))
    with pytest.raises(ConfigError, match="from 10 to 20 steps"):
        prepare(sweep(tmp_path, space={"train.steps": [10, 20]}, halving={"min_steps": 5}))
    beyond = {
        "schedule.warmup_steps=40": "schedule.warmup_steps: 40 is more than the 30 steps",
        "schedule={name: step, warmup_steps: 0, milestones: [40]}": "schedule.milestones",
        "batch.stages=[{from_step: 40, micro_batch_size: 1}]": "batch.stages.0",
        "monitor.profile={steps: '40:42'}": "monitor.profile.steps",
        "precision.qat={bits: 4, group_size: 32, start_step: 40}": "precision.qat.start_step",
    }
    for override, named in beyond.items():
        words = rf"halving: its first rung would be a run of 30 steps, .*larger min_steps\): [^:]*{named}"
        with pytest.raises(ConfigError, match=words):
            prepare(sweep(tmp_path, halving={"min_steps": 30}, overrides=(override,)))


def test_tpe(tmp_path):
    """It asks one by one, goes on with what it asked, and may be given more trials; a resumed sweep asks the same."""
    settings = sweep(tmp_path, method="tpe", trials=6, space={"optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True}})

    def value(trial: Trial) -> float:
        return abs(trial.config.optimizer.lr - 1e-2)

    whole = run(settings, PretendedRunner(value, jobs=1))
    cut = settings.model_copy(update={"dir": tmp_path / "cut"})
    run(cut, PretendedRunner(value, jobs=1, stop_after=4))
    resumed = run(cut, PretendedRunner(value, jobs=1))
    assert [each.point for each in resumed.trials.values()] == [each.point for each in whole.trials.values()]
    runner = PretendedRunner(value, jobs=1)
    more = run(settings.model_copy(update={"trials": 8}), runner)
    assert [name for name, _ in runner.started] == ["trial-0007", "trial-0008"]
    assert len(more.trials) == 8


def test_tpe_on_steps_of_many_digits(tmp_path):
    """Optuna takes back only what is on a step: a third is not 0.3333."""
    steps = {"low": 0.1, "high": 1.1, "step": 1 / 3}
    settings = sweep(tmp_path, method="tpe", trials=12, space={"optimizer.lr": steps})
    book = run(settings, PretendedRunner(lambda trial: trial.config.optimizer.lr, jobs=1))
    drawn = {each.point["optimizer.lr"] for each in book.trials.values()}
    assert drawn == {0.1, 0.433333333333333, 0.766666666666667, 1.1}


@pytest.mark.parametrize("method", ["random", "tpe"])
@pytest.mark.parametrize(("low", "high"), [(1.00001, 1.00009), (0.999, 0.9999), (1e-4, 1e-1)])
def test_points_of_a_narrow_range_differ(tmp_path, method, low, high):
    """They have as many digits as its ends share, and four more; others have four."""
    space = {"optimizer.lr": {"low": low, "high": high}}
    runner = PretendedRunner(lambda trial: trial.config.optimizer.lr, jobs=1)
    book = run(sweep(tmp_path, method=method, trials=5, space=space), runner)
    drawn = [each.point["optimizer.lr"] for each in book.trials.values()]
    assert len(set(drawn)) == 5
    assert all(low <= each <= high for each in drawn)
    if high > 2 * low:
        assert all(each == float(f"{each:.4g}") for each in drawn)


def test_another_sweep_in_the_folder(tmp_path):
    """Every setting that differs is named, of the sweep and of the config; a damaged file is told too."""
    settings = sweep(tmp_path)
    run(settings, PretendedRunner(by_rate))
    other = settings.model_copy(update={"metric": "loss", "overrides": ("batch.seq_len=16",)})
    with pytest.raises(ConfigError) as refused:
        open_book(other)
    assert "metric: 'validation' before, 'loss' now" in str(refused.value)
    assert "config: batch.seq_len: 32 before, 16 now" in str(refused.value)
    (settings.dir / "sweep.json").write_text('{"format": 1}')
    with pytest.raises(DataError, match="damaged"):
        open_book(settings)


def test_every_trial_is_checked_before_the_first_starts(tmp_path):
    """All complaints at once, each with a trial that has it, and no folder is left."""
    settings = sweep(tmp_path, space={"model.num_heads": [3, 4], "optimizer.lr": [1e-3, -1]})
    with pytest.raises(UserError) as refused:
        prepare(settings)
    assert "optimizer.lr: found -1" in str(refused.value)
    assert "(trial-0002, model.num_heads=3 optimizer.lr=-1, and 1 more trials)" in str(refused.value)
    assert "32 / 3 is not whole" in str(refused.value)
    assert not settings.dir.exists()
    with pytest.raises(UserError, match=r"unknown key \(did you mean 'lr'\?\)"):
        prepare(sweep(tmp_path, space={"optimizer.lrr": [1]}))
    with pytest.raises(UserError, match="use validation, validation/packed, loss"):
        prepare(sweep(tmp_path, metric="validation/other"))


def test_a_check_shows_its_points(tmp_path, capsys):
    """In lines, or with --json as one object, which was left out; nothing is started."""
    arguments = ["sweep", str(write_run(tmp_path, **FLAT)), "--over", "optimizer.lr=[1e-3, 1e-2]", "--check"]
    arguments += ["--dir", str(tmp_path / "sweep")]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert "trial-0001: optimizer.lr=0.001\ntrial-0002: optimizer.lr=0.01\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["checked"][1] == {"name": "trial-0002", "point": "optimizer.lr=0.01"}
    assert (found["method"], found["rungs"]) == ("grid", [])
    assert not (tmp_path / "sweep").exists()
