"""Whether the nodes of a job hear each other: an agent asks its neighbours once a second, and answers theirs.

    n0 - n1 - n2 - n3 - n4 - n5 - (n0)          each asks the two before and the two after it on a ring

Datagrams of a few bytes, signed with the job's secret: nobody else gets an answer, and an answer is not longer than the
question. What an agent has heard goes into its report; what that says of the network is in `network_partition.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megalite.slurm.affinity import interfaces

REACH = 2
"""How far the neighbours are that a node asks, in both directions."""

SECONDS_BETWEEN_QUESTIONS = 1.0

SIGNATURE_BYTES = 16

SILENCE_SECONDS = 2.5
"""Of all neighbours, after which the controller's host is asked: who reaches that is not cut off."""

CONTROLLER_TIMEOUT_SECONDS = 1.0

Endpoint = tuple[str, int]


def ring_peers(nodes: Sequence[str], own: str) -> list[str]:
    """The nodes that one asks."""
    if own not in nodes:
        return []
    place, num = list(nodes).index(own), len(nodes)
    steps = [step for reach in range(1, REACH + 1) for step in (reach, -reach)]
    return [node for node in dict.fromkeys(nodes[(place + step) % num] for step in steps) if node != own]


class PeerMonitor:
    """Asks the peers of one node and answers them, on threads of its own.

    Args:
        nodes: of the job, in an order that all of them have.
        own: this one.
        address: of the interface that ranks talk through.
        secret: of the job.
        find: tells another node's endpoint as soon as it is known.
        controller: where Slurm's controller listens, if that is known.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        own: str,
        address: str,
        secret: str,
        find: Callable[[str], Endpoint | None],
        controller: Endpoint | None = None,
    ):
        self._asked = ring_peers(nodes, own)
        self._own, self._secret, self._find, self._controller = own, secret.encode(), find, controller
        self._endpoints: dict[str, Endpoint] = {}
        self._heard: dict[str, float] = {}
        self._interface = next((name for name, each in interfaces().items() if each == address), None)
        self.sees_controller: bool | None = None
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.settimeout(SECONDS_BETWEEN_QUESTIONS)
        for work in (self._listen, self._ask, self._look_for_controller):
            threading.Thread(target=work, name="neighbours", daemon=True).start()

    @property
    def endpoint(self) -> Endpoint:
        """Where this node answers."""
        return self._socket.getsockname()

    @property
    def has_carrier(self) -> bool | None:
        """Whether there is a signal on this node's cable."""
        if self._interface is None:
            return None
        try:
            return Path(f"/sys/class/net/{self._interface}/carrier").read_text(encoding="ascii").strip() == "1"
        except OSError:  # the interface is switched off, or the file is not to be seen here
            return None

    def heard(self) -> dict[str, float]:
        """PeerMonitor that have ever answered, and how many seconds ago they did so last."""
        now = time.monotonic()
        return {node: round(now - at, 1) for node, at in dict(self._heard).items()}

    def close(self) -> None:
        """Neither ask nor answer any more."""
        self._socket.close()

    def _ask(self) -> None:
        while self._socket.fileno() >= 0:
            for node in self._asked:
                endpoint = self._endpoints.get(node) or self._find(node)
                if endpoint is not None:
                    self._endpoints[node] = endpoint
                    with suppress(OSError):  # no route while the cable is out
                        self._socket.sendto(self._signed(b"?" + self._own.encode()), endpoint)
            time.sleep(SECONDS_BETWEEN_QUESTIONS)

    def _listen(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                said, sender = self._socket.recvfrom(512)
            except TimeoutError:
                continue
            except OSError:  # closed, or an ICMP message of a neighbour that has gone
                time.sleep(SECONDS_BETWEEN_QUESTIONS / 10)
                continue
            content = said[:-SIGNATURE_BYTES]
            if not hmac.compare_digest(self._signed(content), said):
                continue
            if content.startswith(b"?"):
                with suppress(OSError):
                    self._socket.sendto(self._signed(b"!" + self._own.encode()), sender)
            else:
                self._heard[content[1:].decode(errors="replace")] = time.monotonic()

    def _look_for_controller(self) -> None:
        while self._socket.fileno() >= 0:
            silent = self._heard and min(self.heard().values()) > SILENCE_SECONDS
            self.sees_controller = _answers(self._controller) if silent and self._controller is not None else None
            time.sleep(SECONDS_BETWEEN_QUESTIONS)

    def _signed(self, content: bytes) -> bytes:
        return content + hmac.new(self._secret, content, hashlib.sha256).digest()[:SIGNATURE_BYTES]


def _answers(endpoint: Endpoint) -> bool:
    """Whether a host answers, if only to say that nobody listens there."""
    try:
        socket.create_connection(endpoint, CONTROLLER_TIMEOUT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
