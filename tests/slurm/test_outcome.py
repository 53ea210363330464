"""How an attempt ended: from what Slurm and the ranks leave behind."""

from __future__ import annotations

import pytest

from megalite.slurm.outcome import Next, judge, rank_ends


@pytest.mark.parametrize(
    ("code", "words", "errors", "expected"),
    [
        (0, "", [], (Next.FINISHED, "all ranks are done", ())),
        (3, "", [], (Next.STOPPED, "all ranks have stopped as asked", ())),
        (
            143,
            "srun: error: n2: task 3: Killed\nsrun: error: n1: tasks 0-2: Terminated\n",
            [{"rank": 0, "time": 2, "is_user_error": False, "message": "Traceback\nRuntimeError: reset by peer"}],
            (Next.RESTART, "rank 3 on n2: Killed", ("n2",)),
        ),
        (
            1,
            "srun: error: n1: tasks 0-1: Exited with exit code 1\n",
            [
                {"rank": 1, "time": 5, "is_user_error": False, "message": "late"},
                {"rank": 0, "time": 4, "is_user_error": False, "message": "Traceback\nValueError: first"},
            ],
            (Next.RESTART, "rank 0 failed first: ValueError: first", ()),
        ),
        (
            2,
            "srun: error: n1: task 0: Exited with exit code 2\n",
            [{"rank": 0, "time": 4, "is_user_error": True, "message": "disk full"}],
            (Next.GIVE_UP, "rank 0 found bad input", ()),
        ),
        (
            143,
            "srun: error: Node failure on n2\nsrun: error: n1: task 0: Terminated\n",
            [],
            (Next.RESTART, "node failure: n2", ("n2",)),
        ),
        (
            1,
            "srun: error: n3: task 1: Exited with exit code 1\n"
            "srun: launch/slurm: _step_signal: Terminating StepId=4.2\nsrun: error: n1: task 0: Killed\n",
            [{"rank": 1, "time": 4, "is_user_error": False, "message": "Traceback\nRuntimeError: no route"}],
            (Next.RESTART, "rank 1 failed first: RuntimeError: no route", ()),
        ),
        (
            1,
            "srun: error: Task launch for StepId=58.1 failed on node n3: Zero Bytes were transmitted or received\n"
            "srun: error: Application launch failed: Zero Bytes were transmitted or received\n"
            "srun: error: n1: task 0: Killed\nsrun: launch/slurm: _step_signal: Terminating StepId=58.1\n",
            [],
            (Next.RESTART, "tasks could not be started on n3: Zero Bytes were transmitted or received", ("n3",)),
        ),
        (
            7,
            "srun: error: n1: task 1: Exited with exit code 7\n",
            [],
            (Next.RESTART, "rank 1 on n1: Exited with exit code 7", ("n1",)),
        ),
        (1, "srun: error: Unable to create step\n", [], (Next.RESTART, "srun ended with exit code 1", ())),
    ],
)
def test_how_an_attempt_ended(code, words, errors, expected):
    """From srun's words as Slurm 22.05 writes them, and the ranks' own errors: the cause, not what it brought about."""
    found = judge(code, words, errors)
    assert (found.next, found.why, found.nodes) == expected


def test_lists_of_ranks():
    assert rank_ends("srun: error: n1: tasks 0-2,5: Killed")[0].ranks == (0, 1, 2, 5)


PEER_GONE = "Traceback\nRuntimeError: Connection closed by peer [10.0.0.1]:3806"

ENDED_ONE = (
    "srun: error: n1: task 0: Exited with exit code 1\nsrun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
)


@pytest.mark.parametrize(
    ("code", "words", "errors", "unfinished", "why"),
    [
        (0, "", [], {1: "n2"}, "rank 1 on n2: ended too early, with exit code 0"),
        (1, ENDED_ONE, [(0, PEER_GONE)], {1: "n2", 0: "n1"}, "rank 1 on n2: ended too early, with exit code 0"),
        (
            1,
            ENDED_ONE + "srun: error: n2: tasks 1-2: Killed\n",
            [(0, PEER_GONE)],
            {2: "n2", 1: "n2", 0: "n1"},
            "rank 2 on n2: Killed",
        ),
        (
            1,
            ENDED_ONE + "srun: error: n2: task 1: Killed\n",
            [(0, "Traceback\nValueError: mine")],
            {1: "n2", 0: "n1"},
            "rank 0 failed first: ValueError: mine",
        ),
        (1, "srun: error: Unable to create step\n", [], {}, "srun ended with exit code 1"),
    ],
)
def test_a_rank_that_left_no_word(code, words, errors, unfinished, why):
    """Peers complain of a lost connection, and of the ranks that said nothing the first to fall silent is to blame;
    also one that ended with code 0, of which srun says nothing."""
    left = [{"rank": rank, "time": 1.0, "is_user_error": False, "message": message} for rank, message in errors]
    found = judge(code, words, left, unfinished)
    assert (found.next, found.why) == (Next.RESTART, why)
