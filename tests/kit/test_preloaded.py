"""A program that a server forks is, to whoever starts it, a process like any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.preloaded import GPU, hook, preloaded
from tests.kit.runs import clean_environment

pytestmark = pytest.mark.skipif(GPU.exists(), reason="on a GPU machine every process imports by itself")

CHILD = """
import json, os, signal, sys, time
known = {name: name in sys.modules for name in ("torch", "deepspeed")}
told = {"known": known, "folder": os.getcwd(), "arguments": sys.argv[1:], "variable": os.environ.get("A_VARIABLE"),
        "cores": sorted(os.sched_getaffinity(0)), "name": __name__}
print(json.dumps(told), flush=True)
print("on stderr", file=sys.stderr, flush=True)
what = sys.argv[1]
if what == "exit":
    sys.exit(int(sys.argv[2]))
if what == "raise":
    raise ArithmeticError("mine")
if what == "abort":
    os.abort()
if what == "hear":
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(9))
print("listens", flush=True)
time.sleep(60)
"""


def start(folder: Path, *arguments: str, preloads: bool = True, **options) -> subprocess.Popen:
    """The child with some arguments, in a folder that only it knows."""
    (folder / "child.py").write_text(CHILD)
    environment = {**clean_environment(), "A_VARIABLE": "its value"}
    if preloads:
        environment = {**preloaded(environment), hook().MODULES_VARIABLE: "child"}
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-m", "child", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **streams, **options)


@pytest.mark.parametrize("arguments", [("exit", "0"), ("exit", "3"), ("raise",), ("abort",)])
def test_it_ends_as_it_would_by_itself(tmp_path, arguments):
    """Exit code or signal, streams, folder, arguments, variables and cores; only the imports are there already."""
    cores = sorted(os.sched_getaffinity(0))[:1]
    found = []
    for preloads in (False, True):
        process = start(tmp_path, *arguments, preloads=preloads, preexec_fn=lambda: os.sched_setaffinity(0, cores))
        said, errors = process.communicate(timeout=120)
        told = json.loads(said)
        assert told.pop("known") == {"torch": preloads, "deepspeed": preloads}
        assert told["cores"] == cores
        found.append((process.returncode, told, "on stderr" in errors, "ArithmeticError: mine" in errors))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("what", "number", "code"),
    [("hear", signal.SIGUSR1, 9), ("wait", signal.SIGTERM, -signal.SIGTERM), ("wait", signal.SIGKILL, -signal.SIGKILL)],
)
def test_signals_reach_it(tmp_path, what, number, code):
    """Those that it hears, those that end it, and SIGKILL, which nobody passes on: its streams are closed then too."""
    process = start(tmp_path, what)
    assert process.stdout is not None
    while process.stdout.readline() != "listens\n":
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=30)  # returns when nobody is left who could write
    assert process.returncode == code
