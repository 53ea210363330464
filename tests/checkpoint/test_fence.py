"""Attempts have one number each, and a stale one commits nothing, whenever it comes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from megalite.checkpoint import catalog
from megalite.checkpoint.fence import Fence, SupersededError, newest_attempt, take_attempt

NUM_RIVALS = 8
NUM_ROUNDS = 10


def take_some(folder: Path, queue: multiprocessing.SimpleQueue) -> None:
    queue.put([take_attempt(folder).attempt for _ in range(NUM_ROUNDS)])


def test_attempts_count_upward(tmp_path):
    """The first is 1, the next 2; the first then no longer passes, and is told who came."""
    assert newest_attempt(tmp_path / "attempts") == 0
    first = take_attempt(tmp_path / "attempts")
    first.check()
    second = take_attempt(tmp_path / "attempts")
    assert (first.attempt, second.attempt) == (1, 2)
    second.check()
    with pytest.raises(SupersededError, match=r"attempt 1, and attempt 2 has started since \(host .*, pid \d+"):
        first.check()


def test_rivals_never_share_a_number(tmp_path):
    """Eight processes that take numbers at the same time get eighty different ones, without a hole."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    rivals = [context.Process(target=take_some, args=(tmp_path / "attempts", queue)) for _ in range(NUM_RIVALS)]
    for rival in rivals:
        rival.start()
    taken = [number for _ in rivals for number in queue.get()]
    for rival in rivals:
        rival.join(timeout=60)
    assert sorted(taken) == list(range(1, NUM_RIVALS * NUM_ROUNDS + 1))


def test_a_supervisor_counts(tmp_path):
    """A given number is taken as it is, may leave holes, and is refused once it or a higher one is there."""
    folder = tmp_path / "attempts"
    assert take_attempt(folder, 7).attempt == 7
    for stale in (7, 3):
        with pytest.raises(SupersededError, match=f"to be attempt {stale}, and attempt 7 has started already"):
            take_attempt(folder, stale)
    assert take_attempt(folder).attempt == 8


def test_a_token_that_cannot_be_read(tmp_path):
    """A token is there before its text is: the fence holds all the same."""
    (tmp_path / "00002").touch()
    with pytest.raises(SupersededError, match="cannot be read"):
        Fence(tmp_path, 1).check()


def test_the_sweep_of_a_new_attempt_closes_the_gap(tmp_path):
    """The old attempt looks, then the new one starts, then the old one renames: there is nothing left to rename.

    The new attempt's own unfinished folder is safe from an old one that sweeps late.
    """
    root = tmp_path / "checkpoints"
    old, new = (root / f"{catalog.PARTIAL}step-0000005-a{attempt:05d}" for attempt in (1, 2))
    old.mkdir(parents=True)
    first = take_attempt(tmp_path / "attempts")
    first.check()  # it may go on, it is told
    take_attempt(tmp_path / "attempts")
    catalog.sweep(root, attempt=2)
    with pytest.raises(FileNotFoundError):
        catalog.commit(old, root / "step-0000005")
    new.mkdir()
    catalog.sweep(root, attempt=1)
    assert [path.name for path in root.iterdir()] == [new.name]
