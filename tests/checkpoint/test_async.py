"""Saving behind the training: the state of the moment is saved, failures reach every rank, what is written is whole."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import torch

from megalite.checkpoint import saving
from megalite.checkpoint.background import Outcome, Saver
from megalite.checkpoint.format import Progress
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.saving import Target
from megalite.checkpoint.shares import write_share
from megalite.checkpoint.snapshot import Share
from megalite.engine import stage_state
from megalite.engine.hooks import FIRST
from megalite.parallel.collectives import agree
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, tiny_config

CPU = torch.device("cpu")
LATE_SECONDS = 0.3
"""Time enough for an update that does not wait."""
LAYOUTS = {
    "zero1": {"dp": 2, "zero_stage": 1},
    "zero3": {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
    "fsdp2": {"dp": 2, "zero_stage": 3, "engine": "fsdp2"},
    "tp2-zero0": {"tp": 2, "zero_stage": 0},
    "pp2": {"pp": 2, "zero_stage": 1},
}


def make_saver(rank: Rank, root: Path, **options) -> Saver:
    timeout = options.pop("timeout_seconds", 60.0)
    target = Target(root, rank.plan, "", {}, timeout_seconds=timeout)
    return Saver(target, rank.engine, rank.axes, CPU, asynchronous=True, **options)


def hold() -> threading.Event:
    """Make this rank's thread wait until the event is set."""
    released = threading.Event()

    def slow(*args, **kwargs):
        assert released.wait(60)
        return write_share(*args, **kwargs)

    saving.write_share = slow
    return released


def vote(saver: Saver, rank: Rank) -> Outcome | None:
    """What the trainer does at the end of a step."""
    is_busy, has_failed = agree(saver.flags(), rank.axes.world, CPU)
    return saver.settle(is_busy=is_busy, has_failed=has_failed)


def vote_until_settled(saver: Saver, rank: Rank) -> Outcome:
    while (outcome := vote(saver, rank)) is None:
        time.sleep(0.01)
    return outcome


def train_while_saving(folder: Path, cases: dict[str, dict]) -> dict[str, list]:
    """In every layout: save step 2 and train on; then the same again at step 4, with another step behind it."""
    facts = {}
    for name, parallel in cases.items():
        rank = start_rank(tiny_config(parallel=parallel))
        curve = rank.train(0, 2)
        rank.save(folder / name / "waited", 2)
        saver = make_saver(rank, folder / name / "behind")
        released = hold()
        saver.start(Progress(step=2, num_updates=2))
        curve += rank.train(2, 4)
        was_busy, before = vote(saver, rank) is None, list((folder / name / "behind").glob("step-*"))
        released.set()
        outcome = vote_until_settled(saver, rank)
        buffer = saver._snapshots._buffer.data_ptr()
        saving.write_share = write_share
        rank.save(folder / name / "waited", 4)
        saver.start(Progress(step=4, num_updates=4))
        curve += rank.train(4, 5)
        second = saver.finish()
        same_buffer = saver._snapshots._buffer.data_ptr() == buffer
        size = saver._snapshots._buffer.numel()
        saver.close()
        facts[name] = [was_busy, before, outcome.error, second.error, saver.is_pending, same_buffer, size, curve]
        rank.engine.close()
    return facts


def train_only(cases: dict[str, dict]) -> dict[str, list[tuple[float, float]]]:
    curves = {}
    for name, parallel in cases.items():
        rank = start_rank(tiny_config(parallel=parallel))
        curves[name] = rank.train(0, 5)
        rank.engine.close()
    return curves


def test_the_state_of_the_moment_is_saved(tmp_path):
    """While the thread is held back training goes on, and disturbs neither the checkpoint nor is disturbed by it.

    The checkpoints are those of a save that is waited for, bit for bit, twice, from one buffer, which is as large as
    the share: the sum over the ranks is the whole state.
    """
    facts = run_ranks(train_while_saving, 2, tmp_path, LAYOUTS)
    truth = run_ranks(train_only, 2, LAYOUTS)[0]
    for name in LAYOUTS:
        sizes = 0
        for rank in facts:
            was_busy, before, *errors, is_pending, same_buffer, size, curve = rank[name]
            assert was_busy, name
            assert before == []
            assert errors == [None, None]
            assert not is_pending
            assert same_buffer
            assert curve == truth[name], name
            sizes += size
        for step in (2, 4):
            waited, behind = (
                CheckpointReader(tmp_path / name / how / f"step-{step:07d}") for how in ("waited", "behind")
            )
            assert behind.verify() == []
            assert behind.manifest.tensors.keys() == waited.manifest.tensors.keys()
            numbers = 0
            for tensor in waited.manifest.tensors:
                for want, got in zip(waited.slabs(tensor), behind.slabs(tensor), strict=True):
                    assert torch.equal(want, got), f"{name}, step {step}: {tensor}"
                    numbers += want.numel()
            assert sizes == numbers, name


