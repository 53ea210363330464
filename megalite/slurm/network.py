"""Which network interface ranks talk through.

gloo and NCCL take the interface of the host's own name, which on many systems is the loopback (Debian writes 127.0.1.1
for it). The one that leads to the first rank's node is right wherever ranks can reach each other at all.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

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
    for name in INTERFACE_VARIABLES if chosen is not None else ():
        if os.environ.get(name, LOOPBACK) == LOOPBACK:  # which was right for ranks of one machine
            os.environ[name] = chosen
    return known.get(chosen) if chosen is not None else None


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
