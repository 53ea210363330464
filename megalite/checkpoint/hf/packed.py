"""Integers of a run with `precision.qat` in a Hugging Face folder, as compressed-tensors packs them.

    X.weight [out, in]  ->  X.weight_packed      int32 [out, in b / 32], 32 / b integers a word, the first lowest
                            X.weight_scale       [out, in / g], in the run's own format
                            X.weight_shape       int64 [2]

Integers are stored with 2^(b-1) added, which leaves none below zero. Readers decompress them to q scale, the very
numbers of the forward pass. Only what transformers holds as linear layers can be packed. Zero points cannot: it finds
those of this format to be of the wrong shape (transformers 5.24, compressed-tensors 0.20).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Rectangle, Weight
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.importer import locate
from megalite.checkpoint.hf.layout import StoredTensor, places, stored_tensors
from megalite.checkpoint.hf.stream import is_finite
from megalite.checkpoint.rounded_weights import DTYPES, RoundedSource
from megalite.checkpoint.tensor_file import Entry
from megalite.errors import ConversionError
from megalite.layers.qat.integers import Integers

PACKAGE = "compressed_tensors"
"""What transformers reads these files with."""

HEAD = "lm_head"
"""What transformers 5 calls the head of every class, whatever its file says."""

WORD_BITS = 32


class Packing:
    """How a model whose weights are integers is written.

    Args:
        source: of the weights, rounded.
        model: filled.
        family: the class that will read it.

    Raises:
        ConversionError: the class holds some of them otherwise than as linear layers, or what reads them is not there.
    """

    def __init__(self, source: RoundedSource, model: Architecture, family: Family):
        self.source, self.model, self.family = source, model, family
        self.qat, self.dtype = source.rounding.qat, source.rounding.dtype
        self.format = next(name for name, each in DTYPES.items() if each == self.dtype)
        """Of what is not integers."""
        _refuse(model, family, is_symmetric=self.qat.symmetric)

    def packs(self, tensor: StoredTensor) -> bool:
        """Whether a tensor of the family becomes integers."""
        return all(map(self.source.rounds, tensor.weights))

    def entries(self, tensor: StoredTensor) -> list[Entry]:
        """The tensors that a file has for it."""
        base, (rows, width) = tensor.name, tensor.shape
        groups = width // (self.qat.group_size or width)
        return [
            Entry(f"{base}_packed", (rows, _words(width, self.qat.bits)), torch.int32),
            Entry(f"{base}_scale", (rows, groups), self.dtype),
            Entry(f"{base}_shape", (2,), torch.int64),
        ]

    def blocks(self, tensor: StoredTensor, name: str) -> Iterator[Tensor]:
        """One of them, from its first row to its last."""
        kind = name.removeprefix(f"{tensor.name}_")
        if kind == "shape":
            yield torch.tensor(tensor.shape)
        elif kind == "packed":
            yield from (pack(q + 2 ** (self.qat.bits - 1), self.qat.bits) for q, _ in self._rows(tensor))
        else:
            yield from (scale for _, scale in self._rows(tensor))

    def settings(self) -> dict[str, Any]:
        """What config.json says of it."""
        plain = [each for each in stored_tensors(self.model, self.family) if not self.packs(each)]
        inside = [each.name for each in plain if len(each.shape) == 2 and each.weights[0].is_inner]
        left = [*inside, self.family.outer["head.weight"], f"{HEAD}.weight"]
        size = self.qat.group_size
        weights = {
            "num_bits": self.qat.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if size is None else "group",
            "group_size": size,
            "dynamic": False,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": list(dict.fromkeys(name.removesuffix(".weight") for name in left)),
        }

    def describe(self) -> str:
        """The number format, for people."""
        size = "rows" if self.qat.group_size is None else f"groups of {self.qat.group_size}"
        return f"int{self.qat.bits} in {size}, the rest {self.format}"

    def _rows(self, tensor: StoredTensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Integers `[rows, in]` and scales `[rows, groups]`, block by block."""
        for block in tensor.blocks():
            parts = [self.source.integers(weight, at.start[0], at.shape[0]) for weight, at in block]
            for (weight, _), part in zip(block, parts, strict=True):
                if not is_finite(part.scale):
                    raise ConversionError(f"{weight.name}: holds NaN or infinite numbers; export an older checkpoint")
            yield (
                tensor.join([part.q.flatten(1) for part in parts]),
                tensor.join([part.scale.flatten(1) for part in parts]),
            )


