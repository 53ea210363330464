"""Texts with some stretches of bytes replaced: how a rare slow repair gets back among millions of good bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megalite.texts import Texts


class Patch(NamedTuple):
    """Bytes to put in the place of buffer[start:end], which lies inside one document."""

    document: int
    start: int
    end: int
    replacement: bytes


def splice(texts: Texts, patches: Sequence[Patch]) -> Texts:
    """The texts with the patches in their places; without patches, the texts themselves.

    Args:
        texts: not changed.
        patches: ascending, none over another.
    """
    if not patches:
        return texts
    memory = np.ascontiguousarray(texts.buffer).data
    pieces: list[memoryview | bytes] = []
    lengths = texts.lengths
    place = int(texts.offsets[0])
    for patch in patches:
        assert place <= patch.start <= patch.end
        pieces += (memory[place : patch.start], patch.replacement)
        lengths[patch.document] += len(patch.replacement) - (patch.end - patch.start)
        place = patch.end
    pieces.append(memory[place : int(texts.offsets[-1])])
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Texts(np.frombuffer(b"".join(pieces), np.uint8), offsets)
