"""Where the time of a run went."""

from __future__ import annotations

import json

import pytest

from megalite.slurm.folder import LaunchFolder
from megalite.slurm.goodput import measure


def test_where_the_time_went(tmp_path):
    """Two attempts, the first of which lost five of its fifteen steps: seconds add up to the whole."""
    folder = LaunchFolder(tmp_path)
    folder.path.mkdir()
    own = [
        {"time": 100, "event": "launched", "job": "1"},
        {"time": 110, "event": "job", "job": "1"},
        {"time": 120, "event": "attempt", "attempt": 1, "job": "1", "nodes": ["a", "b"]},
        {"time": 170, "event": "end", "attempt": 1, "last_step": 15, "why": "node failure: b"},
        {"time": 180, "event": "attempt", "attempt": 2, "job": "1", "nodes": ["a", "c"]},
        {"time": 280, "event": "end", "attempt": 2, "last_step": 30, "why": "all ranks are done"},
        {"time": 280, "event": "finished"},
    ]
    run = [
        {"time": 135, "event": "start", "step": 0, "attempt": 1},
        {"time": 160, "event": "save", "step": 10, "stalled_seconds": 5.0},
        {"time": 200, "event": "start", "step": 10, "attempt": 2},
        {"time": 280, "event": "save", "step": 30, "stalled_seconds": 2.0},
    ]
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in own))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in run))
    found = measure(folder, now=1000.0)
    first, second = found.attempts
    assert (first.total, first.starting, first.saving, first.lost) == (50, 15, 5, pytest.approx(30 * 5 / 15))
    assert (second.total, second.starting, second.saving, second.lost) == (100, 20, 2, 0)
    assert found.total == 180
    assert found.waiting == 30
    parts = sum(each.computing + each.starting + each.saving + each.lost for each in found.attempts)
    assert parts + found.waiting == pytest.approx(found.total)
    assert found.share == pytest.approx((20 + 78) / 180)
