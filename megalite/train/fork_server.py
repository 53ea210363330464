"""Ranks of one machine that import PyTorch once: a process imports it while the command still checks, and forks them.

    command --starts--> fork server      imports PyTorch and what ranks need
            --a rank's environment, program, log-->        forks the rank, which begins with everything imported
            <--its process number, later its exit code--

Commands and ranks speak over the server's stdin, a socket, a line of JSON each way. The server is the ranks' parent: it
ends with the command, and they hear of its end as a request to stop. No GPU is touched before a rank is forked, because
CUDA does not survive that. With MEGALITE_FORK=0 a rank is a Python of its own, which imports by itself: for debuggers
and profilers that lose sight of what is forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from megalite.errors import EXIT_FAULT, StartError, UserError
from megalite.host import open_missing_streams
from megalite.train.imports import import_all
from megalite.train.signals import PARENT_VARIABLE, end_with_parent, held

SERVER = "megalite.train.fork_server"

RANK_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(8 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}
"""What every rank gets, wherever it runs, unless the user has set it: glibc keeps freed memory up to these sizes
instead of giving it back. It reads them as a process begins, so the server has them too. What it cuts off around a
tensor so that it begins at a multiple of 64 bytes, it puts among the free memory at once: by itself it hands these bits
out again one by one, as small objects, and then the next tensor of that size does not fit between them any more, so
that holes grow from step to step (glibc before 2.38 cuts all of them so). oneDNN, and PyTorch's way to
it, keep what they have made for so many shapes of products, not for 1,024 each: documents have ever new lengths, and a
shape takes a quarter of a megabyte in either (docs/config.md)."""

THREADS_VARIABLE = "OMP_NUM_THREADS"

FORK_VARIABLE = "MEGALITE_FORK"
"""0 for ranks that import by themselves; 1, or nothing, for ranks that have all of the server's imports."""

GPU_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Asked whether there is a GPU, PyTorch then does not begin to use it."""

POLL_SECONDS = 0.02


class ForkedRank:
    """The process of a rank, which the server has forked; what `subprocess.Popen` is for a child of one's own."""

    def __init__(self, server: ForkServer, process_number: int):
        self.returncode: int | None = None
        """As `Popen` has it: minus the number of the signal that ended it."""
        self._server, self._number = server, process_number

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self._number)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to it, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._number, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code


class ForkServer:
    """A process that imports what ranks need, and forks them: it begins at once, and ends with its context. It can fork
    as soon as `is_ready`.

    Raises:
        UserError: the environment has a MEGALITE_FORK that is none.
    """

    def __init__(self) -> None:
        if (choice := os.environ.get(FORK_VARIABLE, "")) not in ("", "0", "1"):
            raise UserError(
                f"{FORK_VARIABLE}: found {choice!r} in the environment, expected 0 or 1; correct or unset it"
            )
        open_missing_streams()
        ours, theirs = socket.socketpair()
        with theirs, held():  # ranks inherit that requests to stop wait until they listen
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER],
                env={**RANK_MEMORY, **GPU_CHECK, **os.environ},
                stdin=theirs.fileno(),
                start_new_session=True,  # Ctrl-C reaches the command alone
            )
        ours.setblocking(False)
        self._link, self._received, self._is_ready = ours, b"", False
        self.has_gone = False
        """The server has ended: no rank can be forked any more."""
        self._codes: dict[int, int] = {}
        self._forked: list[int] = []

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._link.close()
        self._process.kill()
        self._process.wait()

    def is_ready(self) -> bool:
        """Whether everything is imported.

        Raises:
            StartError: it has ended instead.
        """
        self._listen()
        if self.has_gone and not self._is_ready:
            raise StartError(
                f"the process that imports PyTorch for all ranks ended with exit code {self._process.wait()}; what it "
                "said stands above"
            )
        return self._is_ready

    def fork(
        self, module: str, arguments: Sequence[str], environment: dict[str, str], log: Path | None = None
    ) -> ForkedRank:
        """Start a rank, once the server is ready.

        Args:
            module: whose `main` it runs.
            arguments: of it, in sys.argv.
            environment: the rank's, but for the parent that it listens to.
            log: takes what it says, behind what stands there; None for our own streams. It can be opened.

        Raises:
            StartError: the server has ended.
        """
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": environment,
            "log": str(log) if log else None,
        }
        known = len(self._forked)
        try:
            self._link.setblocking(True)
            self._link.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            self.has_gone = True
        finally:
            self._link.setblocking(False)
        while len(self._forked) == known:
            if self.has_gone:
                raise StartError("the process that ranks are forked from has ended; start again")
            select.select([self._link], [], [])
            self._listen()
        return ForkedRank(self, self._forked[-1])

    def exit_code(self, process_number: int) -> int | None:
        """Of a rank that has ended; None while it runs. A server that was killed cannot tell: that is a fault."""
        self._listen()
        if self.has_gone and process_number not in self._codes and not _is_running(process_number):
            return EXIT_FAULT
        return self._codes.get(process_number)

    def _listen(self) -> None:
        """Take in what the server has said since."""
        with contextlib.suppress(BlockingIOError):
            while not self.has_gone:
                try:
                    new = self._link.recv(1 << 16)
                except ConnectionResetError:
                    new = b""
                self._received += new
                self.has_gone = not new
        *lines, self._received = self._received.split(b"\n")
        for said in map(json.loads, lines):
            self._is_ready |= "ready" in said
            self._forked += [said["forked"]] if "forked" in said else []
            if "ended" in said:
                self._codes[said["ended"]] = said["code"]


