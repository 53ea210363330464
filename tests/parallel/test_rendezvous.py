"""Ranks meet on one address of one node, and only those of one attempt."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from megalite.parallel import rendezvous
from megalite.parallel.rendezvous import RendezvousError, open_store

TIMEOUT_SECONDS = 30.0

ANY_ADDRESS = {"00000000", "0" * 32}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def meet(*ranks: tuple[int, int, str], timeout_seconds: float = TIMEOUT_SECONDS) -> list[dist.Store | Exception]:
    """Let ranks (rank, number of ranks, token) come to one port; the store of each, or its error."""
    port = free_port()

    def come(rank: int, world_size: int, token: str) -> dist.Store | Exception:
        try:
            return open_store(
                f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=world_size,
                token=token,
                timeout_seconds=timeout_seconds,
            )
        except (RendezvousError, dist.DistError) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result() for future in [pool.submit(come, *rank) for rank in ranks]]


def listening(is_ours: Callable[[int], bool]) -> set[str]:
    """Addresses on which this machine listens, of ports that count."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    places = [line.split()[1].split(":") for table in tables for line in table if line.split()[3] == "0A"]
    return {address for address, port in places if is_ours(int(port, 16))}


def test_ranks_of_an_attempt_meet():
    """What one writes, the others read; also without a token, as ranks that are started by hand have none."""
    for token in ("secret", ""):
        stores = meet(*((rank, 3, token) for rank in range(3)))
        stores[2].set("key", "value")
        assert [store.get("key") for store in stores] == [b"value"] * 3


def test_the_store_listens_on_one_address():
    """Not on all of the node's, as torch's own does: who comes by another one finds no one."""
    port = free_port()
    place = f"tcp://127.0.0.1:{port}"
    store = open_store(place, rank=0, world_size=1, token="secret", timeout_seconds=TIMEOUT_SECONDS)
    found = listening(lambda each: each == port)
    assert found
    assert not found & ANY_ADDRESS
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    del store


def test_gloo_listens_on_its_interface():
    """That of GLOO_SOCKET_IFNAME, which the launcher sets, and no other."""
    before: set[int] = set()
    listening(lambda port: bool(before.add(port)))
    device = dist.ProcessGroupGloo.create_device(interface="lo")
    found = listening(lambda port: port not in before)
    assert not found & ANY_ADDRESS
    del device


def test_a_rank_of_another_attempt_is_refused_at_once():
    """It is told why, and its place stays free for the right one."""
    began = time.monotonic()
    first, stale, right = meet((0, 2, "new"), (1, 2, "old"), (1, 2, "new"))
    assert "is another attempt's" in str(stale)
    assert isinstance(first, dist.Store)
    assert isinstance(right, dist.Store)
    assert time.monotonic() - began < TIMEOUT_SECONDS / 2


def test_who_is_missing_is_named():
    """By the first rank, when patience ends; the others say whom to ask."""
    first, second = meet((0, 4, "t"), (2, 4, "t"), timeout_seconds=2.5)
    assert "there was no sign of 2 of 4 ranks: 1, 3" in str(first)
    assert "others are missing" in str(second) or isinstance(second, dist.DistError)  # its peer may be gone by then


def test_who_waits_says_for_whom(monkeypatch):
    """While they wait, not only at the end: the first rank names the others, a rank alone the place of the first."""
    monkeypatch.setattr(rendezvous, "FIRST_WORD_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "CONNECT_SECONDS", 0.2)
    for rank, whom in ((0, "2 of 3 ranks: 1, 2"), (1, "the first rank, at 127.0.0.1:")):
        said: list[str] = []
        place = {"rank": rank, "world_size": 3, "token": "", "say": said.append, "timeout_seconds": 2.0}
        began = time.monotonic()
        with pytest.raises(RendezvousError, match="unset RANK and WORLD_SIZE"):
            open_store(f"tcp://127.0.0.1:{free_port()}", **place)
        assert time.monotonic() - began < 10
        assert len(said) == 1
        assert said[0].startswith(f"waiting for {whom}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_without_address_is_named(rank, monkeypatch):
    """By the first rank at once, which cannot listen there; others wait, since names may come late, and say why."""
    monkeypatch.setattr(rendezvous, "FIRST_WORD_SECONDS", 0.2)
    said: list[str] = []
    with pytest.raises(RendezvousError, match=r"host.invalid.*MASTER_ADDR"):
        open_store("tcp://host.invalid:2345", rank=rank, world_size=2, token="", say=said.append, timeout_seconds=1.0)
    assert len(said) == rank
    assert all("host.invalid:2345 (" in each for each in said)


def test_a_rank_that_counts_otherwise_is_named():
    """It would wait for ranks that never come."""
    first, _ = meet((0, 2, "t"), (1, 3, "t"), timeout_seconds=5)
    assert "who says to be rank 1 of 2 has not got this attempt's token" in str(first)


def test_a_port_that_is_taken():
    """By another program: said with the port, not as a time-out."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RendezvousError, match="is taken by another"):
            open_store(place, rank=0, world_size=1, token="", timeout_seconds=TIMEOUT_SECONDS)


def test_signals_are_heard_while_ranks_are_missing():
    """Python's handlers run between torch's waits: who is asked to end need not wait for the others."""

    class Asked(Exception):
        pass

    def end(*_: object) -> None:
        raise Asked

    place, before = f"tcp://127.0.0.1:{free_port()}", signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    try:
        with pytest.raises(Asked):
            open_store(place, rank=0, world_size=2, token="t", timeout_seconds=TIMEOUT_SECONDS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 5
