"""Which cores and which network interface the processes of a node use.

Slurm binds tasks to cores; an agent is one task, so its processes are bound here: neighbouring cores, with their
hyperthreads, in the order of sockets, as GPUs usually are. Where Slurm does not confine a job to its cores, others may
be at work on the first ones, and nothing is bound.

gloo and NCCL take the interface of the host's own name, which on many systems is the loopback (Debian writes 127.0.1.1
for it). The one that leads to the first rank's node is right wherever ranks can reach each other at all.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

LOOPBACK = "lo"

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

SIOCGIFADDR = 0x8915
"""ioctl: the address of an interface."""


def choose_address(peer: str, interface: str | None = None) -> str | None:
    """Let gloo and NCCL take one interface, unless the user has named others for them; its address.

    Args:
        peer: a host that ranks talk to.
        interface: to take; None takes the one that leads to the peer.

    Returns:
        None where no interface could be told.
    """
    named = os.environ.get(INTERFACE_VARIABLES[0], LOOPBACK)
    known = interfaces()
    chosen = interface or (named if named != LOOPBACK and named in known else interface_towards(peer))
    if chosen is None:
        return None
    for name in INTERFACE_VARIABLES:
        if os.environ.get(name, LOOPBACK) == LOOPBACK:  # which was right for ranks of one machine
            os.environ[name] = chosen
    return known.get(chosen)


def interface_towards(host: str) -> str | None:
    """Name of the interface that leads to a host; None when it cannot be told.

    On the host itself that is the loopback, unless its name resolves to an address of an interface.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # sends nothing: only looks up the route
            address = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for name, own in interfaces().items() if own == address), None)


def interfaces() -> dict[str, str]:
    """IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
            except OSError:  # it has none
                continue
    return found


def core_shares(num_processes: int) -> list[list[int]] | None:
    """The cores of each process of this node; None where they should not be bound."""
    mine = os.sched_getaffinity(0)
    if len(mine) != num_cores_of_job() or len(mine) < num_processes:
        return None
    return divide_cores(sorted(mine, key=_place), num_processes)


def threads_per_process(num_processes: int) -> int:
    """How many threads a process of this node may use."""
    return max(1, min(len(os.sched_getaffinity(0)), num_cores_of_job() or 1 << 20) // num_processes)


def divide_cores(cores: Sequence[int], num_processes: int) -> list[list[int]]:
    """Runs of equal length; what is left over stays free."""
    size = len(cores) // num_processes
    return [list(cores[place * size : (place + 1) * size]) for place in range(num_processes)]


def num_cores_of_job() -> int | None:
    """The cores of this node that Slurm has given to the job; None outside of one."""
    given = os.environ.get("SLURM_CPUS_ON_NODE")
    return int(given) if given else None


def _place(core: int) -> tuple[int, int, int]:
    """Socket and physical core: a core's hyperthreads become neighbours."""
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        socket, physical = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except OSError:  # not to be seen in some containers
        return 0, core, core
    return socket, physical, core
