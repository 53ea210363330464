"""Random batches with packed documents and uneven loss masks, the same for every layout."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch

from megalite.data.loader import Batch


@functools.lru_cache(maxsize=4096)
def random_sequence(index: int, *, seq_len: int, vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Sequence number `index`: tokens, labels, a mask with holes, and one to four documents. Not to be written to: it
    is made once, for all cases of a process."""
    rng = np.random.default_rng([seed, index])
    tokens = rng.integers(0, vocab_size, seq_len)
    labels = np.roll(tokens, -1)
    mask = rng.random(seq_len) < rng.uniform(0.3, 1.0)
    cuts = np.sort(rng.choice(np.arange(1, seq_len), size=rng.integers(0, 4), replace=False))
    borders = np.concatenate(([0], cuts, [seq_len]))
    positions = np.concatenate([np.arange(b - a) for a, b in itertools.pairwise(borders)])
    return {"tokens": tokens, "labels": labels, "mask": mask, "positions": positions, "borders": borders}


def micro_batch(indices: range, *, seq_len: int, vocab_size: int, seed: int = 0) -> Batch:
    """The sequences `indices` laid end to end."""
    rows = [random_sequence(index, seq_len=seq_len, vocab_size=vocab_size, seed=seed) for index in indices]
    borders = [row["borders"][:-1] + number * seq_len for number, row in enumerate(rows)]
    cu_seqlens = np.concatenate([*borders, [len(rows) * seq_len]]).astype(np.int32)
    join = {key: torch.from_numpy(np.concatenate([row[key] for row in rows])) for key in ("tokens", "labels", "mask")}
    positions = torch.from_numpy(np.concatenate([row["positions"] for row in rows]))
    keys = torch.from_numpy(np.concatenate([index * seq_len + np.arange(seq_len) for index in indices]))
    return Batch(
        tokens=join["tokens"],
        labels=join["labels"],
        loss_mask=join["mask"],
        positions=positions,
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=seq_len,
        keys=keys,
    )


def step_batches(
    step: int, *, global_batch_size: int, micro_batch_size: int, dp: int, dp_rank: int, seq_len: int, vocab_size: int
) -> list[Batch]:
    """This dp rank's micro-batches of a step, cut from the global batch as the loader does."""
    accum = global_batch_size // (micro_batch_size * dp)
    first = step * global_batch_size
    starts = [first + (number * dp + dp_rank) * micro_batch_size for number in range(accum)]
    return [
        micro_batch(range(start, start + micro_batch_size), seq_len=seq_len, vocab_size=vocab_size) for start in starts
    ]
