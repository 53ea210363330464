"""The errors a user can cause, and the exit codes of every command.

A `UserError` says what was found, what was expected and what to do. It is printed without a traceback and ends the
command with exit code 2. Anything else that escapes is our own bug or a fault of the machine and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_REQUEUE = 3
EXIT_INTERRUPTED = 130
"""As shells report Ctrl-C."""


class UserError(ValueError):
    """Something the user asked for that cannot be: the message is all they see."""


class ConfigError(UserError):
    """A config that cannot run. `problems` holds every complaint found, not only the first.

    Args:
        problems: one sentence each, already prefixed with where it was found (`file.yaml:12: model.hidden_size: ...`).
    """

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        count = len(self.problems)
        title = f"{count} problem{'s' if count != 1 else ''} found:"
        super().__init__("\n".join([title, *(f"  - {problem}" for problem in self.problems)]))


class DataError(UserError):
    """Training data, a tokenizer or a data station's folder that is missing, damaged or does not fit."""


class CheckpointError(UserError):
    """A checkpoint that is incomplete, damaged or of another model."""


class MisnamedError(CheckpointError):
    """A checkpoint that is whole, in a folder with another step's name."""


class ConversionError(UserError):
    """A model that cannot be written to, or read from, a Hugging Face folder."""


class UnavailableError(UserError):
    """A device or optional package that was asked for and is not here; the reason and the alternative are named."""


class StartError(RuntimeError):
    """Ranks that could not begin together: a fault of the machines or of who started them. Told without a traceback."""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest candidate, or an empty string when none is close."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
