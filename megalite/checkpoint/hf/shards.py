"""Weights streamed into safetensors files of limited size.

    canonical weights --block of rows--> join --> round --> refuse what is not finite --> file

Memory holds a few blocks, never a file; a tensor whose rows cannot be taken apart is one block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Rectangle, Weight
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.importer import INDEX_FILE, SINGLE_FILE
from megalite.checkpoint.hf.layout import StoredTensor, stored_tensors
from megalite.checkpoint.hf.packed import Packing
from megalite.checkpoint.hf.stream import is_finite, write_stream
from megalite.checkpoint.tensor_file import Entry, group_by_size
from megalite.errors import ConversionError
from megalite.model.initialize import WeightSource

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class WrittenShards:
    """What `write_weights` left."""

    num_tensors: int
    num_parameters: int
    num_bytes: int
    files: tuple[str, ...]


def write_weights(
    source: WeightSource,
    model: Architecture,
    family: Family,
    folder: Path,
    *,
    dtype: str,
    max_shard_bytes: int,
    packing: Packing | None = None,
) -> WrittenShards:
    """Write model.safetensors, or shards and their index, into a folder.

    Args:
        source: of the canonical weights.
        model: filled.
        family: the class that will read it.
        folder: an existing one.
        dtype: fp32, bf16 or fp16.
        max_shard_bytes: no file is larger, unless a single tensor is.
        packing: of weights that are written as integers; None for no such weights.

    Raises:
        ConversionError: a weight is not finite, or not in the number format asked for.
    """
    tensors, entries, parts = stored_tensors(model, family), dict[str, Entry](), dict[str, StoredTensor]()
    for tensor in tensors:
        plain = Entry(tensor.name, tensor.shape, torch.float32 if tensor.is_state else DTYPES[dtype])
        found = packing.entries(tensor) if packing is not None and packing.packs(tensor) else [plain]
        entries |= {entry.key: entry for entry in found}
        parts |= {entry.key: tensor for entry in found}

    def blocks(key: str) -> Iterator[Tensor]:
        if packing is not None and key != parts[key].name:
            return packing.blocks(parts[key], key)
        return tensor_blocks(source, parts[key], entries[key].dtype)

    sizes = {key: entry.num_bytes for key, entry in entries.items()}
    shards = group_by_size(sizes, max_shard_bytes)
    files = _file_names(len(shards))
    weight_map: dict[str, str] = {}
    for file, names in zip(files, shards, strict=True):
        write_stream(folder / file, [entries[name] for name in names], blocks)
        weight_map |= dict.fromkeys(names, file)
    num_parameters = sum(tensor.num_elements for tensor in tensors)
    if len(files) > 1:
        metadata = {"total_parameters": num_parameters, "total_size": sum(sizes.values())}
        index = {"metadata": metadata, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return WrittenShards(len(entries), num_parameters, sum(sizes.values()), tuple(files))


def tensor_blocks(source: WeightSource, tensor: StoredTensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor from its first row to its last: read the parts, round, refuse what is not finite, lay them out."""
    for block in tensor.blocks():
        parts = []
        for weight, rectangle in block:
            part = source.read(weight, rectangle)
            rounded = part.to(dtype)
            if not is_finite(rounded):
                raise ConversionError(_why_not_finite(weight, rectangle, part, dtype))
            parts.append(rounded)
        yield tensor.join(parts)


def parse_size(text: str) -> int:
    """Bytes in `5GB`, `200MB` or `1000000`.

    Raises:
        ConversionError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB|)", text.strip().upper())
    num_bytes = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if num_bytes == 0:
        raise ConversionError(f"max shard size: found {text!r}, expected a size like 5GB, 200MB or 1000000")
    return num_bytes


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    stem, ending = SINGLE_FILE.split(".")
    return [f"{stem}-{number:05d}-of-{count:05d}.{ending}" for number in range(1, count + 1)]


def _why_not_finite(weight: Weight, rectangle: Rectangle, part: Tensor, dtype: torch.dtype) -> str:
    num_bad = part.numel() - int(torch.isfinite(part).sum())
    if num_bad:
        first = rectangle.start[0]
        return (
            f"{weight.name}: {num_bad} of the {part.numel()} numbers in its rows {first} to "
            f"{first + rectangle.shape[0] - 1} are NaN or infinite, so this model is broken; export an older "
            "checkpoint of the run"
        )
    largest = part.abs().max().item()
    return f"{weight.name}: its largest number, {largest:g}, does not fit into {dtype}; export as bf16 or fp32"
