"""`megalite` with small shards, and with tasks that a test can hold back or let fail: python gated.py GATE ARGUMENTS...

GATE/begun             a line for every task that is begun: PHASE NUMBER WORKER
GATE/hold-PHASE-N      while this file is there, whoever has task N waits
GATE/fault-PHASE-N     task N fails; with the text "once" in it, only the first time
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from megalite.cli.main import main
from megalite.corpus import shards
from megalite.stations.runners import worker

SMALLEST_SHARD = 4_000


def gated(perform: Callable[[Path, str, int], None], gate: Path, name: str) -> Callable[[Path, str, int], None]:
    """`tasks.perform` behind a gate."""

    def perform_when_let(folder: Path, phase: str, number: int) -> None:
        with open(gate / "begun", "a", encoding="utf-8") as file:
            file.write(f"{phase} {number} {name}\n")
        fault = gate / f"fault-{phase}-{number}"
        if fault.exists():
            if fault.read_text() == "once":
                fault.unlink()
            raise RuntimeError("the test lets this task fail")
        hold = gate / f"hold-{phase}-{number}"
        if hold.exists() and not hold.read_text():
            hold.write_text(name)
            while hold.exists():
                time.sleep(0.05)
        perform(folder, phase, number)

    return perform_when_let


if __name__ in ("__main__", "__mp_main__"):  # also in processes that it spawns
    gate, arguments = Path(sys.argv[1]), sys.argv[2:]
    shards.SMALLEST_SHARD = SMALLEST_SHARD
    worker.SECONDS_BETWEEN_SIGNS = 0.5
    if "--name" in arguments:
        worker.perform = gated(worker.perform, gate, arguments[arguments.index("--name") + 1])

if __name__ == "__main__":
    main(arguments)
