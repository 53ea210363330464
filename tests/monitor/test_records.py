"""metrics.jsonl keeps one line a step, also after a crash."""

from __future__ import annotations

import json

from megalite.monitor.records import Events, JsonLines, drop_steps_after


def test_lines_of_redone_steps_go(tmp_path):
    """Steps after the resumed one, a line cut short by a crash and what is no record go; the rest stays to the byte."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(1, 6):
        lines.write({"step": step, "loss": 0.1 * step})
    lines.close()
    whole = path.read_text().splitlines()
    path.write_text(path.read_text() + '[]\n5\n{"loss": 1}\n{"step": 6, "lo')
    assert drop_steps_after(path, 3) == 6
    assert path.read_text().splitlines() == whole[:3]
    assert drop_steps_after(path, 3) == 0
    assert drop_steps_after(tmp_path / "none.jsonl", 3) == 0


def test_a_cut_line_is_removed_before_the_next(tmp_path):
    """After a full disk the file goes on with whole lines; a stale writer of the steps' file writes into nothing."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"b": 2, "c')
    lines = JsonLines(path)
    lines.write({"d": 3})
    assert path.read_text() == '{"a": 1}\n{"d": 3}\n'
    path.write_text('{"step": 1}\n')
    stale = JsonLines(path)
    assert drop_steps_after(path, 1) == 0
    stale.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n'
    (tmp_path / "cut.jsonl").write_text('{"a')
    JsonLines(tmp_path / "cut.jsonl").close()
    assert (tmp_path / "cut.jsonl").read_text() == ""


def test_events_carry_time_step_and_reason(tmp_path):
    """Every event can be placed and explained."""
    events = Events(tmp_path / "events.jsonl")
    events.add("skip", 7, why="gradient norm is inf")
    events.close()
    record = json.loads((tmp_path / "events.jsonl").read_text())
    assert record.pop("time") > 0
    assert record == {"event": "skip", "step": 7, "why": "gradient norm is inf"}
