"""`megalite schedule pipeline`: the step drawn, proven, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from megalite.cli.main import main
from tests.kit.paths import ROOT

CONFIG = str(ROOT / "configs/debug.yaml")
LAYOUT = ("model.num_layers=4", "parallel.pp=2", "batch.micro_batch_size=2")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["schedule", "pipeline", CONFIG, *LAYOUT, *arguments])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.mark.parametrize("width", [60, 120])
def test_draws_and_proves(capsys, monkeypatch, tmp_path: Path, width):
    monkeypatch.setattr("megalite.cli.schedule.report_console", lambda: Console(width=width))
    page = tmp_path / "new" / "step.html"
    code, out, _ = run(capsys, "parallel.schedule=zb-v", "--vocab-size", "64", "--out", str(page))
    assert code == 0
    lines = out.splitlines()
    assert [line[:7] for line in lines[:2]] == ["stage 0", "stage 1"]
    assert all(len(line) == width for line in lines[:2])
    text = " ".join(out.split())
    assert "zb-v: 2 stages, 4 chunks, 4 micro-batches a step" in text
    assert "times chunks, that each stage keeps for backward passes at most: 4, 4" in text
    assert re.search(r"stages wait \d+\.\d % of the step \(by stage: \d+\.\d, \d+\.\d\)", text)
    assert "proven: each pass is there once and finds its inputs, each of 16 messages is sent and received once" in text
    drawn = page.read_text()
    assert drawn.count("<rect") == 4 * 3 * 4  # chunks, F and I and W, micro-batches
    assert "3F2: forward of chunk 3, micro-batch 2" in drawn
    assert "http" not in drawn.replace("http://www.w3.org", "")


def test_other_numbers_of_micro_batches(capsys):
    code, out, _ = run(capsys, "--micro-batches", "7")
    assert code == 0
    assert "7 micro-batches a step" in out


def test_too_few_micro_batches_are_refused(capsys):
    code, _, err = run(capsys, "parallel.schedule=dualpipe-v", "--micro-batches", "3")
    assert code == 2
    assert "dualpipe-v needs at least 2 x pp = 4 micro-batches, found 3" in " ".join(err.split())


def test_a_broken_file_is_refused(capsys, tmp_path: Path):
    """By the two passes that wait for each other."""
    path = tmp_path / "cycle.csv"
    path.write_text("0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3\n1F1,1B1,1F0,1B0,1F2,1B2,1F3,1B3\n")
    code, _, err = run(capsys, f"parallel.schedule={path}")
    assert code == 2
    text = " ".join(err.split())
    assert (
        "with 4 micro-batches: no rank can go on: rank 0 waits with 0B0 for 1B0 or 1I0; rank 1 waits with 1F1 for 0F1"
        in text
    )


def test_a_file_for_other_micro_batches_is_refused(capsys, tmp_path: Path):
    path = tmp_path / "short.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    code, _, err = run(capsys, f"parallel.schedule={path}")
    assert code == 2
    assert "batch.global_batch_size: 8 is 4 micro-batches of 2 on each of dp=1 ranks" in " ".join(err.split())


def test_without_a_pipeline(capsys):
    code, _, err = run(capsys, "parallel.pp=1")
    assert code == 2
    assert "has no pipeline to draw; set it to 2 or more" in " ".join(err.split())


def test_what_cannot_be_written_is_said_before(capsys, tmp_path: Path):
    """A folder, a device, a name below a file, and where nothing can be made: nothing is left beside them."""
    (tmp_path / "file").touch()
    for out, why in (
        (tmp_path, "is a folder; give the name of a file to write"),
        (Path("/dev/null"), "is no plain file"),
        (tmp_path / "file" / "x.html", "file is no folder"),
        (Path("/proc/x.html"), "cannot be written"),
    ):
        code, _, err = run(capsys, "--out", str(out))
        assert code == 2, out
        assert why in " ".join(err.split())
    assert sorted(path.name for path in tmp_path.parent.glob(f".{tmp_path.name}*")) == []
    assert not Path("/dev/null").is_file()
