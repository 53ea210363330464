"""Which nodes of a run Slurm has lost sight of: it marks them (`*`) before it takes them out.

A slurmd that dies leaves the ranks of its node at work, and their hearts beat on: nothing in the run can tell. Slurm
takes the node out after SlurmdTimeout (five minutes, commonly), and with it the ranks. Between the mark and that end
there is time for a checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from megalite.errors import UserError
from megalite.slurm.controller import Controller
from megalite.slurm_commands import NoAnswer


class Reach:
    """Asks the controller now and then, on a thread: while it is away, the watch over the ranks must go on.

    Args:
        controller: who is asked.
        every_seconds: at least, between two questions.
    """

    def __init__(self, controller: Controller, every_seconds: float):
        self._controller, self._every_seconds = controller, every_seconds
        self._question: threading.Thread | None = None
        self._asked_at = -every_seconds
        self._unseen: set[str] = set()
        """Nodes that the last answer marked."""
        self._told: set[str] = set()

    def newly_lost(self, nodes: Sequence[str]) -> list[str]:
        """Those of some nodes that Slurm has lost sight of since the last call. Never waits."""
        is_asking = self._question is not None and self._question.is_alive()
        if not is_asking and time.monotonic() - self._asked_at >= self._every_seconds:
            self._asked_at = time.monotonic()
            self._question = threading.Thread(target=self._ask, args=(list(nodes),), daemon=True)
            self._question.start()
        unseen = self._unseen & set(nodes)
        news = sorted(unseen - self._told)
        self._told = unseen  # one that was seen again and is lost again is news
        return news

    def _ask(self, nodes: list[str]) -> None:
        with suppress(UserError, NoAnswer):
            self._unseen = set(self._controller.unseen_nodes(nodes))
