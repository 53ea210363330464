"""How an attempt ended, and what follows: from exit codes, the words of srun, and the errors that ranks left behind.

srun: error: node02: task 3: Killed                     a rank was killed: by whom, the kernel's log may know
srun: error: node02: tasks 2-3: Exited with exit code 1
srun: error: Node failure on node02
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_REQUEUE

_TASK = re.compile(r"srun: error: (?P<node>[\w.-]+): tasks? (?P<tasks>[\d,\-]+): (?P<how>.+)")
_LAUNCH = re.compile(r"srun: error: Task launch for \S+ failed on node (?P<node>[\w.-]+): (?P<how>.+)")
_NODE = re.compile(r"srun: error: Node failure on (?P<nodes>\S+)")
_ENDING_THE_REST = re.compile(r"srun: .*_step_signal: Terminating")
_COLLATERAL = ("Terminated", "Exited with exit code 143")
"""How ranks end that Slurm ended because another one had failed."""

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Read error",
    "ncclRemoteError",
    "ncclSystemError",
)
"""What gloo and NCCL say of a peer that is gone."""


class Next(Enum):
    """What the supervisor does."""

    FINISHED = "the run is at its last step"
    STOPPED = "the run was asked to stop, and has saved"
    RESTART = "start another attempt"
    GIVE_UP = "no restart can help"


@dataclass(frozen=True)
class RankEnd:
    """How srun says that some ranks ended."""

    node: str
    ranks: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt."""

    next: Next
    why: str
    """A line for people: who failed first, and how."""
    detail: str = ""
    """The first traceback, or a user error in full."""
    nodes: tuple[str, ...] = ()
    """Nodes that failed, or whose rank was killed."""


def judge(
    exit_code: int, srun_words: str, errors: Sequence[dict], unfinished: Mapping[int, str] = MappingProxyType({})
) -> Outcome:
    """The outcome of an attempt that has ended by itself.

    Args:
        exit_code: of srun.
        srun_words: its stderr.
        errors: what ranks left in their error files: rank, time, is_user_error, message.
        unfinished: ranks that have begun and are not done, and their nodes; the first to fall silent comes first.
    """
    if exit_code == EXIT_DONE and not errors and not unfinished:
        return Outcome(Next.FINISHED, "all ranks are done")
    if exit_code == EXIT_REQUEUE and not errors:
        return Outcome(Next.STOPPED, "all ranks have stopped as asked")
    first = min(errors, key=lambda error: error["time"], default=None)
    if first is not None and first["is_user_error"] and exit_code == EXIT_BAD_INPUT:
        return Outcome(Next.GIVE_UP, f"rank {first['rank']} found bad input", first["message"])
    lost = lost_nodes(srun_words)
    if lost:
        return Outcome(Next.RESTART, f"node failure: {', '.join(lost)}", nodes=lost)
    launch = _LAUNCH.search(srun_words)
    if launch:
        node = launch["node"]
        return Outcome(Next.RESTART, f"tasks could not be started on {node}: {launch['how'].strip()}", nodes=(node,))
    ends = [end for end in rank_ends(_before_the_rest_was_ended(srun_words)) if end.how not in _COLLATERAL]
    if ends and not ends[0].how.startswith("Exited"):
        return Outcome(Next.RESTART, _sentence(ends[0]), nodes=(ends[0].node,))
    silent = _first_silent(srun_words, errors, unfinished)
    if silent is not None:
        return Outcome(Next.RESTART, _sentence(silent), nodes=(silent.node,))
    if first is not None:
        last_line = first["message"].strip().splitlines()[-1]
        return Outcome(Next.RESTART, f"rank {first['rank']} failed first: {last_line}", first["message"])
    why = _sentence(ends[0]) if ends else f"srun ended with exit code {exit_code}"
    return Outcome(Next.RESTART, why, nodes=(ends[0].node,) if ends else ())


def _first_silent(srun_words: str, errors: Sequence[dict], unfinished: Mapping[int, str]) -> RankEnd | None:
    """The rank that ended first and without a word, if that is what the others' errors come from."""
    first = min(errors, key=lambda error: error["time"], default=None)
    if first is not None and not any(words in first["message"] for words in _LOST_PEER):
        return None
    told = {error["rank"] for error in errors}
    hows = {rank: end.how for end in rank_ends(srun_words) for rank in end.ranks}
    for rank, node in unfinished.items():
        if rank not in told and rank not in hows:  # srun has no words for exit code 0
            return RankEnd(node, (rank,), "ended too early, with exit code 0")
        if rank not in told and first is not None and hows[rank] not in _COLLATERAL:
            return RankEnd(node, (rank,), hows[rank])
    return None


def _before_the_rest_was_ended(srun_words: str) -> str:
    """What srun said up to the moment when it ended all other ranks because of one."""
    ending = _ENDING_THE_REST.search(srun_words)
    return srun_words[: ending.start()] if ending and rank_ends(srun_words[: ending.start()]) else srun_words


def rank_ends(srun_words: str) -> list[RankEnd]:
    """All that srun says of ranks that did not end well, in its order."""
    found = []
    for match in _TASK.finditer(srun_words):
        found.append(RankEnd(match["node"], _numbers(match["tasks"]), match["how"].strip()))
    return found


def lost_nodes(srun_words: str) -> tuple[str, ...]:
    """Nodes of whose failure srun speaks, as it names them."""
    return tuple(dict.fromkeys(match["nodes"] for match in _NODE.finditer(srun_words)))


def read_errors(logs: Path, attempt: int) -> list[dict]:
    """What ranks of an attempt left in a run's logs (`train.worker`); a stale one may have written there since."""
    errors = []
    for path in sorted(logs.glob("error-*.json")):
        try:
            errors.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):  # its rank was killed while it wrote
            continue
    return [error for error in errors if error["attempt"] == attempt]


def _sentence(end: RankEnd) -> str:
    ranks = f"rank {end.ranks[0]}" if len(end.ranks) == 1 else f"ranks {', '.join(map(str, end.ranks))}"
    return f"{ranks} on {end.node}: {end.how}"


def _numbers(text: str) -> tuple[int, ...]:
    """`0-2,5` as numbers."""
    spans = (part.split("-") for part in text.split(","))
    return tuple(number for span in spans for number in range(int(span[0]), int(span[-1]) + 1))
