"""One rank of a run, from its first line to its exit code.

Ranks are told who they are by the environment, in torchrun's names or Slurm's. Whatever goes wrong is left in a file
for whoever started the rank, because the output of many ranks at once tells nobody which one failed first.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megalite.config.schema import Config
from megalite.errors import EXIT_BAD_INPUT, EXIT_FAULT, UserError
from megalite.train.heartbeat import Heart, beat_path
from megalite.train.run_folder import LOGS
from megalite.train.signals import StopRequest

if TYPE_CHECKING:
    import torch

    from megalite.config.plan import RunPlan
    from megalite.monitor.recorder import Recorder
    from megalite.parallel.axes import Axes
    from megalite.train.start import Start

RENDEZVOUS_VARIABLE = "MEGALITE_RENDEZVOUS"
"""Where local ranks meet, set by `train.local`; without it, MASTER_ADDR and MASTER_PORT."""
ATTEMPT_VARIABLE = "MEGALITE_ATTEMPT"
"""Which attempt of the run this is, set by a supervisor who counts them; without it, the next one."""

BEATS_VARIABLE = "MEGALITE_BEATS"
"""Folder for the heartbeats of local ranks, set by `train.local` where it watches over them."""

MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Rank, number of ranks and local rank: Open MPI's names, MVAPICH's, and those of MPICH and Intel MPI."""


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
    """The place that torchrun, srun, mpirun or `train.local` gave this process; None when nobody did."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world_size, local_rank = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and "SLURM_NTASKS" in env:
        rank, world_size = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
        local_rank = int(env.get("SLURM_LOCALID", 0))
    else:
        mpi = next((names for names in MPI_VARIABLES if names[0] in env and names[1] in env), None)
        if mpi is None:
            return None
        rank, world_size, local_rank = int(env[mpi[0]]), int(env[mpi[1]]), int(env.get(mpi[2], 0))
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
    return run_guarded(config, place, lambda: _train(config, place, stop, heart or Heart()))


def run_guarded(config: Config, place: Place, work: Callable[[], int]) -> int:
    """Do a rank's work and return its exit code. Errors are written to the run's logs."""
    try:
        return work()
    except UserError as error:
        _leave_word(config.run.dir, place, str(error), is_user_error=True)
        return EXIT_BAD_INPUT
    except BaseException:
        _leave_word(config.run.dir, place, traceback.format_exc(), is_user_error=False)
        return EXIT_FAULT


def connect_rank(config: Config, plan: RunPlan, place: Place) -> tuple[Axes, torch.device]:
    """Join the other ranks: the axes of the mesh, and this rank's device. Collective."""
    from megalite.engine.runtime import check_dtype, connect_processes, prepare_deepspeed
    from megalite.parallel.axes import connect
    from megalite.parallel.mesh import Mesh
    from megalite.train.device import choose_device

    device = choose_device(config.train.device, place.local_rank)
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    prepare_deepspeed(device.type)
    check_dtype(config.precision.dtype, device.type)
    _set_determinism(config.run.deterministic)
    connect_processes(
        rank=place.rank, world_size=place.world_size, device_type=device.type, init_method=place.init_method
    )
    return connect(Mesh(plan.pp, plan.dp, plan.cp, plan.tp), place.rank), device


def _train(config: Config, place: Place, stop: StopRequest, heart: Heart) -> int:
    from megalite.train.preflight import open_run_tasks, preflight

    plan, samples, valid_sets = preflight(config, place.world_size)

    import torch

    from megalite.checkpoint.stage_state import load_state
    from megalite.engine.build import DTYPES, build_engine
    from megalite.engine.runtime import disconnect_processes
    from megalite.monitor.recorder import Recorder
    from megalite.train.attempt import join_attempt
    from megalite.train.data_check import verify_data
    from megalite.train.device import describe_machine, peak_flops
    from megalite.train.run_folder import write_run_folder
    from megalite.train.start import Zeros, choose_start
    from megalite.train.trainer import Run, Trainer

    axes, device = connect_rank(config, plan, place)
    verified = verify_data(config, plan, axes, device) if config.data.verify else None
    is_writer = place.rank == 0
    if is_writer:
        stop.watch(config.run.dir)
    fence = join_attempt(config.run.dir, place.attempt, axes, device)
    if is_writer:
        write_run_folder(config, plan)
    start = choose_start(config, plan, samples, axes, device)
    is_loaded = bool(start.progress.num_updates) or config.precision.dtype != "fp32"  # sets all weights, unrounded
    engine = build_engine(config, plan, axes, device, Zeros() if is_loaded else start.weights)
    if is_loaded:
        engine.load(start.weights, start.moments, start.progress.num_updates)
    anew = load_state(engine, start.reader)
    recorder = Recorder(
        config,
        plan,
        first_step=start.progress.step,
        peak_flops=peak_flops(device, DTYPES[config.precision.dtype]),
        is_writer=is_writer,
    )
    about = {"world_size": place.world_size, "attempt": fence.attempt, **describe_machine(device)}
    _record_start(recorder, start, plan.total_steps, about)
    if verified is not None:
        recorder.event("data_verified", start.progress.step, **verified)
    tasks = open_run_tasks(config, plan, samples)
    samples = samples.following(start.progress.account)
    if anew and start.reader is not None:
        recorder.event("fp8 history anew", start.progress.step, layers=anew, why="the checkpoint has none for them")
    run = Run(config, plan, axes, device, engine, samples, valid_sets, tasks, recorder, fence, stop, heart)
    try:
        code = Trainer(run, start.progress).train()
    finally:
        recorder.close()
        if is_writer:
            _leave_report(config.run.dir)
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
    if start.remixed:
        why = "data.train or data.mix has changed; every source goes on where it stood"
        recorder.event("mixture", step, why=why, consumed=start.progress.consumed)
        recorder.say(f"from step {step + 1} on another mixture: {why}")
    recorder.say(f"starting from {start.origin}, step {step} of {total_steps}")


def _leave_report(run_dir: Path) -> None:
    """Draw the run for people. A report that fails costs a line, never a run."""
    from megalite.report.write import write_report

    try:
        write_report([run_dir])
    except UserError as error:
        print(f"no report: {error}", file=sys.stderr)
    except Exception:  # whatever it is, the run has ended as it did
        print(f"no report:\n{traceback.format_exc()}", file=sys.stderr)


def _set_determinism(deterministic: bool) -> None:
    import torch

    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a pass over every new buffer


def _leave_word(run_dir: Path, place: Place, message: str, *, is_user_error: bool) -> None:
    """Write what went wrong where a parent looks, and on stderr; a parent speaks for the rank that shares its own."""
    rank = place.rank
    record = {"rank": rank, "attempt": place.attempt, "time": time.time(), "is_user_error": is_user_error}
    record["message"] = message
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
    config, stop_after = load_config(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    if BEATS_VARIABLE in os.environ:
        with open(config.run.dir / LOGS / f"stacks-{place.rank}.txt", "a", encoding="utf-8") as stacks:
            faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
            heart = Heart(beat_path(Path(os.environ[BEATS_VARIABLE]), place.rank))
            code = run_rank(config, place, stop_after, heart)
    else:
        code = run_rank(config, place, stop_after)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a peer that died may have left collectives behind that a normal exit would wait for


if __name__ == "__main__":
    main()
