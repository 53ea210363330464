"""What a program may do with an input that nobody would write: refuse it in words, soon, in little memory, in passing.

each case     in a process forked for the whole lot, so that a limit on memory holds and nothing else is touched
allowed       to come to an end, or a `UserError`
a failure     any other exception; more than SECONDS of CPU; more than BYTES of memory; a file left behind
"""

from __future__ import annotations

import json
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from megalite.errors import UserError

SECONDS = 5.0
"""Of CPU for one case: another program on the machine must not fail a test."""

COMPILING_SECONDS = 60.0

BYTES = 10**9
"""Of memory beyond what the process has when it begins."""

NUM_SHOWN = 8
"""Failures that a message shows, each of another kind."""


SHOWN_CHARACTERS = 500
"""Of a case that failed."""


class TooSlowError(Exception):
    """A case took too long."""


def survive(cases: Iterable[Any], run: Callable[[Any], object], folder: Path, *, may_write: bool = False) -> None:
    """Run every case; fail with those that break a rule.

    Args:
        cases: inputs; shown by `repr`.
        run: is given one. Its working directory is `folder`.
        folder: empty, and to stay so unless `may_write`.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = 1
        try:
            with os.fdopen(writer, "w") as out:
                tell = partial(print, file=out, flush=True)
                _run_all(cases, run, folder, may_write, lambda failure: tell(json.dumps(failure)))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as lines:
        failures = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    kinds = {what[-200:]: (case, what) for case, what in failures}
    shown = "\n\n".join(f"{case}\n{what}" for case, what in list(kinds.values())[:NUM_SHOWN])
    assert not failures, f"{len(failures)} cases of {len(kinds)} kinds:\n{shown}"
    assert os.waitstatus_to_exitcode(status) == 0, "the process that ran the cases died"


def _run_all(cases: Iterable[Any], run: Callable, folder: Path, may_write: bool, tell: Callable) -> None:
    os.chdir(folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    signal.signal(signal.SIGVTALRM, _too_slow)
    for case in cases:
        try:
            _run_in_time(case, run)
        except UserError:
            pass
        except TooSlowError:
            tell((repr(case)[:SHOWN_CHARACTERS], f"took more than {SECONDS:g} s:\n{traceback.format_exc(limit=-6)}"))
        except BaseException:
            tell((repr(case)[:SHOWN_CHARACTERS], traceback.format_exc(limit=-6)))
        left = [] if may_write else os.listdir(folder)
        if left:
            tell((repr(case)[:SHOWN_CHARACTERS], f"left {left} behind"))
            return


def _run_in_time(case: Any, run: Callable) -> None:
    """Run a case; one that takes too long is given time once, to compile what no case before it has needed."""
    for seconds in (SECONDS, COMPILING_SECONDS, SECONDS):
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            run(case)
        except TooSlowError:
            continue
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if seconds == SECONDS:
            return
    raise TooSlowError


def _too_slow(*_: object) -> None:
    raise TooSlowError
