"""Failures: how they are counted, and what a rank leaves behind."""

from __future__ import annotations

from megalite.checkpoint.catalog import CHECKPOINTS
from megalite.checkpoint.format import MANIFEST
from megalite.errors import EXIT_FAULT
from megalite.train.failures import Failures, error_path, leave_error, read_error
from megalite.train.local import _verdict


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


def test_an_error_that_could_not_be_written(tmp_path):
    """A disk that is full when a rank fails hides neither that it did nor how: the rank says it itself."""
    path = error_path(tmp_path, 0)
    assert leave_error(tmp_path, 0, {"rank": 0}) is None
    assert read_error(path) == {"rank": 0}
    path.write_text("")
    assert read_error(path) is None
    assert _verdict(tmp_path, [EXIT_FAULT], is_out_of_memory=False) == EXIT_FAULT
    path.unlink()
    path.mkdir()
    assert isinstance(leave_error(tmp_path, 0, {"rank": 0}), OSError)
