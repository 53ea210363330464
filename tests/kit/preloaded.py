"""Programs of the tests that begin with everything imported: a server imports once, and forks a process for each.

    rank (a fresh Python, 0.1 s)  --who it is-->  server  --fork-->  watcher  --its namespaces, fork-->  the program
         passes signals on        ------------------------------->  kills it when the rank is gone
         ends as the program did  <-------------------------------  its exit code

What the fresh Python does: `preload/sitecustomize.py`. The program has its streams, folder, environment, namespaces (a
node of the testbed is a set of them), rights, limits and cores. What is different from a process of its own: parent and
session, and variables that are read when a library is loaded (of glibc's malloc; threads are set here).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.kit.paths import ROOT

FOLDER = Path(__file__).parent / "preload"

FORK_SERVER = "megalite.train.fork_server"

RANKS = (FORK_SERVER, "megalite.slurm.rank", "megalite.slurm.node_check")
"""Programs that are not the parent of anything which outlives them: ranks, and what forks them on one machine."""

CLONE_FLAGS = {"uts": 0x04000000, "ipc": 0x08000000, "net": 0x40000000, "pid": 0x20000000, "mnt": 0x00020000}
"""Of setns(2); the mounts come last, for /proc is one."""

PR_CAPBSET_DROP, PR_SET_PDEATHSIG = 24, 1

CAPABILITY_VERSION_3 = 0x20080522

SECONDS_TO_START = 120.0

GPU = Path("/dev/nvidiactl")
"""Where there is one, DeepSpeed must choose between it and the CPU as it is imported."""

LIBRARY = ctypes.CDLL(None, use_errno=True)


@functools.cache
def hook() -> ModuleType:
    """The module that every Python of the tests loads first."""
    spec = importlib.util.spec_from_file_location("preload_hook", FOLDER / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def preloaded(environment: dict[str, str], *, with_command: bool = True) -> dict[str, str]:
    """An environment in which some of megalite's programs begin with everything imported.

    Args:
        with_command: `python -m megalite` too, not only ranks.
    """
    path = environment.get("PYTHONPATH", "")
    if GPU.exists() or not hasattr(os, "pidfd_open"):
        return {**environment, "PYTHONPATH": os.pathsep.join([str(FOLDER), *([path] if path else [])])}
    return {
        **environment,
        hook().SOCKET_VARIABLE: str(_server()),
        hook().PATH_VARIABLE: os.environ.get("PYTHONPATH", ""),
        hook().MODULES_VARIABLE: os.pathsep.join((*RANKS, *(("megalite",) if with_command else ()))),
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *([path] if path else [])]),
    }


@functools.cache
def _server() -> Path:
    """The socket of this session's server, which is there before anything is imported, and takes requests meanwhile."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-", dir="/tmp")
    address, log = Path(folder.name) / "socket", Path(folder.name) / "log"
    path = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with open(log, "wb") as said:
        command = [sys.executable, "-m", "tests.kit.preloaded", str(address)]
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
    deadline = time.monotonic() + SECONDS_TO_START
    while not address.exists():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.01)

    def end() -> None:
        server.kill()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return address


def serve(address: str) -> dict[str, Any]:
    """Fork a watcher for each request, for ever; returns the request in the process that is to run it."""
    LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    import_module("tests.kit.imported")
    while True:
        link, _ = listener.accept()
        while _reap():
            pass
        if os.fork() == 0:
            listener.close()
            request = _watch(link)
            if request is not None:
                return request
        link.close()


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _watch(link: socket.socket) -> dict[str, Any] | None:
    """Start a program and watch over it; the request in the process that is to run it."""
    head, files, *_ = socket.recv_fds(link, 4, 3 + len(CLONE_FLAGS))
    content = b""
    while len(content) < struct.unpack("!I", head)[0]:
        content += link.recv(1 << 16)
    request = json.loads(content)
    streams, spaces = files[:3], files[3:]
    for name, space in zip(hook().NAMESPACES, spaces, strict=True):
        is_other = os.fstat(space).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino
        if is_other and LIBRARY.setns(space, CLONE_FLAGS[name]) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(space)
    program = os.fork()
    if program == 0:
        link.close()
        _become(request, streams)
        return request
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(program)
    is_there = True
    while True:
        readable, _, _ = select.select([ended, *([link] if is_there else [])], [], [])
        if ended in readable:
            break
        numbers = link.recv(64) if link in readable else b""
        is_there = bool(numbers)
        for number in numbers if is_there else (signal.SIGKILL,):
            os.kill(program, number)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    if is_there:
        with contextlib.suppress(OSError):
            link.send(struct.pack("!i", code))
    os._exit(0)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Make this process what the one that asked was."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limit)
    os.environ.clear()
    os.environ.update(request["environment"])
    if "MEGALITE_PARENT" in os.environ:
        os.environ["MEGALITE_PARENT"] = str(os.getppid())
    hook().leave_process_number()
    _drop_rights(request["rights"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [request["folder"], *(each for each in path if each and each not in sys.path)]
    sys.argv = [request["module"], *request["arguments"]]
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(request["cores"])))


def _drop_rights(rights: dict[str, int]) -> None:
    """Leave only the capabilities of the process that asked."""
    for number in range(64):
        if not rights["CapBnd"] >> number & 1:
            LIBRARY.prctl(PR_CAPBSET_DROP, number)
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    names = ("CapEff", "CapPrm", "CapInh")
    data = struct.pack("6I", *(rights[name] >> shift & 0xFFFFFFFF for shift in (0, 32) for name in names))
    if LIBRARY.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def run(request: dict[str, Any]) -> NoReturn:
    """Run the program and end as Python would, but for taking apart everything that was imported."""
    code = 0
    try:
        hook().install_faults()
        if request["module"] == FORK_SERVER:
            _serve_ranks()
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _serve_ranks() -> NoReturn:
    """Fork ranks as megalite's own server does, and be in each of them what this folder's hook is in a new Python."""
    server = import_module(FORK_SERVER)
    become_rank = server.become_rank

    def become_ours(request: dict[str, Any]) -> None:
        become_rank(request)
        hook().leave_process_number()
        hook().install_faults()

    server.become_rank = become_ours
    server.main()


if __name__ == "__main__":
    run(serve(sys.argv[1]))
