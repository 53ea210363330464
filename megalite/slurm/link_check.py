"""How fast nodes talk to each other: an all-reduce between neighbours, one task a node.

    round 0     n0-n1  n2-n3  n4            every pair for itself: a node that is cut off holds up its partners only
    round 1     n1-n2  n3-n4  n0
    round 2     n4-n0                       closes the ring when the number is odd

Every node is measured with two others, so a slow node can be told from a slow way between two good ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

Pair = tuple[str, str]

FIRST_PORT, NUM_PORTS = 45000, 10000

SECONDS_TO_MEET = 60
"""Nodes come to their pair when they have imported torch."""

NUM_BYTES = {"gloo": 8 * 2**20, "nccl": 256 * 2**20}

NUM_TRIES = 3

SLOWEST_SHARE = 0.3
"""Of the pair at the upper quartile. Pairs of one switch differ little; a link that fell back to a lower rate loses
nine tenths."""


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """The pairs of neighbours on a ring, in rounds in which each node has one partner at most."""
    if len(nodes) < 2:
        return []
    ring = [(node, nodes[(place + 1) % len(nodes)]) for place, node in enumerate(nodes)]
    if len(nodes) == 2:
        return [ring[:1]]
    last = [ring.pop()] if len(nodes) % 2 else []
    return [found for found in (ring[0::2], ring[1::2], last) if found]


def measure_links(addresses: Mapping[str, str], own: str, backend: str, *, seed: int, token: str) -> dict[str, float]:
    """MB/s between this node and each of its partners; 0 with one that did not come.

    Args:
        addresses: of all nodes that take part, in an order that all of them have; an empty one is the node's name.
        own: this one.
        backend: gloo, or nccl, which takes the current device.
        seed: as all nodes have it; ports are chosen by it.
        token: by which they know each other.
    """
    found = {}
    for number, pairs in enumerate(rounds(list(addresses))):
        pair = next((pair for pair in pairs if own in pair), None)
        if pair is None:
            continue
        partner = pair[1] if pair[0] == own else pair[0]
        port = FIRST_PORT + (seed * 7 + number) % NUM_PORTS
        found[partner] = 0.0
        with suppress(RuntimeError):  # all that a lost partner makes of a collective
            address = f"tcp://{addresses[pair[0]] or pair[0]}:{port}"
            found[partner] = _measure_pair(address, pair.index(own), backend, token)
    return found


def find_slow_links(speeds: Mapping[Pair, float]) -> tuple[dict[str, str], dict[Pair, str]]:
    """The nodes that are slow with all their partners, and the pairs that are slow for no one's fault; with figures."""
    if not speeds:
        return {}, {}
    usual = sorted(speeds.values())[3 * len(speeds) // 4]
    slow = {pair: speed for pair, speed in speeds.items() if speed < SLOWEST_SHARE * usual}
    partners = {node: [pair for pair in speeds if node in pair] for pair in speeds for node in pair}
    nodes = {
        node: f"{max(speeds[pair] for pair in pairs):,.0f} MB/s at best with its neighbours, others have {usual:,.0f}"
        for node, pairs in partners.items()
        if len(pairs) > 1 and all(pair in slow for pair in pairs)
    }
    return nodes, {
        pair: f"{speed:,.0f} MB/s, others have {usual:,.0f}"
        for pair, speed in slow.items()
        if not nodes.keys() & set(pair)
    }


def _measure_pair(address: str, rank: int, backend: str, token: str) -> float:
    import torch
    import torch.distributed as dist

    from megalite.parallel.rendezvous import open_store

    gpu = torch.device("cuda", 0) if backend == "nccl" else None
    dist.init_process_group(
        backend,
        store=open_store(address, rank=rank, world_size=2, token=token, timeout_seconds=SECONDS_TO_MEET),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=SECONDS_TO_MEET),
        device_id=gpu,
    )
    try:
        data = torch.zeros(NUM_BYTES[backend], dtype=torch.uint8, device=gpu)
        dist.all_reduce(data[: 1 << 16])  # connects
        best = float("inf")
        for _ in range(NUM_TRIES):
            start = time.perf_counter()
            dist.all_reduce(data)
            if gpu is not None:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
    finally:
        dist.destroy_process_group()
    return round(NUM_BYTES[backend] / 1e6 / best, 1)
