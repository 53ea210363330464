"""What the testbed's script writes, without bringing anything up."""

from __future__ import annotations

import os
import subprocess

from tests.kit.slurm import TESTBED

NAMES = ("sbatch", "srun", "salloc", "squeue", "sinfo", "scontrol", "scancel", "sacct", "sstat")


def test_commands_do_not_call_themselves(tmp_path):
    """Written again under the PATH that the script recommends, they still call Slurm's own commands."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in NAMES:
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    bed = tmp_path / "bed"
    for first in (programs, f"{bed}/bin:{programs}", f"{bed}/bin:{bed}/bin:{programs}"):
        environment = {"SLURM_TB_DIR": str(bed), "PATH": f"{first}:{os.environ['PATH']}:{bed}/bin"}
        subprocess.run([TESTBED, "_commands"], env=environment, check=True, timeout=60)
        for name in NAMES:
            assert f" {programs}/{name} " in (bed / "bin" / name).read_text()
