"""The supervisor: the one process of a batch job that decides, from its first second to its last.

    job starts -> put the next job of the chain into the queue
               -> attempt: good nodes -> checked -> in the order of switches -> ranks -> watched
                    ended well          finished: the next job is taken out of the queue
                    asked to stop       by the time limit: the next job goes on; by a person: the chain ends
                    failed              another attempt, without the node that failed; spares step in
                    no progress         after some failures without a new checkpoint the chain ends, and says why

The next job waits in the queue all the time (dependency=singleton), so the run goes on within seconds of a time limit,
and also when this job's own node dies: no one has to be left to resubmit it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from megalite.checkpoint.fence import ATTEMPTS, newest_attempt
from megalite.config.load import load_config
from megalite.config.schema import Config, SlurmConfig
from megalite.errors import EXIT_DONE, EXIT_FAULT, EXIT_REQUEUE, UserError
from megalite.slurm.attempt import Attempt, Job
from megalite.slurm.cluster import ClusterConfig, load_cluster
from megalite.slurm.controller import Controller
from megalite.slurm.deputy import Deputy
from megalite.slurm.evaluate import Evaluations
from megalite.slurm.fitness import check_nodes
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.hosts import Hosts, choose
from megalite.slurm.outcome import Next, Outcome
from megalite.slurm.reach import Reach
from megalite.slurm.render import job_name
from megalite.slurm.room import SECONDS_BETWEEN_LOOKS, lack_of_room, note
from megalite.train.failures import Failures
from megalite.train.heartbeat import Beat, Heart
from megalite.train.watch import Patience, find_stragglers

SECONDS_AFTER_NODE_FAILURE = 1.0
"""Slurm needs a moment to take a lost node out of the job."""


class Signals:
    """What was asked of this process, remembered until the loop looks."""

    def __init__(self) -> None:
        self.time_limit = False
        self.terminated = False
        self._to_pass_on: int | None = None
        signal.signal(signal.SIGUSR1, self._remember)
        signal.signal(signal.SIGTERM, self._remember)

    def take(self) -> int | None:
        """A signal that ranks should get now, once."""
        number, self._to_pass_on = self._to_pass_on, None
        return number

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.time_limit = self.time_limit or number == signal.SIGUSR1
        self.terminated = self.terminated or number == signal.SIGTERM
        self._to_pass_on = signal.SIGUSR1  # to ranks both mean: finish the step, save, stop


class Supervisor:
    """Runs attempts until the run is finished, stopped or beyond help.

    Args:
        folder: of the run.
        config: of the run.
        cluster: its profile.
        job: number of the batch job that this is.
    """

    def __init__(self, folder: LaunchFolder, config: Config, cluster: ClusterConfig, job: str):
        self._folder, self._config, self._cluster = folder, config, cluster
        self._controller = Controller()
        self._signals = Signals()
        settings: SlurmConfig = config.slurm
        patience = Patience(settings.beat_seconds, settings.start_seconds, settings.step_seconds)
        self._patience_seconds = settings.start_seconds
        state = folder.read_state()
        self._job = Job(job, folder, cluster, state["ranks_per_node"], patience)
        self._num_nodes: int = state["num_nodes"]
        self._failures = Failures(state.get("failures_without_progress", 0), state.get("last_step", 0))
        self._deputy = Deputy(folder, job)
        self._evaluations = Evaluations(folder, cluster.evaluation, self._controller)
        self._reach = Reach(self._controller, settings.node_seconds)
        self._stragglers: dict[int, str] = {}
        """Slow ranks of the attempt, and what is known of them."""
        self._bad: dict[str, str] = {}
        """Nodes that failed in this job, and why."""

    def run(self) -> int:
        """Run to the end of this job; its exit code."""
        heart = Heart(self._folder.alive)  # beats while this process waits for Slurm, too
        try:
            return self._run()
        finally:
            self._deputy.dismiss()
            heart.stop()

    def _run(self) -> int:
        folder = self._folder
        if folder.finished.exists():
            say("the run is finished already")
            return EXIT_DONE
        if folder.stop.exists():
            return self._end_chain(
                "stopped", f"{folder.stop} is there; remove it and launch again to go on", EXIT_REQUEUE
            )
        self._submit_next()
        self._event("job", nodes=self._controller.nodes_of(self._job.number))
        while True:
            try:
                hosts = self._prepare_hosts()
            except UserError as error:
                if self._signals.terminated:  # scancel also ends the question that is being asked
                    return self._after_stop(Outcome(Next.STOPPED, str(error)))
                return self._leave_to_next(str(error))
            number = self._next_attempt()
            self._event("attempt", attempt=number, nodes=list(hosts.used), spares=list(hosts.spares))
            self._write_state(attempt=number, nodes=list(hosts.used), status="running", stragglers=[])
            self._deputy.post(hosts, os.environ.get("SLURMD_NODENAME", ""))
            outcome = self._train(Attempt(self._job, number, hosts, self._controller))
            code = self._after(outcome)
            if code is not None:
                return code

    def _train(self, attempt: Attempt) -> Outcome:
        """Watch an attempt to its end."""
        self._stragglers = {}
        outcome = attempt.run(self._look)
        if attempt.is_running:
            self._event("trouble", attempt=attempt.number, why=outcome.why)
            attempt.end()
        self._evaluate(at_once=True)
        outcome = self._judge_room(outcome)
        end = {"next": outcome.next.name, "why": outcome.why, "nodes": list(outcome.nodes)}
        self._event("end", attempt=attempt.number, last_step=attempt.last_step(), **end)
        return outcome

    def _look(self, attempt: Attempt, beats: Mapping[int, Beat]) -> int | None:
        """Name slow ranks and lost nodes, have new checkpoints evaluated; a signal that ranks should get."""
        for rank, why in find_stragglers(beats).items():
            if rank not in self._stragglers:
                self._stragglers[rank] = f"rank {rank} on {attempt.node_of(rank)}: {why}"
                self._event("straggler", attempt=attempt.number, rank=rank, node=attempt.node_of(rank), why=why)
                self._write_state(stragglers=list(self._stragglers.values()))
        lost = self._reach.newly_lost(attempt.hosts.used)
        if lost:
            note(self._folder.save.touch, self._patience_seconds)
            self._event("unreached", attempt=attempt.number, nodes=lost, why="no answer to Slurm; saving")
        self._evaluate()
        return self._signals.take()

    def _evaluate(self, *, at_once: bool = False) -> None:
        """Submit a job for each new checkpoint."""
        for step, job in self._evaluations.submit_new(at_once=at_once):
            self._event("evaluation", step=step, evaluation_job=job)
            self._write_state(evaluated_step=step)

    def _next_attempt(self) -> int:
        """A number above all that ranks have taken and all that they were given."""
        given = self._folder.read_state().get("attempt", 0)
        return max(given, newest_attempt(self._folder.run_dir / ATTEMPTS)) + 1

    def _after(self, outcome: Outcome) -> int | None:
        """What an attempt's end means for this job: its exit code, or None for another attempt."""
        if self._is_replaced():
            return EXIT_FAULT
        if outcome.next is Next.FINISHED:
            self._folder.finished.touch()
            return self._end_chain("finished", outcome.why, EXIT_DONE)
        if outcome.next is Next.GIVE_UP:
            say(outcome.detail)
            return self._end_chain("gave up", f"{outcome.why}: {outcome.detail}", EXIT_FAULT)
        if outcome.next is Next.STOPPED or self._signals.terminated or self._signals.time_limit:
            return self._after_stop(outcome)
        say(f"{outcome.why}\n{outcome.detail}")
        code = self._wait_for_room()
        if code is not None:
            return code
        if self._is_stuck():
            number = self._failures.in_a_row
            why = f"{number} failures without a new checkpoint, the last one: {outcome.why}"
            return self._end_chain("gave up", why, EXIT_FAULT)
        self._bad |= dict.fromkeys(outcome.nodes, outcome.why)
        time.sleep(SECONDS_AFTER_NODE_FAILURE)
        return None

    def _judge_room(self, outcome: Outcome) -> Outcome:
        """An attempt that failed while the disk was full failed because of that; what else is written down of it may be
        cut short, and no node is to blame."""
        missing = lack_of_room(self._folder.run_dir)
        if missing is None or outcome.next not in (Next.RESTART, Next.GIVE_UP):
            return outcome
        return Outcome(Next.RESTART, missing, f"{outcome.why}\n{outcome.detail}")

    def _wait_for_room(self) -> int | None:
        """Wait until the disk has room for a checkpoint; this job's exit code if that was in vain."""
        began = time.monotonic()
        missing = why = lack_of_room(self._folder.run_dir)
        while missing is not None:
            if self._signals.time_limit or self._signals.terminated:
                return self._after_stop(Outcome(Next.RESTART, missing))
            if time.monotonic() - began > self._patience_seconds:
                return self._end_chain("gave up", missing, EXIT_FAULT)
            time.sleep(SECONDS_BETWEEN_LOOKS)
            missing = lack_of_room(self._folder.run_dir)
        if why is not None:
            self._event("waited for room", why=why, seconds=round(time.monotonic() - began, 1))
        return None

    def _after_stop(self, outcome: Outcome) -> int:
        """End the chain if a person asked for the end, else leave the run to the next job; well saved or not."""
        if self._folder.stop.exists():
            return self._end_chain("stopped", f"{self._folder.stop.name} was found; {outcome.why}", EXIT_REQUEUE)
        if self._signals.terminated and not self._signals.time_limit and self._was_cancelled():
            return self._end_chain("cancelled", f"scancel; {outcome.why}", EXIT_REQUEUE)
        reason = "the time limit is near" if self._signals.time_limit else "asked to stop"
        return self._leave_to_next(f"{reason}; {outcome.why}")

    def _was_cancelled(self) -> bool:
        """Whether a person ended this job; a preempted one goes on."""
        return self._controller.job_state(self._job.number).startswith(("CANCELLED", "COMPLETING"))

    def _is_stuck(self) -> bool:
        """Count a failure; whether there have been too many since the run last got anywhere."""
        number = self._failures.add(self._folder.run_dir)
        self._write_state(failures_without_progress=number, last_step=self._failures.last_step)
        return number >= self._config.slurm.max_failures

    def _prepare_hosts(self) -> Hosts:
        """Nodes for the next attempt: in order by Slurm, fit by their own measurements, not the ones that failed.

        Raises:
            UserError: too few are left.
        """
        nodes = self._controller.good_nodes(self._controller.nodes_of(self._job.number))
        trusted = [node for node in nodes if node not in self._bad]
        if len(trusted) >= self._num_nodes:
            nodes = trusted  # a node that failed gets another chance only where there is no other
        if not self._config.slurm.check_nodes:
            return choose(nodes, {}, self._num_nodes)
        gpus = self._cluster.gpus_per_node if self._config.train.device != "cpu" else 0
        reports = self._folder.path / "nodes" / self._job.number
        verdict = check_nodes(reports, nodes, gpus, self._controller, self._job.number)
        for node, why in verdict.unfit.items():
            self._event("unfit", node=node, why=why)
        for pair, why in verdict.slow_pairs.items():
            self._event("slow link", nodes=list(pair), why=why)
        self._bad |= verdict.unfit
        return choose([node for node in nodes if node not in verdict.unfit], verdict.addresses, self._num_nodes)

    def _submit_next(self) -> None:
        """Put the next job of the chain behind this one, unless it is there already."""
        name = job_name(self._folder.run_dir)
        waiting = self._controller.waiting_jobs(name)  # not one that Slurm still cleans up after, on a dead node
        jobs = self._folder.read_state().get("num_jobs", 1)
        if not waiting and jobs < self._cluster.max_jobs:
            waiting = [self._controller.submit(str(self._folder.script))]
        self._write_state(job=self._job.number, next_job=waiting[0] if waiting else None, num_jobs=jobs + 1)

    def _is_replaced(self) -> bool:
        """Whether the next job runs already: Slurm lost sight of this node, and believes that this job has ended."""
        if self._folder.read_state().get("job") == self._job.number:
            return False
        say("another job has taken the run over")
        return True

    def _leave_to_next(self, why: str) -> int:
        """End this job; the next one of the chain goes on, on other nodes than those that failed."""
        if self._is_replaced():
            return EXIT_FAULT
        next_job = self._folder.read_state().get("next_job")
        if next_job is None:
            return self._end_chain(
                "gave up", f"{why}; and max_jobs in the cluster profile allows no further job", EXIT_FAULT
            )
        if next_job not in self._controller.live_jobs(job_name(self._folder.run_dir)):
            return self._end_chain(
                "stopped", f"{why}; the next job, {next_job}, was cancelled; launch again to go on", EXIT_REQUEUE
            )
        excluded = sorted(self._bad)
        if excluded and not self._controller.exclude_nodes(next_job, excluded):
            excluded = []
        self._event("handed on", why=why, next_job=next_job, excluded=excluded)
        self._write_state(status="waiting")
        return EXIT_DONE

    def _end_chain(self, status: str, why: str, code: int) -> int:
        """End the run's jobs for now or for good."""
        name = job_name(self._folder.run_dir)
        self._controller.cancel(*(job for job in self._controller.live_jobs(name) if job != self._job.number))
        self._event(status, why=why)
        self._write_state(status=status, why=why, next_job=None)
        return code

    def _event(self, kind: str, **details: object) -> None:
        note(lambda: self._folder.add_event(kind, job=self._job.number, **details), self._patience_seconds)
        say(" ".join([time.strftime("%F %T"), kind, *(f"{name}={value}" for name, value in details.items())]))

    def _write_state(self, **changes: object) -> None:
        note(lambda: self._folder.write_state(**changes), self._patience_seconds)


def say(text: str) -> None:
    """Print to the job's log, which may be on a disk that is full."""
    with suppress(OSError):
        print(text, flush=True)


def main() -> None:
    """Entry of the batch script: `python -m megalite.slurm.supervise RUN`."""
    folder = LaunchFolder(Path(sys.argv[1]))
    config, cluster = load_config(folder.config), load_cluster(folder.cluster)
    sys.exit(Supervisor(folder, config, cluster, os.environ["SLURM_JOB_ID"]).run())


if __name__ == "__main__":
    main()
