"""A live line on a terminal, plain lines in a file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megalite.engine.protocol import StepResult
from megalite.monitor.display import Display, LiveLine

RESULT = StepResult(loss=2.5, grad_norm=0.75, lr=1e-3, num_tokens=100)


def test_plain_lines_every_so_often():
    """First, every tenth and last step; with loss, speed and time left, and no control characters."""
    out = io.StringIO()
    display = Display(total_steps=25, first_step=0, log_every=10, stream=out)
    for step in range(1, 26):
        display.step(step, RESULT, tokens_per_second=12345.6, mfu=0.4)
    display.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert "loss 2.5000" in lines[0]
    assert "12,346 tok/s" in lines[0]
    assert "left 0:00:00" in lines[-1]
    assert "\x1b" not in out.getvalue()


def test_time_left_after_going_back(monkeypatch):
    """Counted from where the run went back to: a second a step, however long it had taken before."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    out = io.StringIO()
    display = Display(total_steps=100, first_step=0, log_every=10, stream=out)
    clock[0] = 5000.0
    display.rewind(10)
    for step in range(11, 21):
        clock[0] += 1.0
        display.step(step, RESULT, tokens_per_second=1.0, mfu=0.0)
    assert out.getvalue().splitlines()[-1].endswith("left 0:01:20")


def test_live_line_on_a_terminal():
    """A terminal gets one line that is drawn anew, and still shows what is said in between."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    display = Display(total_steps=5, first_step=2, log_every=1, stream=out)
    display.step(3, RESULT, tokens_per_second=10.0, mfu=0.1)
    display.say("saved [a] checkpoint")
    display.close()
    assert "saved [a] checkpoint" in out.getvalue()
    assert "3/5" in out.getvalue()


@pytest.mark.parametrize(("width", "num_lines"), [(24, 5), (50, 3), (80, 2), (120, 1)])
def test_live_line_drops_nothing_at_any_width(width, num_lines):
    """Every figure is there in one piece, in as few lines as the terminal allows."""
    figures = ("loss 2.5000", "norm 0.750", "lr 1.00e-03", "1,234,567 tok/s", "mfu 41%")
    line = LiveLine(0, 120_000)
    line.show(41_000, figures, "left 12:02:40")
    console = Console(width=width, file=io.StringIO())
    console.print(line)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == num_lines
    assert max(map(len, lines)) <= width
    for figure in (*figures, "left 12:02:40"):
        assert any(figure in each for each in lines), figure
    assert "━" in lines[0]


def test_live_line_shows_what_the_step_was(monkeypatch):
    """Norm and rate too, on a terminal of 80 columns."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    display = Display(total_steps=5, first_step=0, log_every=1, stream=out)
    display.step(1, RESULT, tokens_per_second=10.0, mfu=0.1)
    display.close()
    for figure in ("loss 2.5000", "norm 0.750", "lr 1.00e-03", "10 tok/s", "mfu 10%"):
        assert figure in out.getvalue()
