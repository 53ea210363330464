"""What `megalite doctor` finds."""

from __future__ import annotations

from megalite.planner.examine import examine
from tests.kit.runs import megalite


def test_findings_name_what_is_missing(tmp_path):
    """Everything required is here in a test environment, and what is missing says what it would need."""
    findings = {finding.name: finding for finding in examine(tmp_path / "not" / "yet")}
    assert {"torch", "deepspeed", "CPU", "CUDA", "gloo", "NCCL", "Transformer Engine", "Slurm", "disk"} <= set(findings)
    assert all(finding.present for finding in findings.values() if finding.required)
    assert all(finding.needs for finding in findings.values() if not finding.present)


def test_doctor_command():
    """The command ends with exit code 0 and a verdict."""
    done = megalite("doctor")
    assert done.returncode == 0, done.stderr
    assert "ready to train" in done.stdout
