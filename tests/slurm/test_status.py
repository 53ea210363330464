"""What `megalite launch status` shows of a run's files, where Slurm cannot be asked."""

from __future__ import annotations

import json

import pytest

from megalite.errors import UserError
from megalite.slurm import status
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.status import ask_to_stop, describe


def test_a_step_without_a_loss(tmp_path, monkeypatch):
    """One that had no valid token bears null; a line that is being written is passed over; the run has ended, so that
    no time is said to be left."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    folder = LaunchFolder(tmp_path)
    folder.path.mkdir()
    folder.write_state(status="stopped", why="STOP was found", job="4", num_nodes=1, ranks_per_node=1, attempt=1)
    (tmp_path / "plan.json").write_text(json.dumps({"total_steps": 1200, "tokens_per_step": 4096}))
    steps = [{"step": 1099, "loss": 2.5, "seconds": 2.0}, {"step": 1100, "loss": None, "seconds": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 110')
    first, *_ = lines = describe(tmp_path)
    assert first == f"{tmp_path}: stopped (STOP was found)"
    assert "job 4, when last heard of (no Slurm here to ask, or no answer)" in lines
    assert "step 1,100 of 1,200, loss none" in lines
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    assert "no step yet" in describe(tmp_path)


@pytest.mark.parametrize(
    ("plan", "where"),
    [
        ('{"total_steps": 40, "tokens_per_step": 4096}', "step 12 of 40, loss 2.5000, 2,048 tokens/s, 0:00:56 left"),
        ('{"total_steps": 40, "tokens_per_step": "4096"}', "step 12 of 40, loss 2.5000"),
        ('{"total_steps": 5, "tokens_per_step": 4096}', "step 12 of 5, loss 2.5000, 2,048 tokens/s, 0:00:00 left"),
        ("[1, 2]", "step 12, loss 2.5000"),
        ('{"total_st', "step 12, loss 2.5000"),
        (None, "step 12, loss 2.5000"),
    ],
)
def test_damaged_files(plan, where, tmp_path, monkeypatch):
    """Lines that are no steps, seconds that are none, and a plan that does not say: what is left is told."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    monkeypatch.setattr(status, "find_wait_reason", lambda *given, **more: None)
    folder = LaunchFolder(tmp_path)
    folder.path.mkdir()
    folder.write_state(status="running", job="4", num_nodes=1, ranks_per_node=1, attempt=1)
    if plan is not None:
        (tmp_path / "plan.json").write_text(plan)
    steps = ['{"step": 10, "seconds": 2.0}', '{"step": 11, "seconds": "2"}', "[]", "7", '{"seconds": 1}', "\x00\x00"]
    steps += ['{"step": 12, "loss": 2.5, "seconds": 0}', '{"step": "13"}', '{"ste']
    (tmp_path / "metrics.jsonl").write_text("\n".join(steps))
    (said,) = [line for line in describe(tmp_path) if line.startswith("step ")]
    assert said == (f"{where} at this speed" if where.endswith("left") else where)


@pytest.mark.parametrize("state", ['{"status": "runn', "[]", '{"status": "running"}', "[" * 10**5])
def test_a_damaged_state(state, tmp_path, monkeypatch):
    """Told by name, with where else to look; the run can still be stopped."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    folder = LaunchFolder(tmp_path)
    folder.path.mkdir()
    folder.state.write_text(state)
    with pytest.raises(UserError, match=r"state\.json: damaged, .* its steps are in .*metrics\.jsonl"):
        describe(tmp_path)
    ask_to_stop(tmp_path, at_once=False)
    assert folder.stop.exists()
