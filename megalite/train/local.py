"""Starting the ranks of a run on this machine, and watching over them.

    parent: check everything -> start ranks -> forward signals -> first failure ends all -> say what failed first

The parent never imports torch, so a wrong config is told at once; a process beside it does meanwhile, and forks the
ranks (`fork_server.py`). Each rank gets its share of the cores, and allocator settings that keep large buffers mapped:
glibc otherwise returns them to the kernel and faults them in again every step, a fifth of the time of a small model.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megalite.checkpoint.catalog import CHECKPOINTS, latest, step_of
from megalite.config.load import dump_config
from megalite.config.schema import Config, SlurmConfig
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAULT, EXIT_REQUEUE, StartError, UserError
from megalite.host import num_cores, num_killed_for_memory
from megalite.train.failures import Failures, error_path, read_error, speaks_of_a_peer
from megalite.train.fit import check_fit
from megalite.train.fork_server import RANK_MEMORY, THREADS_VARIABLE, ForkedRank, ForkServer
from megalite.train.heartbeat import read_beats
from megalite.train.in_place import clock_of
from megalite.train.place import BEATS_VARIABLE, RENDEZVOUS_VARIABLE
from megalite.train.preflight import preflight_stages
from megalite.train.run_folder import LOGS
from megalite.train.signals import STOP_SIGNALS, held
from megalite.train.startup import IMPORTING
from megalite.train.watch import Patience, Trouble, find_trouble

WORKER = "megalite.train.worker"

POLL_SECONDS = 0.05
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_FOR_STACKS = 1.0
GRACE_SECONDS = 10.0
"""Ranks get this long to fail by themselves once one has, and to obey SIGTERM."""
BAD_INPUT_GRACE_SECONDS = 2.0
"""The same where one has found what the user must change: there is nothing that the others could save."""


CODES_WITH_A_WORD = (EXIT_DONE, EXIT_REQUEUE, EXIT_FAULT, EXIT_BAD_INPUT)
"""With which a rank ends by itself, and has said why."""

OUT_OF_MEMORY = (
    ": the kernel killed it because memory ran out; use a smaller batch.micro_batch_size, train.recompute=full, or a "
    "larger machine"
)


Handler = Callable[[int, FrameType | None], Any] | int | None
"""What `signal.signal` takes and gives back."""


@dataclass
class Rank:
    """A started rank."""

    number: int
    process: ForkedRank


def train_locally(
    config: Config,
    world_size: int,
    *,
    stop_after: int | None = None,
    max_failures: int = 0,
    is_forced: bool = False,
    server: ForkServer | None = None,
) -> int:
    """Run a whole training on this machine and return its exit code.

    Args:
        stop_after: stop after this step as if asked to.
        max_failures: start again after a fault or a hang, until so many have happened in a row without a new
            checkpoint; 0 ends with the first, and leaves a hang to itself.
        is_forced: do not ask whether the run fits this machine.
        server: forks the ranks, where one has been started already; else one is started here.

    Raises:
        UserError: the run cannot start, or its ranks found what the user must change.
    """
    with ExitStack() as servers:
        server = server or servers.enter_context(ForkServer())
        if not _is_to_train(config, world_size, is_forced=is_forced):
            return EXIT_DONE
        print(_announcement(config, world_size), flush=True)
        arguments = (str(stop_after),) if stop_after is not None else ()
        launch, failures = _Launch(WORKER, arguments, is_watched=max_failures > 0), Failures()
        while True:
            code, is_asked_to_stop = _attempt(config, world_size, launch, server)
            if code != EXIT_FAULT or is_asked_to_stop or max_failures == 0:
                return code
            number = failures.add(config.run.dir)
            if number >= max_failures:
                print(f"megalite: {number} failures without a new checkpoint, the last one above", file=sys.stderr)
                return code
            print(f"megalite: starting again from step {failures.last_step}", file=sys.stderr)
            if server.has_gone:
                server = servers.enter_context(ForkServer())


def _is_to_train(config: Config, world_size: int, *, is_forced: bool) -> bool:
    """Check a run before its ranks start; whether it has steps left.

    Raises:
        UserError: it cannot start.
    """
    stages, _ = preflight_stages(config, world_size)
    plan = stages[0].plan
    newest = latest(config.run.dir / CHECKPOINTS)
    if newest is not None and step_of(newest) >= plan.total_steps:
        print(f"{config.run.dir} is at step {step_of(newest)} of {plan.total_steps}: done; raise train.steps to go on")
        return False
    for stage in () if is_forced else stages:
        check_fit(stage.config, stage.plan, range(world_size))
    return True


def _announcement(config: Config, world_size: int) -> str:
    """What is about to be started."""
    ranks = f"{world_size} rank{'s' * (world_size > 1)} on this machine"
    threads = _threads_a_rank(world_size)
    crowd = f", more than its {num_cores()} cores: it will be slow" if world_size > num_cores() else ""
    others = f"; the others' output is in {config.run.dir / LOGS}" if world_size > 1 else ""
    return f"starting {ranks}, {threads} thread{'s' * (threads > 1)} each{crowd}{others}"


def _threads_a_rank(world_size: int) -> int:
    return max(1, num_cores() // world_size)


def run_local_ranks(config: Config, world_size: int, module: str, arguments: Sequence[str]) -> int:
    """Run MODULE's `main` with CONFIG.yaml ARGUMENTS... once a rank and wait for all; returns the exit code.

    Raises:
        UserError: the ranks found what the user must change.
    """
    with ForkServer() as server:
        return _attempt(config, world_size, _Launch(module, tuple(arguments)), server)[0]


@dataclass(frozen=True)
class _Launch:
    """What each rank runs."""

    module: str
    arguments: tuple[str, ...]
    """Behind the config's path."""
    is_watched: bool = False
    """Ranks leave heartbeats, and one that hangs ends all."""


