"""Safetensors written as a stream: read by the library itself, blocks that do not show, numbers that are not finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megalite.checkpoint.format import hash_file
from megalite.checkpoint.hf import layout
from megalite.checkpoint.hf.layout import Place, join, row_blocks
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
@pytest.mark.parametrize("multiple", [1, 2, 3, 12])
@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
def test_blocks_tile_a_weight(shape, multiple: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """Blocks of rows cover a weight once and in order, and begin at multiples of what has to stay together."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", block_bytes)
    whole = torch.arange(12 * 5 * 6)[: torch.Size(shape).numel()].reshape(shape)
    blocks = list(row_blocks(shape, multiple=multiple))
    assert torch.equal(torch.cat([whole[block.slices] for block in blocks]), whole)
    assert all(block.start[0] % multiple == 0 for block in blocks)
    if block_bytes == 1:
        assert len(blocks) == 12 // multiple


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("num_parts", "group"), [(1, 12), (3, 12), (3, 4), (3, 2)])
def test_joined_by_blocks(num_parts: int, group: int, transposed: bool, monkeypatch: pytest.MonkeyPatch):
    """Blocks joined one after the other are the bytes of the whole tensor, however its parts are dealt out."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 1)
    place = Place("t", group=group, num_parts=num_parts, transposed=transposed)
    parts = [torch.arange(60.0).reshape(12, 5) + 100 * number for number in range(num_parts)]
    blocks = row_blocks((12, 5), multiple=place.rows_together(12), num_parts=num_parts)
    joined = [join([part[block.slices] for part in parts], place).flatten() for block in blocks]
    assert torch.equal(torch.cat(joined), join(parts, place).flatten())


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
