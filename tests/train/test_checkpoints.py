"""A run's rule about saves: when one waits or is left out, how often one may fail, what is written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint.background import Outcome
from megalite.checkpoint.fence import SupersededError
from megalite.checkpoint.format import Progress
from megalite.checkpoint.retention import Pruned
from megalite.config.schema import Config
from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.errors import CheckpointError
from megalite.train.checkpoints import Checkpoints

FULL = CheckpointError("the disk is full")


class ScriptedSaver:
    """Stands in for a `Saver`: a save is pending until `finish`; errors come as scripted, one a save."""

    def __init__(
        self, errors: list[CheckpointError | None], *, asynchronous: bool = True, fails_to_start: bool = False
    ):
        self.asynchronous = asynchronous
        self.errors, self.fails_to_start = errors, fails_to_start
        self.pending: int | None = None
        self.calls: list[str] = []

    @property
    def is_pending(self) -> bool:
        return self.pending is not None

    def start(self, progress: Progress, validation_loss: float | None) -> None:
        assert self.pending is None
        self.calls.append(f"start {progress.step}")
        if self.fails_to_start and (error := self.errors.pop(0)) is not None:
            raise error
        self.pending = progress.step

    def finish(self) -> Outcome | None:
        if self.pending is None:
            return None
        self.calls.append(f"finish {self.pending}")
        step, self.pending = self.pending, None
        error = None if self.fails_to_start else self.errors.pop(0)
        return Outcome(step, Path(f"step-{step:07d}"), 0.25, 1.5, error, Pruned((Path("step-0000001"),)))

    def settle(self, *, is_busy: bool, has_failed: bool) -> Outcome | None:
        return None if is_busy and not has_failed else self.finish()

    def close(self) -> Outcome | None:
        return self.finish()


class Notebook:
    """Stands in for a `Recorder`."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def event(self, event: str, step: int, **details: object) -> None:
        self.events.append((event, step, details))

    def say(self, text: str) -> None: ...

    def kinds(self) -> list[tuple[str, int]]:
        return [(event, step) for event, step, _ in self.events]


def make(saver: ScriptedSaver, saved_step: int | None = None, **settings) -> tuple[Checkpoints, Notebook]:
    notebook = Notebook()
    config = Config(checkpoint=CheckpointConfig(**settings))
    return Checkpoints(saver, notebook, config, saved_step), notebook


def test_wait_for_the_last_one():
    """The second save begins when the first has been committed."""
    saver = ScriptedSaver([None, None])
    checkpoints, notebook = make(saver, if_busy="wait")
    checkpoints.save(Progress(step=2), None)
    checkpoints.settle(is_busy=True, has_failed=False)
    checkpoints.save(Progress(step=4), None)
    assert saver.calls == ["start 2", "finish 2", "start 4"]
    assert notebook.kinds() == [("save_started", 2), ("save", 2), ("save_started", 4)]


def test_leave_one_out():
    """The second save is left out and said so; the last one of the run never is."""
    saver = ScriptedSaver([None, None])
    checkpoints, notebook = make(saver, if_busy="skip")
    checkpoints.save(Progress(step=2), None)
    checkpoints.save(Progress(step=4), None)
    assert saver.calls == ["start 2"]
    checkpoints.finish(Progress(step=5), None)
    assert saver.calls == ["start 2", "finish 2", "start 5", "finish 5"]
    assert [kind for kind, _ in notebook.kinds()] == ["save_started", "save_skipped", "save", "save_started", "save"]


def test_what_events_say():
    """When it began; and when it has been committed, for how long training stood still, and what was dropped."""
    checkpoints, notebook = make(ScriptedSaver([None]))
    checkpoints.save(Progress(step=2), None)
    checkpoints.settle(is_busy=False, has_failed=False)
    details = {"folder": "step-0000002", "seconds": 1.5, "stalled_seconds": 0.25, "dropped": ["step-0000001"]}
    assert notebook.events == [("save_started", 2, {}), ("save", 2, details)]


def test_a_synchronous_save_is_waited_for():
    """And nothing is saved twice: neither a step that has been, nor the one that the run goes on from."""
    saver = ScriptedSaver([None], asynchronous=False)
    checkpoints, _ = make(saver, saved_step=1, asynchronous=False)
    checkpoints.save(Progress(step=1), None)
    assert saver.calls == []
    checkpoints.save(Progress(step=2), None)
    assert saver.calls == ["start 2", "finish 2"]
    checkpoints.finish(Progress(step=2), None)
    assert saver.calls == ["start 2", "finish 2"]


@pytest.mark.parametrize("fails_to_start", [False, True], ids=["while writing", "at the start"])
def test_failures_in_a_row_end_the_run(fails_to_start):
    """Two may fail; a good one in between lets two more fail; the third in a row is the run's error."""
    saver = ScriptedSaver([FULL, FULL, None, FULL, FULL, FULL], fails_to_start=fails_to_start)
    checkpoints, notebook = make(saver, max_failures=3)

    def save(step: int) -> None:
        checkpoints.save(Progress(step=step), None)
        checkpoints.settle(is_busy=False, has_failed=True)

    for step in range(1, 6):
        save(step)
    with pytest.raises(CheckpointError, match="the disk is full"):
        save(6)
    failed = [
        (step, details["failures_in_a_row"]) for event, step, details in notebook.events if event == "save_failed"
    ]
    assert failed == [(1, 1), (2, 2), (4, 1), (5, 2), (6, 3)]


@pytest.mark.parametrize("fails_to_start", [False, True], ids=["while writing", "at the start"])
def test_the_last_save_has_one_try(fails_to_start):
    """There is no next time to hope for."""
    checkpoints, notebook = make(ScriptedSaver([FULL], fails_to_start=fails_to_start), max_failures=5)
    with pytest.raises(CheckpointError):
        checkpoints.finish(Progress(step=9), None)
    assert notebook.kinds()[-1] == ("save_failed", 9)


@pytest.mark.parametrize("fails_to_start", [False, True], ids=["while writing", "at the start"])
def test_a_newer_attempt_ends_this_one_at_once(fails_to_start):
    """That is no failure to be tried again."""
    saver = ScriptedSaver([SupersededError("attempt 2")], fails_to_start=fails_to_start)
    checkpoints, notebook = make(saver, max_failures=9)

    def save() -> None:
        checkpoints.save(Progress(step=1), None)
        checkpoints.settle(is_busy=False, has_failed=True)

    with pytest.raises(SupersededError):
        save()
    assert notebook.kinds()[-1] == ("save_failed", 1)


def test_a_save_that_ends_with_the_run_is_noted():
    """Training broke, the thread went on and committed."""
    checkpoints, notebook = make(ScriptedSaver([None]))
    checkpoints.save(Progress(step=3), None)
    checkpoints.close()
    assert notebook.kinds() == [("save_started", 3), ("save", 3)]
