"""What a run has left out of its data, and what it has drawn under earlier mixtures: what a checkpoint knows of both.

Training counts the samples that it reads, 0, 1, 2, ... without holes: run indices. Where a run was rolled back, the
data that it had read meanwhile is left out, so from there on run index and data index differ:

    run index     0 ... 39 | 40 41 ...              gaps = ((40, 16),): from run index 40 on, 16 samples are left out
    data index    0 ... 39 | 56 57 ...

A source's own samples come in an order of their own, which goes on where it stood when the weights of the mixture
change in mid-run: `shift` says by how much the present mixture's count of a source is to be moved for that.

Both are facts of the run, not of its config, so every checkpoint carries them, and any restart reads what an
undisturbed run would have read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np


class Gap(NamedTuple):
    """Data that is left out."""

    at: int
    """The run index from which on it is."""
    num_samples: int


@dataclass(frozen=True)
class DataCursor:
    """From run indices to data indices, and on to the samples of each source."""

    gaps: tuple[Gap, ...] = ()
    """By rising `at`, each of which is there once."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Samples in the gaps, by source."""
    shift: dict[str, int] = field(default_factory=dict)
    """By source: samples drawn before the last change of the mixture, less those that the present one would have."""
    shift_from: int = 0
    """The data index of that change; what was before cannot be told from the present mixture."""

    read: dict[str, int] = field(default_factory=dict)
    """By source: samples read before that change; passes that are asked for share out what is left of the run."""

    def data_index(self, run_index: int) -> int:
        """The data index of a run index."""
        return run_index + sum(gap.num_samples for gap in self.gaps if gap.at <= run_index)

    def data_indices(self, run_indices: np.ndarray) -> np.ndarray:
        """The data indices of many run indices, int64 [n]."""
        if not self.gaps:
            return run_indices
        borders = np.array([gap.at for gap in self.gaps])
        left_out = np.cumsum([0, *(gap.num_samples for gap in self.gaps)])
        return run_indices + left_out[np.searchsorted(borders, run_indices, side="right")]

    def run_index(self, data_index: int) -> int:
        """The run index of a data index; of data that is left out, the one from which on it is."""
        left_out = 0
        for gap in self.gaps:
            if data_index < gap.at + left_out + gap.num_samples:
                return min(gap.at, data_index - left_out)
            left_out += gap.num_samples
        return data_index - left_out

    def beginning(self, run_index: int) -> int:
        """The data index of data that begins with a run index: what was left out before that was of other data."""
        return run_index + sum(gap.num_samples for gap in self.gaps if gap.at < run_index)

    def leave_out(self, run_index: int, data_stop: int) -> DataCursor:
        """The cursor of a run that goes back to `run_index` and on with data index `data_stop` from there. What that
        leaves out of each source is for the caller to count."""
        kept = tuple(gap for gap in self.gaps if gap.at < run_index)
        count = data_stop - run_index - sum(gap.num_samples for gap in kept)
        return replace(self, gaps=(*kept, Gap(run_index, count)) if count else kept)

    def remix(self, run_index: int, drawn: dict[str, int], would_have: dict[str, int]) -> DataCursor:
        """The cursor of a run whose mixture changes at `run_index`.

        Args:
            drawn: samples of each source that were drawn by then.
            would_have: those that the new mixture would have drawn.
        """
        shift = {name: drawn.get(name, 0) - count for name, count in would_have.items()}
        return replace(self, shift=shift, shift_from=self.data_index(run_index))

    def of_other_data(self) -> DataCursor:
        """The cursor of a run that goes on with data of which it has drawn nothing."""
        return replace(self, shift={}, shift_from=0, read={})


def add_counts(one: dict[str, int], two: dict[str, int]) -> dict[str, int]:
    """Samples of each source in both together."""
    return {name: one.get(name, 0) + two.get(name, 0) for name in {**one, **two}}
