"""One rank of a run, from its first line to its exit code.

Ranks are told who they are by the environment, in torchrun's names or Slurm's. Whatever goes wrong is left in a file
for whoever started the rank, because the output of many ranks at once tells nobody which one failed first.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megalite.config.plan import compile_pays
from megalite.config.schema import Config
from megalite.errors import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_REQUEUE, StartError, UserError
from megalite.host import total_bytes
from megalite.plugins import place_of
from megalite.train.failures import error_path, leave_error
from megalite.train.heartbeat import Heartbeat, beat_path
from megalite.train.imports import import_all
from megalite.train.place import BEATS_VARIABLE, RENDEZVOUS_VARIABLE, Place, given_place
from megalite.train.run_folder import LOGS
from megalite.train.signals import StopRequest
from megalite.train.startup import COMPILING, FIRST_STEP, IMPORTING, MEETING, Say, StartUp

if TYPE_CHECKING:
    import torch

    from megalite.data.samples import Samples
    from megalite.parallel.axes import Axes
    from megalite.train.open_run import Connected, Entrance
    from megalite.train.preflight import ReadyStage


def run_rank(
    config: Config,
    place: Place,
    stop_after: int | None = None,
    heartbeat: Heartbeat | None = None,
    *,
    is_forced: bool = False,
) -> int:
    """Train as this rank and return the exit code. Errors are written to the run's logs.

    Args:
        stop_after: stop after this step as if asked to.
        heartbeat: is told what the rank does, for a supervisor.
        is_forced: do not ask whether the run fits.
    """

    def give_up(why: str) -> None:
        faulthandler.dump_traceback()
        _leave_word(config.run.dir, place, why, is_user_error=False)
        leave(EXIT_FAULT)

    stop, heart = StopRequest(stop_after), heartbeat or Heartbeat()
    stop.install(heart, config.slurm.step_seconds, give_up)
    return run_guarded(config.run.dir, place, lambda: _train(config, place, stop, heart, is_forced=is_forced))


def run_by(path: str | Path, place: Place, work: Callable[[Config], int]) -> int:
    """Read the config that who started this rank has left, and do a rank's work by it; returns its exit code, that of a
    stop where the work is interrupted."""
    from megalite.config.load import load_config
    from megalite.config.yaml_source import read_source

    run_dir = Path(read_source(Path(path)).data["run"]["dir"])  # known before plug-ins are loaded, which may fail

    def do() -> int:
        try:
            return work(load_config(path))
        except KeyboardInterrupt:  # where work does not hear of a stop by itself, as training does
            return EXIT_REQUEUE

    return run_guarded(run_dir, place, do)


def run_guarded(run_dir: Path, place: Place, work: Callable[[], int]) -> int:
    """Do a rank's work and return its exit code. Errors are written to the run's logs."""
    try:
        return work()
    except UserError as error:
        _leave_word(run_dir, place, str(error), is_user_error=True)
        return EXIT_BAD_INPUT
    except StartError as error:
        _leave_word(run_dir, place, str(error), is_user_error=False)
        return EXIT_FAULT
    except BaseException as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        message = _full_disk(run_dir, error) if is_full else f"{traceback.format_exc()}{_blame(error)}"
        _leave_word(run_dir, place, message, is_user_error=False)
        return EXIT_FAULT


def _blame(error: BaseException) -> str:
    """Name the plug-in in which an error came up, below its traceback."""
    place = place_of(error)
    return f"this came up in a plug-in{place}: {type(error).__name__}: {error}\n" if place else ""


def _full_disk(run_dir: Path, error: BaseException) -> str:
    return f"{error}, with run.dir={run_dir}; make room and start again: the run goes on from its last checkpoint"


def connect_rank(
    config: Config,
    stages: Sequence[ReadyStage],
    place: Place,
    valid_sets: dict[str, Samples],
    *,
    say: Say = lambda what: None,
    is_forced: bool = False,
) -> tuple[Axes, torch.device]:
    """Join the other ranks: the axes of the mesh, and this rank's device. Collective.

    Args:
        stages: of the run; these, and the validation sets, are to be the same everywhere.
        say: is told what is waited for.
        is_forced: do not ask whether the model fits on the device.

    Raises:
        UserError: it does not, the device has not the run's format, ranks that are to share memory cannot, other
            ranks have another run, or a tensor-parallel group has machines of unlike kind.
        StartError: the ranks could not meet.
    """
    from megalite.engine.runtime import check_dtype, connect_processes, let_products_round, set_determinism
    from megalite.layers.flash import use_flash_attention
    from megalite.parallel.axes import connect, connect_world
    from megalite.parallel.mesh import Mesh
    from megalite.train.device import choose_device, free_bytes, kind_of_machine
    from megalite.train.fit import check_device_memory, check_shared_memory
    from megalite.train.same_run import check_same_run

    plan = stages[0].plan
    mesh = Mesh(plan.pp, plan.dp, plan.cp, plan.tp, plan.ep)
    device = choose_device(config.train.device, place.local_rank)
    if config.parallel.async_tp:
        check_shared_memory(device.type != "cpu", plan.tp, place.local_world_size)
    if device.type == "cuda" and not is_forced:
        for stage in stages:
            check_device_memory(stage.config, stage.plan, mesh.coords(place.rank).pp, free_bytes(device))
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    check_dtype(config.precision.dtype, device.type)
    set_determinism(config.run.deterministic, device.type)
    let_products_round(config.precision.products, device.type)
    use_flash_attention(config.train.flash_attention, device)
    connect_processes(
        rank=place.rank,
        world_size=place.world_size,
        device_type=device.type,
        init_method=place.init_method,
        token=place.token,
        say=say,
        for_host=config.optimizer.offload,
    )
    world = connect_world(place.world_size, place.rank)
    check_same_run(config, stages, valid_sets, world, kind_of_machine(device))
    return connect(mesh, place.rank), device


def _train(config: Config, place: Place, stop: StopRequest, heartbeat: Heartbeat, *, is_forced: bool) -> int:
    from megalite.train.fit import check_fit
    from megalite.train.preflight import preflight_stages

    start_up = StartUp(is_first=place.rank == 0, is_first_here=place.local_rank == 0)
    stages, valid_sets = preflight_stages(config, place.world_size, local_rank=place.local_rank)
    if place.local_ranks is not None and place.local_rank == 0 and not is_forced:
        memory = None if place.attempt is None else total_bytes()  # a former attempt's may not be free yet
        cores = os.cpu_count()  # of ours, each may have a share
        for stage in stages:
            check_fit(stage.config, stage.plan, place.local_ranks, memory=memory, cores=cores)
    if "megalite.train.loop" not in sys.modules:  # else a fork server has imported all
        start_up.say(IMPORTING)
        import_all()

    from megalite.engine.build import DTYPES
    from megalite.engine.runtime import disconnect_processes, set_determinism
    from megalite.train.open_run import Connected, enter
    from megalite.trial import try_plugins

    start_up.say(MEETING)
    axes, device = connect_rank(config, stages, place, valid_sets, say=start_up.say_wait, is_forced=is_forced)
    try_plugins(config, stages[0].plan.model, device, DTYPES[config.precision.dtype])
    if place.rank == 0:
        stop.watch(config.run.dir)
    connected = Connected(config, stages, valid_sets, place, axes, device, stop, heartbeat)
    entry, code = enter(connected, start_up.say), None
    while code is None:
        code = _train_stage(connected, entry, start_up)
    disconnect_processes()
    set_determinism(False, device.type)
    return code


def _train_stage(rank: Connected, entry: Entrance, start_up: StartUp) -> int | None:
    """Train from where the run stands to the end of the stage that this is in; the exit code, None where another stage
    follows."""
    from megalite.train.loop import TrainingLoop
    from megalite.train.open_run import open_run

    run, progress = open_run(rank, entry, start_up.say)
    try:
        loop = TrainingLoop(run, progress)
        start_up.say(COMPILING if compile_pays(run.config, run.plan, run.device.type) else FIRST_STEP)
        rank.stop.begin()
        code = loop.train()
    finally:
        run.recorder.close()
        if rank.place.rank == 0:
            _leave_report(run.config.run.dir)
    run.engine.close()
    del run, loop
    gc.collect()  # hooks refer to what holds them, and the next stage needs the memory
    return code


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
    record = {
        "rank": rank,
        "attempt": place.attempt,
        "time": time.time(),
        "is_user_error": is_user_error,
        "message": message,
    }
    failure = leave_error(run_dir, rank, record)
    if failure is not None:
        print(f"rank {rank}: could not write {error_path(run_dir, rank)}: {failure}", file=sys.stderr)
    if failure is not None or rank > 0 or RENDEZVOUS_VARIABLE not in os.environ:
        print(f"rank {rank}: {message}", file=sys.stderr, flush=True)


def main() -> None:
    """Entrance of a rank that `train.local` started, with CONFIG.yaml [STOP_AFTER] in sys.argv."""
    place = given_place()
    assert place is not None, "a worker is started by megalite train"
    stop_after = int(sys.argv[2]) if len(sys.argv) > 2 else None
    leave(run_by(sys.argv[1], place, lambda config: _run_watched(config, place, stop_after)))


def _run_watched(config: Config, place: Place, stop_after: int | None) -> int:
    """Train as this rank, with a heartbeat where somebody reads it."""
    if BEATS_VARIABLE not in os.environ:
        return run_rank(config, place, stop_after)
    with open(config.run.dir / LOGS / f"stacks-{place.rank}.txt", "a", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        heartbeat = Heartbeat(beat_path(Path(os.environ[BEATS_VARIABLE]), place.rank))
        return run_rank(config, place, stop_after, heartbeat)


def leave(code: int) -> NoReturn:
    """End this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a peer that died may have left collectives behind that a normal exit would wait for
