"""How a case of the data benchmark is measured.

    set up on a tiny corpus, run      compiles the kernels, starts the workers: not counted
    set up on the corpus              imports, tokenizers, open files: not counted
    run                               from files to files: counted
    judge                             what came out, against the truth: not counted

The same for our stations (`data_cases.py`) and for other tools (`data_peers.py`), each in a process of its own, so that
memory is its own too.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from data_inputs import Inputs

NUM_WARM_UPS = 2
"""The first starts the workers of a pool, and may find only one of them up; the second reaches all."""


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    amount: float
    """Million bytes of text, or million tokens."""
    facts: dict[str, float] = field(default_factory=dict)
    """Figures that are known at once."""
    judge: Callable[[], dict[str, float]] | None = None
    """Figures that take time."""


Run = Callable[[Path], Outcome]
"""Does the work, and may write into the folder it is given."""

SetUp = Callable[[Inputs, str], Run]
"""Makes a run of inputs and a setting; what it does itself is not counted."""


@dataclass(frozen=True)
class Job:
    """What a process is to do."""

    case: str
    setting: str
    folder: str
    tiny: str
    """Inputs to warm up on."""
    scratch: str
    """Where to write."""
    num_shards: int | None = None
    is_judged: bool = False


def measure(job: Job, set_up: SetUp) -> dict[str, float]:
    """Warm up, run, judge.

    Returns:
        amount, cpu_seconds, wall_seconds, peak_mb, extra_mb (what the peak lies above the memory before the run), and
        the figures of the case.
    """
    with tempfile.TemporaryDirectory(dir=job.scratch) as name:
        folders = [Path(name) / str(number) for number in range(NUM_WARM_UPS + 1)]
        for folder in folders:
            folder.mkdir()
        for folder in folders[:-1]:
            set_up(Inputs(Path(job.tiny)), job.setting)(folder)
        run = set_up(Inputs(Path(job.folder), job.num_shards), job.setting)
        _give_back_memory()
        before = _forget_peak()
        wall, cpu = time.perf_counter(), _cpu_seconds()
        outcome = run(folders[-1])
        wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
        peak = sum(_memory_mb(pid, "VmHWM") for pid in _processes())
        figures = {"amount": outcome.amount, "cpu_seconds": cpu, "wall_seconds": wall}
        figures |= {"peak_mb": peak, "extra_mb": peak - before, **outcome.facts}
        if job.is_judged and outcome.judge:
            figures |= outcome.judge()
    return figures


def _processes() -> list[int]:
    return [os.getpid(), *(child.pid for child in multiprocessing.active_children())]


def _cpu_seconds() -> float:
    """User and system time of this process, of its children that have ended, and of those that live."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for pid in _processes()[1:]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _give_back_memory() -> None:
    """Return what the warm-up freed to the system, or the run would fill it again and seem to need none."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> float:
    """Let the peak begin at the memory of now, MB; where the kernel does not allow that, it includes the set-up's."""
    for pid in _processes():
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError:
            print("the peak of memory includes the set-up: clear_refs cannot be written", file=sys.stderr)
    return sum(_memory_mb(pid, "VmRSS") for pid in _processes())


def _memory_mb(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6
