"""Tasks on the machines of a cluster, simulated: event by event, with slow nodes and failures, decided by a seed.

A phase is a number of equal tasks, none of which needs another one. They are given to workers, one a core, in their
order. A task reads, then computes, then writes, as a worker of ours does; the disk and the network are shared out
evenly among the workers that are busy. Tasks differ in length, some nodes are slow, nodes fail: what ran there is lost,
noticed after a while, and done again. A phase ends with its last task, and only then the next begins.

What it leaves out: the shared disk is as fast for many as for few, tasks of several phases do not overlap, and the
coordinator takes no time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

GB = 1e9
HOUR = 3600.0


@dataclass(frozen=True)
class Cluster:
    """Machines, and the disk that they share."""

    nodes: int = 100
    cores: int = 64
    """Workers of a node."""
    disk_gbs: float = 100.0
    """GB/s that the shared disk gives all nodes together."""
    node_gbs: float = 12.5
    """GB/s of a node's network."""
    reads_per_second: float = 1e6
    """Small reads (a slice of a file: open, seek, read) that the disk answers for all nodes together."""

    @property
    def workers(self) -> int:
        """One a core."""
        return self.nodes * self.cores

    def bytes_per_second(self, busy: int) -> float:
        """What one of so many busy workers gets of disk and network."""
        on_a_node = min(self.cores, math.ceil(busy / self.nodes))
        return min(self.disk_gbs * GB / busy, self.node_gbs * GB / on_a_node)


@dataclass(frozen=True)
class Trouble:
    """What goes wrong; nothing by default."""

    spread: float = 0.0
    """Standard deviation of the logarithm of a task's length."""
    slow_share: float = 0.0
    """Share of nodes that are slow for good."""
    slow_factor: float = 1.0
    """How many times as long a task takes there."""
    hours_between_failures: float = math.inf
    """Of one node, on average."""
    minutes_to_notice: float = 2.0
    """Until a lost task is given out again."""
    minutes_to_repair: float = 30.0
    """Until a failed node works again."""


@dataclass(frozen=True)
class Phase:
    """Equal tasks, none of which needs another one."""

    station: str
    name: str
    num_tasks: int
    cpu_seconds: float
    """Of a task, here and below."""
    bytes_read: float
    bytes_written: float
    small_reads: float
    memory: float
    """Bytes."""

    def task_seconds(self, cluster: Cluster) -> float:
        """Length of a task among as many as can run at once."""
        busy = min(self.num_tasks, cluster.workers)
        moving = (self.bytes_read + self.bytes_written) / cluster.bytes_per_second(busy)
        return self.cpu_seconds + moving + self.small_reads * busy / cluster.reads_per_second


@dataclass
class Outcome:
    """What came of a phase."""

    seconds: float = 0.0
    runs: int = 0
    """Tasks that were done."""
    lost: int = 0
    """Tasks that a failure took, and that were done again."""
    busy_seconds: float = 0.0
    """Of all workers."""


class Node:
    """The times at which a node fails, drawn as far as they are asked for."""

    def __init__(self, trouble: Trouble, slowness: float, rng: np.random.Generator):
        self.slowness = slowness
        self._mean = trouble.hours_between_failures * HOUR
        self._repair = trouble.minutes_to_repair * 60
        self._rng = rng
        self._failures: list[float] = []

    def _place(self, time: float) -> int:
        """Of the first failure after a time."""
        while not self._failures or self._failures[-1] <= time:
            works_from = self._failures[-1] + self._repair if self._failures else 0.0
            self._failures.append(works_from + self._rng.exponential(self._mean) if self._mean < math.inf else math.inf)
        return bisect_right(self._failures, time)

    def up_from(self, time: float) -> float:
        """When the node works: at this time, or after the repair that is going on."""
        place = self._place(time)
        return max(time, self._failures[place - 1] + self._repair) if place else time

    def next_failure(self, time: float) -> float:
        """The first failure after a time."""
        return self._failures[self._place(time)]


def simulate(
    phases: Iterable[Phase], cluster: Cluster, trouble: Trouble | None = None, *, seed: int = 0
) -> list[Outcome]:
    """One phase after the other, on the same machines.

    Args:
        phases: in their order.
        cluster: who works.
        trouble: what goes wrong; None for nothing.
        seed: decides which tasks are long, which nodes slow, and when they fail.
    """
    trouble = trouble or Trouble()
    rng = np.random.default_rng(seed)
    slow = rng.random(cluster.nodes) < trouble.slow_share
    nodes = [Node(trouble, trouble.slow_factor if each else 1.0, rng) for each in slow]
    now, outcomes = 0.0, []
    for phase in phases:
        lengths = phase.task_seconds(cluster) * rng.lognormal(-(trouble.spread**2) / 2, trouble.spread, phase.num_tasks)
        outcome = _run(lengths, nodes, cluster.cores, trouble.minutes_to_notice * 60, now)
        now += outcome.seconds
        outcomes.append(outcome)
    return outcomes


def _run(lengths: np.ndarray, nodes: Sequence[Node], cores: int, notice: float, start: float) -> Outcome:
    """Give tasks to workers until all are done.

    Events are (time, kind, worker or task): a worker is free, or a lost task is to be done again.
    """
    free, again = 0, 1
    outcome = Outcome()
    ready, idle = deque(range(lengths.size)), []
    # numbered across the nodes: few tasks are spread over many machines
    events = [(nodes[worker % len(nodes)].up_from(start), free, worker) for worker in range(len(nodes) * cores)]
    heapq.heapify(events)
    ends = start
    while outcome.runs < lengths.size:
        time, kind, number = heapq.heappop(events)
        if kind == again:
            ready.append(number)
            if not idle:
                continue
            number = idle.pop()
        if not ready:
            idle.append(number)
            continue
        node = nodes[number % len(nodes)]
        begins = node.up_from(time)
        if begins > time:
            heapq.heappush(events, (begins, free, number))
            continue
        task = ready.popleft()
        done, fails = time + lengths[task] * node.slowness, node.next_failure(time)
        if done <= fails:
            outcome.runs += 1
            outcome.busy_seconds += done - time
            ends = max(ends, done)
            heapq.heappush(events, (done, free, number))
        else:
            outcome.lost += 1
            outcome.busy_seconds += fails - time
            heapq.heappush(events, (fails + notice, again, task))
            heapq.heappush(events, (node.up_from(fails), free, number))
    outcome.seconds = ends - start
    return outcome
