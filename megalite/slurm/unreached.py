"""Nodes that Slurm does not reach while their ranks go on: a slurmd that died, a management network with a fault.

Training does not feel it, yet: after SlurmdTimeout (five minutes on most clusters) Slurm takes such a node for lost and
kills what runs there. Whoever knows before can save before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from megalite.slurm.controller import Controller


class UnreachedNodes:
    """Asks now and then, without ever waiting for the answer.

    Args:
        controller: the cluster's controller, which may be away.
        every_seconds: between two questions.
        now: a clock in seconds.
    """

    def __init__(self, controller: Controller, every_seconds: float, now: Callable[[], float] = time.monotonic):
        self._controller, self._every_seconds, self._now = controller, every_seconds, now
        self._asked = now()
        self._known: set[str] = set()
        self._answer: list[str] = []
        self._thread: threading.Thread | None = None

    def look(self, nodes: Sequence[str]) -> list[str]:
        """Those of an attempt's nodes that have become unreachable since the last look."""
        if self._thread is not None and self._thread.is_alive():
            return []
        found = [node for node in self._answer if node in nodes]
        new = [node for node in found if node not in self._known]
        self._known = set(found)
        if self._now() - self._asked >= self._every_seconds:
            self._asked = self._now()
            self._thread = threading.Thread(target=self._ask, args=(tuple(nodes),), daemon=True)
            self._thread.start()
        return new

    def _ask(self, nodes: tuple[str, ...]) -> None:
        self._answer = self._controller.unreached_nodes(nodes)