def _is_running(process_number: int) -> bool:
    """Whether a rank runs whose server has ended. Whoever it belongs to now may be us, or may never ask for its end."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(process_number, os.WNOHANG)[0] == 0
    try:
        state = Path(f"/proc/{process_number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return False
    return state.split()[0] not in ("Z", "X")


def serve(link: socket.socket) -> dict[str, Any]:
    """Import, then fork a rank for each request, until the command ends; returns the request in the forked process."""
    if not is_anew():
        import_all()
    _say(link, {"ready": True})
    running: set[int] = set()
    while True:
        if select.select([link], [], [], POLL_SECONDS)[0]:
            line = _line(link)
            if not line:  # the command has ended
                os._exit(0)
            request = json.loads(line)
            parent, number = os.getpid(), _fork()
            if number == 0:
                link.close()
                request["environment"][PARENT_VARIABLE] = str(parent)
                return request
            running.add(number)
            _say(link, {"forked": number})
        for number in sorted(running):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                running.remove(number)
                _say(link, {"ended": number, "code": os.waitstatus_to_exitcode(status)})


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # of Python 3.12 about threads: numpy's, which stop for a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _line(link: socket.socket) -> bytes:
    """The next request; nothing where the command has ended."""
    line = b""
    while not line.endswith(b"\n"):
        new = b""
        with contextlib.suppress(ConnectionResetError):  # it has left unread what we said
            new = link.recv(1 << 16)
        if not new:
            return b""
        line += new
    return line


def _say(link: socket.socket, what: dict[str, Any]) -> None:
    try:
        link.sendall(json.dumps(what).encode() + b"\n")
    except OSError:  # the command has ended; ranks hear it when we do
        os._exit(0)


def is_anew() -> bool:
    """Whether ranks are to import by themselves."""
    return os.environ.get(FORK_VARIABLE) == "0"


def become_rank(request: dict[str, Any]) -> None:
    """Make this process, just forked, the rank of a request: session, streams, environment, threads."""
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if request["log"] is not None:
        with open(request["log"], "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    threads_before = os.environ.get(THREADS_VARIABLE)
    os.environ.clear()
    os.environ.update(request["environment"])
    if is_anew():
        os.execv(sys.executable, [sys.executable, "-m", SERVER, request["module"], *request["arguments"]])
    threads = os.environ.get(THREADS_VARIABLE, "")
    if threads != threads_before and threads.isdecimal():  # else read as torch was imported
        import torch

        torch.set_num_threads(int(threads))
    sys.argv = [request["module"], *request["arguments"]]


def run_rank(request: dict[str, Any] | None) -> NoReturn:
    """Be the rank of a request, to its end; None for a rank of its own, which has become it."""
    import traceback

    try:
        if request is None:
            del sys.argv[0]
        else:
            become_rank(request)
        import_module(sys.argv[0]).main()
    except BaseException:  # those that ranks expect do not come here: they leave with a code of their own
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


def main() -> NoReturn:
    """`python -m megalite.train.fork_server`, its stdin the socket of a `ForkServer`; or with a rank's program and its
    arguments, which it then is."""
    if sys.argv[1:]:
        run_rank(None)
    end_with_parent(signal.SIGKILL)  # in the middle of an import it would not hear of the command's end
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by some who start commands, and no end is told then
    run_rank(serve(socket.socket(fileno=os.dup(0))))


if __name__ == "__main__":
    main()
