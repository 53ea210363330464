"""Saving behind the training: a thread copies the state to host memory, writes it and commits it.

    training    | step | forward, backward | update | step | step | ...       every step ends in a vote of all ranks,
    thread             | copy   | write, sync, commit    |                    which also says what the threads came to

The state changes only in updates, so the copy has a forward and a backward pass to be made in. Only an update that is
there before the copy is done has to wait: that is all training ever stands still.

Why a thread and not a process: all that takes long (checksums, writing, syncing) releases the interpreter's lock, so
the two hardly meet. A forked process would inherit the locks of gloo's and NCCL's threads at a random moment; a spawned
one costs seconds, its own copy of torch in memory and a buffer shared with it; and when training is killed, either
would live on and might commit what nobody knows of.

The thread talks to no process group. Success reaches rank 0's thread through files (`saving`); failure reaches every
rank through the vote at the end of a step, so all of them learn of it together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megalite.checkpoint.fence import SupersededError
from megalite.checkpoint.format import Progress
from megalite.checkpoint.retention import Pruned
from megalite.checkpoint.saving import Saving, Target, not_saved
from megalite.checkpoint.shares import WrittenShare
from megalite.checkpoint.snapshot import Share, Snapshots, live_share
from megalite.engine.hooks import FIRST
from megalite.engine.protocol import Engine
from megalite.errors import CheckpointError
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import agree, any_rank, from_all

CLOSE_SECONDS = 8.0
"""What is being written when training breaks gets this long to be committed."""

POLL_SECONDS = (0.002, 0.05)
"""How often ranks that wait for a save ask each other: at first, and after a while."""


@dataclass(frozen=True)
class Outcome:
    """What became of a save; the same on all ranks, but for what only rank 0 knows."""

    step: int
    folder: Path
    stalled_seconds: float
    """For which training stood still: at the start of the save, and before the next update."""
    seconds: float
    """From the start to the commit."""
    error: CheckpointError | None = None
    """Why there is no checkpoint."""
    pruned: Pruned = field(default_factory=Pruned)
    """What became of former checkpoints after the commit; on rank 0."""
    trouble: str = ""
    """What went wrong when they were removed; on rank 0."""
    written: WrittenShare = field(default_factory=WrittenShare)
    """What this rank's share took."""


