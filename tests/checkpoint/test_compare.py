"""Differences of checkpoints against numpy's own arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.checkpoint.compare import compare
from megalite.checkpoint.format import read_manifest, write_manifest
from tests.checkpoint.stored import SMALL, store


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("weight/a", "weight/b", "exp_avg/a", "exp_avg/b")
    return {name: torch.randn((12, 7) if name.endswith("a") else (30,), generator=generator) for name in names}


def test_one_state_of_two_layouts(tmp_path):
    """Equal tensors in other pieces, stored otherwise, are one state; the layout is told as different."""
    tensors = state()
    a, _ = store(tmp_path / "a", 3, tensors)
    b, _ = store(tmp_path / "b", 3, tensors, ranks=3, dim=1, storage=replace(SMALL, compress=True))
    found = compare(a, b)
    assert found.is_same_state
    assert found.different == []
    assert found.layout == {"tp": (1, 3)}
    assert len(found.tensors) == 4


def test_numbers_agree_with_numpy(tmp_path):
    """How many numbers differ, by how much, absolutely and relatively; most different first."""
    tensors = state()
    a, _ = store(tmp_path / "a", 3, tensors)
    changed = dict(tensors)
    changed["weight/a"] = tensors["weight/a"].clone()
    changed["weight/a"][5, 2] += 0.25
    changed["exp_avg/b"] = tensors["exp_avg/b"] * 3
    b, _ = store(tmp_path / "b", 3, changed, ranks=2)
    found = compare(a, b)
    assert not found.is_same_state
    assert [tensor.name for tensor in found.different] == ["exp_avg/b", "weight/a"]
    for tensor in found.tensors:
        left, right = tensors[tensor.name].numpy(), changed[tensor.name].numpy()
        distance = np.abs(left - right)
        assert tensor.num_different == int((left != right).sum())
        assert tensor.max_abs == distance.max()
        assert tensor.relative == pytest.approx(distance.max() / np.abs(left).max())
    weights = compare(a, b, weights_only=True)
    assert [tensor.name for tensor in weights.different] == ["weight/a"]


def test_numbers_that_are_not_finite(tmp_path):
    """NaN equals itself bit for bit; a NaN against a number is infinitely far; -0 and 0 differ in bits alone."""
    tensors = {"weight/a": torch.tensor([1.0, float("nan"), 0.0])}
    a, _ = store(tmp_path / "a", 1, tensors)
    assert compare(a, a).is_same_state
    b, _ = store(tmp_path / "b", 1, {"weight/a": torch.tensor([1.0, 2.0, 0.0])})
    assert compare(a, b).different[0].max_abs == math.inf
    c, _ = store(tmp_path / "c", 1, {"weight/a": torch.tensor([1.0, float("nan"), -0.0])})
    (tensor,) = compare(a, c).different
    assert (tensor.num_different, tensor.max_abs, tensor.relative) == (1, 0.0, 0.0)


def test_other_models(tmp_path):
    """Missing tensors and other shapes are differences with both shapes."""
    a, _ = store(tmp_path / "a", 1, {"weight/a": torch.zeros(2, 3), "weight/b": torch.zeros(4)})
    b, _ = store(tmp_path / "b", 1, {"weight/a": torch.zeros(3, 2), "weight/c": torch.zeros(5)})
    shapes = {tensor.name: (tensor.shape, tensor.other_shape) for tensor in compare(a, b).different}
    assert shapes == {"weight/a": ((2, 3), (3, 2)), "weight/b": ((4,), None), "weight/c": (None, (5,))}


def test_progress_model_and_config(tmp_path):
    """Another point of the run is another state; another config alone is not, and every setting is named."""
    a, _ = store(tmp_path / "a", 1, state())
    b, _ = store(tmp_path / "b", 2, state())
    assert compare(a, b).progress["step"] == (1, 2)
    assert not compare(a, b).is_same_state
    c = copy_of(a, tmp_path / "c", config="optimizer: {lr: 0.1}\nmodel: {hidden_size: 8}\n")
    found = compare(a, c)
    assert found.is_same_state
    assert found.config == {"optimizer.lr": ("absent", 0.1)}
    write_manifest(c, replace(read_manifest(c), model={"hidden_size": 16}))
    assert compare(a, c).model == {"hidden_size": (8, 16)}
    assert not compare(a, c).is_same_state


def copy_of(folder: Path, target: Path, *, config: str) -> Path:
    """A checkpoint of the same tensors with another config."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    (target / "config.yaml").write_text(config)
    return target
