"""The agent of a node: one Slurm task for the life of a job, which starts and ends the processes of every attempt.

    python -m megalite.slurm.agent HOME

    supervisor                      agent of node01                  agent of node02 ...
        order.json: work 3     ->   starts ranks 0-7                 starts ranks 8-15
                               <-   reports/node01.json: each second, and when a rank ends, with its exit code
        order.json: it is over ->   stacks of all that live, then SIGKILL

Slurm is asked once a job: attempts begin and end while its controller is away. What a rank died of is known from its
parent. An agent also hears whether its neighbours are there (`peers.py`), on nodes that run no ranks as well.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from megalite.errors import EXIT_DONE
from megalite.slurm.affinity import choose_address, core_shares, threads_per_process
from megalite.slurm.control_channel import AgentReport, ControlChannel, ProcessExit, Workload
from megalite.slurm.peers import PeerMonitor
from megalite.train.place import TOKEN_VARIABLE
from megalite.train.worker import leave

POLL_SECONDS = 0.2

NODES_A_SECOND = 500
"""All agents together open order.json so often: those of many nodes look less often each."""

SECONDS_BETWEEN_REPORTS = 1.0

SECONDS_FOR_STACKS = 2.0

NOTHING = Workload((), (), 0, {}, "")


class Processes:
    """What a node runs of a work.

    Args:
        work: of all nodes.
        node: this one.
        token: by which the processes of the work know each other.
    """

    def __init__(self, work: Workload, node: str, token: str):
        self.ended: list[ProcessExit] = []
        self._running: dict[int, subprocess.Popen] = {}
        self._num_stops = 0
        self._kill_at: float | None = None
        ranks = work.ranks_of(node)
        shares = core_shares(len(ranks)) if len(ranks) > 1 else None
        before = os.sched_getaffinity(0)
        for local_rank, rank in enumerate(ranks):
            environment = {
                "OMP_NUM_THREADS": str(threads_per_process(len(ranks))),
                **os.environ,
                **work.environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(len(ranks)),
                "WORLD_SIZE": str(work.world_size),
                TOKEN_VARIABLE: token,
            }
            try:
                with open(Path(work.logs) / f"rank-{rank}.log", "ab") as log:
                    if shares is not None:
                        os.sched_setaffinity(0, shares[local_rank])  # a process has its parent's
                    self._running[rank] = subprocess.Popen(
                        work.command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                    )
            except OSError as error:
                self.ended.append(ProcessExit(rank, f"could not be started: {error}", time.monotonic()))
            finally:
                os.sched_setaffinity(0, before)

    @property
    def num_running(self) -> int:
        """How many have not ended."""
        return len(self._running)

    def reap(self) -> bool:
        """See which have ended, and kill those whose time is up; whether there is news."""
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self.signal(signal.SIGKILL)
        codes = {rank: process.poll() for rank, process in self._running.items()}
        for rank, code in codes.items():
            if code is not None:
                self.ended.append(ProcessExit(rank, code, time.monotonic()))
                del self._running[rank]
        return any(code is not None for code in codes.values())

    def ask_to_stop(self, num_times: int) -> None:
        """Pass on requests to save and stop that are new."""
        if num_times > self._num_stops:
            self._num_stops = num_times
            self.signal(signal.SIGUSR1)

    def end(self, *, wants_stacks: bool = False) -> None:
        """Kill those that live: one that hangs would take SIGTERM for a request. Ask for their stacks before."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + (SECONDS_FOR_STACKS if wants_stacks else 0.0)
            if wants_stacks:
                self.signal(signal.SIGUSR2)
            self.reap()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all that have not ended."""
        for process in self._running.values():
            process.send_signal(number)


class Agent:
    """The agent of one node.

    Args:
        channel: through which the supervisor says what is to be done.
        node: this one.
        num_nodes: of the job.
        peers: whom this node hears; None where no address of it was found.
    """

    def __init__(self, channel: ControlChannel, node: str, num_nodes: int, peers: PeerMonitor | None):
        self._channel, self._node, self._peers = channel, node, peers
        self._pause = max(POLL_SECONDS, num_nodes / NODES_A_SECOND)
        self._number, self._processes = 0, Processes(NOTHING, node, "")
        self._is_asked_to_leave = False
        self._reported = -SECONDS_BETWEEN_REPORTS
        signal.signal(signal.SIGTERM, self._ask_to_leave)

    def run(self) -> None:
        """Do as is ordered until there is nothing more to come."""
        is_closed = False
        while not (is_closed or self._is_asked_to_leave) or self._processes.num_running:
            desired = self._channel.desired_state()
            is_closed = is_closed or desired.is_closed
            news = self._processes.reap()
            if desired.work == self._number:
                self._processes.ask_to_stop(desired.num_stops)
            if is_closed or desired.work > self._number or (desired.work == self._number and desired.is_over):
                self._processes.end(wants_stacks=desired.wants_stacks)
            is_leaving = is_closed or self._is_asked_to_leave
            if desired.work > self._number and not (desired.is_over or is_leaving or self._processes.num_running):
                self._begin(desired.work)
                news = True
            if news or time.monotonic() - self._reported >= SECONDS_BETWEEN_REPORTS:
                self._report()
            time.sleep(self._pause)
        self._report()

    def _begin(self, number: int) -> None:
        self._number = number
        token = hmac.new(self._channel.secret().encode(), f"work {number}".encode(), hashlib.sha256).hexdigest()
        self._processes = Processes(self._channel.work(number), self._node, token)

    def _report(self) -> None:
        self._reported = now = time.monotonic()
        peers = self._peers
        report = AgentReport(
            time=now,
            work=self._number,
            num_running=self._processes.num_running,
            ended=tuple(self._processes.ended),
            address=os.environ.get("SLURM_TOPOLOGY_ADDR", ""),
            endpoint=peers.endpoint if peers is not None else None,
            heard=peers.heard() if peers is not None else {},
            has_carrier=peers.has_carrier if peers is not None else None,
            sees_controller=peers.sees_controller if peers is not None else None,
        )
        with suppress(OSError):  # an absent disk ends no rank; the supervisor looks for the report
            self._channel.write_report(self._node, report)

    def _ask_to_leave(self, number: int, frame: FrameType | None) -> None:
        """scancel, or a job that ends: ranks save and stop, then this process has nothing more to do."""
        self._is_asked_to_leave = True
        self._processes.signal(signal.SIGTERM)


def main() -> None:
    """Serve until the job ends."""
    channel, node = ControlChannel(Path(sys.argv[1])), os.environ["SLURMD_NODENAME"]
    info = channel.job_info()
    peer = next((each for each in info.nodes if each != node), node)
    address, peers = choose_address(peer, info.interface), None
    if address is not None:
        secret, find = channel.secret(), lambda each: channel.report(each).endpoint
        peers = PeerMonitor(info.nodes, node, address, secret, find, info.controller)
    Agent(channel, node, len(info.nodes), peers).run()
    leave(EXIT_DONE)


if __name__ == "__main__":
    main()
