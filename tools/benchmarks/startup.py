"""Seconds from `megalite train` to its first step, as a person at the terminal waits for them.

    python tools/benchmarks/startup.py CONFIG [section.key=value ...] [--rounds 3]

Each round trains one step in a new folder; the clock stops when the step stands in metrics.jsonl. The first round may
include compiled kernels that later ones find on disk, so all rounds are printed. What a wait is worth depends on the
machine and on who else uses it, so each round also times a bare `import torch`, which no rank can do without.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arguments import count, existing

TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.02


def first_step(config: str, overrides: list[str]) -> float:
    """Start training and wait for its first step; seconds."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run", "metrics.jsonl")
        settings = [
            *overrides,
            f"run.dir={folder}/run",
            "train.steps=1",
            "train.tokens=null",
            "schedule.warmup_steps=1",
        ]
        started = time.monotonic()
        command = [sys.executable, "-m", "megalite", "train", config, *settings]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            while time.monotonic() - started < TIMEOUT_SECONDS:
                if metrics.is_file() and metrics.read_text().strip():
                    return time.monotonic() - started
                if process.poll() is not None:
                    sys.exit(f"megalite train ended with {process.returncode}:\n{process.stdout.read()}")
                time.sleep(POLL_SECONDS)
            sys.exit(f"no step within {TIMEOUT_SECONDS:.0f} s")
        finally:
            process.communicate(timeout=TIMEOUT_SECONDS)


def bare_import() -> float:
    """Seconds of a Python that only imports PyTorch."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=existing)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=count, default=3)
    arguments = parser.parse_args()
    config, overrides = str(arguments.config), arguments.overrides
    rounds = [(first_step(config, overrides), bare_import()) for _ in range(arguments.rounds)]
    seconds = [whole for whole, _ in rounds]
    said = ", ".join(f"{each:.1f}" for each in seconds)
    print(f"command to first step: {statistics.median(seconds):.1f} s (median of {said})")
    ratio = statistics.median(whole / bare for whole, bare in rounds)
    print(f"{ratio:.1f} x a bare `import torch` in the same round")


if __name__ == "__main__":
    main()
