"""The difference of two checkpoints, whatever layouts wrote them.

Two checkpoints hold the same *state* if every tensor is equal bit for bit, of one model at one point of the run: then
training goes on alike from both. Config and layout may differ between them and are told beside. Tensors are compared
slab by slab, so that checkpoints larger than memory can be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.architecture.weights import is_of_model
from megalite.checkpoint.format import CONFIG
from megalite.checkpoint.reader import CheckpointReader
from megalite.config.yaml_source import read_source

ABSENT = "absent"


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor of B is from that of A."""

    name: str
    shape: tuple[int, ...] | None
    """In A; None where it is missing."""
    other_shape: tuple[int, ...] | None
    """In B."""
    num_different: int = 0
    """Numbers whose bits differ."""
    max_abs: float = 0.0
    """Largest |a - b|; infinite where one of the two is not finite."""
    max_value: float = 0.0
    """Largest finite |a|."""

    @property
    def is_equal(self) -> bool:
        return self.shape == self.other_shape and self.num_different == 0

    @property
    def relative(self) -> float:
        """Largest |a - b| over largest |a|."""
        if self.max_abs == 0.0:
            return 0.0
        return self.max_abs / self.max_value if self.max_value else math.inf


@dataclass(frozen=True)
class Comparison:
    """What differs between checkpoints A and B; values in pairs (A's, B's)."""

    progress: dict[str, tuple[Any, Any]]
    model: dict[str, tuple[Any, Any]]
    layout: dict[str, tuple[Any, Any]]
    config: dict[str, tuple[Any, Any]]
    tensors: tuple[TensorDifference, ...]

    @property
    def different(self) -> list[TensorDifference]:
        """The tensors that differ, most different first."""
        worst = {t.name: math.inf if t.shape != t.other_shape else t.relative for t in self.tensors}
        found = [tensor for tensor in self.tensors if not tensor.is_equal]
        return sorted(found, key=lambda tensor: (-worst[tensor.name], -tensor.max_abs, tensor.name))

    @property
    def is_same_state(self) -> bool:
        """Whether training goes on alike from both; layout and config aside."""
        return not (self.progress or self.model or self.different)


def compare(a: Path, b: Path, *, weights_only: bool = False) -> Comparison:
    """Compare two checkpoints' folders.

    Raises:
        CheckpointError: one is incomplete or damaged where it is read.
    """
    first, second = CheckpointReader(a), CheckpointReader(b)
    names = first.manifest.tensors | second.manifest.tensors
    wanted = [name for name in names if is_of_model(name) or not weights_only]
    return Comparison(
        progress=_differences(asdict(first.manifest.progress), asdict(second.manifest.progress)),
        model=_differences(first.manifest.model, second.manifest.model),
        layout=_differences(first.manifest.layout, second.manifest.layout),
        config=_differences(_config(a), _config(b)),
        tensors=tuple(_compare_tensor(name, first, second) for name in wanted),
    )


def _compare_tensor(name: str, first: CheckpointReader, second: CheckpointReader) -> TensorDifference:
    records = [reader.manifest.tensors.get(name) for reader in (first, second)]
    shape, other_shape = (record.shape if record is not None else None for record in records)
    if shape != other_shape:
        return TensorDifference(name, shape, other_shape)
    num_different, max_abs, max_value = 0, 0.0, 0.0
    for left, right in zip(first.slabs(name), second.slabs(name), strict=True):
        differs = left.view(torch.int32) != right.view(torch.int32)
        max_value = max(max_value, _largest(torch.where(left.isfinite(), left, 0.0)))
        if differs.any():
            num_different += int(differs.sum())
            distance = torch.where(differs, left - right, 0.0)
            max_abs = max(max_abs, _largest(torch.nan_to_num(distance, nan=math.inf)))
    return TensorDifference(name, shape, other_shape, num_different, max_abs, max_value)


def _largest(numbers: Tensor) -> float:
    return float(numbers.abs().max()) if numbers.numel() else 0.0


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    left, right = _leaves(a), _leaves(b)
    keys = left | right
    return {
        key: (left.get(key, ABSENT), right.get(key, ABSENT))
        for key in keys
        if left.get(key, ABSENT) != right.get(key, ABSENT)
    }


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    return read_source(path).data if path.is_file() else {}