def update_before_the_copy_is_done(folder: Path, cases: dict[str, dict]) -> None:
    """Save step 2 with a copy that begins only when the next update is due; a gathered state is copied at once."""
    copy = Share.copy
    for name, parallel in cases.items():
        is_gathered = name == "zero3-gathered"
        stage_state.MAX_SLICES = 1 if is_gathered else 64
        rank = start_rank(tiny_config(parallel=parallel))
        rank.train(0, 2)
        rank.save(folder / name / "waited", 2)
        saver = make_saver(rank, folder / name / "behind")
        is_due = threading.Event()

        def late_copy(share: Share, is_due=is_due) -> None:
            assert is_due.wait(60)
            time.sleep(LATE_SECONDS)
            copy(share)

        rank.engine.hooks.before_update.add(is_due.set, order=FIRST - 1)  # before the save's own
        Share.copy = copy if is_gathered else late_copy
        saver.start(Progress(step=2, num_updates=2))
        rank.train(2, 3)
        outcome = saver.finish()
        Share.copy = copy
        assert outcome.error is None
        assert is_due.is_set()
        rank.engine.close()


def test_an_update_waits_for_the_copy(tmp_path):
    """Every engine and ZeRO stage: the weights change only when they have been copied, so the old ones are saved."""
    cases = {**LAYOUTS, "zero2": {"dp": 2, "zero_stage": 2}, "zero3-gathered": LAYOUTS["zero3"]}
    run_ranks(update_before_the_copy_is_done, 2, tmp_path, cases)
    for name in cases:
        waited, behind = (CheckpointReader(tmp_path / name / how / "step-0000002") for how in ("waited", "behind"))
        assert behind.verify() == []
        for tensor in waited.manifest.tensors:
            for want, got in zip(waited.slabs(tensor), behind.slabs(tensor), strict=True):
                assert torch.equal(want, got), f"{name}: {tensor}"


def fail_on_one_rank(root: Path) -> list[str]:
    """Rank 1's disk is full for the first save; rank 0 is already waiting for it. The second save is fine."""
    rank = start_rank(tiny_config(parallel=LAYOUTS["zero1"]))
    saver = make_saver(rank, root)
    rank.train(0, 1)

    def no_space(*args, **kwargs):
        time.sleep(0.2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank.axes.global_rank == 1:
        saving.write_share = no_space
    saver.start(Progress(step=1))
    steps = 1
    while (outcome := vote(saver, rank)) is None:
        rank.train(steps, steps + 1)
        steps += 1
    saving.write_share = write_share
    left = sorted(path.name for path in root.iterdir()) if rank.axes.global_rank == 0 else []
    saver.start(Progress(step=steps))
    return [str(outcome.error), *left, saver.finish().folder.name, f"step-{steps:07d}"]


def test_a_failure_reaches_every_rank(tmp_path):
    """Both learn at the same step that rank 1's disk is full, nothing is left behind, and the next save is whole."""
    told = run_ranks(fail_on_one_rank, 2, tmp_path)
    assert told[0] == told[1]
    error, saved, expected = told[0]
    assert error.startswith("rank 1: ")
    assert "No space left" in error
    assert saved == expected
    assert [path.name for path in tmp_path.iterdir()] == [expected]
    assert CheckpointReader(tmp_path / expected).verify() == []


def wait_for_a_lost_rank(root: Path) -> str:
    """Rank 1's thread hangs; rank 0 gives up."""
    rank = start_rank(tiny_config(parallel=LAYOUTS["zero1"]))
    saver = make_saver(rank, root, timeout_seconds=0.5)
    if rank.axes.global_rank == 1:
        threading.Timer(2.0, hold().set).start()
    saver.start(Progress(step=1))
    return str(vote_until_settled(saver, rank).error)


def test_a_rank_that_never_writes(tmp_path):
    """Rank 0 waits for it as long as it was told to, names it, and leaves nothing behind."""
    told = run_ranks(wait_for_a_lost_rank, 2, tmp_path)
    assert told[0] == told[1]
    assert "1 ranks (1) had not written their share after 0.5 s" in told[0]
    assert list(tmp_path.iterdir()) == []


def break_off(root: Path) -> Outcome | None:
    """Training breaks while a save is being written: nobody votes any more."""
    rank = start_rank(tiny_config(parallel=LAYOUTS["zero1"]))
    saver = make_saver(rank, root)
    released = hold()
    saver.start(Progress(step=1))
    threading.Timer(0.3, released.set).start()
    return saver.close()


def test_what_is_being_written_when_training_breaks_is_committed(tmp_path):
    """Without a vote, and without any rank talking to another."""
    outcomes = run_ranks(break_off, 2, tmp_path)
    assert outcomes[0].folder == tmp_path / "step-0000001"
    assert outcomes[1] is None
    assert CheckpointReader(tmp_path / "step-0000001").verify() == []


def tidy_badly(root: Path) -> Outcome:
    """Old checkpoints cannot be removed."""

    def refuse(folder: Path) -> list[str]:
        raise PermissionError("not yours")

    rank = start_rank(tiny_config())
    saver = make_saver(rank, root, after_commit=refuse)
    saver.start(Progress(step=1))
    return saver.finish()


def test_old_ones_that_cannot_go_are_no_failure(tmp_path):
    """The new checkpoint is there, whatever the tidying behind it says."""
    outcome = run_ranks(tidy_badly, 1, tmp_path)[0]
    assert outcome.error is None
    assert outcome.trouble == "not yours"
    assert (outcome.folder / "manifest.json").is_file()
