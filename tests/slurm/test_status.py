"""What `megalite launch status` shows of a run's files, where Slurm cannot be asked."""

from __future__ import annotations

import json

from megalite.slurm.folder import LaunchFolder
from megalite.slurm.status import describe


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
