"""Make each small fault in a copy of the tree, and see whether the nearest tests notice: python tools/mutation/run.py

Prints a line each: caught, or survived. The tree itself is not touched. Ends with 1 when a fault survives, or stands
for code that is no longer there.

    python tools/mutation/run.py [PART_OF_A_FILE_NAME ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from mutant import Mutant
from mutants import MUTANTS

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 900
PYTEST_FAILED = 1


def judge(mutant: Mutant, tree: Path) -> tuple[str, float]:
    """What becomes of a fault: caught, survived, stale or broken; and after how many seconds."""
    path = tree / "megalite" / mutant.file
    sound, began = path.read_text(), time.monotonic()
    if sound.count(mutant.old) != 1 or mutant.old == mutant.new:
        return "stale", 0.0
    path.write_text(sound.replace(mutant.old, mutant.new))
    tests = [f"tests/{name}" for name in mutant.tests.split()]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        found = {0: "survived", PYTEST_FAILED: "caught"}.get(done.returncode, "broken")
        found = "caught" if done.returncode < 0 else found  # one that ends the process is noticed, too
    except subprocess.TimeoutExpired:
        found = "caught"  # a fault that hangs is noticed
    finally:
        path.write_text(sound)
    return found, time.monotonic() - began


def main(parts: list[str]) -> int:
    """Judge all faults, or those in files whose names hold one of some parts."""
    chosen = [each for each in MUTANTS if not parts or any(part in each.file for part in parts)]
    counts = {"caught": 0, "survived": 0, "stale": 0, "broken": 0}
    with tempfile.TemporaryDirectory(prefix="megalite-mutation-") as folder:
        tree = Path(folder) / "tree"
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )
        for name in filter(None, files):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        for mutant in chosen:
            found, seconds = judge(mutant, tree)
            counts[found] += 1
            change = " ".join(mutant.new.split())[:60]
            print(f"{found:9} {seconds:6.1f} s  {mutant.file}: {change}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items() if count), f"of {len(chosen)}")
    return int(counts["caught"] < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
