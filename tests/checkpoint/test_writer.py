"""A save that fails on one rank fails on all, leaves nothing, and costs no checkpoint that was there before."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megalite.checkpoint import catalog, saving
from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import CheckpointError
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

CONFIG = {"parallel": {"tp": 2, "zero_stage": 1}}


def save_with_a_full_disk(root: Path, failing_rank: int, failing_call: str) -> str:
    """Save step 1, then step 2 with a disk that is full for one call of one rank; return what this rank was told."""
    rank = start_rank(tiny_config(**CONFIG))
    rank.train(0, 1)
    rank.save(root, 1)

    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank.axes.global_rank == failing_rank:
        setattr(saving, failing_call, no_space)
    try:
        rank.save(root, 2)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("failing_rank", "failing_call"), [(0, "write_share"), (1, "write_share"), (0, "write_manifest")]
)
def test_full_disk_on_one_rank(tmp_path, failing_rank, failing_call):
    """Every rank is told, the former checkpoint is whole, and no half-written folder is left."""
    words = run_ranks(save_with_a_full_disk, 2, tmp_path, failing_rank, failing_call)
    assert words[0] == words[1]
    assert f"rank {failing_rank}" in words[0]
    assert "not saved: [Errno 28] No space left" in words[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]
    assert CheckpointReader(tmp_path / "step-0000001").verify() == []


def save_twice(root: Path) -> None:
    rank = start_rank(tiny_config(**CONFIG))
    rank.train(0, 1)
    for _ in range(2):
        rank.save(root, 1)


def test_same_step_saved_again(tmp_path):
    """A step that is saved again replaces the former one whole."""
    run_ranks(save_twice, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]
    reader = CheckpointReader(catalog.latest(tmp_path))
    assert reader.verify() == []
    assert reader.manifest.layout == {"pp": 1, "dp": 1, "cp": 1, "tp": 2, "zero_stage": 1}


def test_damage_is_named(tmp_path):
    """A flipped byte, a truncated file, a missing file and a broken manifest each get a sentence of their own."""
    run_ranks(save_twice, 2, tmp_path)
    folder = tmp_path / "step-0000001"
    victim = folder / "rank-00000.safetensors"
    data = victim.read_bytes()
    victim.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert "checksum differs" in CheckpointReader(folder).verify()[0]
    victim.write_bytes(data[:-9])
    assert f"{len(data) - 9} bytes, expected {len(data)}" in CheckpointReader(folder).verify()[0]
    victim.unlink()
    assert "missing" in CheckpointReader(folder).verify()[0]
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        CheckpointReader(folder)
