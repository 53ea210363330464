"""An attempt that was given up and still runs cannot put its checkpoints among those of the one that replaced it."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from megalite.checkpoint import catalog, saving
from megalite.checkpoint.attempt import join_attempt
from megalite.checkpoint.background import Saver
from megalite.checkpoint.fence import Fence, SupersededError, take_attempt
from megalite.checkpoint.format import Progress
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.saving import Target
from megalite.checkpoint.shares import write_share
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, tiny_config

CPU = torch.device("cpu")
CONFIG = {"parallel": {"dp": 2, "zero_stage": 1}}


def make_saver(rank: Rank, run_dir: Path, fence: Fence) -> Saver:
    target = Target(run_dir / catalog.CHECKPOINTS, rank.plan, "", {}, fence)
    return Saver(target, rank.engine, rank.axes, CPU, asynchronous=True)


def be_overtaken(run_dir: Path) -> list[str]:
    """Save step 1 as attempt 1; begin to save step 2; be overtaken while writing it; try step 3 all the same."""
    rank = start_rank(tiny_config(**CONFIG))
    saver = make_saver(rank, run_dir, join_attempt(run_dir, None, rank.axes, CPU))
    saver.start(Progress(step=1))
    said = [str(saver.finish().error)]

    released = threading.Event()

    def slow(*args, **kwargs):
        released.wait(60)
        return write_share(*args, **kwargs)

    saving.write_share = slow
    saver.start(Progress(step=2))
    if rank.axes.global_rank == 0:
        take_attempt(run_dir / "attempts")
    torch.distributed.barrier()
    released.set()
    outcome = saver.finish()
    assert isinstance(outcome.error, SupersededError)
    said.append(str(outcome.error))
    try:
        saver.start(Progress(step=3))
    except SupersededError as error:
        said.append(str(error))
    return said


def test_overtaken_while_writing(tmp_path):
    """The commit is refused on both ranks, with who came; so is the beginning of the next save. Step 1 is untouched."""
    told = run_ranks(be_overtaken, 2, tmp_path)
    assert told[0] == told[1]
    first, second, third = told[0]
    assert first == "None"
    for text in (second, third):
        assert "this is attempt 1, and attempt 2 has started since" in text
    assert [path.name for path in (tmp_path / catalog.CHECKPOINTS).iterdir()] == ["step-0000001"]
    assert CheckpointReader(tmp_path / catalog.CHECKPOINTS / "step-0000001").verify() == []


def take_over(run_dir: Path) -> list[str]:
    """Two attempts side by side, as two jobs would be: the new one starts and saves while the old one writes."""
    rank = start_rank(tiny_config(**CONFIG))
    old = make_saver(rank, run_dir, join_attempt(run_dir, None, rank.axes, CPU))
    released = threading.Event()

    def slow(folder, *args, **kwargs):
        if folder.name.endswith("-a00001"):
            released.wait(60)
        return write_share(folder, *args, **kwargs)

    saving.write_share = slow
    rank.train(0, 1)
    old.start(Progress(step=1, num_updates=1))
    new = make_saver(rank, run_dir, join_attempt(run_dir, None, rank.axes, CPU))  # sweeps the old one's folder away
    new.start(Progress(step=1, num_updates=7))
    assert new.finish().error is None
    released.set()
    return [str(old.finish().error)]


def test_the_new_attempt_wins(tmp_path):
    """The old one finds its folder gone; the checkpoint of the same step is the new one's."""
    told = run_ranks(take_over, 2, tmp_path)
    assert "not saved" in told[0][0]
    folder = tmp_path / catalog.CHECKPOINTS / "step-0000001"
    reader = CheckpointReader(folder)
    assert reader.verify() == []
    assert reader.manifest.progress.num_updates == 7
    assert list(folder.parent.iterdir()) == [folder]


def count_attempts(run_dir: Path, number: int | None) -> int | str:
    rank = start_rank(tiny_config(**CONFIG))
    try:
        return join_attempt(run_dir, number, rank.axes, CPU).attempt
    except SupersededError as error:
        return str(error)


def test_all_ranks_are_of_one_attempt(tmp_path):
    """The first rank takes the number for all; a supervisor's number that is too low ends all of them."""
    assert run_ranks(count_attempts, 2, tmp_path, 5) == [5, 5]
    assert run_ranks(count_attempts, 2, tmp_path, None) == [6, 6]
    told = run_ranks(count_attempts, 2, tmp_path, 6)
    assert "attempt 6 has started already" in told[0]
    assert "could not become the newest attempt" in told[1]
