"""Progress lines: a pace for people, and no arithmetic that can end a station."""

from __future__ import annotations

import io
import threading

import pytest

from megalite import progress as module
from megalite.progress import PlainLines


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time, as a list of one number that a test moves on."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_lines_of_a_log(clock):
    """A line every ten seconds: share, amount, rate, what is left."""
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.start("clean", 8.0, "MB")
    for _ in range(4):
        clock[0] += 5.0
        lines.advance(1.0)
    lines.finish("all kept")
    assert stream.getvalue().splitlines() == [
        "clean: ...",
        "clean: 25%, 2.0 MB, 0.2 MB/s, 30 s left",
        "clean: 50%, 4.0 MB, 0.2 MB/s, 20 s left",
        "clean: all kept (20.0 s)",
    ]


@pytest.mark.parametrize("total", [8.0, 0.0, None])
def test_nothing_done_at_the_first_line(clock, total):
    """A first task that read no text (all its records were refused) for more than ten seconds."""
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.start("clean", total, "MB")
    clock[0] += 12.0
    lines.advance(0.0)
    share = "0%, " if total else ""
    assert stream.getvalue().splitlines()[1] == f"clean: {share}0.0 MB, 0.0 MB/s"
    clock[0] += 12.0
    lines.advance(4.0)
    assert "0.2 MB/s" in stream.getvalue().splitlines()[2]


def test_why_nothing_moves_yet(monkeypatch):
    """While kernels are compiled the line says so, once; when something has moved it is no reason any more."""
    told, compiling = threading.Event(), [True]
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LOOKS", 0.001)
    monkeypatch.setattr(module, "is_compiling", lambda: compiling[0])
    stream = io.StringIO()
    lines = PlainLines(stream)
    monkeypatch.setattr(lines, "_print", lambda text: (stream.write(text + "\n"), "compiling" in text and told.set()))
    lines.start("clean", 8.0, "MB")
    assert told.wait(60)
    lines.advance(1.0)
    lines.finish("all kept")
    assert stream.getvalue().startswith(f"...\n{module.COMPILING} ...\nall kept")
    compiling[0] = False
    lines.start("dedup", 8.0, "MB")
    lines.finish("all kept")
    assert stream.getvalue().count(module.COMPILING) == 1
