"""Compiled code is shared between processes: one compiles, once for each type, and the others wait and read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

NUM_PROCESSES = 3

CHILD_SECONDS = 120

KERNELS = """
import sys
import numpy as np
from megalite.kernel import kernel

@kernel
def add_square(total, number):
    return total + number * number

@kernel
def sum_of_squares(numbers):
    total = 0  # a constant, until the loop changes it
    for place in range(numbers.size):
        total = add_square(total, numbers[place])
    return total

if __name__ == "__main__":
    import kernels  # the module, and not this program, is what the cache knows
    found = kernels.sum_of_squares(np.arange(5))
    compiled = [sum(each.stats.cache_misses.values()) for each in (kernels.add_square, kernels.sum_of_squares)]
    print(found, sum(compiled))
"""


def test_processes_that_start_together_compile_once(tmp_path):
    """Of three only one compiles the two kernels, each for one type of numbers, and all get the right one."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, str(tmp_path / "kernels.py")]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(NUM_PROCESSES)
    ]
    answers = [process.communicate(timeout=CHILD_SECONDS) for process in running]
    assert sorted(out for out, _ in answers) == ["30 0\n"] * (NUM_PROCESSES - 1) + ["30 2\n"], answers
