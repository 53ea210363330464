"""One rank of a run, from its first line to its exit code.

Ranks are told who they are by the environment, in torchrun's names or Slurm's. Whatever goes wrong is left in a file
for whoever started the rank, because the output of many ranks at once tells nobody which one failed first.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config.schema import Config
from megalite.errors import EXIT_BAD_INPUT, EXIT_FAULT, UserError
from megalite.train.heartbeat import Heart
from megalite.train.signals import StopRequest

if TYPE_CHECKING:
    from megalite.monitor.recorder import Recorder
    from megalite.train.start import Start

RENDEZVOUS_VARIABLE = "MEGALITE_RENDEZVOUS"
"""Where local ranks meet, set by `train.local`; without it, MASTER_ADDR and MASTER_PORT."""
ATTEMPT_VARIABLE = "MEGALITE_ATTEMPT"
"""Which attempt of the run this is, set by a supervisor who counts them; without it, the next one."""


@dataclass(frozen=True)
class Place:
    """Who a rank is among all of a run."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str
    attempt: int | None = None
    """As a supervisor counts; None for the next."""


def given_place() -> Place | None:
    """The place that torchrun, srun or `train.local` gave this process; None when nobody did."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world_size, local_rank = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and "SLURM_NTASKS" in env:
        rank, world_size = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
        local_rank = int(env.get("SLURM_LOCALID", 0))
    else:
        return None
    attempt = int(env[ATTEMPT_VARIABLE]) if ATTEMPT_VARIABLE in env else None
    return Place(rank, world_size, local_rank, _init_method(), attempt)


def _init_method() -> str:
    env = os.environ
    if RENDEZVOUS_VARIABLE in env:
        return env[RENDEZVOUS_VARIABLE]
    host = env.get("MASTER_ADDR") or env.get("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1"
    port = env.get("MASTER_PORT") or str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000)
    return f"tcp://{host}:{port}"


def run_rank(config: Config, place: Place, stop_after: int | None = None, heart: Heart | None = None) -> int:
    """Train as this rank and return the exit code. Errors are written to the run's logs.

    Args:
        stop_after: stop after this step as if asked to.
        heart: is told what the rank does, for a supervisor.
    """
    stop = StopRequest(stop_after)
    stop.install()
    try:
        return _train(config, place, stop, heart or Heart())
    except UserError as error:
        _leave_word(config.run.dir, place.rank, str(error), is_user_error=True)
        return EXIT_BAD_INPUT
    except BaseException:
        _leave_word(config.run.dir, place.rank, traceback.format_exc(), is_user_error=False)
        return EXIT_FAULT


def _train(config: Config, place: Place, stop: StopRequest, heart: Heart) -> int:
    from megalite.train.preflight import preflight

    plan, samples, valid_samples = preflight(config, place.world_size)

    import torch

    from megalite.engine.build import DTYPES, build_engine
    from megalite.engine.runtime import connect_processes, disconnect_processes, prepare_deepspeed
    from megalite.monitor.recorder import Recorder
    from megalite.parallel.axes import connect
    from megalite.parallel.mesh import Mesh
    from megalite.train.attempt import join_attempt
    from megalite.train.device import choose_device, peak_flops
    from megalite.train.run_folder import write_run_folder
    from megalite.train.start import choose_start
    from megalite.train.trainer import Run, Trainer

    device = choose_device(config.train.device, place.local_rank)
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    prepare_deepspeed(device.type)
    _set_determinism(config.run.deterministic)
    connect_processes(
        rank=place.rank, world_size=place.world_size, device_type=device.type, init_method=place.init_method
    )
    axes = connect(Mesh(plan.pp, plan.dp, plan.cp, plan.tp), place.rank)
    is_writer = place.rank == 0
    if is_writer:
        stop.watch(config.run.dir)
    fence = join_attempt(config.run.dir, place.attempt, axes, device)
    if is_writer:
        write_run_folder(config, plan)
    start = choose_start(config, plan, samples, axes, device)
    engine = build_engine(config, plan, axes, device, start.weights)
    if start.progress.num_updates or config.precision.dtype != "fp32":
        engine.load(start.weights, start.moments, start.progress.num_updates)
    recorder = Recorder(
        config,
        plan,
        first_step=start.progress.step,
        peak_flops=peak_flops(device, DTYPES[config.precision.dtype]),
        is_writer=is_writer,
    )
    about = {"world_size": place.world_size, "device": str(device), "attempt": fence.attempt}
    _record_start(recorder, start, plan.total_steps, about)
    run = Run(config, plan, axes, device, engine, samples, valid_samples, recorder, fence, stop, heart)
    try:
        code = Trainer(run, start.progress).train()
    finally:
        recorder.close()
    engine.close()
    disconnect_processes()
    torch.use_deterministic_algorithms(False)
    return code


def _record_start(recorder: Recorder, start: Start, total_steps: int, about: dict[str, Any]) -> None:
    """Write down and say where the run goes on from, and what it had to pass over."""
    step = start.progress.step
    for problem in start.damaged:
        recorder.event("damaged checkpoint", step, why=problem)
        recorder.say(f"passed over a damaged checkpoint: {problem}")
    recorder.event("start", step, origin=start.origin, **about)
    recorder.say(f"starting from {start.origin}, step {step} of {total_steps}")


def _set_determinism(deterministic: bool) -> None:
    import torch

    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a pass over every new buffer


def _leave_word(run_dir: Path, rank: int, message: str, *, is_user_error: bool) -> None:
    """Write what went wrong where a parent looks, and on stderr; a parent speaks for the rank that shares its own."""
    record = {"rank": rank, "time": time.time(), "is_user_error": is_user_error, "message": message}
    path = error_path(run_dir, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record), encoding="utf-8")
    except OSError as error:  # a full disk must not hide the first error
        print(f"rank {rank}: could not write {path}: {error}", file=sys.stderr)
    if rank > 0 or RENDEZVOUS_VARIABLE not in os.environ:
        print(f"rank {rank}: {message}", file=sys.stderr, flush=True)


def error_path(run_dir: Path, rank: int) -> Path:
    """Where a rank leaves its error."""
    return run_dir / "logs" / f"error-{rank}.json"


def main() -> None:
    """Entry of a rank that `train.local` started: `python -m megalite.train.worker CONFIG.yaml [STOP_AFTER]`."""
    from megalite.config.load import load_config

    place = given_place()
    assert place is not None, "a worker is started by megalite train"
    code = run_rank(load_config(sys.argv[1]), place, *map(int, sys.argv[2:]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a peer that died may have left collectives behind that a normal exit would wait for


if __name__ == "__main__":
    main()
