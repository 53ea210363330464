"""One rank of a run, from its first line to its exit code.

Ranks are told who they are by the environment, in torchrun's names or Slurm's. Whatever goes wrong is left in a file
for whoever started the rank, because the output of many ranks at once tells nobody which one failed first.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megalite.config.plan import compile_pays
from megalite.config.schema import Config
from megalite.errors import EXIT_BAD_INPUT, EXIT_FAULT, StartError, UserError
from megalite.host import total_bytes
from megalite.train.heartbeat import Heart, beat_path
from megalite.train.last_words import error_path, leave_error
from megalite.train.run_folder import LOGS
from megalite.train.signals import StopRequest
from megalite.train.startup import BUILDING, COMPILING, FIRST_STEP, IMPORTING, LOADING, MEETING, Say, StartUp

if TYPE_CHECKING:
    import torch

    from megalite.config.plan import RunPlan
    from megalite.engine.protocol import Engine
    from megalite.monitor.recorder import Recorder
    from megalite.parallel.axes import Axes
    from megalite.train.start import Start

RENDEZVOUS_VARIABLE = "MEGALITE_RENDEZVOUS"
"""Where local ranks meet, set by `train.local`; without it, MASTER_ADDR and MASTER_PORT."""
ATTEMPT_VARIABLE = "MEGALITE_ATTEMPT"
"""Which attempt of the run this is, set by a supervisor who counts them; without it, the next one."""

TOKEN_VARIABLE = "MEGALITE_TOKEN"
"""A secret of the attempt, by which its ranks know each other, set by who starts them; none is well, too."""

BEATS_VARIABLE = "MEGALITE_BEATS"
"""Folder for the heartbeats of local ranks, set by `train.local` where it watches over them."""

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Rank, number of ranks, local rank and number of local ranks; the last two need not be there. Of MPI: Open MPI's
names, MVAPICH's, and those of MPICH and Intel MPI."""


