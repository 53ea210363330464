"""Ranks that are forked are to a command what processes of its own would be."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.errors import EXIT_FAULT, StartError, UserError
from megalite.train import fork_server
from megalite.train.fork_server import ForkedRank, ForkServer
from megalite.train.imports import IMPORTS
from tests.kit.paths import ROOT
from tests.kit.runs import clean_environment, metrics, write_run

TIMEOUT_SECONDS = 60.0

PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans below a process become its children."""

PROGRAM = """
import json, os, signal, sys, time

def main():
    import torch
    from megalite.train.signals import hear
    what, *rest = sys.argv[1:]
    if what == "tell":
        print("to the log", flush=True)
        print("and this", file=sys.stderr)
        seen = {
            "arguments": rest, "environment": dict(os.environ), "threads": torch.get_num_threads(),
            "session": os.getsid(0) == os.getpid(), "parent": os.getppid(), "stdin": sys.stdin.read(),
            "files": [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) > 2
                      and os.path.exists(f"/proc/self/fd/{name}")],
            "imported": sorted(sys.modules),
        }
        open(rest[0], "w").write(json.dumps(seen))
        os._exit(7)
    if what == "wait":
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        open(rest[0] + ".waits", "w").close()
        time.sleep(0.3)  # a request that comes by now is not lost
        hear()
        while not asked:
            time.sleep(0.01)
        open(rest[0], "w").write("stopped")
        os._exit(3)
    raise ValueError("a program of its own mind")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "forked_program.py").write_text(PROGRAM)
    return folder


@pytest.fixture(scope="module")
def server(folder) -> Iterator[ForkServer]:
    """One for all tests that leave it as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder)]))
        patch.delenv("OMP_NUM_THREADS", raising=False)
        with ForkServer() as server:
            ready(server)
            yield server


def ready(server: ForkServer) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not server.is_ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fork(server: ForkServer, *arguments: object, log: Path | None = None, **variables: str) -> ForkedRank:
    environment = {**os.environ, **variables}
    return server.fork("forked_program", [str(each) for each in arguments], environment, log)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def test_a_rank_has_what_it_was_given(server, tmp_path):
    """Arguments, environment and no other's, threads, a session, a log that it adds to; none of the server's files."""
    log, out = tmp_path / "rank-1.log", tmp_path / "seen"
    log.write_text("of the attempt before\n")
    rank = fork(server, "tell", out, "a b", log=log, OMP_NUM_THREADS="3", RANK="1")
    assert rank.wait() == 7
    assert rank.returncode == 7
    seen = json.loads(out.read_text())
    assert seen["arguments"] == [str(out), "a b"]
    given = {**os.environ, "OMP_NUM_THREADS": "3", "RANK": "1", "MEGALITE_PARENT": str(seen["parent"])}
    assert seen["environment"] == given
    assert seen["threads"] == 3
    assert seen["session"]
    assert seen["stdin"] == ""
    assert not [each for each in seen["files"] if each.startswith("socket")]
    assert set(IMPORTS) < set(seen["imported"])
    assert "deepspeed" not in seen["imported"]
    assert log.read_text() == "of the attempt before\nto the log\nand this\n"


def test_ends_are_told_as_popen_does(server, tmp_path):
    """A signal by its number below 0, an exception as a fault with its traceback; who has ended gets no signal more."""
    waiting, failing = fork(server, "wait", tmp_path / "out"), fork(server, "fail", log=tmp_path / "log")
    assert failing.wait() == EXIT_FAULT
    assert "a program of its own mind" in (tmp_path / "log").read_text()
    assert waiting.poll() is None
    waiting.kill()
    assert waiting.wait() == -signal.SIGKILL
    waiting.send_signal(signal.SIGTERM)
    assert waiting.poll() == -signal.SIGKILL


def test_a_request_to_stop_waits_until_the_rank_listens(server, tmp_path):
    out = tmp_path / "out"
    rank = fork(server, "wait", out)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait() == 3
    assert out.read_text() == "stopped"


