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
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megalite.checkpoint.catalog import CHECKPOINTS, latest, step_of
from megalite.checkpoint.fence import ATTEMPTS, newest_attempt
from megalite.config.load import load_config
from megalite.config.schema import Config, SlurmConfig
from megalite.errors import EXIT_DONE, EXIT_FAULT, EXIT_REQUEUE, UserError
from megalite.slurm.attempt import Attempt, Job
from megalite.slurm.cluster import ClusterConfig, load_cluster
from megalite.slurm.controller import Controller
from megalite.slurm.deputy import Deputy
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.hosts import Hosts, choose
from megalite.slurm.node_check import read_reports, unfit
from megalite.slurm.outcome import Next, Outcome
from megalite.slurm.render import job_name
from megalite.slurm.watch import Patience

NODE_CHECK_SECONDS = 120.0

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


@dataclass
class Counts:
    """What has gone wrong so far, over all jobs of the chain."""

    failures_without_progress: int = 0
    last_step: int = 0


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
        state = folder.read_state()
        self._job = Job(job, folder, cluster, state["ranks_per_node"], patience)
        self._num_nodes: int = state["num_nodes"]
        self._counts = Counts(state.get("failures_without_progress", 0), state.get("last_step", 0))
        self._deputy = Deputy(folder, job)
        self._bad: dict[str, str] = {}
        """Nodes that failed in this job, and why."""

    def run(self) -> int:
        """Run to the end of this job; its exit code."""
        self._folder.alive.touch()
        try:
            return self._run()
        finally:
            self._deputy.dismiss()

    def _run(self) -> int:
        folder = self._folder
        if folder.finished.exists():
            print("the run is finished already", flush=True)
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
                return self._leave_to_next(str(error))
            number = self._next_attempt()
            self._event("attempt", attempt=number, nodes=list(hosts.used), spares=list(hosts.spares))
            folder.write_state(attempt=number, nodes=list(hosts.used), status="running")
            self._deputy.post(hosts, os.environ.get("SLURMD_NODENAME", ""))
            attempt = Attempt(self._job, number, hosts, self._controller)
            outcome = attempt.run(self._look)
            end = {"next": outcome.next.name, "why": outcome.why, "nodes": list(outcome.nodes)}
            self._event("end", attempt=number, last_step=attempt.last_step(), **end)
            code = self._after(outcome)
            if code is not None:
                return code

    def _next_attempt(self) -> int:
        """A number above all that ranks have taken and all that they were given."""
        given = self._folder.read_state().get("attempt", 0)
        return max(given, newest_attempt(self._folder.run_dir / ATTEMPTS)) + 1

    def _look(self) -> int | None:
        """Give a sign of life; a signal that ranks should get."""
        self._folder.alive.touch()
        return self._signals.take()

    def _after(self, outcome: Outcome) -> int | None:
        """What an attempt's end means for this job: its exit code, or None for another attempt."""
        if outcome.next is Next.FINISHED:
            self._folder.finished.touch()
            return self._end_chain("finished", outcome.why, EXIT_DONE)
        if outcome.next is Next.GIVE_UP:
            print(outcome.detail, flush=True)
            return self._end_chain("gave up", f"{outcome.why}: {outcome.detail}", EXIT_FAULT)
        if outcome.next is Next.STOPPED or self._signals.terminated or self._signals.time_limit:
            return self._after_stop(outcome)
        print(f"{outcome.why}\n{outcome.detail}", flush=True)
        if self._is_stuck():
            number = self._counts.failures_without_progress
            why = f"{number} failures without a new checkpoint, the last one: {outcome.why}"
            return self._end_chain("gave up", why, EXIT_FAULT)
        self._bad |= dict.fromkeys(outcome.nodes, outcome.why)
        time.sleep(SECONDS_AFTER_NODE_FAILURE)
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
        newest = latest(self._folder.run_dir / CHECKPOINTS)
        step = step_of(newest) if newest is not None else 0
        counts = self._counts
        counts.failures_without_progress = 1 if step > counts.last_step else counts.failures_without_progress + 1
        counts.last_step = step
        self._folder.write_state(failures_without_progress=counts.failures_without_progress, last_step=step)
        return counts.failures_without_progress >= self._config.slurm.max_failures

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
        reports = read_reports(self._check_nodes(nodes), nodes)
        problems = unfit(reports, self._cluster.gpus_per_node if self._config.train.device != "cpu" else 0)
        for node, why in problems.items():
            self._event("unfit", node=node, why=why)
        self._bad |= problems
        fit = [node for node in nodes if node not in problems]
        return choose(fit, {node: report.address for node, report in reports.items() if report}, self._num_nodes)

    def _check_nodes(self, nodes: list[str]) -> Path:
        """Run the check on each node; the folder of the reports."""
        folder = self._folder.path / "nodes" / self._job.number
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json"):
            path.unlink()
        command = [
            *("srun", "--job-name=node-check", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"),
            *(f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--overlap", "--export=ALL"),
            *(sys.executable, "-m", "megalite.slurm.node_check", str(folder)),
        ]
        with open(folder / "srun.log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            try:
                process.wait(NODE_CHECK_SECONDS)
            except subprocess.TimeoutExpired:
                step = self._controller.step_of(self._job.number, "node-check")
                self._controller.cancel(*([step] if step else []))
                process.kill()
                process.wait()
        return folder

    def _submit_next(self) -> None:
        """Put the next job of the chain behind this one, unless it is there already."""
        name = job_name(self._folder.run_dir)
        waiting = [job for job in self._controller.live_jobs(name) if job != self._job.number]
        jobs = self._folder.read_state().get("num_jobs", 1)
        if not waiting and jobs < self._cluster.max_jobs:
            waiting = [self._controller.submit(str(self._folder.script))]
        self._folder.write_state(job=self._job.number, next_job=waiting[0] if waiting else None, num_jobs=jobs + 1)

    def _leave_to_next(self, why: str) -> int:
        """End this job; the next one of the chain goes on, on other nodes than those that failed."""
        next_job = self._folder.read_state().get("next_job")
        if next_job is None:
            return self._end_chain(
                "gave up", f"{why}; and max_jobs in the cluster profile allows no further job", EXIT_FAULT
            )
        excluded = sorted(self._bad)
        if excluded and not self._controller.exclude_nodes(next_job, excluded):
            excluded = []
        self._event("handed on", why=why, next_job=next_job, excluded=excluded)
        self._folder.write_state(status="waiting")
        return EXIT_DONE

    def _end_chain(self, status: str, why: str, code: int) -> int:
        """End the run's jobs for now or for good."""
        name = job_name(self._folder.run_dir)
        self._controller.cancel(*(job for job in self._controller.live_jobs(name) if job != self._job.number))
        self._event(status, why=why)
        self._folder.write_state(status=status, why=why, next_job=None)
        return code

    def _event(self, kind: str, **details: object) -> None:
        self._folder.add_event(kind, job=self._job.number, **details)
        print(time.strftime("%F %T"), kind, *(f"{name}={value}" for name, value in details.items()), flush=True)


def main() -> None:
    """Entry of the batch script: `python -m megalite.slurm.supervise RUN`."""
    folder = LaunchFolder(Path(sys.argv[1]))
    config, cluster = load_config(folder.config), load_cluster(folder.cluster)
    sys.exit(Supervisor(folder, config, cluster, os.environ["SLURM_JOB_ID"]).run())


if __name__ == "__main__":
    main()