class PackedWeights:
    """The weights of such a folder, read back; as `model.initialize.WeightSource` for whole rows."""

    def __init__(self, folder: Path, packing: Packing):
        self._folder, self._packing, self._files = folder, packing, locate(folder)
        self._places = places(packing.model, packing.family)

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        place, (start, *_), (count, *_) = self._places[weight.name], rectangle.start, rectangle.shape
        runs = [slice(at, at + size) for at, size in place.runs(start, start + count)]
        if not self._packing.source.rounds(weight):
            return torch.cat([self._tensor(place.tensor)[run] for run in runs]).float()
        qat, base = self._packing.qat, place.tensor
        packed, scale = (
            torch.cat([self._tensor(f"{base}_{kind}")[run] for run in runs]) for kind in ("packed", "scale")
        )
        _, width = self._tensor(f"{base}_shape").tolist()
        q = (unpack(packed, qat.bits, width) - 2 ** (qat.bits - 1)).float().unflatten(1, (scale.shape[1], -1))
        return Integers(q, scale.unsqueeze(2).float(), None).values()

    def _tensor(self, name: str) -> Tensor:
        with safe_open(self._folder / self._files[name], framework="pt") as file:
            return file.get_tensor(name)


class AsPacked:
    """A weight source as it looks after a trip through such a folder: what is not integers in the run's own format."""

    def __init__(self, packing: Packing):
        self._packing = packing

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        part, source = self._packing.source.read(weight, rectangle), self._packing.source
        is_kept = source.rounds(weight) or weight.state is not None
        return part if is_kept else part.to(self._packing.dtype).float()


def pack(unsigned: Tensor, bits: int) -> Tensor:
    """Rows of integers from 0 on `[m, n]` -> int32 `[m, n b / 32]`, rounded up."""
    as_bytes = F.pad(unsigned, (0, -unsigned.shape[1] % (WORD_BITS // bits))).to(torch.uint8)
    if bits == 4:
        as_bytes = as_bytes[:, ::2] | as_bytes[:, 1::2] << 4
    return as_bytes.flatten().view(torch.int32).view(len(unsigned), -1)


def unpack(words: Tensor, bits: int, width: int) -> Tensor:
    """The other way, int16 `[m, width]`."""
    as_bytes = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        as_bytes = torch.stack((as_bytes & 15, as_bytes >> 4), dim=2).flatten(1)
    return as_bytes[:, :width].to(torch.int16)


def _words(numbers: int, bits: int) -> int:
    return -(-numbers * bits // WORD_BITS)


def _refuse(model: Architecture, family: Family, *, is_symmetric: bool) -> None:
    why = None
    if not is_symmetric:
        why = "precision.qat.symmetric=false has zero points, which transformers does not read in this format"
    elif model.moe is not None:
        why = f"{family.architecture} has the experts of a block in one tensor, and no linear layers"
    elif family.transposed:
        why = f"{family.architecture} has no linear layers but Conv1D, whose weights lie the other way"
    elif model.mtp is not None:
        why = "layers that predict further ahead are not rounded, and have the names of blocks"
    elif model.mup is not None:
        why = "muP's factors are multiplied into the weights, which then are no integers times their scales"
    if why is not None:
        raise ConversionError(f"--quantized: {why}; export without it, which writes the rounded weights as numbers")
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConversionError(
            "--quantized: what is written is read back by transformers, which needs compressed-tensors for it; "
            'pip install "megalite[quantized]"'
        )
