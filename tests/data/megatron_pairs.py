"""The program that asks Megatron-core's IndexedDataset: read a pair of ours, or write one."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np


def read(prefix: str) -> dict[str, Any]:
    """All that Megatron finds in a pair."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix, mmap=True)
    return {
        "dtype": np.dtype(dataset.index.dtype).name,
        "sequences": [dataset[number].tolist() for number in range(len(dataset))],
        "tails": [dataset.get(number, offset=1).tolist() for number in range(len(dataset)) if dataset[number].size],
        "borders": dataset.document_indices.tolist(),
    }


def write(prefix: str, dtype: str, documents: list[list[list[int]]], then: tuple[str, ...] = ()) -> None:
    """A pair of documents of several sequences each, and then those of other pairs."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype))
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    for other in then:
        builder.add_index(other)
    builder.finalize(f"{prefix}.idx")


def main() -> None:
    question = json.load(sys.stdin)
    for each in question["write"]:
        write(**each)
    print(json.dumps([read(prefix) for prefix in question["read"]]))


if __name__ == "__main__":
    main()
