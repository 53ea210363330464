"""Runs in every Python that the tests start with this folder on PYTHONPATH: gives the program to a process that has
imported everything, or makes faults on request.

A rank of a test spends nine tenths of its life on imports. Where SOCKET_VARIABLE names the socket of a server
(`tests/kit/preloaded.py`), one of MODULES_VARIABLE hands itself over: arguments, environment, standard streams,
namespaces, rights, limits. The server forks a process with all of that. This one stays as its stand-in towards the
parent: it passes signals on, ends as the other one ends, and takes it along when it is killed.
"""

from __future__ import annotations

import os
import sys

SOCKET_VARIABLE = "MEGALITE_TEST_PRELOADED"

PATH_VARIABLE = "MEGALITE_TEST_PRELOADED_PATH"
"""PYTHONPATH of the server: with another one other packages may be meant."""

FAULTS_VARIABLE = "MEGALITE_TEST_FAULTS"
"""`tests/slurm/inject` is on PYTHONPATH then."""

PROCESSES_VARIABLE = "MEGALITE_TEST_PROCESSES"
"""A folder where each rank leaves its process number in `rank-RANK`, for tests that send it what only it can get."""

MODULES_VARIABLE = "MEGALITE_TEST_PRELOADED_MODULES"
"""Programs that are run by the server."""

NAMESPACES = ("uts", "ipc", "net", "pid", "mnt")


def own_path() -> str:
    """PYTHONPATH without the folders of the tests' own hooks."""
    hooks = ("/tests/kit/preload", "/tests/slurm/inject")
    return os.pathsep.join(
        each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and not each.endswith(hooks)
    )


def hand_over(address: str) -> None:
    """Let the server run this program; ends this process."""
    import json
    import resource
    import signal
    import socket
    import struct
    from contextlib import suppress
    from ctypes import CDLL

    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(address)
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    with open("/proc/self/status", encoding="ascii") as status:
        rights = {line.split(":")[0]: int(line.split()[1], 16) for line in status if line.startswith("Cap")}
    umask = os.umask(0)
    os.umask(umask)
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    request = {
        "module": sys.orig_argv[2],
        "arguments": sys.orig_argv[3:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "cores": sorted(os.sched_getaffinity(0)),
        "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "rights": rights,
        "limits": limits,
    }
    content = json.dumps(request).encode()
    socket.send_fds(link, [struct.pack("!I", len(content))], [0, 1, 2, *spaces])
    link.sendall(content)

    def pass_on(number: int, frame: object) -> None:
        with suppress(OSError):  # it has ended
            link.send(bytes([number]))

    for number in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, number), pass_on)
    if "MEGALITE_PARENT" in os.environ:  # as `megalite.train.signals`
        CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != int(os.environ["MEGALITE_PARENT"]):
            link.send(bytes([signal.SIGTERM]))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    answer = link.recv(4)
    if len(answer) < 4:
        print(f"the server at {address} has gone, and its program with it; it has left a log there", file=sys.stderr)
    code = struct.unpack("!i", answer)[0] if len(answer) == 4 else 70
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def is_wanted() -> bool:
    """Whether the server is to run this program."""
    given = sys.orig_argv[1:3]
    is_one = len(given) == 2 and given[0] == "-m" and given[1] in os.environ.get(MODULES_VARIABLE, "").split(os.pathsep)
    return is_one and SOCKET_VARIABLE in os.environ and own_path() == os.environ.get(PATH_VARIABLE)


def install_faults() -> None:
    """Make this process listen for faults, if it is a rank of a run that has some."""
    if FAULTS_VARIABLE in os.environ:
        import rank_faults

        rank_faults.install()


def leave_process_number() -> None:
    """Tell the test which process this rank is, if it wants to know."""
    if PROCESSES_VARIABLE in os.environ and "RANK" in os.environ:
        with open(f"{os.environ[PROCESSES_VARIABLE]}/rank-{os.environ['RANK']}", "w", encoding="ascii") as file:
            file.write(str(os.getpid()))


if __name__ == "sitecustomize":
    if is_wanted():
        hand_over(os.environ[SOCKET_VARIABLE])
    leave_process_number()
    install_faults()
