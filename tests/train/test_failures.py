"""Failures are counted since the last new checkpoint."""

from __future__ import annotations

from megalite.checkpoint.catalog import CHECKPOINTS
from megalite.checkpoint.format import MANIFEST
from megalite.train.failures import Failures


def test_progress_starts_the_count_anew(tmp_path):
    """Without a checkpoint every failure counts; a newer one than at the last failure takes all former ones back."""
    failures = Failures()
    assert [failures.add(tmp_path), failures.add(tmp_path)] == [1, 2]
    checkpoint = tmp_path / CHECKPOINTS / "step-0000010"
    checkpoint.mkdir(parents=True)
    assert failures.add(tmp_path) == 3  # it is not complete
    (checkpoint / MANIFEST).write_text("{}")
    assert [failures.add(tmp_path), failures.add(tmp_path)] == [1, 2]
    assert failures.last_step == 10
