"""What a person asks of a launched run: where it stands, its logs, its end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.checkpoint.catalog import CHECKPOINTS, latest
from megalite.errors import UnavailableError, UserError
from megalite.slurm.controller import Controller
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.goodput import Goodput, measure
from megalite.slurm.render import job_name
from megalite.train.run_folder import METRICS, PLAN

ENDED = ("finished", "stopped", "gave up", "cancelled")

SECONDS_BETWEEN_LOOKS = 1.0

TAIL_BYTES = 1 << 16


def describe(run_dir: Path, *, now: float) -> list[str]:
    """Lines about a run.

    Raises:
        UserError: it was never launched.
    """
    folder = _open(run_dir)
    state = folder.read_state()
    lines = [f"{run_dir}: {state['status']}" + (f" ({state['why']})" if state.get("why") else "")]
    lines.append(_jobs(folder, state))
    if state.get("attempt"):
        lines.append(f"attempt {state['attempt']} on {', '.join(state.get('nodes', []))}")
    lines += [f"slow: {straggler}" for straggler in state.get("stragglers", [])]
    lines += _progress(folder)
    newest = latest(folder.run_dir / CHECKPOINTS)
    lines.append(f"last checkpoint: {newest.name if newest else 'none yet'}")
    return [*lines, *_goodput_lines(measure(folder, now))]


def log_path(run_dir: Path, rank: int | None) -> Path:
    """The supervisor's log, or a rank's of the last attempt.

    Raises:
        UserError: there is none yet.
    """
    folder = _open(run_dir)
    state = folder.read_state()
    if rank is None:
        path = folder.jobs / f"{state['job']}.log"
    else:
        path = folder.attempt(state.get("attempt", 0)) / f"rank-{rank}.log"
    if not path.is_file():
        raise UserError(f"{path}: no such log yet; `megalite launch status {run_dir}` tells where the run stands")
    return path


def ask_to_stop(run_dir: Path, *, at_once: bool) -> str:
    """Ask a run to end; what will happen, for people."""
    folder = _open(run_dir)
    folder.stop.touch()
    if not at_once:
        return f"{folder.stop} made: the run saves at its next step and ends; remove it before the next launch"
    controller = Controller()
    jobs = controller.live_jobs(job_name(folder.run_dir))
    controller.cancel(*reversed(jobs))  # the waiting one first, or it would start
    return f"cancelled: job {', '.join(jobs)}" if jobs else "no job of it was in the queue"


def follow_log(run_dir: Path) -> Iterator[str]:
    """Lines of the supervisors' logs, job after job, until the run has ended."""
    folder = _open(run_dir)
    path, place = Path(), 0
    while True:
        state = folder.read_state()
        has_ended = state["status"] in ENDED
        current = folder.jobs / f"{state['job']}.log"
        if current != path:
            path, place = current, 0
        if path.is_file():
            with open(path, encoding="utf-8", errors="replace") as file:
                file.seek(place)
                yield from file.read().splitlines()
                place = file.tell()
        if has_ended:
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


def read_tail(path: Path, num_lines: int) -> str:
    """The last lines of a file."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-num_lines:])


def _open(run_dir: Path) -> LaunchFolder:
    folder = LaunchFolder(run_dir.absolute())
    if not folder.state.is_file():
        raise UserError(
            f"{run_dir}: no launched run (there is no slurm/{folder.state.name}); give the folder that run.dir names, "
            "or start it with `megalite launch CONFIG --cluster PROFILE`"
        )
    return folder


def _jobs(folder: LaunchFolder, state: dict[str, Any]) -> str:
    try:
        live = Controller().live_jobs(job_name(folder.run_dir))
    except UnavailableError:
        return f"job {state.get('job')}, when last heard of (no Slurm here to ask)"
    waiting = f", then {', '.join(live[1:])}" if len(live) > 1 else ""
    return f"job {live[0]}{waiting}" if live else "no job in the queue"


def _progress(folder: LaunchFolder) -> list[str]:
    """The last step, its speed, and the time left."""
    path = folder.run_dir / METRICS
    if not path.is_file() or not path.stat().st_size:
        return ["no step yet"]
    steps = [json.loads(line) for line in read_tail(path, 20).splitlines()]
    last, plan = steps[-1], json.loads((folder.run_dir / PLAN).read_text(encoding="utf-8"))
    seconds = sum(step["seconds"] for step in steps) / len(steps)
    left = (plan["total_steps"] - last["step"]) * seconds
    return [
        f"step {last['step']:,} of {plan['total_steps']:,}, loss {last['loss']:.4f}, "
        f"{plan['tokens_per_step'] / seconds:,.0f} tokens/s, {_clock(left)} left at this speed"
    ]


def _goodput_lines(found: Goodput) -> list[str]:
    share = f"{100 * found.share:.1f} % of {_clock(found.total)} went into steps that count"
    lines = [f"{share}; {_clock(found.waiting)} waiting"]
    for each in found.attempts:
        parts = f"computing {_clock(each.computing)}, starting {_clock(each.starting)}, saving {_clock(each.saving)}"
        steps = f"steps {each.first_step}-{each.last_step}"
        ending = f": {each.why}" if each.why else ""
        lines.append(f"  attempt {each.attempt} (job {each.job}): {steps}, {parts}, lost {_clock(each.lost)}{ending}")
    return lines


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
