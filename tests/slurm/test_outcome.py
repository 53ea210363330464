"""How an attempt ended: from what agents saw and ranks left behind."""

from __future__ import annotations

import pytest

from megalite.slurm.outcome import NextAction, RankExit, find_outcome, read_errors
from megalite.train.failures import error_path, leave_error

PEER_GONE = "Traceback\nRuntimeError: Connection closed by peer [10.0.0.1]:3806"
MINE = "Traceback\nValueError: mine"

NODES = ("n1", "n1", "n2", "n2")


def ends(*hows: int | str | None) -> list[RankExit]:
    """Of ranks 0, 1, ... on two nodes, one after the other; None for one that goes on."""
    return [RankExit(rank, NODES[rank], how, 10.0 + rank) for rank, how in enumerate(hows) if how is not None]


def errors(**messages: str) -> list[dict]:
    """r1="..." is rank 1's, in that order."""
    return [
        {"rank": int(name[1:]), "time": 5.0 + place, "is_user_error": text.startswith("bad:"), "message": text}
        for place, (name, text) in enumerate(messages.items())
    ]


@pytest.mark.parametrize(
    ("ended", "told", "unfinished", "expected"),
    [
        (ends(0, 0, 0, 0), [], (), (NextAction.FINISHED, "all ranks are done", ())),
        (ends(3, 3, 3, 3), [], (), (NextAction.STOPPED, "all ranks have stopped as asked", ())),
        (ends(None, -9), [], (0, 1), (NextAction.RESTART, "rank 1 on n1: Killed", ("n1",))),
        (ends(None, None, 137), [], (), (NextAction.RESTART, "rank 2 on n2: Killed", ("n2",))),
        (
            ends(1, None, None, -11),
            errors(r0=PEER_GONE),
            (),
            (NextAction.RESTART, "rank 3 on n2: Segmentation fault", ("n2",)),
        ),
        (
            ends(None, None, 0),
            [],
            (0, 1, 2, 3),
            (NextAction.RESTART, "rank 2 on n2: ended too early, with exit code 0", ("n2",)),
        ),
        (
            ends(1, 0),
            errors(r0=PEER_GONE),
            (1, 0),
            (NextAction.RESTART, "rank 1 on n1: ended too early, with exit code 0", ("n1",)),
        ),
        (
            ends(1, 1),
            errors(r1=MINE, r0=PEER_GONE),
            (),
            (NextAction.RESTART, "rank 1 failed first: ValueError: mine", ()),
        ),
        (ends(2), errors(r0="bad: the disk"), (), (NextAction.GIVE_UP, "rank 0 found bad input", ())),
        (ends(2, -6, 1), errors(r0="bad: the disk"), (), (NextAction.GIVE_UP, "rank 0 found bad input", ())),
        (
            ends("could not be started: no such file"),
            [],
            (),
            (NextAction.RESTART, "rank 0 on n1: could not be started: no such file", ("n1",)),
        ),
    ],
)
def test_how_an_attempt_ended(ended, told, unfinished, expected):
    """The cause, not what it brought about, as soon as it is known: others may go on."""
    found = find_outcome(ended, told, {rank: NODES[rank] for rank in unfinished}, world_size=4)
    assert (found.next, found.why, found.nodes) == expected


@pytest.mark.parametrize(
    ("ended", "told", "guess"),
    [
        (ends(1), errors(r0=PEER_GONE), ("rank 0 failed first: RuntimeError: Connection closed by peer", ())),
        (ends(1, 7), errors(r0=PEER_GONE), ("rank 1 on n1: Exited with exit code 7", ("n1",))),
        (ends(1, None, -6), errors(r0=PEER_GONE), ("rank 2 on n2: Aborted", ("n2",))),
        (ends(1), [], ("rank 0 on n1: Exited with exit code 1", ("n1",))),
        (ends(-15, -15, -15, -15), [], ("rank 0 on n1: Terminated", ("n1",))),
        ([], errors(r0=PEER_GONE), ("rank 0 failed first: RuntimeError: Connection closed", ())),
    ],
)
def test_complaints_of_peers_wait_for_the_cause(ended, told, guess):
    """Nobody is named while another may have failed first; then one that left no word, and for the others' no node."""
    assert find_outcome(ended, told, {}, world_size=4) is None
    found = find_outcome(ended, told, {}, world_size=4, is_final=True)
    assert found.next is NextAction.RESTART
    assert found.why.startswith(guess[0])
    assert found.nodes == guess[1]


def test_a_word_comes_before_the_end():
    """Of a rank that found bad input: an attempt is not tried again because its exit code has not been seen yet."""
    told = errors(r1="bad: no checkpoint is whole")
    assert find_outcome([], told, {}, world_size=4) is None
    assert find_outcome(ends(None, 2), told, {}, world_size=4).next is NextAction.GIVE_UP
    assert find_outcome([], told, {}, world_size=4, is_final=True).next is NextAction.RESTART


@pytest.mark.parametrize("code", [0, 1, 3, -9, -15])
def test_only_the_code_of_bad_input_gives_up(code):
    """A user error by a rank that ends in any other way is tried again: the disk may have been away for a moment."""
    told = errors(r1="bad: the disk")
    found = find_outcome(ends(None, code), told, {1: "n1"}, world_size=4, is_final=True)
    assert found.next is NextAction.RESTART


def test_errors_of_another_attempt_do_not_count(tmp_path):
    """A stale rank may leave one while its successors train; a file that was cut off is nothing."""
    for rank, attempt in enumerate((3, 4, 5)):
        assert leave_error(tmp_path, rank, {"rank": rank, "attempt": attempt, "message": "mine"}) is None
    error_path(tmp_path, 3).write_text('{"rank": 3, "att')
    assert [error["rank"] for error in read_errors(tmp_path / "logs", 4)] == [1]


def test_an_attempt_that_goes_on():
    """Nothing has ended, or some have ended well before the others."""
    for ended in ([], ends(0), ends(3, None, 3)):
        assert find_outcome(ended, [], {}, world_size=4) is None
        assert find_outcome(ended, [], {}, world_size=4, is_final=True) is None
