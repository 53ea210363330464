"""The supervisor: the one process of a batch job that decides, from its first second to its last.

    job starts -> put the next job of the chain into the queue, an agent on each node
               -> attempt: nodes that are there -> checked -> in the order of switches -> ranks -> watched
                    ended well          finished: the next job is taken out of the queue
                    asked to stop       by the time limit: the next job goes on; by a person: the chain ends
                    failed              another attempt, without the node that failed; spares step in
                    no progress         after some failures without a new checkpoint the chain ends, and says why
                    cut off             this very node cannot reach the others: watchdogs end the job from there

The next job waits in the queue all the time (dependency=singleton), so the run goes on within seconds of a time limit,
and also when this job's own node dies: no one has to be left to resubmit it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from megalite.checkpoint.fence import ATTEMPTS, newest_attempt
from megalite.config.load import load_config
from megalite.config.schema import Config, SlurmConfig
from megalite.errors import EXIT_DONE, EXIT_FAULT, EXIT_REQUEUE, UserError
from megalite.report.json_lines import current_kind
from megalite.slurm.agents import Agents
from megalite.slurm.attempt import LOST_SECONDS, Attempt, Job
from megalite.slurm.cluster import ClusterConfig, load_cluster
from megalite.slurm.controller import Controller, NodeStatePoller
from megalite.slurm.evaluate import EvaluationJobs
from megalite.slurm.folder import EventLog, LaunchFolder, say
from megalite.slurm.network_partition import find_partition
from megalite.slurm.node_selection import NodeAssignment, NodeSelector, RefusedByNodes
from megalite.slurm.outcome import AttemptOutcome, NextAction
from megalite.slurm.render import job_name
from megalite.slurm.stall import StallTracker
from megalite.slurm.storage import POLL_SECONDS, find_fault, retry_on_disk_fault
from megalite.slurm.succession import find_end_of_chain
from megalite.slurm.watchdog import Watchdogs
from megalite.train.failures import Failures
from megalite.train.heartbeat import Beat, Heartbeat
from megalite.train.watch import Patience, find_stragglers

SECONDS_BETWEEN_STARTS = 2.0
"""Of the agents, when Slurm does not start them."""


class Signals:
    """What was asked of this process, remembered until the loop looks."""

    def __init__(self) -> None:
        self.time_limit = False
        self.terminated = False
        self._is_to_pass_on = False
        signal.signal(signal.SIGUSR1, self._remember)
        signal.signal(signal.SIGTERM, self._remember)

    @property
    def any(self) -> bool:
        """Whether this job is to end."""
        return self.time_limit or self.terminated

    def take(self) -> bool:
        """Whether ranks should be asked to save and stop now; once for each signal."""
        taken, self._is_to_pass_on = self._is_to_pass_on, False
        return taken

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.time_limit = self.time_limit or number == signal.SIGUSR1
        self.terminated = self.terminated or number == signal.SIGTERM
        self._is_to_pass_on = True


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
        settings: SlurmConfig = config.slurm
        self._log = EventLog(folder, job, settings.start_seconds)
        self._controller = Controller(lambda why: self._log.waits_for(f"Slurm's controller ({why})"))
        self._signals = Signals()
        patience = Patience(settings.beat_seconds, settings.start_seconds, settings.step_seconds)
        state = folder.read_state()
        self._job = Job(job, folder, cluster, state["ranks_per_node"], patience)
        self._own_node = os.environ.get("SLURMD_NODENAME", "")
        self._failures = Failures(state.get("failures_without_progress", 0), state.get("last_step", 0))
        self._watchdogs = Watchdogs(folder, job)
        self._agents = Agents(folder, job, cluster, self._controller)
        self._evaluations = EvaluationJobs(folder, cluster.evaluation, self._controller)
        self._node_states = NodeStatePoller(self._controller, settings.node_seconds)
        self._selector = NodeSelector(
            folder,
            config,
            cluster,
            job,
            agents=self._agents,
            node_states=self._node_states,
            num_nodes=state["num_nodes"],
            tell=self._log.event,
        )
        self._stragglers: dict[int, str] = {}
        """Slow ranks of the attempt, and what is known of them."""
        self._stall_tracker = StallTracker()
        self._has_trained = False
        """Whether this job has had an attempt."""

    def run(self) -> int:
        """Run to the end of this job; its exit code."""
        ended = find_end_of_chain(self._folder, self._job.number, self._controller)
        if ended is not None:
            return self._end_chain(*ended, EXIT_REQUEUE)
        heartbeat = Heartbeat(self._folder.alive)  # beats while this process waits for Slurm, too
        try:
            code = self._run()
        except OSError as error:  # the disk, for longer than it is waited for
            say(f"gave up: {self._folder.run_dir}: {error}")
            self._cancel_others()
            code = EXIT_FAULT
        finally:
            heartbeat.stop()
        if not self._is_cut_off():  # else watchdogs end this job
            self._watchdogs.stop()
            self._agents.close()
        return code

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
        nodes = self._controller.nodes_of(self._job.number)
        self._log.event("job", nodes=nodes)
        while not self._is_replaced():
            try:
                assignment = self._select_nodes(nodes)
            except UserError as error:
                return self._without_nodes(error)
            number = self._next_attempt()
            self._log.event("attempt", attempt=number, nodes=list(assignment.used), spares=list(assignment.spares))
            self._log.state(attempt=number, nodes=list(assignment.used), status="running", stragglers=[])
            self._has_trained = True
            code = self._after(self._train(Attempt(self._job, number, assignment, self._agents)))
            if code is not None:
                return code
        return EXIT_FAULT

    def _select_nodes(self, nodes: Sequence[str]) -> NodeAssignment:
        """Nodes for the next attempt. Agents are started, if they do not run already, and watchdogs too."""
        began = time.monotonic()
        while True:
            if not self._agents.is_running:
                self._agents.start(nodes)
            self._watchdogs.start(self._agents.nodes, self._own_node, self._agents.channel.home)
            self._log.waits_for("nodes: the agents on them, and the check of each")
            there = self._selector.gather(lambda: not self._signals.any)
            if self._agents.is_running or self._signals.any:
                return self._selector.select(there, lambda: not self._signals.any)
            why = self._agents.words().strip().rpartition("\n")[2]
            if time.monotonic() - began > self._config.slurm.start_seconds:
                raise UserError(f"agents could not be started on {', '.join(self._agents.nodes)}: {why}")
            self._log.waits_for(f"Slurm to start agents ({why})")
            time.sleep(SECONDS_BETWEEN_STARTS)

    def _without_nodes(self, error: UserError) -> int:
        """No attempt can begin in this job; its exit code."""
        if self._signals.any:  # scancel also ends the question that is being asked
            return self._after_stop(AttemptOutcome(NextAction.STOPPED, str(error)))
        if self._is_cut_off():
            return self._hand_over(str(error))
        if isinstance(error, RefusedByNodes):
            return self._end_chain("gave up", str(error), EXIT_FAULT)
        return self._leave_to_next(str(error))

    def _train(self, attempt: Attempt) -> AttemptOutcome:
        """Watch an attempt to its end."""
        self._stragglers, self._stall_tracker = {}, StallTracker()
        try:
            outcome = attempt.run(self._on_poll)
        except OSError as error:  # the disk, for longer than it is waited for
            outcome = AttemptOutcome(NextAction.RESTART, f"the run's folder: {error}")
        if attempt.is_running:
            self._log.event("trouble", attempt=attempt.number, why=outcome.why)
            attempt.end()
        outcome = self._attribute_to_disk(outcome)
        for step, job in self._evaluations.submit_last() if outcome.next is not NextAction.RESTART else ():
            self._note_evaluation(step, job)
        end = {"next": outcome.next.name, "why": outcome.why, "nodes": list(outcome.nodes)}
        self._log.event("end", attempt=attempt.number, last_step=attempt.last_step(), **end)
        return outcome

    def _on_poll(self, attempt: Attempt, beats: Mapping[int, Beat]) -> bool:
        """Name slow ranks and lost nodes, have new checkpoints evaluated; whether ranks are to save and stop."""
        for rank, why in find_stragglers(beats).items():
            if rank not in self._stragglers:
                self._stragglers[rank] = f"rank {rank} on {attempt.node_of(rank)}: {why}"
                self._log.event("straggler", attempt=attempt.number, rank=rank, node=attempt.node_of(rank), why=why)
                self._log.state(stragglers=list(self._stragglers.values()))
        stall, ended_stall = self._stall_tracker.update(beats, self._agents.channel.clock())
        if stall is not None:
            self._log.waits_for(stall.why, stall.since)
        if ended_stall is not None:
            self._log.event("standstill", attempt=attempt.number, **ended_stall)
        lost = self._node_states.newly_unresponsive(self._agents.nodes)
        used = [node for node in lost if node in attempt.assignment.used]
        if used:
            retry_on_disk_fault(self._folder.save.touch, self._config.slurm.start_seconds)
            self._log.event("unreached", attempt=attempt.number, nodes=used, why="no answer to Slurm; saving")
        for step, job in self._evaluations.submit_new():
            self._note_evaluation(step, job)
        return self._signals.take()

    def _note_evaluation(self, step: int, job: str) -> None:
        self._log.event("evaluation", step=step, evaluation_job=job)
        self._log.state(evaluated_step=step)

    def _next_attempt(self) -> int:
        """A number above all that ranks have taken and all that they were given."""
        given = self._folder.read_state().get("attempt", 0)
        return max(given, newest_attempt(self._folder.run_dir / ATTEMPTS)) + 1

    def _after(self, outcome: AttemptOutcome) -> int | None:
        """What an attempt's end means for this job: its exit code, or None for another attempt."""
        if self._is_replaced():
            return EXIT_FAULT
        if outcome.next is NextAction.FINISHED:
            self._folder.finished.touch()
            return self._end_chain("finished", outcome.why, EXIT_DONE)
        if outcome.next is NextAction.GIVE_UP:
            say(outcome.detail)
            return self._end_chain("gave up", f"{outcome.why}: {outcome.detail}", EXIT_FAULT)
        if outcome.next is NextAction.STOPPED or self._signals.any:
            return self._after_stop(outcome)
        say(f"{outcome.why}\n{outcome.detail}")
        if self._is_cut_off():
            return self._hand_over(outcome.why)
        code = self._wait_for_disk()
        if code is not None:
            return code
        if self._is_stuck():
            number = self._failures.in_a_row
            why = f"{number} failures without a new checkpoint, the last one: {outcome.why}"
            return self._end_chain("gave up", why, EXIT_FAULT)
        self._selector.bad |= dict.fromkeys(outcome.nodes, outcome.why)
        return None

    def _attribute_to_disk(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """An attempt that failed while the disk was full or closed failed because of that; what else is written down of
        it may be cut short, and no node is to blame."""
        fault = find_fault(self._folder.run_dir)
        if fault is None or outcome.next not in (NextAction.RESTART, NextAction.GIVE_UP):
            return outcome
        return AttemptOutcome(NextAction.RESTART, fault, f"{outcome.why}\n{outcome.detail}")

    def _wait_for_disk(self) -> int | None:
        """Wait until the disk takes a checkpoint; this job's exit code if that was in vain."""
        began = time.monotonic()
        fault = why = find_fault(self._folder.run_dir)
        if fault is not None:
            self._log.waits_for(f"the disk: {fault}")
        while fault is not None:
            if self._signals.any:
                return self._after_stop(AttemptOutcome(NextAction.RESTART, fault))
            if time.monotonic() - began > self._config.slurm.start_seconds:
                return self._end_chain("gave up", fault, EXIT_FAULT)
            time.sleep(POLL_SECONDS)
            fault = find_fault(self._folder.run_dir)
        if why is not None:
            self._log.event("waited_for_disk", why=why, seconds=round(time.monotonic() - began, 1))
        return None

    def _is_cut_off(self) -> bool:
        """Whether it is this node that the others do not hear."""
        with suppress(OSError):
            if self._agents.nodes:
                partition = find_partition(self._agents.reports, self._agents.channel.clock(), limit=LOST_SECONDS)
                return partition is not None and self._own_node in partition.nodes
        return False

    def _hand_over(self, why: str) -> int:
        """Let watchdogs end this job: Slurm cannot be reached from here."""
        self._log.event("cut_off", why=why, node=self._own_node)
        self._log.state(status="waiting")
        self._agents.channel.hand_over(why, [self._own_node])
        return EXIT_FAULT

    def _after_stop(self, outcome: AttemptOutcome) -> int:
        """End the chain if a person asked for the end, else leave the run to the next job; well saved or not."""
        if self._folder.stop.exists():
            return self._end_chain("stopped", f"{self._folder.stop.name} was found; {outcome.why}", EXIT_REQUEUE)
        is_ended = self._signals.terminated and not self._signals.time_limit
        if is_ended and self._controller.was_cancelled(self._job.number):
            return self._end_chain("cancelled", f"scancel; {outcome.why}", EXIT_REQUEUE)
        reason = "the time limit is near" if self._signals.time_limit else "asked to stop"
        return self._leave_to_next(f"{reason}; {outcome.why}")

    def _is_stuck(self) -> bool:
        """Count a failure; whether there have been too many since the run last got anywhere."""
        number = self._failures.add(self._folder.run_dir)
        self._log.state(failures_without_progress=number, last_step=self._failures.last_step)
        return number >= self._config.slurm.max_failures

    def _submit_next(self) -> None:
        """Put the next job of the chain behind this one, unless it is there already."""
        name = job_name(self._folder.run_dir)
        waiting = self._controller.waiting_jobs(name)  # not one that Slurm still cleans up after, on a dead node
        jobs = self._folder.read_state().get("num_jobs", 1)
        if not waiting and jobs < self._cluster.max_jobs:
            waiting = [self._controller.submit(str(self._folder.script))]
        next_job = waiting[0] if waiting else None
        self._log.state(job=self._job.number, next_job=next_job, num_jobs=jobs + 1)

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
        excluded = sorted(self._selector.bad)
        if excluded and not self._controller.exclude_nodes(next_job, excluded):
            excluded = []
        if not (self._has_trained or excluded) and self._is_stuck():  # the next one would get the same nodes
            return self._end_chain("gave up", f"{self._failures.in_a_row} jobs could not begin: {why}", EXIT_FAULT)
        self._log.event("handed_on", why=why, next_job=next_job, excluded=excluded)
        self._log.state(status="waiting")
        return EXIT_DONE

    def _end_chain(self, status: str, why: str, code: int) -> int:
        """End the run's jobs for now or for good."""
        self._cancel_others()
        self._log.event(current_kind(status), why=why)
        self._log.state(status=status, why=why, next_job=None)
        return code

    def _cancel_others(self) -> None:
        name = job_name(self._folder.run_dir)
        self._controller.cancel(*(job for job in self._controller.live_jobs(name) if job != self._job.number))


def main() -> None:
    """Entry of the batch script: `python -m megalite.slurm.supervise RUN`."""
    folder = LaunchFolder(Path(sys.argv[1]))

    def supervisor() -> Supervisor:
        config, cluster = load_config(folder.config), load_cluster(folder.cluster)
        return Supervisor(folder, config, cluster, os.environ["SLURM_JOB_ID"])

    sys.exit(retry_on_disk_fault(supervisor, SlurmConfig().start_seconds).run())


if __name__ == "__main__":
    main()
