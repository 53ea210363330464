"""A rank that believes in GPUs and trains several whole runs, one after another; says what each asked of the device.

    python -m tests.stand_in.rank JOB.json RANK

The job: the library, the number of ranks, the folder, for each run its name and what is set in its config, the name of
a run that may lock no memory, and a free port. The
answer is `NAME-RANK.json` in the folder; `lines-RANK.json` says which lines for CUDA have run.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any], rank: int) -> None:
    """Do all runs of a job as one rank."""
    gc.disable()
    os.environ.update(DS_ACCELERATOR="cuda", LOCAL_RANK=str(rank), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    from tests.stand_in.cuda import pretend, seen
    from tests.stand_in.lines import Lines, cuda_statements

    device = pretend(Path(job["library"]), devices=2)
    import torch

    lines = Lines({file for file, _ in cuda_statements()})
    from megalite.config.load import load_config
    from megalite.engine import runtime
    from megalite.train.loop import TrainingLoop
    from megalite.train.place import Place
    from megalite.train.worker import run_rank
    from tests.stand_in.questions import ask_all

    gc.freeze()  # each run ends with a search for garbage, which would look through all that was imported
    gc.enable()
    torch.set_num_threads(1)
    folder = Path(job["folder"])
    runtime.disconnect_processes = lambda: None  # DeepSpeed remembers groups of a world that is gone
    counts: list[int] = []
    count_votes = TrainingLoop._count_votes

    def counted(loop: TrainingLoop, *told: Any) -> Any:
        """Votes are counted once a step, when the host has waited for it."""
        try:
            return count_votes(loop, *told)
        finally:
            counts.append(sum(count for (_, place), count in seen.syncs.items() if "(MainThread)" in place))

    TrainingLoop._count_votes = counted
    for name, overrides in job["runs"].items():
        config = load_config(folder / "config.yaml", [f"run.dir={folder / name}", *overrides])
        torch.cuda.cudart().refuses = name == job.get("unlocked")
        seen.clear()
        counts.clear()
        code = run_rank(config, Place(rank, job["world_size"], rank, f"file://{folder / 'meet'}"))
        touched = [index for index in range(2) if device.stand_in_touched(index)]
        answer = {"code": code, "devices": seen.devices, "touched": touched, "calls": dict(seen.calls)}
        answer["syncs_by_step"] = counts
        answer["syncs"] = [[what, place, count] for (what, place), count in seen.syncs.items()]
        (folder / f"{name}-{rank}.json").write_text(json.dumps(answer))
        if code:
            sys.exit(f"{name}: exit code {code}")
    ask_all(folder, rank, job["world_size"], job["port"])
    (folder / f"lines-{rank}.json").write_text(json.dumps(lines.run()))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
