"""metrics.jsonl keeps one line a step, also after a crash."""

from __future__ import annotations

import json

from megalite.monitor.records import Events, JsonLines, drop_steps_after, last_event


def test_lines_of_redone_steps_go(tmp_path):
    """Steps after the resumed one, a line cut short by a crash and what is no record go; the rest stays to the byte."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(1, 6):
        lines.write({"step": step, "loss": 0.1 * step})
    lines.close()
    whole = path.read_text().splitlines()
    damage = b'[]\n5\n{"loss": 1}\n{"step": "2"}\n{"step": 2.0}\n\xff\n\0\0\n' + b"[" * 100_000 + b"\n"
    path.write_bytes(path.read_bytes() + damage + b'{"step": 6, "lo')
    assert drop_steps_after(path, 3) == 11
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


def test_the_last_event_is_the_last_whole_one(tmp_path):
    """Lines that hold its kind and are damaged are passed over: bytes that are no text, zeros, a list, no step."""
    path = tmp_path / "events.jsonl"
    kind = b'"event": "start"'
    damage = (b"{%s, \xff}", b'\0{%s, "step": 2}', b"[{%s}]", b"{%s}", b'{"a": {%s}, "event": [], "step": 3}')
    lines = [b'{"step": 1, %s}' % kind, *(line % kind for line in damage)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert last_event(path, "start") == {"step": 1, "event": "start"}
    assert last_event(path, "stop") == {}
    assert last_event(tmp_path / "none.jsonl", "start") == {}
