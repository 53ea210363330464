"""Where a station's tasks run: in this process, a pool of processes, a Slurm array, a Ray cluster.

All of them do no more than to see to it that `tasks.perform` is called for every task, so the bytes are the same.
"""

from megalite.stations.runners.local import InProcess, LocalPool, default_workers

__all__ = ["InProcess", "LocalPool", "default_workers"]
