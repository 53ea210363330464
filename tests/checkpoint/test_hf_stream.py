"""Safetensors written as a stream: read by the library itself, blocks that do not show, numbers that are not finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megalite.architecture.weights import Weight
from megalite.checkpoint.format import hash_file
from megalite.checkpoint.hf import layout
from megalite.checkpoint.hf.layout import StoredTensor, row_blocks
from megalite.checkpoint.hf.stream import is_finite, write_stream
from megalite.checkpoint.tensor_file import Entry

SHAPES = {"a": (7, 5), "b.weight": (3,), "long name with ü": (130, 4), "wide": (2, 3000)}


def _numbers(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def _write(path: Path, tensors: dict[str, torch.Tensor]):
    entries = [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    return write_stream(path, entries, lambda name: tensors[name].split(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_read_by_the_library(dtype: torch.dtype, tmp_path: Path):
    """The library reads back every tensor and the metadata, and the checksum is that of the file."""
    tensors = _numbers(dtype)
    record = _write(tmp_path / "a.safetensors", tensors)
    assert record == hash_file(tmp_path / "a.safetensors")
    stored = load_file(tmp_path / "a.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_header_is_the_library_s(tmp_path: Path):
    """Names, formats, shapes and metadata are those that the library writes, and the numbers are aligned alike."""
    headers = []
    for name, write in (("ours", _write), ("theirs", lambda path, all_: save_file(all_, path, {"format": "pt"}))):
        write(tmp_path / name, _numbers(torch.float32))
        raw = (tmp_path / name).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        assert length % 8 == 0
        header = json.loads(raw[8 : 8 + length])
        headers.append({key: (each.get("dtype"), each.get("shape")) for key, each in header.items()})
        assert max(each["data_offsets"][1] for key, each in header.items() if key != "__metadata__") == (
            len(raw) - 8 - length
        )
    assert headers[0] == headers[1]


def test_files_have_the_permissions_of_any_new_file(tmp_path: Path):
    """Files are not private to whoever made them, as the library's are (safetensors/safetensors#782)."""
    (tmp_path / "ordinary").touch()
    _write(tmp_path / "a.safetensors", {"a": torch.ones(3)})
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("shape", [(12,), (12, 5), (12, 3, 2)])
@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
def test_blocks_tile_a_weight(shape, block_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """Blocks of rows cover a weight once and in order."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", block_bytes)
    whole = torch.arange(12 * 5 * 6)[: torch.Size(shape).numel()].reshape(shape)
    blocks = list(row_blocks(shape))
    assert torch.equal(torch.cat([whole[block.slices] for block in blocks]), whole)
    if block_bytes == 1:
        assert len(blocks) == 12


FUSED = {
    "alone": ([12], 1, [("0", 0, 12)]),
    "one after the other": ([12, 4, 8], 1, [("0", 0, 12), ("1", 0, 4), ("2", 0, 8)]),
    "by head": ([4, 4, 4], 2, [("0", 0, 2), ("1", 0, 2), ("2", 0, 2), ("0", 2, 4), ("1", 2, 4), ("2", 2, 4)]),
    "by head, grouped queries": (
        [8, 4, 4],
        2,
        [("0", 0, 4), ("1", 0, 2), ("2", 0, 2), ("0", 4, 8), ("1", 2, 4), ("2", 2, 4)],
    ),
}
"""Rows of each part, number of groups, and what then stands one below the other: (part, from row, to row)."""


@pytest.mark.parametrize("block_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_fused_tensors(name: str, transposed: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """Blocks joined one after the other are the tensor, however its parts are dealt out and however unequal they are;
    and every row of every part is found there again."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", block_bytes)
    sizes, num_groups, order = FUSED[name]
    parts = {str(number): torch.arange(size * 5.0).reshape(size, 5) + 100 * number for number, size in enumerate(sizes)}
    weights = tuple(Weight(each, tuple(part.shape), "blocks.0", each) for each, part in parts.items())
    tensor = StoredTensor("t", weights, num_groups, transposed)
    rows = torch.cat([parts[each][start:stop] for each, start, stop in order])
    expected = rows.t() if transposed else rows
    assert tensor.shape == tuple(expected.shape)
    blocks = list(tensor.blocks())
    joined = [tensor.join([parts[weight.name][at.slices] for weight, at in block]).flatten() for block in blocks]
    assert torch.equal(torch.cat(joined), expected.flatten())
    assert transposed or block_bytes > 1 or len(blocks) >= num_groups
    for number, part in enumerate(parts.values()):
        for start, stop in ((0, part.shape[0]), (1, part.shape[0]), (1, 3)):
            runs = tensor.place(number).runs(start, stop)
            assert torch.equal(torch.cat([rows[at : at + size] for at, size in runs]), part[start:stop])


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("numbers", "finite"),
    [
        ([1.0, 2.0], True),
        ([LARGEST, LARGEST], True),
        ([1.0, float("nan")], False),
        ([float("inf"), float("-inf")], False),
        ([LARGEST, float("-inf")], False),
    ],
)
def test_finite(numbers: list[float], finite: bool):
    """A sum that overflows is no proof against numbers that are all finite, and infinities do not cancel out."""
    assert is_finite(torch.tensor(numbers)) is finite