def _attempt(config: Config, world_size: int, launch: _Launch, server: ForkServer) -> tuple[int, bool]:
    """Start all ranks and wait for their end; the exit code, and whether the user asked for the end."""
    logs = _make_logs(config.run.dir, world_size)
    with tempfile.TemporaryDirectory(prefix="megalite-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        arguments = [str(folder / "config.yaml"), *launch.arguments]
        environments = [rank_environment(number, world_size, folder) for number in range(world_size)]
        if launch.is_watched:
            environments = [{**environment, BEATS_VARIABLE: name} for environment in environments]
        ranks: list[Rank] = []
        requests: list[int] = []
        num_killed = num_killed_for_memory()
        previous = _forward_signals(ranks, requests)
        try:
            if not _await(server, requests):
                return _verdict(config.run.dir, [-requests[0]], is_out_of_memory=False), True
            with held():
                for number, (environment, log) in enumerate(zip(environments, logs, strict=True)):
                    ranks.append(Rank(number, server.fork(launch.module, arguments, environment, log)))
            for rank in ranks if requests else ():  # some may have been started after the request
                rank.process.send_signal(requests[0])
            find = _trouble_finder(folder, world_size, config.slurm) if launch.is_watched else None
            codes = _watch(ranks, find)
        except StartError as error:
            print(f"megalite: {error}", file=sys.stderr)
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()
            return EXIT_FAULT, bool(requests)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    if server.has_gone:
        print("megalite: the process that ranks are forked from has ended, and they with it", file=sys.stderr)
    return _verdict(config.run.dir, codes, is_out_of_memory=num_killed_for_memory() > num_killed), bool(requests)


def _await(server: ForkServer, requests: list[int]) -> bool:
    """Wait until ranks can be forked; whether that was not cut short by a request to stop.

    Raises:
        StartError: they never can.
    """
    if not server.is_ready():
        print(IMPORTING, flush=True)
    while not server.is_ready() and not requests:
        time.sleep(POLL_SECONDS)
    return not requests


def rank_environment(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """Environment of a local rank: who it is, its share of the cores, the allocator."""
    return {
        **RANK_MEMORY,
        THREADS_VARIABLE: str(_threads_a_rank(world_size)),
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        RENDEZVOUS_VARIABLE: f"file://{folder}/rendezvous",
    }


def _forward_signals(ranks: list[Rank], requests: list[int]) -> dict[int, Handler]:
    """Pass requests to stop on to every rank, and note them. A second SIGINT ends them at once."""

    def forward(number: int, frame: FrameType | None) -> None:
        requests.append(number)
        interrupts = requests.count(signal.SIGINT)
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGKILL if interrupts > 1 else number)
        if interrupts == 1:
            print("\nstopping after this step and saving; press Ctrl-C again to end at once", file=sys.stderr)

    return {number: signal.signal(number, forward) for number in STOP_SIGNALS}


def _trouble_finder(folder: Path, world_size: int, settings: SlurmConfig) -> Callable[[], Trouble | None]:
    """What asks the ranks' heartbeats, twice a second, whether one of them holds the others up."""
    started, due = clock_of(folder), time.monotonic()
    patience = Patience(settings.beat_seconds, settings.start_seconds, settings.step_seconds)

    def find() -> Trouble | None:
        nonlocal due
        if time.monotonic() < due:
            return None
        due = time.monotonic() + SECONDS_BETWEEN_LOOKS
        now = clock_of(folder)
        return find_trouble(read_beats(folder), world_size, started=started, now=now, patience=patience)

    return find


def _watch(ranks: list[Rank], find: Callable[[], Trouble | None] | None) -> list[int]:
    """Wait for all ranks; a while after one has failed, end the rest. Returns their exit codes.

    Args:
        ranks: that have been started.
        find: finds ranks that hang, which ends all; None for no one who looks.
    """
    deadline: float | None = None
    while any(rank.process.poll() is None for rank in ranks):
        trouble = find() if find is not None else None
        if trouble is not None:
            named = ", ".join(f"rank {rank}" for rank in trouble.ranks)
            print(f"megalite: {named}: {trouble.why}; the stacks are in the run's logs", file=sys.stderr)
            _end_with_stacks(ranks)
        failed = {rank.process.poll() for rank in ranks} - {None, EXIT_DONE, EXIT_REQUEUE}
        if failed and deadline is None:
            deadline = time.monotonic() + (BAD_INPUT_GRACE_SECONDS if EXIT_BAD_INPUT in failed else GRACE_SECONDS)
        if deadline is not None and time.monotonic() > deadline:
            for rank in ranks:
                if rank.process.poll() is None:
                    rank.process.kill()
        time.sleep(POLL_SECONDS)
    return [rank.process.wait() for rank in ranks]


def _end_with_stacks(ranks: list[Rank]) -> None:
    """Ask all ranks for their stacks, then kill them."""
    living = [rank for rank in ranks if rank.process.poll() is None]
    for rank in living:
        rank.process.send_signal(signal.SIGUSR2)
    time.sleep(SECONDS_FOR_STACKS)
    for rank in living:
        rank.process.kill()
        rank.process.wait()


def _verdict(run_dir: Path, codes: list[int], *, is_out_of_memory: bool) -> int:
    """The run's exit code; for a failure, say which rank failed first and how.

    Args:
        is_out_of_memory: the kernel has killed for want of memory meanwhile.
    """
    if all(code == codes[0] for code in codes) and codes[0] in (EXIT_DONE, EXIT_REQUEUE):
        return codes[0]
    if all(-code in STOP_SIGNALS for code in codes):
        print("megalite: stopped before the first step; there was nothing to save", file=sys.stderr)
        return EXIT_REQUEUE
    left = (read_error(error_path(run_dir, rank)) for rank in range(len(codes)))
    errors = [error for error in left if error is not None]
    user_errors = [error for error in errors if error["is_user_error"]]
    if user_errors and EXIT_BAD_INPUT in codes:
        raise UserError(min(user_errors, key=lambda error: error["time"])["message"])
    wordless = {rank: code for rank, code in enumerate(codes) if code not in CODES_WITH_A_WORD}
    for rank, code in wordless.items():
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        memory = OUT_OF_MEMORY if code == -signal.SIGKILL and is_out_of_memory else ""
        print(f"megalite: rank {rank} ended with {reason}{memory}", file=sys.stderr)
    if errors:
        first = min(errors, key=lambda error: error["time"])
        when = "then failed" if wordless and speaks_of_a_peer(first) else "failed first"
        print(f"megalite: rank {first['rank']} {when}:\n{first['message']}", file=sys.stderr)
    print(f"megalite: the other ranks' output is in {run_dir / LOGS}", file=sys.stderr)
    return EXIT_FAULT


def _make_logs(run_dir: Path, world_size: int) -> list[Path | None]:
    """Where each rank writes what it says, for the first to our own streams; without the errors of another attempt.

    Raises:
        UserError: they cannot be written.
    """
    logs = [run_dir / LOGS / f"rank-{rank}.log" if rank > 0 else None for rank in range(world_size)]
    try:
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
        for rank, log in enumerate(logs):
            error_path(run_dir, rank).unlink(missing_ok=True)
            if log is not None:
                open(log, "ab").close()
    except OSError as error:
        raise UserError(f"{run_dir / LOGS}: cannot be written ({error}); move it away, or set run.dir") from error
    return logs
