"""One attempt to train: ranks that agents start, watched until they end or have to be ended.

start -> four times a second: have ranks ended? is it asked to stop? does every rank live and go on? does every node?
      -> ended by itself                                       `outcome.find_outcome`
      -> a rank is frozen, nothing moves, a node is lost       stacks of all ranks, then SIGKILL

Nothing here asks Slurm, so its controller may be away all the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megalite.slurm.agents import Agents, python_command
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.control_channel import AgentReport, Workload
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.network_partition import find_partition
from megalite.slurm.node_selection import NodeAssignment
from megalite.slurm.outcome import AttemptOutcome, NextAction, RankExit, find_outcome, read_errors
from megalite.slurm.storage import STORAGE_FAULTS
from megalite.train.fork_server import RANK_MEMORY
from megalite.train.heartbeat import DONE, Beat, read_beats
from megalite.train.place import ATTEMPT_VARIABLE
from megalite.train.run_folder import LOGS
from megalite.train.watch import Patience, find_trouble

POLL_SECONDS = 0.25

RANKS_A_SECOND = 1000
"""Heartbeats that are read in a second, at most: those of many ranks are looked at less often."""

NUM_NAMED = 8

FIRST_PORT, NUM_PORTS = 20000, 20000

GRACE_SECONDS = 2.0
"""After a rank's end that tells no cause: who failed first may not have been seen yet."""

SUSPECT_SECONDS, LOST_SECONDS = 2.5, 6.0
"""Silence of a node when ranks have lost a connection: from which on it is waited for, and from which on it is lost."""

WAIT_SECONDS = 60.0
"""After the first rank's end, well as it may be, the others have so long."""


@dataclass(frozen=True)
class Job:
    """What a supervisor knows of the job it runs in."""

    number: str
    folder: LaunchFolder
    cluster: ClusterConfig
    ranks_per_node: int
    patience: Patience


