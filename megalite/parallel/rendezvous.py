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
from collections.abc import Callable, Sequence
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from megalite.errors import StartError

PUBLIC_KEY = "megalite/attempt"

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 1.0
"""Between two looks, each half as long again as the one before. Torch's own waits print its stack at each time-out, and
no signal is heard in them."""

NUM_NAMED = 8
"""Missing ranks that a message names."""

TIMEOUT_SECONDS = 600.0
"""To wait for the others: ranks of a large job import their packages from one slow disk."""

FIRST_WORD_SECONDS, SECONDS_BETWEEN_WORDS = 5.0, 30.0
"""After which whoever waits says for whom, and how often."""

CONNECT_SECONDS = 5.0
"""Of one try to reach the first rank."""

Say = Callable[[str], None]


class RendezvousError(StartError):
    """The ranks could not meet."""


def open_store(
    init_method: str,
    *,
    rank: int,
    world_size: int,
    token: str,
    say: Say = lambda what: None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> dist.Store:
    """Meet the other ranks, and return the store that they share. Collective.

    Args:
        init_method: `tcp://HOST:PORT`; HOST is an address of the first rank's node that the others reach.
        rank: global rank.
        world_size: number of ranks.
        token: of the attempt; empty for none, when ranks are told apart from other runs' by the port alone.
        say: is told who is waited for, now and then.
        timeout_seconds: to wait for the others.

    Raises:
        RendezvousError: the port is taken, the store is another attempt's, a rank's proof is wrong, or some have not
            come.
    """
    waiting = _Waiting(timeout_seconds, say)
    tcp = _serve(init_method, world_size) if rank == 0 else _reach(init_method, rank, world_size, waiting)
    tcp.set_timeout(timedelta(seconds=timeout_seconds))
    public = hashlib.sha256(token.encode()).hexdigest()
    if rank == 0:
        tcp.set(PUBLIC_KEY, public)
    if tcp.get(PUBLIC_KEY).decode() != public:
        raise RendezvousError(f"{init_method} is another attempt's, whose token is not ours; this rank ends")
    store = dist.PrefixStore(_proof(token, "keys"), tcp)
    store.set(f"hello/{rank}", _proof(token, f"{rank} of {world_size}"))
    if rank == 0:
        _check_all(store, world_size, token, waiting)
        store.set("welcome", _proof(token, "welcome"))
    elif not _wait_for(store, ["welcome"], waiting, lambda: "others; the first rank says for whom"):
        raise RendezvousError(f"{init_method}: the first rank is there, others are missing; its own error names them")
    if store.get("welcome").decode() != _proof(token, "welcome"):
        raise RendezvousError(f"{init_method}: the first rank has not got this attempt's token")
    return store


class _Waiting:
    """How long a rank has waited for the others, and may."""

    def __init__(self, timeout_seconds: float, say: Say):
        self._say, self._began = say, time.monotonic()
        self._deadline, self._next_word = self._began + timeout_seconds, FIRST_WORD_SECONDS
        self._pause = FIRST_PAUSE_SECONDS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def may_go_on(self, whom: Callable[[], str]) -> bool:
        """Whether there is time left; says whom it is waited for when it is time for that."""
        if self.seconds > self._next_word:
            self._next_word = self.seconds + SECONDS_BETWEEN_WORDS
            self._say(f"waiting for {whom()}")
        return time.monotonic() < self._deadline

    def pause(self) -> None:
        """Let some time go by before the next look."""
        time.sleep(self._pause)
        self._pause = min(LONGEST_PAUSE_SECONDS, 1.5 * self._pause)


def _serve(init_method: str, world_size: int) -> dist.TCPStore:
    """The first rank's store."""
    host, port = _parts(init_method)
    listener = _listen(host, port)
    return dist.TCPStore(host, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener)


def _reach(init_method: str, rank: int, world_size: int, waiting: _Waiting) -> dist.TCPStore:
    """The first rank's store as another one reaches it."""
    host, port = _parts(init_method)
    why = ["no answer yet"]
    while waiting.may_go_on(lambda: f"the first rank, at {host}:{port} ({why[-1]})"):
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()  # torch's own fails with its stack
            patience = timedelta(seconds=CONNECT_SECONDS)
            return dist.TCPStore(host, port, world_size, is_master=False, timeout=patience, wait_for_workers=False)
        except OSError as error:
            why.append(error.strerror or str(error))
        except dist.DistError:
            why.append("who listens there is no store of torch's")
        waiting.pause()
    raise RendezvousError(
        f"rank {rank} of {world_size}: the first rank was not at {host}:{port} for {waiting.seconds:.0f} s "
        f"({why[-1]}); see whether it was started, and whether MASTER_ADDR and MASTER_PORT are the same on all nodes. "
        "To let megalite start the ranks itself, unset RANK and WORLD_SIZE"
    )


def _parts(init_method: str) -> tuple[str, int]:
    parts = urlsplit(init_method)
    assert parts.hostname is not None, f"{init_method} names no host"
    assert parts.port is not None, f"{init_method} names no port"
    return parts.hostname, parts.port


def _listen(host: str, port: int) -> int | None:
    """A socket that listens on one address; None where the host's name is not that of an address here."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(
            f"{host}, where the first rank is to listen: {error.strerror}; set MASTER_ADDR to an address of its node"
        ) from error
    for family, _, _, _, address in found:
        try:
            return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN).detach()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RendezvousError(f"port {port} of {host} is taken by another program") from error
    return None


def _check_all(store: dist.Store, world_size: int, token: str, waiting: _Waiting) -> None:
    keys = [f"hello/{rank}" for rank in range(world_size)]

    def missing() -> str:
        ranks = [rank for rank, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(map(str, ranks[:NUM_NAMED])) + (", ..." if len(ranks) > NUM_NAMED else "")
        return f"{len(ranks)} of {world_size} ranks: {names}"

    if not _wait_for(store, keys, waiting, missing):
        raise RendezvousError(
            f"after {waiting.seconds:.0f} s there was no sign of {missing()}; see whether they were started, and what "
            "they say. To let megalite start the ranks itself, unset RANK and WORLD_SIZE"
        )
    for rank, key in enumerate(keys):
        if store.get(key).decode() != _proof(token, f"{rank} of {world_size}"):
            raise RendezvousError(f"who says to be rank {rank} of {world_size} has not got this attempt's token")


def _wait_for(store: dist.Store, keys: Sequence[str], waiting: _Waiting, whom: Callable[[], str]) -> bool:
    """Whether keys have come before patience ended."""
    while waiting.may_go_on(whom):
        if store.check(list(keys)):
            return True
        waiting.pause()
    return False


def _proof(token: str, text: str) -> str:
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
