"""Slurm's commands, asked so that a controller that is away for a while (a restart, a failover) does no harm.

What Slurm refuses, and why, goes to the user word by word.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from megalite.errors import UnavailableError, UserError

COMMAND_TIMEOUT_SECONDS = 60.0

PATIENCE_SECONDS = 600.0
"""How long Slurm may be without an answer."""

SECONDS_BETWEEN_TRIES = 3.0

NO_ANSWER = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Communication connection failure",
    "connect failure",
    "Zero Bytes were transmitted",
    "temporarily unable",
    "Transport endpoint",
)
"""What the commands say when the controller is away. Anything else is an answer."""

NO_CLUSTER = "Could not establish a configuration source"
"""What they say where Slurm is installed and no cluster is."""

AnswerT = TypeVar("AnswerT")


class NoAnswer(Exception):
    """Slurm's controller cannot be reached."""


def ask(command: Sequence[str]) -> str:
    """Run one of Slurm's commands and return what it prints.

    Its environment has nothing of a job that this process may be in: it would be handed on to the new job. Its session
    is its own, so that Ctrl-C does not cut off a submission.

    Raises:
        NoAnswer: the controller is away.
        UserError: Slurm refuses.
        UnavailableError: there is no Slurm, or no cluster behind it.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_SECONDS,
            env=environment,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise UnavailableError(f"there is no {command[0]} here; run this on a login node of a Slurm cluster") from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"{command[0]} gave no answer in {COMMAND_TIMEOUT_SECONDS:.0f} s") from error
    said = done.stderr.strip()
    if done.returncode == 0:
        return done.stdout
    if any(words in said for words in NO_ANSWER):
        raise NoAnswer(said.splitlines()[-1])
    if NO_CLUSTER in said:
        raise UnavailableError(
            f"{command[0]} is here, but finds no cluster; run this on a login node of a Slurm cluster"
        )
    if done.returncode < 0:
        raise UserError(f"{command[0]} was ended by signal {-done.returncode}")
    raise UserError(f"{command[0]} refused: {said}")


def insist(
    question: Callable[[], AnswerT], notify: Callable[[str], None], patience_seconds: float = PATIENCE_SECONDS
) -> AnswerT:
    """Ask until there is an answer.

    Args:
        question: raises NoAnswer while the controller is away.
        notify: told once that it is.
        patience_seconds: how long to ask.

    Raises:
        UnavailableError: it is away for too long.
    """
    began, told = time.monotonic(), False
    while True:
        try:
            return question()
        except NoAnswer as error:
            if time.monotonic() - began >= patience_seconds:
                raise gone_too_long(error) from error
            if not told:
                notify(f"{error}; trying again for {patience_seconds:.0f} s")
                told = True
            time.sleep(SECONDS_BETWEEN_TRIES)


def gone_too_long(error: NoAnswer) -> UnavailableError:
    """What the user is told when patience ends."""
    return UnavailableError(
        f"Slurm has not answered for {PATIENCE_SECONDS:.0f} s ({error}); what is done is kept: run the same command "
        "again when `scontrol ping` finds the controller"
    )
