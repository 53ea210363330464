"""Tasks on a Slurm cluster: workers wait and run as array jobs, and a driver gives them the tasks of every station.

    driver   megalite data prepare RECIPE --runner slurm       on a login node or in a small job of its own
      |        sbatch --array=0-15 ...                         once; further ones replace what was lost
      |        OUT/slurm/                                      says what is to do, and hears who does it (task_queue.py)
    worker   megalite data work OUT/slurm --name 4711_3        on any node; all see the same disk

Who is gone is known from Slurm (a node failed, a worker was killed, its time was up), or from a worker's silence (it
hangs): its task is given out again, and another worker started in its place. A worker that somebody cancelled is not
replaced. Whatever ends the driver cancels the workers, and the successor of a driver that was killed begins with
cancelling what it finds: two arrays never work on one folder.
"""

from __future__ import annotations

import errno
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from megalite.errors import DataError, UserError
from megalite.slurm_commands import PATIENCE_SECONDS, NoAnswer, gone_too_long
from megalite.slurm_quoting import check_log_folder, check_options, command_line, job_name
from megalite.stations.lease import Lease
from megalite.stations.runners.signals import stopping_in_order
from megalite.stations.runners.slurm_queue import OWNED, Element, SlurmQueue
from megalite.stations.runners.task_queue import TaskQueue, WorkerHeartbeat
from megalite.stations.tasks import missing_tasks

