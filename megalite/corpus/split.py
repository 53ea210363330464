"""Which documents are held out for validation: decided by a hash of the text alone.

The choice needs no list, does not move when documents are added or reordered, and keeps equal texts on one side.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import xxhash

from megalite.errors import DataError, did_you_mean
from megalite.texts import Texts

Part = Literal["all", "train", "valid"]


@dataclass(frozen=True)
class CorpusSplit:
    """One side of a corpus.

    Args:
        part: the side that is wanted; `all` takes both.
        valid_fraction: share of the documents on the `valid` side.
        seed: another seed holds out other documents.
    """

    part: Part = "all"
    valid_fraction: float = 0.0
    seed: int = 0

    def keeps(self, text: str) -> bool:
        """Whether a document is on the wanted side."""
        return self.part == "all" or (self.part == "valid") == chosen(text, self.valid_fraction, self.seed)

    def mask(self, texts: Texts) -> np.ndarray:
        """Which texts are on the wanted side: bool [documents]."""
        if self.part == "all":
            return np.ones(len(texts), bool)
        memory = np.ascontiguousarray(texts.buffer).data
        ends = texts.offsets.tolist()
        held_out = [_chosen(memory[a:b], self.valid_fraction, self.seed) for a, b in itertools.pairwise(ends)]
        return np.array(held_out, bool) == (self.part == "valid")

    def share_of(self, amount: float | None) -> float | None:
        """About how much of an amount of text is on the wanted side; None of an unknown amount."""
        if amount is None or self.part == "all":
            return amount
        return amount * (self.valid_fraction if self.part == "valid" else 1 - self.valid_fraction)

    def settings(self) -> dict[str, Any]:
        """JSON-ready form, for a manifest."""
        return asdict(self)


ALL = CorpusSplit()
"""No document is left out."""


def chosen(text: str, fraction: float, seed: int) -> bool:
    """Whether a text falls into a random `fraction` of all texts."""
    return _chosen(text.encode(), fraction, seed)


def _chosen(utf8: bytes | memoryview, fraction: float, seed: int) -> bool:
    return xxhash.xxh3_64_intdigest(utf8, seed) < fraction * 2.0**64


def parse_split(part: str, valid_fraction: float) -> CorpusSplit:
    """A split from what a user wrote.

    Raises:
        DataError: no such part, or a part without a fraction.
    """
    parts: tuple[Part, ...] = get_args(Part)
    wanted = next((each for each in parts if each == part), None)
    if wanted is None:
        raise DataError(f"part {part!r}{did_you_mean(part, parts)}; use {', '.join(parts)}")
    if part == "valid" and valid_fraction == 0.0:
        raise DataError("the valid part is empty with a fraction of 0; give --valid-fraction")
    if part == "all" and valid_fraction != 0.0:
        raise DataError("with --valid-fraction say which side to write: --part train or --part valid")
    return CorpusSplit(wanted, valid_fraction)
