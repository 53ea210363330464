"""What `megalite doctor` finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalite.planner.examine import Finding, _devices, examine
from tests.kit.paths import ROOT
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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("fpu avx512f avx512_bf16", "units for bf16: the faster precision.dtype is bf16"),
        ("fpu amx_bf16", "units for bf16: the faster precision.dtype is bf16"),
        ("fpu avx2", "no units for bf16: the faster precision.dtype is fp32"),
    ],
)
def test_the_fast_format_of_a_cpu(flags: str, says: str, tmp_path, monkeypatch):
    """By what its first processor can do."""
    (tmp_path / "cpuinfo").write_text(f"vendor_id : AuthenticAMD\nflags : {flags}\n")
    monkeypatch.setattr("megalite.host.PROC", tmp_path)
    found = next(_devices()).found
    assert found.split(", ", 1)[1] == says


def test_configs_say_no_more_than_that():
    """Whether fp32 is the fast format is the CPU's affair: a comment leaves it to `doctor`."""
    texts = [path.read_text("utf-8") for path in (ROOT / "configs").glob("*.yaml")]
    comments = re.findall(r"dtype: fp32 +# (.*)", "\n".join(texts))
    assert len(comments) > 2
    assert all("exact; bf16 is faster on a GPU, and where `megalite doctor` finds units" in each for each in comments)


def fake(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1", "sinfo fails: sinfo: fatal"),
        ("exit 3", "sinfo fails: exit code 3"),
        ("exec sleep 5", "sinfo does not answer in 0.2 s"),
        (None, "but not sinfo: No such file"),
    ],
)
def test_a_slurm_that_does_not_answer(tmp_path, monkeypatch, script: str | None, says: str):
    """What sinfo says itself, in one line."""
    fake(tmp_path, "sbatch", "true")
    if script is not None:
        fake(tmp_path, "sinfo", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin" if script else str(tmp_path))
    monkeypatch.setattr("megalite.planner.examine.COMMAND_TIMEOUT_SECONDS", 0.2)
    found: Finding = next(each for each in examine(tmp_path) if each.name == "Slurm")
    assert not found.present
    assert says in found.found
    assert "\n" not in found.found