class Saver:
    """Saves the engine's state, one checkpoint at a time.

    Args:
        target: where checkpoints go.
        engine: whose state is saved.
        axes: of this rank.
        device: of this rank, for votes.
        asynchronous: copy and write behind the training, the engine's updates waiting for the copy; else live memory is
            written, and the caller is to `finish` before the next step.
        after_commit: called with each new checkpoint, on rank 0, in the thread; says what became of former ones.
    """

    def __init__(
        self,
        target: Target,
        engine: Engine,
        axes: Axes,
        device: torch.device,
        *,
        asynchronous: bool,
        after_commit: Callable[[Path], Pruned] | None = None,
    ):
        self.asynchronous = asynchronous
        self._target, self._engine, self._axes, self._device = target, engine, axes, device
        self._after_commit = after_commit
        self._snapshots = Snapshots(engine, axes)
        self._job: _Job | None = None
        if asynchronous:
            engine.hooks.before_update.add(self._wait_for_copy, order=FIRST)

    def start(self, progress: Progress, validation_loss: float | None = None) -> None:
        """Begin to save the current step. Collective; nothing may be pending.

        Raises:
            CheckpointError: on all ranks, when it cannot even begin.
        """
        assert self._job is None, "a save is pending"
        clock = time.perf_counter()
        saving = Saving(self._target, self._axes, progress, validation_loss)
        error: CheckpointError | None = None
        try:
            saving.begin()
        except CheckpointError as caught:
            error = caught
        if any_rank(error is not None, self._axes.world, self._device):
            raise self._shared_error(error)
        self._job = _Job(saving, self._share(), self._after_commit, clock)

    def flags(self) -> tuple[bool, bool]:
        """What this rank brings to a vote: whether its thread is at work, whether it has failed."""
        job = self._job
        return (False, False) if job is None else (job.is_alive(), job.error is not None)

    def settle(self, *, is_busy: bool, has_failed: bool) -> Outcome | None:
        """Take note of a vote over `flags`. Collective: all ranks bring the same result.

        Returns:
            What became of the pending save; None when it is still being written, or there is none.
        """
        job = self._job
        if job is None or (is_busy and not has_failed):
            return None
        job.saving.given_up.set()  # without effect unless rank 0 still waits
        job.join()
        error = self._shared_error(job.error) if has_failed else None
        self._job = None
        if has_failed:
            job.saving.clean_up()
        return self._outcome(job, error)

    def finish(self) -> Outcome | None:
        """Wait for the pending save. Collective.

        Returns:
            What became of it; None when nothing was pending.

        Raises:
            CheckpointError: on all ranks, when it does not end.
        """
        if self._job is None:
            return None
        deadline = time.monotonic() + 2 * self._target.timeout_seconds
        pause, last_pause = POLL_SECONDS
        while True:
            is_stuck = time.monotonic() > deadline
            is_busy, has_failed, is_stuck = agree((*self.flags(), is_stuck), self._axes.world, self._device)
            outcome = self.settle(is_busy=is_busy, has_failed=has_failed)
            if outcome is not None:
                return outcome
            if is_stuck:
                raise not_saved(self._job.saving.final, TimeoutError("the disk has not answered in time"))
            time.sleep(pause)
            pause = min(2 * pause, last_pause)

    @property
    def is_pending(self) -> bool:
        """Whether a save has begun that no vote has settled; the same on all ranks."""
        return self._job is not None

    def close(self) -> Outcome | None:
        """Let what is being written end, for a while, and give the memory back. Not collective: training may have
        broken on this rank alone.

        Returns:
            The save that has been committed meanwhile; on rank 0, who alone knows.
        """
        job = self._job
        if job is not None:
            job.join(CLOSE_SECONDS)
            if job.is_alive():
                return None  # it still reads the buffer; the process is about to end anyway
        self._snapshots.close()
        if job is None or job.error is not None or self._axes.global_rank != 0:
            return None
        return self._outcome(job, None)

    def _outcome(self, job: _Job, error: CheckpointError | None) -> Outcome:
        step, folder = job.saving.progress.step, job.saving.final
        return Outcome(
            step,
            folder,
            job.stalled_seconds,
            job.seconds,
            error,
            job.pruned,
            job.trouble,
            job.saving.written,
        )

    def _wait_for_copy(self) -> None:
        """Let an update wait until the state has been copied."""
        if self._job is not None and not self._job.is_copied.is_set():
            clock = time.perf_counter()
            self._job.is_copied.wait()
            self._job.stalled_seconds += time.perf_counter() - clock

    def _share(self) -> Share:
        if self.asynchronous:
            return self._snapshots.take()
        return live_share(self._engine, self._axes)

    def _shared_error(self, error: Exception | None) -> CheckpointError:
        """One error on all ranks, made of what each has to say. Collective."""
        mine = None if error is None else (str(error), isinstance(error, SupersededError))
        words = from_all(mine, self._axes.world)
        for word in words:
            if word is not None and word[1]:
                return SupersededError(word[0])
        first_to_say = {word[0]: rank for rank, word in reversed(list(enumerate(words))) if word is not None}
        return CheckpointError("; ".join(f"rank {rank}: {text}" for text, rank in first_to_say.items()))


class _Job(threading.Thread):
    """The thread of one save. Starts at once."""

    def __init__(self, saving: Saving, share: Share, after_commit: Callable[[Path], Pruned] | None, clock: float):
        super().__init__(name=f"save-{saving.progress.step}", daemon=True)
        self.saving = saving
        self.is_copied = threading.Event()
        self.stalled_seconds = time.perf_counter() - clock
        self.seconds = 0.0
        self.error: Exception | None = None
        self.pruned = Pruned()
        self.trouble = ""
        self._share, self._after_commit, self._clock = share, after_commit, clock
        self.start()

    def run(self) -> None:
        try:
            self._share.copy()
        except Exception as error:  # it must reach the rank that trains
            self.error = not_saved(self.saving.final, error)
            return
        finally:
            self.is_copied.set()
        try:
            self.saving.write(self._share)
        except CheckpointError as error:
            self.error = error
            return
        self.seconds = time.perf_counter() - self._clock
        if self._after_commit is None or self.saving.axes.global_rank != 0:
            return
        try:
            self.pruned = self._after_commit(self.saving.final)
        except (OSError, CheckpointError) as error:  # the new checkpoint is there; old ones can be removed next time
            self.trouble = str(error)
