"""What Slurm thinks of the nodes of a run: which it has lost sight of, and which should not be used anew.

A slurmd that dies leaves the ranks of its node at work, and their hearts beat on: nothing in the run can tell. Slurm
marks the node (`*`), and takes it out after SlurmdTimeout (five minutes, commonly), and with it the ranks. Between the
mark and that end there is time for a checkpoint.

Slurm is asked on a thread, and its last answer counts while it is away: the watch over the ranks never waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from megalite.errors import UserError
from megalite.slurm.controller import BAD_NODE_WORDS, NO_ANSWER_SIGN, Controller
from megalite.slurm_commands import NoAnswer


class Reach:
    """Asks the controller now and then.

    Args:
        controller: who is asked.
        every_seconds: at least, between two questions.
    """

    def __init__(self, controller: Controller, every_seconds: float):
        self._controller, self._every_seconds = controller, every_seconds
        self._question: threading.Thread | None = None
        self._asked_at = -every_seconds
        self._states: Mapping[str, str] = {}
        """By the last answer."""
        self._told: set[str] = set()

    def newly_lost(self, nodes: Sequence[str]) -> list[str]:
        """Those of some nodes that Slurm has lost sight of since the last call. Never waits."""
        is_asking = self._question is not None and self._question.is_alive()
        if not is_asking and time.monotonic() - self._asked_at >= self._every_seconds:
            self._asked_at = time.monotonic()
            self._question = threading.Thread(target=self._ask, args=(list(nodes),), daemon=True)
            self._question.start()
        unseen = {node for node in nodes if NO_ANSWER_SIGN in self._states.get(node, "")}
        news = sorted(unseen - self._told)
        self._told = unseen  # one that was seen again and is lost again is news
        return news

    def is_good(self, node: str) -> bool:
        """Whether Slurm found nothing wrong with a node when it last answered; so it is before it has."""
        return not any(word in self._states.get(node, "") for word in BAD_NODE_WORDS)

    def _ask(self, nodes: list[str]) -> None:
        with suppress(UserError, NoAnswer):
            self._states = self._controller.states_of(nodes)
