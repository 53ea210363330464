"""Pictures of how tokens went to experts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megalite.report import balance
from megalite.report.balance import expert_balance
from megalite.report.run_data import read_runs
from tests.report.conftest import write_lines


def run_with(folder: Path, records: list, name: str = "run"):
    folder = folder / name
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", [{"step": step, "loss": 2.0, "tokens": step} for step in (1, 2, 3)])
    write_lines(folder / "experts.jsonl", records)
    (run,) = read_runs([folder])
    return run


def fields(picture: str) -> dict[tuple[int, int], str]:
    """The colour of each field."""
    found = {}
    for d, colour in re.findall(r'<path d="([^"]*)" fill="(#\w+)"', picture):
        for x, y in re.findall(r"M(\d+) (\d+)h1v1h-1z", d):
            assert (int(x), int(y)) not in found, "drawn twice"
            found[int(x), int(y)] = colour
    return found


def test_colours(tmp_path: Path):
    """White is even, red none, blue three times as many; each field is drawn once."""
    loads = [[8.0, 8.0, 8.0, 8.0], [0.0, 24.0, 4.0, 4.0]]
    run = run_with(tmp_path, [{"step": step, "loads": {"blocks.1": each}} for step, each in enumerate(loads, 1)])
    found = fields(str(expert_balance([run])))
    assert len(found) == 8
    assert {found[0, expert] for expert in range(4)} == {"#f7f7f7"}
    assert (found[1, 0], found[1, 1]) == ("#b2182b", "#2166ac")
    assert found[1, 2] == found[1, 3] not in ("#f7f7f7", "#b2182b")
    assert "blocks.1: at the end the fullest has 3.00 times the mean, the emptiest 0.00" in str(expert_balance([run]))


def test_many_steps_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No more columns than fit, over all blocks of a page."""
    monkeypatch.setattr(balance, "MAX_FIELDS", 60)
    rng = np.random.default_rng(0)
    records = [
        {"step": step, "loads": {f"blocks.{block}": rng.random(4).tolist() for block in range(3)}}
        for step in range(1, 50)
    ]
    page = str(expert_balance([run_with(tmp_path, records)]))
    assert page.count("<svg") == 3
    assert set(re.findall(r'viewBox="0 0 (\d+) 4"', page)) == {"5"}


@pytest.mark.parametrize(
    "record",
    [{"loads": {}}, {"step": "1", "loads": {"a": [1]}}, {"step": 1, "loads": {"a": ["1"]}}, {"step": 1, "loads": [1]}],
)
def test_what_is_no_record_is_left_out(record: dict, tmp_path: Path):
    run = run_with(
        tmp_path, [record, {"step": 2, "loads": {"blocks.0": [1, 3]}}, {"step": 3, "loads": {"blocks.0": []}}]
    )
    assert str(expert_balance([run])).count("<svg") <= 1
    assert expert_balance([run_with(tmp_path, [], "none")]) is None