class Attempt:
    """An attempt on some nodes.

    Args:
        job: in which it runs.
        number: of the attempt, higher than all before.
        assignment: nodes in the order of their ranks.
        agents: of the job's nodes.
    """

    def __init__(self, job: Job, number: int, assignment: NodeAssignment, agents: Agents):
        self.number = number
        self.assignment = assignment
        self._job, self._agents = job, agents
        self.folder = job.folder.attempt(number)
        self.world_size = len(assignment.used) * job.ranks_per_node
        (self.folder / "beats").mkdir(parents=True, exist_ok=True)
        for path in (job.folder.run_dir / LOGS).glob("error-*.json"):
            path.unlink(missing_ok=True)  # of former attempts
        self._started = agents.channel.clock()
        self._first_end: float | None = None
        agents.begin(self.work())

    def work(self) -> Workload:
        """The ranks, and where they meet."""
        port = FIRST_PORT + (int(self._job.number) * 31 + self.number) % NUM_PORTS
        first = self._agents.channel.report(self.assignment.used[0]).endpoint
        python = python_command(self._job.cluster.container, is_step=False)
        return Workload(
            command=(*python, "-m", "megalite.slurm.rank", str(self._job.folder.run_dir)),
            hosts=self.assignment.used,
            processes_per_node=self._job.ranks_per_node,
            environment={
                **{name: os.environ.get(name, value) for name, value in RANK_MEMORY.items()},
                "MASTER_ADDR": first[0] if first is not None else self.assignment.used[0],
                "MASTER_PORT": str(port),
                ATTEMPT_VARIABLE: str(self.number),
            },
            logs=str(self.folder),
        )

    def run(self, on_poll: Callable[[Attempt, Mapping[int, Beat]], bool]) -> AttemptOutcome:
        """Watch until the end, or until there is trouble that only an end can mend.

        Args:
            on_poll: is called all the time with the ranks' last beats; whether ranks are to save and stop.
        """
        blind_since, blind_until = None, 0.0
        while True:
            try:
                beats, reports, now = self.beats(), self._agents.reports, self._agents.channel.clock()
                if on_poll(self, beats):
                    self._agents.ask_to_stop()
                outcome = self._find_end(reports, beats, now)
                if outcome is None and time.monotonic() > blind_until:
                    outcome = self._find_trouble(reports, beats, now)
                if outcome is not None:
                    return outcome
                blind_since = None
            except OSError as error:
                blind_since = blind_since or time.monotonic()
                patience = self._job.patience
                if error.errno not in STORAGE_FAULTS or time.monotonic() - blind_since > patience.start:
                    raise
                blind_until = time.monotonic() + patience.beat  # by then all have had time to say that they live
            time.sleep(max(POLL_SECONDS, self.world_size / RANKS_A_SECOND))

    def _find_end(
        self, reports: Mapping[str, AgentReport], beats: Mapping[int, Beat], now: float
    ) -> AttemptOutcome | None:
        """How it ended by itself, if it has."""
        ends = [
            RankExit(end.rank, node, end.how, end.time)
            for node in self.assignment.used
            if self._agents.has_begun(reports[node])
            for end in reports[node].ended
        ]
        errors = read_errors(self._job.folder.run_dir / LOGS, self.number)
        if not ends and not errors:
            return None
        if self._first_end is None:
            self._first_end = now
        unfinished = {rank: self.node_of(rank) for rank, beat in beats.items() if beat.phase != DONE}
        waited = now - self._first_end
        if not errors and all(end.is_well for end in ends):
            outcome = find_outcome(ends, errors, unfinished, world_size=self.world_size)
            return outcome or (self._laggards(ends) if waited > WAIT_SECONDS else None)
        lost = self._find_lost(reports, now, LOST_SECONDS, is_moving=False) if waited > GRACE_SECONDS else None
        if lost is not None:
            return lost
        ages = [now - reports[node].time for node in self.assignment.used]
        is_suspect = waited < GRACE_SECONDS + LOST_SECONDS and any(SUSPECT_SECONDS < age < LOST_SECONDS for age in ages)
        is_final = waited > GRACE_SECONDS and not is_suspect
        return find_outcome(ends, errors, unfinished, world_size=self.world_size, is_final=is_final)

    def _laggards(self, ends: Sequence[RankExit]) -> AttemptOutcome:
        """Ranks that go on when the others have ended long ago."""
        left = sorted(set(range(self.world_size)) - {end.rank for end in ends})
        ranks = ", ".join(f"rank {rank} on {self.node_of(rank)}" for rank in left[:NUM_NAMED])
        return AttemptOutcome(
            NextAction.RESTART, f"{ranks}: not at its end {WAIT_SECONDS:.0f} s after rank {ends[0].rank} was"
        )

    def _find_trouble(
        self, reports: Mapping[str, AgentReport], beats: Mapping[int, Beat], now: float
    ) -> AttemptOutcome | None:
        """What only an end can mend."""
        patience = self._job.patience
        moved = max((beat.since for beat in beats.values()), default=self._started)
        lost = self._find_lost(reports, now, patience.beat, is_moving=now - moved <= patience.beat)
        if lost is not None:
            return lost
        trouble = find_trouble(beats, self.world_size, started=self._started, now=now, patience=patience)
        if trouble is None:
            return None
        nodes = tuple(dict.fromkeys(self.node_of(rank) for rank in trouble.ranks))
        ranks = ", ".join(f"rank {rank} on {self.node_of(rank)}" for rank in trouble.ranks[:NUM_NAMED])
        return AttemptOutcome(NextAction.RESTART, f"{ranks}: {trouble.why}", nodes=nodes if len(nodes) == 1 else ())

    def _find_lost(
        self, reports: Mapping[str, AgentReport], now: float, limit: float, *, is_moving: bool
    ) -> AttemptOutcome | None:
        """Nodes that Slurm has taken out, that are cut off, or that give no sign."""
        lost = tuple(node for node in self._agents.lost() if node in self.assignment.used)
        if lost:
            return AttemptOutcome(NextAction.RESTART, f"node failure: {', '.join(lost)}", nodes=lost)
        if is_moving:  # what runs has a way that the agents do not see
            return None
        partition = find_partition(reports, now, limit=limit)
        if partition is not None and (not partition.nodes or set(partition.nodes) & set(self.assignment.used)):
            return AttemptOutcome(NextAction.RESTART, partition.why, nodes=partition.nodes)
        silent = tuple(node for node in self.assignment.used if reports[node].time and now - reports[node].time > limit)
        if silent:
            return AttemptOutcome(NextAction.RESTART, f"no sign of {', '.join(silent)} for {limit:.0f} s", nodes=silent)
        return None

    @property
    def is_running(self) -> bool:
        """Whether ranks are left, on nodes that answer."""
        return not self._agents.is_done(self.assignment.used)

    def beats(self) -> dict[int, Beat]:
        """The last heartbeat of each rank."""
        return read_beats(self.folder / "beats")

    def node_of(self, rank: int) -> str:
        """The node of a rank."""
        return self.assignment.used[rank // self._job.ranks_per_node]

    def last_step(self) -> int:
        """The last step that a rank has been in."""
        return max((beat.step for beat in self.beats().values()), default=0)

    def end(self) -> None:
        """End those that are left; where none of them told what is wrong, they write down where they stand first."""
        self._agents.end(self.assignment.used, wants_stacks=self._first_end is None)
