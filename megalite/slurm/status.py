"""What a person asks of a launched run: where it stands, its logs, its end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.checkpoint.catalog import CHECKPOINTS, latest
from megalite.errors import UnavailableError, UserError
from megalite.slurm.controller import Controller, QueuedJob
from megalite.slurm.folder import ENDED, LaunchFolder
from megalite.slurm.goodput import Goodput, measure
from megalite.slurm.render import job_name
from megalite.slurm.wait_reason import WaitReason, find_wait_reason
from megalite.step_lines import is_finite_number, parse_step_line
from megalite.train.heartbeat import read_beats
from megalite.train.in_place import clock_of
from megalite.train.run_folder import METRICS, PLAN

POLL_SECONDS = 1.0

TAIL_BYTES = 1 << 16

STATE_KEYS = {"status", "num_nodes", "ranks_per_node"}
"""Of every state since a run was launched."""

YEAR = 365 * 86400.0
"""Seconds; no step takes as long."""


def describe(run_dir: Path) -> list[str]:
    """Lines about a run.

    Raises:
        UserError: it was never launched.
    """
    folder = _open(run_dir)
    state, now = _read_state(folder), _now(folder)
    jobs = _queue(folder)
    waiting = _waiting(folder, state, jobs, now) if state["status"] not in ENDED else None
    status = "waiting" if waiting is not None else state["status"]
    lines = [f"{run_dir}: {status}" + (f" ({state['why']})" if state.get("why") else "")]
    if waiting is not None:
        lines.append(f"waiting for {waiting.what}{_since(waiting.since, now)}")
    lines.append(_jobs(jobs, state))
    if state.get("attempt"):
        lines.append(f"attempt {state['attempt']} on {', '.join(state.get('nodes', []))}")
    lines += [f"slow: {straggler}" for straggler in state.get("stragglers", [])]
    lines += _progress(folder, is_moving=status == "running")
    newest = latest(folder.run_dir / CHECKPOINTS)
    lines.append(f"last checkpoint: {newest.name if newest else 'none yet'}")
    return [*lines, *_goodput_lines(measure(folder, now))]


def log_path(run_dir: Path, rank: int | None) -> Path:
    """The supervisor's log, or a rank's of the last attempt.

    Raises:
        UserError: there is none yet.
    """
    folder = _open(run_dir)
    state = _read_state(folder)
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
        state = _read_state(folder)
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
        time.sleep(POLL_SECONDS)


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


def _read_state(folder: LaunchFolder) -> dict[str, Any]:
    """What the supervisor wrote last.

    Raises:
        UserError: it is damaged.
    """
    state = folder.known_state()
    if not state.keys() >= STATE_KEYS:
        raise UserError(
            f"{folder.state}: damaged, or not of this version; `squeue` shows the run's jobs, its steps are in "
            f"{folder.run_dir / METRICS}, and `megalite launch stop {folder.run_dir}` ends it all the same"
        )
    return state


def _now(folder: LaunchFolder) -> float:
    """The time by the clock of heartbeats; who may only read the folder has none but their own."""
    try:
        return clock_of(folder.path)
    except OSError:
        return time.time()


def _queue(folder: LaunchFolder) -> list[QueuedJob] | None:
    """The run's jobs; None where there is no Slurm to ask, or it does not answer."""
    try:
        return Controller(notify=lambda why: None, patience_seconds=0.0).queue(job_name(folder.run_dir))
    except UnavailableError:
        return None


def _waiting(
    folder: LaunchFolder, state: dict[str, Any], jobs: list[QueuedJob] | None, now: float
) -> WaitReason | None:
    attempts = [event for event in folder.read_events() if event["event"] == "attempt"]
    return find_wait_reason(
        state,
        folder.read_waiting(),
        jobs,
        read_beats(folder.attempt(state.get("attempt", 0)) / "beats"),
        world_size=state["num_nodes"] * state["ranks_per_node"],
        alive=folder.alive.stat().st_mtime if folder.alive.exists() else None,
        attempt_began=attempts[-1]["time"] if attempts else None,
        now=now,
    )


def _since(since: float | None, now: float) -> str:
    if since is None:
        return ""
    return f", since {time.strftime('%F %T', time.localtime(since))} ({_clock(max(0.0, now - since))})"


def _jobs(jobs: list[QueuedJob] | None, state: dict[str, Any]) -> str:
    if jobs is None:
        return f"job {state.get('job')}, when last heard of (no Slurm here to ask, or no answer)"
    if not jobs:
        return "no job in the queue"
    first, *others = [job.number for job in jobs]
    return f"job {first}, then {', '.join(others)}" if others else f"job {first}"


def _progress(folder: LaunchFolder, *, is_moving: bool) -> list[str]:
    """The last step, and while the run moves its speed and the time left."""
    path = folder.run_dir / METRICS
    if not path.is_file() or not path.stat().st_size:
        return ["no step yet"]
    steps = [step for line in read_tail(path, 20).splitlines() if (step := parse_step_line(line.encode())) is not None]
    if not steps:
        return ["no step yet"]
    last, (total, tokens) = steps[-1], _planned(folder)
    loss = f"{last['loss']:.4f}" if is_finite_number(last.get("loss")) else "none"
    where = f"step {last['step']:,}{f' of {total:,}' if total else ''}, loss {loss}"
    took = [step["seconds"] for step in steps if is_finite_number(step.get("seconds")) and 0 < step["seconds"] < YEAR]
    if not (is_moving and took and total and tokens):
        return [where]
    seconds = sum(took) / len(took)
    left = max(0, total - last["step"]) * seconds
    return [f"{where}, {tokens / seconds:,.0f} tokens/s, {_clock(left)} left at this speed"]


def _planned(folder: LaunchFolder) -> tuple[int, int]:
    """Steps of the run and tokens of each; 0 for what its plan, damaged or not there yet, does not say."""
    try:
        plan = json.loads((folder.run_dir / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return 0, 0
    found = [plan.get(name) if isinstance(plan, dict) else None for name in ("total_steps", "tokens_per_step")]
    total, tokens = (value if type(value) is int and 0 < value < 2**53 else 0 for value in found)
    return total, tokens


def _goodput_lines(found: Goodput) -> list[str]:
    share = f"{100 * found.share:.1f} % of {_clock(found.total)} went into steps that count"
    lines = [f"{share}; {_clock(found.waiting)} waiting"]
    for each in found.attempts:
        parts = ", ".join(f"{name} {_clock(seconds)}" for name, seconds in each.parts().items() if round(seconds))
        steps = f"steps {each.first_step}-{each.last_step}"
        ending = f": {each.why}" if each.why else ""
        lines.append(f"  attempt {each.attempt} (job {each.job}): {steps}{', ' + parts if parts else ''}{ending}")
    return lines


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
