"""The checkpoints of a run as its loop sees them: when the next begins, what a failure means, what stays.

    save      begin one; if the last is still being written, wait for it or leave this one out (`checkpoint.if_busy`)
    settle    at the end of every step, with what all ranks have voted: note what has been committed or has failed
    finish    before the run ends: see to it that the last step is saved

A save that fails costs a checkpoint, not the run: it is noted and tried again when the next is due. The run ends when
`checkpoint.max_failures` in a row have failed, when the last one does, or at once when a newer attempt has started.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megalite.checkpoint import catalog
from megalite.checkpoint.background import Outcome, Saver
from megalite.checkpoint.differential import Storage
from megalite.checkpoint.fence import SupersededError
from megalite.checkpoint.format import Progress
from megalite.checkpoint.retention import Keep, Pruned, point_at_best, prune
from megalite.checkpoint.saving import Target
from megalite.config.load import dump_config
from megalite.config.schema import Config
from megalite.errors import CheckpointError
from megalite.monitor.recorder import Recorder
from megalite.optim.schedules import last_stable_step
from megalite.train.run import Run


class Checkpoints:
    """Saves a run's state and keeps its folder tidy. Every method but `close` is collective.

    Args:
        saver: writes.
        recorder: notes.
        config: the run's.
        saved_step: the step of the checkpoint that the run goes on from, None for none.
    """

    name = "checkpoints"

    def __init__(self, saver: Saver, recorder: Recorder, config: Config, saved_step: int | None):
        self.saver = saver
        self._recorder, self._settings = recorder, config.checkpoint
        self._saved_step = saved_step
        self._num_failures = 0

    def save(self, progress: Progress, validation_loss: float | None) -> None:
        """Begin to save, by the run's rule for when the last one is still being written."""
        if progress.step == self._saved_step:
            return
        if self.saver.is_pending and self._settings.if_busy == "skip":
            self._recorder.event("save_skipped", progress.step, why="the last one is still being written")
            return
        self._note(self.saver.finish())
        self._begin(progress, validation_loss)
        if not self.saver.asynchronous:
            self._note(self.saver.finish())

    def settle(self, *, is_busy: bool, has_failed: bool) -> None:
        """Note what has become of the pending save."""
        self._note(self.saver.settle(is_busy=is_busy, has_failed=has_failed))

    def finish(self, progress: Progress, validation_loss: float | None) -> None:
        """Wait for the pending save, then save this step and wait for that.

        Raises:
            CheckpointError: it could not be saved.
        """
        self._note(self.saver.finish())
        if progress.step != self._saved_step:
            self._num_failures = self._settings.max_failures - 1  # there is no next time
            self._begin(progress, validation_loss)
            self._note(self.saver.finish())

    def settle_pending(self) -> None:
        """Wait for the pending save, if there is one."""
        self._note(self.saver.finish())

    def went_back_to(self, step: int) -> None:
        """The run goes on from this step's checkpoint, or from its beginning at step 0."""
        self._saved_step = step or None

    def close(self) -> None:
        """Let what is being written end, for a while: training has ended, well or badly. Not collective."""
        self._note(self.saver.close())

    def _begin(self, progress: Progress, validation_loss: float | None) -> None:
        try:
            self.saver.start(progress, validation_loss)
        except CheckpointError as error:
            self._fail(progress.step, error)
            return
        self._recorder.event("save_started", progress.step)

    def _note(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        if outcome.error is not None:
            self._fail(outcome.step, outcome.error)
            return
        self._num_failures, self._saved_step = 0, outcome.step
        self._recorder.event(
            "save",
            outcome.step,
            folder=outcome.folder.name,
            seconds=round(outcome.seconds, 3),
            stalled_seconds=round(outcome.stalled_seconds, 4),
            dropped=[path.name for path in outcome.pruned.removed],
            **self._stored(outcome),
        )
        self._recorder.say(f"saved {outcome.folder} in {outcome.seconds:.1f} s")
        for path in outcome.pruned.set_aside:
            self._recorder.event("damaged_checkpoint", outcome.step, why="files are cut or gone", folder=path.name)
            self._recorder.say(f"a damaged checkpoint is set aside as {path}")
        if outcome.trouble:
            self._recorder.event("old_checkpoints_stay", outcome.step, why=outcome.trouble)

    def _stored(self, outcome: Outcome) -> dict[str, int | str]:
        """What a differential save came to in this rank's share."""
        written = outcome.written
        if not self._settings.differential:
            return {}
        facts: dict[str, int | str] = {"bytes_written": written.bytes_written, "bytes_linked": written.bytes_linked}
        if written.note:
            facts["note"] = written.note
        return facts

    def _fail(self, step: int, error: CheckpointError) -> None:
        """Note a failure, and raise it when it ends the run."""
        self._num_failures += 1
        self._recorder.event("save_failed", step, why=str(error), failures_in_a_row=self._num_failures)
        if isinstance(error, SupersededError) or self._num_failures >= self._settings.max_failures:
            raise error
        self._recorder.say(f"save failed, training goes on: {error}")


def open_checkpoints(run: Run, saved_step: int | None, is_in_trouble: Callable[[], bool]) -> Checkpoints:
    """Make a run's `Checkpoints` of its settings. While it is in trouble no old one goes: it may have to go back."""
    config = run.config
    settings = config.checkpoint
    root = config.run.dir / catalog.CHECKPOINTS
    tokenizer = config.data.tokenizer or run.samples.tokenizer_path
    target = Target(
        root,
        run.plan,
        dump_config(run.whole),
        data={
            "fingerprint": run.samples.fingerprint,
            **_seen_sources(run),
            "tokenizer": str(tokenizer) if tokenizer else None,
            "tokenizer_fingerprint": run.samples.tokenizer and run.samples.tokenizer.fingerprint,
        },
        fence=run.fence,
        storage=Storage(differential=settings.differential, compress=settings.compress),
        timeout_seconds=settings.timeout_seconds,
    )
    trunk = last_stable_step(run.plan.total_steps, run.plan.schedule)
    steps = frozenset() if trunk is None else frozenset({trunk})
    keep = Keep(settings.keep_last, settings.keep_every, settings.keep_best, steps)
    saver = Saver(
        target,
        run.engine,
        run.axes,
        run.device,
        asynchronous=settings.asynchronous,
        after_commit=_tidier(root, keep, is_in_trouble),
    )
    return Checkpoints(saver, run.recorder, config, saved_step)


def _seen_sources(run: Run) -> dict[str, dict[str, str]]:
    """Fingerprint and order of every source that the run has had, those among them that it has dropped: one that comes
    back is compared with what it was."""
    now = {
        "sources": {source.name: source.fingerprint for source in run.samples.sources},
        "orders": run.samples.orders,
    }
    return {key: {**run.former_data.get(key, {}), **found} for key, found in now.items()}


def _tidier(root: Path, keep: Keep, is_in_trouble: Callable[[], bool]) -> Callable[[Path], Pruned]:
    """Removes what need not stay behind a new checkpoint, and says what went; then `best` points at the best left."""

    def tidy(just_written: Path) -> Pruned:
        pruned = Pruned() if is_in_trouble() else prune(root, keep, just_written)
        point_at_best(root)
        return pruned

    return tidy