@dataclass(frozen=True)
class Place:
    """Who a rank is among all of a run."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str
    attempt: int | None = None
    """As a supervisor counts; None for the next."""
    token: str = ""
    """By which the ranks of an attempt know each other."""
    local_world_size: int | None = None
    """Ranks on this machine, where whoever started them says so."""

    @property
    def local_ranks(self) -> range | None:
        """The ranks on this machine; None where nobody has said how many."""
        if self.local_world_size is None:
            return None
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def given_place() -> Place | None:
    """The place that torchrun, srun, mpirun or `train.local` gave this process; None when nobody did.

    Raises:
        UserError: variables that say so make no sense.
    """
    env = os.environ
    known = [TORCHRUN_VARIABLES, *([SLURM_VARIABLES] if "SLURM_STEP_ID" in env else []), *MPI_VARIABLES]
    names = next((names for names in known if names[0] in env and names[1] in env), None)
    if names is None:
        return None
    rank, world_size = _number(names[0]), _number(names[1])
    local_rank = _number(names[2]) if names[2] in env else 0
    local_world_size = _number(names[3]) if names[3] in env else None
    if rank >= world_size or local_rank >= (local_world_size or world_size):
        raise UserError(
            f"{names[0]}={rank}, {names[1]}={world_size}, {names[2]}={local_rank}: ranks count from 0 to one below "
            "their number; correct these variables, or unset them to let megalite start the ranks itself"
        )
    attempt = _number(ATTEMPT_VARIABLE) if ATTEMPT_VARIABLE in env else None
    return Place(rank, world_size, local_rank, _init_method(), attempt, env.get(TOKEN_VARIABLE, ""), local_world_size)


def _number(name: str) -> int:
    """A variable of the environment that is a whole number from 0 up."""
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"{name}: found {text!r} in the environment, expected a whole number; correct or unset it")
    return int(text)


def _init_method() -> str:
    env = os.environ
    if RENDEZVOUS_VARIABLE in env:
        return env[RENDEZVOUS_VARIABLE]
    host = env.get("MASTER_ADDR") or env.get("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1"
    port = _number("MASTER_PORT") if env.get("MASTER_PORT") else 20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000
    if port >= 1 << 16:
        raise UserError(f"MASTER_PORT: found {port} in the environment, expected 0 to 65535; correct or unset it")
    return f"tcp://{host}:{port}"


def run_rank(
    config: Config,
    place: Place,
    stop_after: int | None = None,
    heart: Heart | None = None,
    *,
    is_forced: bool = False,
) -> int:
    """Train as this rank and return the exit code. Errors are written to the run's logs.

    Args:
        stop_after: stop after this step as if asked to.
        heart: is told what the rank does, for a supervisor.
        is_forced: do not ask whether the run fits.
    """
    stop = StopRequest(stop_after)
    stop.install()
    return run_guarded(config, place, lambda: _train(config, place, stop, heart or Heart(), is_forced=is_forced))


def run_guarded(config: Config, place: Place, work: Callable[[], int]) -> int:
    """Do a rank's work and return its exit code. Errors are written to the run's logs."""
    try:
        return work()
    except UserError as error:
        _leave_word(config.run.dir, place, str(error), is_user_error=True)
        return EXIT_BAD_INPUT
    except StartError as error:
        _leave_word(config.run.dir, place, str(error), is_user_error=False)
        return EXIT_FAULT
    except BaseException as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        message = _full_disk(config.run.dir, error) if is_full else traceback.format_exc()
        _leave_word(config.run.dir, place, message, is_user_error=False)
        return EXIT_FAULT


def _full_disk(run_dir: Path, error: BaseException) -> str:
    return f"{error}, with run.dir={run_dir}; make room and start again: the run goes on from its last checkpoint"


def connect_rank(
    config: Config, plan: RunPlan, place: Place, *, say: Say = lambda what: None, is_forced: bool = False
) -> tuple[Axes, torch.device]:
    """Join the other ranks: the axes of the mesh, and this rank's device. Collective.

    Args:
        say: is told what is waited for.
        is_forced: do not ask whether the model fits on the device.

    Raises:
        UserError: it does not, or the device has not the run's format.
        StartError: the ranks could not meet.
    """
    from megalite.engine.runtime import check_dtype, connect_processes, prepare_deepspeed, set_determinism
    from megalite.parallel.axes import connect
    from megalite.parallel.mesh import Mesh
    from megalite.train.device import choose_device, free_bytes
    from megalite.train.fit import check_device_memory

    mesh = Mesh(plan.pp, plan.dp, plan.cp, plan.tp)
    device = choose_device(config.train.device, place.local_rank)
    if device.type == "cuda" and not is_forced:
        check_device_memory(config, plan, mesh.coords(place.rank).pp, free_bytes(device))
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    prepare_deepspeed(device.type)
    check_dtype(config.precision.dtype, device.type)
    set_determinism(config.run.deterministic, device.type)
    connect_processes(
        rank=place.rank,
        world_size=place.world_size,
        device_type=device.type,
        init_method=place.init_method,
        token=place.token,
        say=say,
    )
    return connect(mesh, place.rank), device


def _train(config: Config, place: Place, stop: StopRequest, heart: Heart, *, is_forced: bool) -> int:
    from megalite.train.fit import check_fit
    from megalite.train.preflight import open_run_tasks, preflight

    start_up = StartUp(is_first=place.rank == 0, is_first_here=place.local_rank == 0)
    plan, samples, valid_sets = preflight(config, place.world_size, local_rank=place.local_rank)
    if place.local_ranks is not None and place.local_rank == 0 and not is_forced:
        memory = None if place.attempt is None else total_bytes()  # a former attempt's may not be free yet
        check_fit(
            config, plan, place.local_ranks, memory=memory, cores=os.cpu_count()
        )  # of ours, each may have a share
    start_up.say(IMPORTING)

    from megalite.checkpoint.stage_state import load_state
    from megalite.engine.build import DTYPES
    from megalite.engine.runtime import disconnect_processes, set_determinism
    from megalite.monitor.recorder import Recorder
    from megalite.train.attempt import join_attempt
    from megalite.train.data_check import verify_data
    from megalite.train.device import describe_machine, find_peak
    from megalite.train.run_folder import write_run_folder
    from megalite.train.start import choose_start
    from megalite.train.trainer import Run, Trainer

    start_up.say(MEETING)
    axes, device = connect_rank(config, plan, place, say=start_up.say_wait, is_forced=is_forced)
    verified = verify_data(config, plan, axes, device, start_up.say) if config.data.verify else None
    is_writer = place.rank == 0
    if is_writer:
        stop.watch(config.run.dir)
    fence = join_attempt(config.run.dir, place.attempt, axes, device)
    if is_writer:
        write_run_folder(config, plan)
    start_up.say(LOADING)
    start = choose_start(config, plan, samples, axes, device)
    start_up.say(BUILDING)
    engine = _build_engine(config, plan, axes, device, start)
    anew = load_state(engine, start.reader)
    peak = find_peak(device, DTYPES[config.precision.dtype])
    first_step = start.progress.step
    recorder = Recorder(config, plan, first_step=first_step, peak_flops=peak.flops, is_writer=is_writer)
    about = {"world_size": place.world_size, "attempt": fence.attempt, **describe_machine(device)}
    _record_start(recorder, start, plan, {**about, "peak_flops": peak.flops, "peak_is": peak.origin}, anew, verified)
    recorder.say(f"mfu is a share of {peak}")
    tasks = open_run_tasks(config, plan, samples)
    samples = samples.following(start.progress.account)
    run = Run(config, plan, axes, device, engine, samples, valid_sets, tasks, recorder, fence, stop, heart)
    try:
        trainer = Trainer(run, start.progress)
        start_up.say(COMPILING if compile_pays(config, plan, device.type) else FIRST_STEP)
        stop.begin()
        code = trainer.train()
    finally:
        recorder.close()
        if is_writer:
            _leave_report(config.run.dir)
    engine.close()
    disconnect_processes()
    set_determinism(False, device.type)
    return code


def _build_engine(config: Config, plan: RunPlan, axes: Axes, device: torch.device, start: Start) -> Engine:
    """The engine in the state that a run starts from."""
    from megalite.engine.build import build_engine
    from megalite.train.start import Zeros

    is_loaded = bool(start.progress.num_updates) or config.precision.dtype != "fp32"  # sets all weights, unrounded
    engine = build_engine(config, plan, axes, device, Zeros() if is_loaded else start.weights)
    if is_loaded:
        engine.load(start.weights, start.moments, start.progress.num_updates)
    return engine


def _record_start(
    recorder: Recorder,
    start: Start,
    plan: RunPlan,
    about: dict[str, Any],
    anew: Sequence[str],
    verified: dict[str, float] | None,
) -> None:
    """Write down and say where the run goes on from, and what it had to pass over.

    Args:
        about: the machine.
        anew: layers whose FP8 history begins anew.
        verified: of `data_check.verify_data`; None where that was not asked for.
    """
    from megalite.checkpoint.hf.families.registry import exportable

    total_steps, why_not_exportable = plan.total_steps, exportable(plan.model).why_not
    step = start.progress.step
    for problem in start.damaged:
        recorder.event("damaged checkpoint", step, why=problem)
        recorder.say(f"passed over a damaged checkpoint: {problem}")
    for folder in start.set_aside:
        recorder.event("checkpoint_set_aside", step, folder=folder.name)
        recorder.say(f"it is kept as {folder}; mended, it takes part again under its old name")
    recorder.event("start", step, origin=start.origin, **about)
    if verified is not None:
        recorder.event("data_verified", step, **verified)
    if start.proof:
        recorder.event("weights_compared", step, why=start.proof)
        recorder.say(f"{start.origin}: {start.proof}")
    for choice in start.choices:
        recorder.event("model_choice_changed", step, why=choice)
        recorder.say(f"on purpose: {choice}")
    if anew and start.reader is not None:
        recorder.event("fp8 history anew", step, layers=anew, why="the checkpoint has none for them")
    if start.remixed:
        why = "data.train or data.mix has changed; every source goes on where it stood"
        recorder.event("mixture", step, why=why, consumed=start.progress.consumed)
        recorder.say(f"from step {step + 1} on another mixture: {why}")
    if why_not_exportable and step == 0:
        recorder.event("not_exportable", step, why=why_not_exportable)
        recorder.say(f"this model cannot be exported to Hugging Face: {why_not_exportable}")
    again = f"; steps done before that come again: {recorder.num_redone:,}" if recorder.num_redone else ""
    recorder.say(f"starting from {start.origin}, step {step} of {total_steps}{again}")


def _leave_report(run_dir: Path) -> None:
    """Draw the run for people. A report that fails costs a line, never a run."""
    from megalite.report.page import write_report

    try:
        write_report([run_dir])
    except UserError as error:
        print(f"no report: {error}", file=sys.stderr)
    except Exception:  # whatever it is, the run has ended as it did
        print(f"no report:\n{traceback.format_exc()}", file=sys.stderr)


def _leave_word(run_dir: Path, place: Place, message: str, *, is_user_error: bool) -> None:
    """Write what went wrong where a parent looks, and on stderr; a parent speaks for the rank that shares its own."""
    rank = place.rank
    record = {"rank": rank, "attempt": place.attempt, "time": time.time(), "is_user_error": is_user_error}
    record["message"] = message
    failure = leave_error(run_dir, rank, record)
    if failure is not None:
        print(f"rank {rank}: could not write {error_path(run_dir, rank)}: {failure}", file=sys.stderr)
    if failure is not None or rank > 0 or RENDEZVOUS_VARIABLE not in os.environ:
        print(f"rank {rank}: {message}", file=sys.stderr, flush=True)


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
