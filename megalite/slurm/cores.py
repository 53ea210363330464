"""A node's cores, shared out among the processes that an agent starts.

Slurm binds tasks to cores; an agent is one task, so its processes are bound here: neighbouring cores, with their
hyperthreads, in the order of sockets, as GPUs usually are. Where Slurm does not confine a job to its cores, others may
be at work on the first ones, and nothing is bound.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def shares(num_processes: int) -> list[list[int]] | None:
    """The cores of each process of this node; None where they should not be bound."""
    mine = os.sched_getaffinity(0)
    if len(mine) != num_cores_of_job() or len(mine) < num_processes:
        return None
    return divide(sorted(mine, key=_place), num_processes)


def threads(num_processes: int) -> int:
    """How many threads a process of this node may use."""
    return max(1, min(len(os.sched_getaffinity(0)), num_cores_of_job() or 1 << 20) // num_processes)


def divide(cores: Sequence[int], num_processes: int) -> list[list[int]]:
    """Runs of equal length; what is left over stays free."""
    size = len(cores) // num_processes
    return [list(cores[place * size : (place + 1) * size]) for place in range(num_processes)]


def num_cores_of_job() -> int | None:
    """The cores of this node that Slurm has given to the job; None outside of one."""
    given = os.environ.get("SLURM_CPUS_ON_NODE")
    return int(given) if given else None


def _place(core: int) -> tuple[int, int, int]:
    """Socket and physical core: a core's hyperthreads become neighbours."""
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        socket, physical = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except OSError:  # not to be seen in some containers
        return 0, core, core
    return socket, physical, core
