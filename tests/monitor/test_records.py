"""metrics.jsonl keeps one line a step, also after a crash."""

from __future__ import annotations

import json

from megalite.monitor.records import Events, JsonLines, drop_steps_after


def test_lines_of_redone_steps_go(tmp_path):
    """Steps after the resumed one, and a line cut short by a crash, are dropped; the rest stays to the byte."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(1, 6):
        lines.write({"step": step, "loss": 0.1 * step})
    lines.close()
    whole = path.read_text().splitlines()
    path.write_text(path.read_text() + '{"step": 6, "lo')
    assert drop_steps_after(path, 3) == 3
    assert path.read_text().splitlines() == whole[:3]
    assert drop_steps_after(path, 3) == 0
    assert drop_steps_after(tmp_path / "none.jsonl", 3) == 0


def test_events_carry_time_step_and_reason(tmp_path):
    """Every event can be placed and explained."""
    events = Events(tmp_path / "events.jsonl")
    events.add("skip", 7, why="gradient norm is inf")
    events.close()
    record = json.loads((tmp_path / "events.jsonl").read_text())
    assert record.pop("time") > 0
    assert record == {"event": "skip", "step": 7, "why": "gradient norm is inf"}
