"""Where the ranks of an attempt meet: a store on the first rank's node, in which they know each other by a token.

    first rank   listens on one address (torch's own store does on all of the node's)
                 attempt = hash(token)                         an attempt with another token reads this, and leaves
    every rank   hello/RANK = HMAC(token, "RANK of N")         under keys that only who has the token can name
    first rank   has checked all of them: welcome = HMAC(token, "welcome")
    every rank   has checked that: torch.distributed starts on this store

That keeps out ranks of other attempts and strangers that knock on the port by mistake. It does not keep out who means
harm: torch's store lets everyone who can connect list, read and write keys, and gloo's connections have no check at all
(docs/security.md).
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

PUBLIC_KEY = "megalite/attempt"

SECONDS_A_WAIT = 1.0
"""In torch, where no signal is heard."""

NUM_NAMED = 8
"""Missing ranks that a message names."""


class RendezvousError(RuntimeError):
    """The ranks could not meet."""


def open_store(init_method: str, *, rank: int, world_size: int, token: str, timeout_seconds: float) -> dist.Store:
    """Meet the other ranks, and return the store that they share. Collective.

    Args:
        init_method: `tcp://HOST:PORT`; HOST is an address of the first rank's node that the others reach.
        rank: global rank.
        world_size: number of ranks.
        token: of the attempt; empty for none, when ranks are told apart from other runs' by the port alone.
        timeout_seconds: to wait for the others.

    Raises:
        RendezvousError: the port is taken, the store is another attempt's, a proof is wrong, or some have not come.
    """
    host, port = _parts(init_method)
    deadline = time.monotonic() + timeout_seconds
    listener = _listen(host, port) if rank == 0 else None
    tcp = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        **({"master_listen_fd": listener} if listener is not None else {}),
    )
    public = hashlib.sha256(token.encode()).hexdigest()
    if rank == 0:
        tcp.set(PUBLIC_KEY, public)
    if tcp.get(PUBLIC_KEY).decode() != public:
        raise RendezvousError(f"{init_method} is another attempt's, whose token is not ours; this rank ends")
    store = dist.PrefixStore(_proof(token, "keys"), tcp)
    store.set(f"hello/{rank}", _proof(token, f"{rank} of {world_size}"))
    if rank == 0:
        _check_all(store, world_size, token, deadline)
        store.set("welcome", _proof(token, "welcome"))
    elif not _wait_for(store, ["welcome"], deadline):
        raise RendezvousError(
            f"{init_method}: the first rank is there, and others are missing; its own error names them"
        )
    if store.get("welcome").decode() != _proof(token, "welcome"):
        raise RendezvousError(f"{init_method}: the first rank has not got this attempt's token")
    return store


def _parts(init_method: str) -> tuple[str, int]:
    parts = urlsplit(init_method)
    assert parts.hostname is not None, f"{init_method} names no host"
    assert parts.port is not None, f"{init_method} names no port"
    return parts.hostname, parts.port


def _listen(host: str, port: int) -> int | None:
    """A socket that listens on one address; None where the host's name is not that of an address here."""
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN).detach()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RendezvousError(f"port {port} of {host} is taken by another program") from error
    return None


def _check_all(store: dist.Store, world_size: int, token: str, deadline: float) -> None:
    keys = [f"hello/{rank}" for rank in range(world_size)]
    if not _wait_for(store, keys, deadline):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(map(str, missing[:NUM_NAMED])) + (", ..." if len(missing) > NUM_NAMED else "")
        raise RendezvousError(f"{len(missing)} of {world_size} ranks have not come: {names}")
    for rank, key in enumerate(keys):
        if store.get(key).decode() != _proof(token, f"{rank} of {world_size}"):
            raise RendezvousError(f"who says to be rank {rank} of {world_size} has not got this attempt's token")


def _wait_for(store: dist.Store, keys: Sequence[str], deadline: float) -> bool:
    """Wait for keys; a second at a time, so that signals are heard in between."""
    while time.monotonic() < deadline:
        with suppress(dist.DistStoreError):
            store.wait(keys, timedelta(seconds=SECONDS_A_WAIT))
            return True
    return False


def _proof(token: str, text: str) -> str:
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
