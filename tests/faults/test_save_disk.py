"""A full disk costs a checkpoint, not the run and not the former ones: for real, not by a patched call."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.checkpoint import catalog
from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import CheckpointError
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

CONFIG = {"parallel": {"dp": 2, "zero_stage": 1}, "model": {"hidden_size": 128, "ffn_hidden_size": 256}}
TMPFS_MB = 24
"""A checkpoint of this model is 7 MB."""
MAX_FILE_BYTES = 100_000


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of a few MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MB}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("a small tmpfs cannot be mounted: there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], timeout=30, check=True)


def fill_the_disk(root: Path, looks_first: bool) -> list[str]:
    """Save until there is no room; make room; save once more. Returns what the failing save said."""
    if not looks_first:
        catalog.check_disk = lambda *args: None
    rank = start_rank(tiny_config(**CONFIG))
    words = []
    for step in range(1, 8):
        try:
            rank.save(root, step)
        except CheckpointError as error:
            words = [str(error), f"step-{step:07d}"]
            break
    if rank.axes.global_rank == 0:
        shutil.rmtree(root / "step-0000001")
    rank.train(0, 1)  # all ranks: none comes too early
    rank.save(root, 9)
    return words


@pytest.mark.parametrize(
    ("looks_first", "reason"),
    [
        (True, r"the next checkpoint needs [\d.]+ MB and the disk has [\d.]+ [Mk]B free"),
        (False, r"\[Errno 28\] No space left on device"),
    ],
    ids=["told before", "found out while writing"],
)
def test_full_disk(small_disk, looks_first, reason):
    """All ranks are told why, former checkpoints are whole, nothing half-written takes room, the next save works."""
    told = run_ranks(fill_the_disk, 2, small_disk / "checkpoints", looks_first)
    assert told[0] == told[1]
    error, name = told[0]
    assert f"{name}: checkpoint not saved" in error
    assert re.search(reason, error)
    found = sorted((small_disk / "checkpoints").iterdir())
    assert found == catalog.complete(small_disk / "checkpoints")
    assert found[-1].name == "step-0000009"
    assert name not in [path.name for path in found]
    assert all(CheckpointReader(folder).verify() == [] for folder in found)


def hit_the_limit(root: Path) -> str:
    """Save a step, then one with a limit on the size of files, then one without."""
    rank = start_rank(tiny_config(**CONFIG))
    rank.save(root, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, hard))
    try:
        rank.save(root, 2)
    except CheckpointError as error:
        word = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    rank.train(0, 1)
    rank.save(root, 3)
    return word


def test_file_size_limit(tmp_path):
    """The kernel cuts a write short on both ranks, anywhere and without privileges: as with a full disk."""
    told = run_ranks(hit_the_limit, 2, tmp_path)
    assert told[0] == told[1]
    assert "rank 0: " in told[0]
    assert "[Errno 27] File too large" in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000001", "step-0000003"]
    assert all(CheckpointReader(folder).verify() == [] for folder in catalog.complete(tmp_path))