SECONDS_BETWEEN_LOOKS = 0.2
"""At the reports, at least; looking takes no more than a sixth of the time."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 30.0
"""Between two questions to Slurm: early in a phase, and in one that takes long."""

SILENCE_SECONDS = 120.0
"""A worker that gives no sign of life for so long is taken for lost."""

MAX_LOSSES = 3
"""How often a task may be lost with its worker: after that, it is the task that kills them."""

MAX_VAIN_ARRAYS = 3
"""Arrays on end that may go without finishing a task: after that, workers cannot work there."""

CANCEL_SECONDS = 60.0
"""Slurm kills what it cancels after KillWait, 30 s by default."""

LEAVE_SECONDS = 10.0
"""Workers leave by themselves when all is done, and are cancelled when they do not."""


class SlurmArray:
    """Runs tasks in array jobs; use as a context manager, in the main thread.

    Args:
        num_workers: elements of the arrays, at most.
        home: folder for the queue and the workers' output, on a disk that all nodes see.
        options: further options of sbatch, as in ["--partition=cpu", "--time=4:00:00"]. With --cpus-per-task=N a
            worker does N tasks at a time.
        command: starts `megalite` on a node; None is this very Python. A container's command goes here.

    Raises:
        UnavailableError: there is no Slurm here.
        UserError: an option of sbatch cannot be, or another driver is at work in this folder.
    """

    def __init__(self, num_workers: int, home: Path, options: Sequence[str] = (), command: Sequence[str] = ()):
        check_options(options, OWNED, "--sbatch")
        check_log_folder(home.absolute(), "out")
        self._num_workers = num_workers
        self._home = home.absolute()
        self._options = list(options)
        self._command = list(command or (sys.executable, "-m", "megalite"))
        self._queue = SlurmQueue(job_name("megalite-data", self._home), _notify)
        self._tasks = TaskQueue(self._home)
        self._heartbeats: dict[str, tuple[WorkerHeartbeat | None, float]] = {}
        self._written_off: set[str] = set()
        """Workers that count no more: an earlier driver's, and those that hung."""
        self._cancelled: set[str] = set()
        """By somebody else."""
        self._told = ""
        self._open = ExitStack()

    def __enter__(self) -> SlurmArray:
        self._queue.await_elements()  # Slurm answers: make no folder before
        (self._home / "logs").mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(Lease(self._home / ".lock", self._home))
            stack.enter_context(stopping_in_order())
            self._cancel_older()
            self._tasks.clear()
            self._open = stack.pop_all()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        with self._open:
            self._tasks.withdraw(closed=True)
            if error_type is not None or not self._queue.cancel_all(LEAVE_SECONDS, only="PENDING"):
                self._cancel_all()

    def run(self, folder: Path, phase: str, numbers: Sequence[int]) -> Iterator[int]:
        turn = _PhaseRun(folder, phase, set(numbers))
        self._tasks.post(folder, phase, numbers)
        try:
            while True:
                looked = time.monotonic()
                yield from turn.take_reports()
                if not turn.missing:
                    return
                self._see_failures(turn)
                if turn.question_is_due():
                    self._see_to_workers(turn)
                time.sleep(max(SECONDS_BETWEEN_LOOKS, 5 * (time.monotonic() - looked)))
        except BaseException:
            self._tasks.withdraw()
            self._cancel_all()  # they would write into a folder that is being removed
            raise

    def _cancel_older(self) -> None:
        elements = self._queue.await_elements()
        self._written_off = set(elements)
        older = [each for each in elements.values() if each.is_there]
        if older:
            _notify(f"cancelling {_count(len(older), 'worker')} of an earlier driver that was killed")
            self._cancel_all()

    def _cancel_all(self) -> None:
        if not self._queue.cancel_all(CANCEL_SECONDS):
            _notify(f"some workers could not be cancelled; do so yourself: scancel --name={self._queue.name}")

    def _see_failures(self, turn: _PhaseRun) -> None:
        """Raise what a task raised; a fault is tried elsewhere first."""
        for failure in self._tasks.failures():
            place = self._place(turn, failure.number, failure.worker)
            if failure.kind == "disk full":
                raise OSError(errno.ENOSPC, f"{failure.message} ({place})")
            if failure.kind != "fault":
                kind = DataError if failure.kind == "data" else UserError
                raise kind(f"{failure.message} ({place})")
            turn.losses[failure.number] += 1
            if turn.losses[failure.number] >= MAX_LOSSES:
                raise RuntimeError(f"{place}: failed {MAX_LOSSES} times, at last with\n{failure.message}")
            _notify(f"{place}: {failure.message.strip().splitlines()[-1]}; another worker tries it")
            self._tasks.offer_again(failure.number)

    def _see_to_workers(self, turn: _PhaseRun) -> None:
        """Give out again what was lost, and submit workers in the place of those that are gone."""
        try:
            elements = self._queue.elements()
        except NoAnswer as error:
            turn.bear_with(error)
            return
        turn.heard()
        elements = {name: each for name, each in elements.items() if name not in self._written_off}
        self._cancelled |= {name for name, each in elements.items() if each.state == "CANCELLED"}
        # whoever is gone by Slurm's answer has said all before: failures and reports are read after it
        self._see_failures(turn)
        missing = set(missing_tasks(turn.folder, turn.phase))
        for number, worker in self._tasks.claims(missing).items():
            name = worker.rpartition(".")[0]
            if worker and not (name in elements and elements[name].does_work):
                self._lose(turn, number, worker, elements.get(name))
            elif self._is_silent(worker or f"whoever claimed task {number}"):
                self._give_up(name)
                self._lose(turn, number, worker, None)
        self._tell([each for each in elements.values() if each.does_work])
        self._keep_up(turn, list(elements.values()))

    def _lose(self, turn: _PhaseRun, number: int, worker: str, element: Element | None) -> None:
        why = element.state if element is not None else "no sign of life"
        place = self._place(turn, number, worker)
        turn.losses[number] += 1
        if turn.losses[number] >= MAX_LOSSES:
            raise UserError(
                f"{place}: lost {MAX_LOSSES} times with its worker, at last by {why}. Look at the output, and give "
                "workers more memory (--sbatch=--mem=16G) or time (--sbatch=--time=8:00:00); what is done is kept"
            )
        _notify(f"{place}: its worker is gone ({why}); the task is given out again")
        self._tasks.offer_again(number)

    def _keep_up(self, turn: _PhaseRun, elements: list[Element]) -> None:
        """Submit workers until there are enough for what is left."""
        num_live = sum(each.is_there for each in elements)
        wanted = min(self._num_workers - len(self._cancelled), len(turn.missing))
        if num_live >= max(1, wanted):
            return
        if wanted < 1:
            raise UserError(
                f"all workers were cancelled ({', '.join(sorted(self._cancelled))}); what is done is kept: run the "
                "same command again to go on"
            )
        if turn.num_vain_arrays >= MAX_VAIN_ARRAYS:
            if num_live:
                return
            raise UserError(self._why_in_vain(elements))
        jobs = self._queue.submit(
            wanted - num_live, self._worker_script(), options=self._options, logs=self._home / "logs"
        )
        turn.num_vain_arrays += 1
        _notify(f"submitted {_count(wanted - num_live, 'worker')} as array {', '.join(jobs)}")

    def _worker_script(self) -> str:
        """The shell line of each element."""
        command = command_line([*self._command, "data", "work", str(self._home)])
        name = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
        return f'exec {command} --name {name} --processes "${{SLURM_CPUS_PER_TASK:-1}}"'

    def _is_silent(self, worker: str) -> bool:
        heartbeat, now = self._tasks.heartbeat(worker), time.monotonic()
        known, since = self._heartbeats.get(worker, (None, 0.0))
        if worker not in self._heartbeats or heartbeat != known:
            self._heartbeats[worker] = (heartbeat, now)
            return False
        return now - since > SILENCE_SECONDS

    def _give_up(self, name: str) -> None:
        """Cancel a worker that hangs. If it lives after all, it does no harm."""
        if name:
            self._written_off.add(name)
            self._queue.cancel(name)

    def _tell(self, live: list[Element]) -> None:
        """Say how many workers run and wait, when that has changed."""
        if not live:
            return
        waiting = [each for each in live if each.state == "PENDING"]
        if any(each.waits_for_ever for each in waiting):
            raise UserError(
                f"Slurm will not start workers as they were asked for ({waiting[0].reason}); change the options of "
                "--sbatch: `sinfo` and `scontrol show partition` show what there is"
            )
        text = f"{_count(len(live) - len(waiting), 'worker')} at work"
        if waiting:
            text += f", {len(waiting)} waiting ({waiting[0].reason})"
        if text != self._told:
            self._told = text
            _notify(text)

    def _place(self, turn: _PhaseRun, number: int, worker: str) -> str:
        """Where a task is, or was, done."""
        heartbeat = self._tasks.heartbeat(worker)
        where = f" on {heartbeat.host}, output in {heartbeat.log}" if heartbeat else ""
        return f"task {number} of {turn.folder} phase {turn.phase!r}{where}"

    def _why_in_vain(self, elements: list[Element]) -> str:
        ended = [each for each in elements if not each.is_there]
        last = f"; the last worker, {ended[-1].name} on {ended[-1].node}, ended as {ended[-1].state}" if ended else ""
        return (
            f"{MAX_VAIN_ARRAYS} arrays of workers on end did not finish a single task{last}. Their output is in "
            f"{self._home / 'logs'}: look there, then run the same command again; what is done is kept"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _notify(text: str) -> None:
    print(f"slurm: {text}", file=sys.stderr, flush=True)


class _PhaseRun:
    """What a driver remembers about one phase of a station."""

    def __init__(self, folder: Path, phase: str, missing: set[int]):
        self.folder = folder
        self.phase = phase
        self.missing = missing
        self.losses: Counter[int] = Counter()
        self.num_vain_arrays = 0
        self._began = self._last_answer = time.monotonic()
        self._last_question = -float("inf")

    def question_is_due(self) -> bool:
        """Whether to ask Slurm now; if so, it counts as asked."""
        now = time.monotonic()
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS + (now - self._began) / 20)
        if now - self._last_question < pause:
            return False
        self._last_question = now
        return True

    def take_reports(self) -> list[int]:
        """Tasks that were done since the last time."""
        done = self.missing - set(missing_tasks(self.folder, self.phase))
        self.missing -= done
        if done:
            self.num_vain_arrays = 0
            self.heard()
        return sorted(done)

    def heard(self) -> None:
        """Slurm answered, or workers' reports came."""
        self._last_answer = time.monotonic()

    def bear_with(self, error: NoAnswer) -> None:
        """Slurm did not answer. Workers go on without it, so that only a long silence of both ends the driver."""
        if time.monotonic() - self._last_answer > PATIENCE_SECONDS:
            raise gone_too_long(error) from error
