"""How an attempt ended, and what follows: from the ends that agents saw, and the errors that ranks left behind.

    killed by a signal, could not be started,      the cause, whatever the others say
    ended with code 0 before it was done
    an error of its own                            the cause
    an error that speaks of a lost connection      what came of it: the cause is waited for, for a moment

The rank that complains first is seldom the one that failed, so nobody is named while that cannot be told.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_REQUEUE
from megalite.train.failures import read_error, speaks_of_a_peer

SHELL_SIGNAL = 128
"""What shells, and programs that start others, add to the number of a signal."""

_OF_PEERS = (signal.SIGABRT, signal.SIGTERM)
"""Signals by which a rank ends when another one has: NCCL's watchdog aborts, Slurm asks before it kills."""


class NextAction(Enum):
    """What the supervisor does."""

    FINISHED = "the run is at its last step"
    STOPPED = "the run was asked to stop, and has saved"
    RESTART = "start another attempt"
    GIVE_UP = "no restart can help"


@dataclass(frozen=True)
class RankExit:
    """The end of a rank, as its agent saw it."""

    rank: int
    node: str
    how: int | str
    """Its exit code, negative for a signal; or why it could not be started."""
    time: float

    @property
    def is_well(self) -> bool:
        """Whether it says that it is done, or has stopped as asked."""
        return self.how in (EXIT_DONE, EXIT_REQUEUE)

    @property
    def is_conclusive(self) -> bool:
        """Whether it tells what failed by itself."""
        return isinstance(self.how, str) or (self._signal is not None and self._signal not in _OF_PEERS)

    @property
    def _signal(self) -> signal.Signals | None:
        if isinstance(self.how, str):
            return None
        number = -self.how if self.how < 0 else self.how - SHELL_SIGNAL
        return signal.Signals(number) if number in {each.value for each in signal.Signals} else None

    def __str__(self) -> str:
        if isinstance(self.how, str):
            how = self.how
        elif self._signal is not None:
            how = signal.strsignal(self._signal) or self._signal.name
        else:
            how = "ended too early, with exit code 0" if self.how == EXIT_DONE else f"Exited with exit code {self.how}"
        return f"rank {self.rank} on {self.node}: {how}"


@dataclass(frozen=True)
class AttemptOutcome:
    """The end of an attempt."""

    next: NextAction
    why: str
    """A line for people: who failed first, and how."""
    detail: str = ""
    """The first traceback, or a user error in full."""
    nodes: tuple[str, ...] = ()
    """Nodes that failed, or whose rank was killed."""


def find_outcome(
    ends: Sequence[RankExit],
    errors: Sequence[dict],
    unfinished: Mapping[int, str],
    *,
    world_size: int,
    is_final: bool = False,
) -> AttemptOutcome | None:
    """The outcome of an attempt; None while it goes on, or while it cannot be told who failed first.

    Args:
        ends: of ranks.
        errors: what ranks left in their error files: rank, time, is_user_error, message.
        unfinished: ranks that have begun and are not done, and their nodes; the first to fall silent comes first.
        world_size: number of ranks.
        is_final: nothing more will come: say what is known.
    """
    ended = {end.rank: end for end in ends}
    first_error = min(errors, key=lambda error: error["time"], default=None)
    if len(ended) == world_size and not errors and all(end.is_well for end in ends):
        codes = {end.how for end in ends}
        if codes == {EXIT_DONE} and not unfinished:
            return AttemptOutcome(NextAction.FINISHED, "all ranks are done")
        if codes == {EXIT_REQUEUE}:
            return AttemptOutcome(NextAction.STOPPED, "all ranks have stopped as asked")
    if first_error is not None and first_error["is_user_error"]:
        if EXIT_BAD_INPUT in {end.how for end in ends}:
            return AttemptOutcome(
                NextAction.GIVE_UP, f"rank {first_error['rank']} found bad input", first_error["message"]
            )
        if not is_final:
            return None  # it is about to end with that code
    in_order = sorted(ends, key=lambda end: end.time)
    for end in in_order:
        if end.is_conclusive or (end.how == EXIT_DONE and end.rank in unfinished):
            return AttemptOutcome(NextAction.RESTART, str(end), nodes=(end.node,))
    if first_error is not None and not speaks_of_a_peer(first_error):
        last_line = first_error["message"].strip().splitlines()[-1]
        return AttemptOutcome(
            NextAction.RESTART, f"rank {first_error['rank']} failed first: {last_line}", first_error["message"]
        )
    bad = [end for end in in_order if not end.is_well]
    if not is_final or not (bad or errors or len(ended) == world_size):
        return None
    return _best_guess(bad or in_order, first_error, {error["rank"] for error in errors})


def _best_guess(ends: Sequence[RankExit], first_error: dict | None, told: Set[int]) -> AttemptOutcome:
    """What can be said when nobody left a cause: the first to end without a word, or else the first word, which blames
    no node."""
    wordless = next((end for end in ends if end.rank not in told), None)
    if wordless is not None or first_error is None:
        end = wordless or ends[0]
        return AttemptOutcome(NextAction.RESTART, str(end), nodes=(end.node,))
    last_line = first_error["message"].strip().splitlines()[-1]
    return AttemptOutcome(
        NextAction.RESTART, f"rank {first_error['rank']} failed first: {last_line}", first_error["message"]
    )


def read_errors(logs: Path, attempt: int) -> list[dict]:
    """What ranks of an attempt left in a run's logs (`train.worker`); a stale one may have written there since."""
    errors = map(read_error, sorted(logs.glob("error-*.json")))
    return [error for error in errors if error is not None and error["attempt"] == attempt]
