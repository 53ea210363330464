"""Tasks on a Ray cluster: one that runs already, or one of this machine's processes. Needs `pip install ray`.

The stations' folders must lie on a disk that all nodes see. A task whose worker dies is given out again by Ray; as it
leaves its files and report under its own name, nothing is done twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.errors import DataError, UnavailableError
from megalite.stations.tasks import perform

LOCAL = "local"
"""The address of a cluster of one's own; none at all would be that of any cluster that Ray finds traces of."""

MAX_RETRIES = 3
"""Times a task is given out again after its worker died."""

WAITING_PER_CPU = 4
"""Tasks handed to Ray ahead of time, so that its own tables stay small however many there are."""


class RayCluster:
    """Runs tasks as Ray tasks of one CPU each; use as a context manager.

    Args:
        address: of a running cluster, `auto` for the one this machine belongs to, `local` starts one here, whatever
            other clusters run or once ran on this machine.
        num_cpus: processes of a cluster that is started here.

    Raises:
        UnavailableError: Ray is not installed.
        DataError: there is no cluster at the address.
    """

    def __init__(self, address: str = LOCAL, num_cpus: int | None = None):
        try:
            import ray
        except ImportError as error:
            raise UnavailableError("--runner ray needs Ray; run `pip install ray`, or use --runner local") from error
        self._ray = ray
        try:
            if address == LOCAL:
                ray.init(address, log_to_driver=False, num_cpus=num_cpus, include_dashboard=False)
            else:
                ray.init(address, log_to_driver=False)
        except ConnectionError as error:
            raise DataError(
                f"no Ray cluster at {address!r} ({error}); start one with `ray start --head`, or name another"
            ) from error
        # a worker's own exception is final: only a dead worker's task is tried again
        self._perform = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, retry_exceptions=False)(perform)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def run(self, folder: Path, phase: str, numbers: Sequence[int]) -> Iterator[int]:
        ray = self._ray
        ahead = max(1, WAITING_PER_CPU * int(ray.cluster_resources().get("CPU", 1)))
        left = list(reversed(numbers))
        running: dict[Any, int] = {}
        try:
            while left or running:
                while left and len(running) < ahead:
                    number = left.pop()
                    running[self._perform.remote(folder.absolute(), phase, number)] = number
                (done, *_), _ = ray.wait(list(running))
                number = running.pop(done)
                try:
                    ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, DataError) else error) from None  # as elsewhere
                yield number
        finally:
            self._call_off(list(running))

    def _call_off(self, running: list[Any]) -> None:
        """Drop what has not begun and wait for the rest: it would write into a folder that is being removed."""
        for task in running:
            self._ray.cancel(task, force=False, recursive=False)
        if running:
            self._ray.wait(running, num_returns=len(running))
