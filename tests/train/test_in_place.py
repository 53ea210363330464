"""Small files that are overwritten where they stand, and the file server's clock."""

from __future__ import annotations

import time

from megalite.train.in_place import clock_of, read_in_place, write_in_place


def test_a_file_keeps_its_length(tmp_path):
    """Also when it says less than before, and one that says nothing yet is read as that."""
    path = tmp_path / "file.json"
    assert read_in_place(path) == (None, 0.0)
    path.write_bytes(b" " * 64)
    assert read_in_place(path)[0] is None
    for content in ({"word": "long enough ö"}, {}):
        write_in_place(path, content, 64)
        said, written = read_in_place(path)
        assert (said, path.stat().st_size) == (content, 64)
        assert abs(written - time.time()) < 5


def test_the_clock_leaves_nothing(tmp_path):
    """Whatever ends its process: eleven files of ended ones stayed in a run's folder."""
    before = clock_of(tmp_path)
    time.sleep(0.02)
    assert before < clock_of(tmp_path) < before + 5
    assert list(tmp_path.iterdir()) == []
