"""What a rank does before its first step, said aloud: nobody should look at a silent terminal and wonder.

    importing PyTorch | meeting the other ranks | reading ... | building the model | the first step

The first rank speaks. A phase is told when it begins, so the last line says what takes so long. Who waits for other
ranks says so on every node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

Say = Callable[[str], None]
"""Is told what begins, or what is waited for."""

IMPORTING = "importing PyTorch"
MEETING = "meeting the other ranks"
LOADING = "looking for checkpoints"
BUILDING = "building the model"
FIRST_STEP = "the first step"
COMPILING = "the first step, which compiles the blocks: half a minute and more"


@dataclass
class StartUp:
    """Tells the phases of one rank.

    Args:
        is_first: this is the first rank of all.
        is_first_here: and this the first one of its machine.
    """

    is_first: bool
    is_first_here: bool = True
    _began: float = field(default_factory=time.monotonic)

    def say(self, what: str) -> None:
        """Tell a phase that begins, or how it goes."""
        self._print(what, self.is_first)

    def say_wait(self, what: str) -> None:
        """Tell who is waited for."""
        self._print(what, self.is_first_here)

    def _print(self, what: str, is_heard: bool) -> None:
        if is_heard:
            print(f"[{time.monotonic() - self._began:5.1f} s] {what}", flush=True)