def test_a_rank_may_be_a_python_of_its_own(folder, tmp_path, monkeypatch):
    """MEGALITE_FORK=0, for what loses sight of a fork: it has all that others have, but the imports."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder)]))
    monkeypatch.setenv("MEGALITE_FORK", "0")
    with ForkServer() as server:
        ready(server)
        out = tmp_path / "seen"
        rank = fork(server, "tell", out, "a b", log=tmp_path / "log", RANK="1")
        waiting = fork(server, "wait", tmp_path / "another")  # which it writes to as it stops
        waiting.send_signal(signal.SIGTERM)
        assert rank.wait() == 7
        seen = json.loads(out.read_text())
        assert seen["environment"] == {**os.environ, "RANK": "1", "MEGALITE_PARENT": str(server._process.pid)}
        assert (seen["arguments"], seen["session"], seen["stdin"]) == ([str(out), "a b"], True, "")
        assert "megalite.train.loop" not in seen["imported"]
        assert (tmp_path / "log").read_text() == "to the log\nand this\n"
        assert waiting.wait() == 3


def test_a_choice_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("MEGALITE_FORK", "no")
    with pytest.raises(UserError, match="found 'no' in the environment, expected 0 or 1"):
        ForkServer()


@pytest.mark.parametrize("is_adopted", [False, True])
def test_ranks_end_with_a_server_that_is_killed(folder, tmp_path, monkeypatch, is_adopted):
    """They are asked to stop, their end is a fault, and no other rank is forked; also where the command is the first
    process of a container, whose children they are then."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder)]))
    library = ctypes.CDLL(None)
    assert library.prctl(PR_SET_CHILD_SUBREAPER, is_adopted) == 0
    try:
        with ForkServer() as server:
            ready(server)
            out = tmp_path / "out"
            rank = fork(server, "wait", out)
            wait_for(tmp_path / "out.waits")
            server._process.kill()
            assert rank.wait() == EXIT_FAULT
            assert out.read_text() == "stopped"
            assert server.has_gone
            with pytest.raises(StartError, match="has ended"):
                fork(server, "wait", out)
    finally:
        library.prctl(PR_SET_CHILD_SUBREAPER, 0)


def test_who_has_ended_and_is_not_asked_for_does_not_run():
    """A first process that reaps nobody leaves zombies; they are no reason to wait."""
    forks = "import os, time; child = os.fork() or os._exit(0); print(child, flush=True); time.sleep(100)"
    parent = subprocess.Popen([sys.executable, "-c", forks], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while fork_server._is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert fork_server._is_running(parent.pid)
    parent.kill()
    parent.communicate()
    assert not fork_server._is_running(child)


def test_surroundings_that_daemons_have(tmp_path):
    """No streams at all, ends of children ignored, a large environment: a run trains, and its ranks have their logs."""
    config = write_run(tmp_path, train={"steps": 2, "compile": "off"})
    variables = {f"LONG_{number}": "é" * 60_000 for number in range(12)}
    done = subprocess.run(
        ["bash", "-c", f"trap '' CHLD; exec {sys.executable} -m megalite train {config} <&- >&- 2>&-"],
        env={**clean_environment(), **variables},
        timeout=120,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert done.returncode == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


COMMAND = """
import os, sys, time
from megalite.train.fork_server import ForkServer
with ForkServer() as server:
    while not server.is_ready():
        time.sleep(0.01)
    server.fork("forked_program", ["wait", sys.argv[1]], dict(os.environ))
    print(server._process.pid, flush=True)
    time.sleep(1000)
"""


def test_server_and_ranks_end_with_a_command_that_is_killed(folder, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    out = tmp_path / "out"
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(out)], stdout=subprocess.PIPE, text=True, env=environment
    )
    server = int(command.stdout.readline())
    wait_for(tmp_path / "out.waits")
    command.kill()
    command.communicate()
    wait_for(out)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while Path(f"/proc/{server}").exists() and "Z" not in Path(f"/proc/{server}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_cannot_be_imported_ends_the_wait(tmp_path, monkeypatch, capfd):
    """A broken PyTorch, say: its traceback stands above, and the command does not wait for ever."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so is broken')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    with ForkServer() as server, pytest.raises(StartError, match="ended with exit code 1"):
        ready(server)
    assert "libtorch.so is broken" in capfd.readouterr().err


NO_GPU = """
import sys, torch
def touched(*_, **__):
    sys.exit("a GPU was asked for something before ranks are forked, and CUDA does not survive that")
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_capability"):
    setattr(torch.cuda, name, touched)
from importlib import import_module
from megalite.train import fork_server
from megalite.train.imports import IMPORTS
for name in IMPORTS:
    import_module(name)
"""


def test_no_gpu_is_touched_by_what_is_imported():
    done = subprocess.run([sys.executable, "-c", NO_GPU], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("is_read", [True, False])
def test_a_command_that_ends_as_the_server_is_ready(is_read):
    """Is no fault, whether it has read that or not, which a socket tells by a reset."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b'{"ready": true}\n')
    if is_read:
        ours.recv(100)
    ours.close()
    assert fork_server._line(theirs) == b""
    theirs.close()
