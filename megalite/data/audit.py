"""A running hash over which samples were consumed: two runs with equal chains have read the same data in one order."""

from __future__ import annotations

import xxhash

from megalite.data.samples import Samples

EMPTY_CHAIN = ""
"""The chain before the first sample."""


def chain(previous: str, samples: Samples, start: int, stop: int) -> str:
    """Extend a chain by global samples start..stop-1.

    Sample by sample, so it does not matter in how many calls a range is covered.

    Args:
        previous: the chain up to `start`; EMPTY_CHAIN at the beginning.
        samples: what is read.
        start: first global index.
        stop: one past the last.

    Returns:
        xxh3_128 in hexadecimal.
    """
    link = bytes.fromhex(previous)
    for identity in samples.identities(start, stop):
        link = xxhash.xxh3_128_digest(link + identity.tobytes())
    return link.hex()
