"""Run a function on several ranks, forked from a server that has imported torch and DeepSpeed and done nothing else.

A fork costs milliseconds where a fresh interpreter costs seconds of imports on each rank, and a server that never
computed has no threads that a fork would lose. Ranks meet through a file, so that parallel test runs never fight over
ports, and talk over shared memory (`memory_group`), or over gloo where that is what a test is about. The error of every
rank is collected and shown, oldest first, because the rank that fails first is rarely the one that complains loudest. A
rank that a signal ends (an abort in a library, a bad address) leaves its Python and native stacks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.kit import memory_group

RANK_TIMEOUT_SECONDS = 480.0
"""Generous: two cores may carry eight ranks, and other tests beside them."""


class RanksFailed(AssertionError):
    """Some ranks raised, died or hung; the message has every rank's traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = memory_group.NAME,
    timeout_seconds: float = RANK_TIMEOUT_SECONDS,
) -> list[Any]:
    """Call `function(*args)` on every rank of a world and return the results in order of rank.

    Inside, torch.distributed is initialised; one thread a rank.

    Args:
        backend: `gloo`, or the tests' own, which sends tiny messages twenty times as fast.
    """
    context = _fork_server()
    with tempfile.TemporaryDirectory(prefix="megalite-ranks-") as folder:
        ranks = [
            context.Process(target=_rank_main, args=(function, rank, world_size, Path(folder), backend, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        _wait(ranks, Path(folder), timeout_seconds)
        return _collect(ranks, Path(folder))


@functools.cache
def _fork_server() -> Any:
    """The server that ranks are forked from; it imports once what every rank would import again: modules of tests
    begin with pytest, and many with transformers' models."""
    os.environ.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", LOCAL_RANK="0", OMP_NUM_THREADS="1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.kit.reference", "tests.kit.imported"])
    return context


_NATIVE_FRAMES = 64

_FATAL = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


_KEPT: list[Any] = []
"""Handlers that C calls, which nothing else refers to."""


def _show_stacks(path: Path) -> None:
    """From now on a fatal signal writes the stacks of this process to a file before it ends it.

    faulthandler writes those of Python, then calls the handler that was there before it: ours, of the C library alone,
    since a handler in Python runs only once the interpreter gets its turn, which is never behind an abort.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    library = ctypes.CDLL(None)
    frames = (ctypes.c_void_p * _NATIVE_FRAMES)()
    library.backtrace(frames, 1)  # its first call loads a library, which a handler must not

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def write(number: int) -> None:
        library.signal(number, signal.SIG_DFL)
        library.backtrace_symbols_fd(frames, library.backtrace(frames, _NATIVE_FRAMES), file)
        os.kill(os.getpid(), number)

    _KEPT.append(write)
    for number in _FATAL:
        library.signal(number, write)
    faulthandler.enable(file, all_threads=True)


def _rank_main(
    function: Callable[..., Any], rank: int, world_size: int, folder: Path, backend: str, args: tuple
) -> None:
    _show_stacks(folder / f"stacks-{rank}")
    try:
        import torch
        import torch.distributed as dist

        from megalite.engine.runtime import connect_processes, disconnect_processes

        torch.set_num_threads(1)
        memory_group.register()
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=RANK_TIMEOUT_SECONDS),
        )
        connect_processes(rank=rank, world_size=world_size, device_type="cpu", init_method="")
        result = function(*args)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        disconnect_processes()
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _wait(ranks: list[Any], folder: Path, timeout_seconds: float) -> None:
    """Wait for all ranks; once one has failed, give the others a moment and end them."""
    deadline = time.monotonic() + timeout_seconds
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in ranks):
            deadline = min(deadline, time.monotonic() + 2.0)
        time.sleep(0.01)
    for rank, process in enumerate(ranks):
        if process.is_alive():
            process.kill()
            if not (folder / f"error-{rank}").exists():
                (folder / f"error-{rank}").write_text("still running when it was ended: hung, or waiting for another\n")
        process.join()


def _collect(ranks: list[Any], folder: Path) -> list[Any]:
    errors = []
    for rank, process in enumerate(ranks):
        error = folder / f"error-{rank}"
        if error.exists():
            errors.append((error.stat().st_mtime_ns, f"--- rank {rank} ---\n{error.read_text()}"))
        elif process.exitcode != 0:
            stacks = (folder / f"stacks-{rank}").read_text(errors="replace")
            errors.append((0, f"--- rank {rank} ---\ndied with exit code {process.exitcode}\n{stacks}"))
    if errors:
        raise RanksFailed("\n" + "\n".join(text for _, text in sorted(errors)))
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(len(ranks))]
