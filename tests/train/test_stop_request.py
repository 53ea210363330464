"""What files in a run's folder ask for."""

from __future__ import annotations

import pytest

from megalite.train.signals import SAVE_FILE, STOP_FILE, StopRequest


@pytest.mark.parametrize("is_folder", [False, True])
def test_files_and_folders_that_ask(tmp_path, is_folder):
    """SAVE is a file, which goes when it is seen, so that a folder of the name asks for nothing; STOP may be either,
    and stays."""
    request = StopRequest()
    request.watch(tmp_path)
    assert not request.is_save_asked()
    assert not request.is_asked(1)
    for name in (SAVE_FILE, STOP_FILE):
        (tmp_path / name).mkdir() if is_folder else (tmp_path / name).touch()
    if request.is_save_asked():
        request.note_save()
    assert (tmp_path / SAVE_FILE).exists() == is_folder
    assert not request.is_save_asked()
    assert request.is_asked(1)
    assert request.why(1) == "the file STOP"
