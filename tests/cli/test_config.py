"""`megalite config check` for people, whatever their terminal."""

from __future__ import annotations

import pytest
from rich.console import Console

from megalite.cli.main import main
from tests.kit.paths import ROOT


@pytest.mark.parametrize("width", [50, 80, 120])
def test_memory_fits_the_terminal(capsys, monkeypatch, width):
    """Four stages of 70B: every part's title and every figure in one piece, where they were `weig…` and `4…`."""
    monkeypatch.setattr("megalite.cli.data.options.report_console", lambda: Console(width=width))
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", str(ROOT / "configs/llama-70b.yaml"), "--world-size", "512"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    memory = text.split("at the peak of a step")[1].split("DeepSpeed's JSON")[0]
    words = memory.split()
    for title in ("stage", "blocks", "parameters", "weights", "grads", "optim", "activ", "head", "comm", "total"):
        assert title in words
    assert {"0-19", "20-39", "40-59", "60-79", "2,172,452,864", "2,172,461,056"} <= set(words)
    assert sum("." in word for word in words) == 4 * 7
    assert "…" not in text
    assert max(map(len, memory.splitlines())) <= width


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "native, as parallel.engine=null chooses"),
        (["parallel.zero_stage=3"], "fsdp2, as parallel.engine=null chooses"),
        (["parallel.zero_stage=3", "parallel.engine=deepspeed"], "deepspeed"),
    ],
)
def test_it_says_which_engine(capsys, monkeypatch, settings, said):
    """Where a config leaves it open too."""
    monkeypatch.setattr("megalite.cli.data.options.report_console", lambda: Console(width=120))
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", str(ROOT / "configs/llama-1b3.yaml"), *settings, "--world-size", "8"])
    assert ended.value.code == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("engine ")]
    assert line.split(maxsplit=1)[1].strip() == said
