"""Which tests are slow: measured, not guessed.

`tests/slow.txt` names the functions that take half a second or more, all their cases together; `make test-fast` leaves
them out. To measure anew, on a quiet machine:

    tools/run_tests.sh .venv/bin/python --durations=0 --durations-min=0.005 > all.txt
    .venv/bin/python -m tests.kit.slow all.txt
    tools/run_tests.sh .venv/bin/python --durations=0 --durations-min=0.005 -m "not slow" > fast.txt
    .venv/bin/python -m tests.kit.slow all.txt fast.txt

The second round finds who pays for what tests share once the first to use it is left out; another may find more.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).parent.parent / "slow.txt"
SLOW_SECONDS = 0.5

_LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown) +(\S+::[^\[\s]+)")


def slow_tests() -> set[str]:
    """`tests/FILE.py::NAME` of each, without the brackets of its cases."""
    return set(LIST.read_text("utf-8").split())


def measured(paths: list[str]) -> dict[str, float]:
    """Seconds by function, of what pytest printed into some files: where it took longest."""
    longest: dict[str, float] = {}
    for path in paths:
        seconds: dict[str, float] = defaultdict(float)
        for line in Path(path).read_text("utf-8", errors="replace").splitlines():
            if found := _LINE.match(line):
                seconds[found[2]] += float(found[1])
        longest |= {name: max(taken, longest.get(name, 0.0)) for name, taken in seconds.items()}
    return longest


if __name__ == "__main__":
    found = measured(sys.argv[1:])
    if not found:
        sys.exit("no durations found; pytest prints them with --durations=0")
    names = sorted(name for name, seconds in found.items() if seconds >= SLOW_SECONDS)
    LIST.write_text("".join(f"{name}\n" for name in names), "utf-8")
    fast = sum(seconds for seconds in found.values() if seconds < SLOW_SECONDS)
    print(f"{len(names)} of {len(found)} functions are slow; the others take {fast:.0f} s")
