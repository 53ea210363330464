"""The weights of a Hugging Face folder as a weight source: any rectangle of any canonical weight.

Files are memory-mapped and only the rows asked for are read, so each rank of a large run reads its own part. Only
safetensors: a `pytorch_model.bin` is a pickle, and unpickling what someone else made runs their code.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Rectangle, Weight
from megalite.checkpoint.hf.config_read import Description, read_config
from megalite.checkpoint.hf.layout import TensorPlace, places
from megalite.config.model_match import match
from megalite.errors import CheckpointError, ConversionError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_TYPES = ("F64", "F32", "BF16", "F16")

DERIVABLE = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$")
"""Buffers that older versions of transformers saved beside the weights."""

MANY = 5
"""Names listed in a message before it says how many more there are."""


class HuggingFaceWeights:
    """An open folder of a Hugging Face model.

    Args:
        folder: with config.json and safetensors, one file or shards with an index.
        model: filled; what the weights are for. None takes the folder's own.

    Raises:
        ConversionError: the folder's model is none that megalite has, or not `model`; there are only pickles.
        CheckpointError: files are missing or damaged, tensors are missing, too many, or of another shape.
    """

    def __init__(self, folder: Path, model: Architecture | None = None):
        self.folder = Path(folder)
        self.description, self._files = _described(self.folder)
        self.model = self.description.model
        if model is not None:
            require_same_model(self.folder, self.model, model)
            self.model = model
        self._open: dict[str, safe_open] = {}
        self._places = self._find_places()
        self._refuse_strangers()
        self._refuse_second_head()

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        """A rectangle of a canonical weight, fp32 on the CPU.

        Raises:
            CheckpointError: the tensor there is missing, of another shape or no float.
        """
        out = torch.empty(rectangle.shape)
        place = self._places.get(weight.name)
        if place is None:
            raise CheckpointError(f"{self.folder}: has no {weight.name}; it is of another model")
        stored = self._slice(place.tensor)
        if tuple(stored.get_shape()) != place.shape:
            raise CheckpointError(
                f"{self.folder}: {place.tensor} is {stored.get_shape()}, {weight.name} needs {list(place.shape)}"
            )
        if stored.get_dtype() not in FLOAT_TYPES:
            raise CheckpointError(
                f"{self.folder}: {place.tensor} is stored as {stored.get_dtype()}, expected {' or '.join(FLOAT_TYPES)}"
            )
        (rows, *others), row = rectangle.slices, 0
        for start, size in place.runs(rows.start, rows.stop):
            run = slice(start, start + size)
            places: tuple[Any, ...] = (*others, run) if place.transposed else (run, *others)
            if place.index is not None:
                places = place.index, *places
            out[row : row + size] = stored[places].t() if place.transposed else stored[places]
            row += size
        return out

    def _find_places(self) -> dict[str, TensorPlace]:
        """Places of all weights; names lose the base model's prefix where the folder has none."""
        family = self.description.family
        found = places(self.model, family)
        if any(name.startswith(family.base) for name in self._files):
            return found
        return {name: place.renamed(place.tensor.removeprefix(family.base)) for name, place in found.items()}

    def _refuse_strangers(self) -> None:
        """Every tensor has a weight and every weight a tensor."""
        expected = {place.tensor for place in self._places.values()}
        missing = sorted(expected - self._files.keys())
        family, whole = self.description.family, self.description.model
        if whole.mtp is not None and self.model.mtp is None:
            expected |= {place.tensor for place in places(whole, family).values()}
        if missing:
            raise CheckpointError(f"{self.folder}: tensors are missing: {_some(missing)}")
        head = self.description.family.outer["head.weight"]
        strangers = [name for name in sorted(self._files.keys() - expected) if not DERIVABLE.search(name)]
        if self.model.tie_embeddings and head in strangers:
            strangers.remove(head)
        for name, original in self._copies(strangers).items():
            if not torch.equal(self._slice(name)[:], self._slice(original)[:]):
                raise ConversionError(f"{self.folder}: {name} differs from {original}, and megalite has one for both")
            strangers.remove(name)
        if strangers:
            raise CheckpointError(
                f"{self.folder}: a {self.description.family.model_type} with this config.json has no place for "
                f"{_some(strangers)}"
            )

    def _copies(self, names: list[str]) -> dict[str, str]:
        """Of some tensors those that a published folder repeats for layers that predict further, and of which each is
        a copy."""
        family = self.description.family
        first = self.description.model.num_layers
        originals = {"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": "head.weight"}
        found = {
            f"{family.blocks}.{first + depth}.{name}": family.outer[original]
            for depth in range(self.description.model.num_predictions)
            for name, original in originals.items()
        }
        return {name: original for name, original in found.items() if name in names and original in self._files}

    def _refuse_second_head(self) -> None:
        """A tied model may carry a copy of its embedding as head, but no other: versions differ in which they use."""
        head = self.description.family.outer["head.weight"]
        if not self.model.tie_embeddings or head not in self._files:
            return
        embedding = self._places["embedding.weight"].tensor
        if not torch.equal(self._slice(head)[:], self._slice(embedding)[:]):
            raise ConversionError(
                f"{self.folder}: tie_word_embeddings is true, yet {head} differs from {embedding}; transformers 4 "
                "ignores it and 5 uses it. Set tie_word_embeddings to false in config.json, or delete the tensor"
            )

    def _slice(self, name: str) -> Any:
        """A tensor as safetensors' lazy slice, whose type it does not export."""
        file = self._files[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            return self._open[file].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / file}: {name} cannot be read ({error})") from error


def _described(folder: Path) -> tuple[Description, dict[str, str]]:
    """What config.json says, and the file of every tensor. Without layers that predict further if none of their weights
    is there: transformers 5 counts them in every config of such a class."""
    found, files = read_config(folder), locate(folder)
    first = f"{found.family.blocks}.{found.model.num_layers}."
    if found.model.mtp is None or any(name.startswith(first) for name in files):
        return found, files
    return replace(found, model=found.model.model_copy(update={"mtp": None})), files


def model_config(folder: Path) -> Architecture:
    """The filled model of a Hugging Face folder, for the `model` section of a config.

    Raises:
        ConversionError: megalite has no such model.
    """
    return _described(Path(folder))[0].model


def require_same_model(folder: Path, theirs: Architecture, ours: Architecture) -> None:
    """Refuse to read the weights of one model into another that computes something else from them.

    Raises:
        ConversionError: with every field that differs.
    """
    if theirs.num_predictions > ours.num_predictions:
        theirs = theirs.model_copy(update={"mtp": ours.mtp})  # what is left out changes no logits
    found = match(theirs, ours)
    differing = (*found.refused, *found.changed)
    if differing:
        raise ConversionError(
            "\n".join([f"{folder}: of another model than the config:", *(f"  - {each}" for each in differing)])
        )


def locate(folder: Path) -> dict[str, str]:
    """The file of every tensor."""
    index = folder / INDEX_FILE
    if index.is_file():
        files = _read_index(index)
        missing = sorted({file for file in files.values() if not os.path.isfile(folder / file)})
        if missing:
            raise CheckpointError(f"{folder}: shards named by {INDEX_FILE} are missing: {_some(missing)}")
        return files
    if (folder / SINGLE_FILE).is_file():
        try:
            with safe_open(folder / SINGLE_FILE, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE_FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / SINGLE_FILE}: cannot be read ({error})") from error
    if any(folder.glob("pytorch_model*.bin")):
        raise ConversionError(
            f"{folder}: has only pytorch_model.bin, a pickle, which megalite does not open because that can run code. "
            "If you trust its maker, convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise ConversionError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _read_index(path: Path) -> dict[str, str]:
    """Which file each tensor is in."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error!r})") from error
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: weight_map is {reprlib.repr(files)}, expected a file for each tensor")
    for name, file in files.items():
        if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", ".."):
            raise CheckpointError(
                f"{path}: {name} lies in {reprlib.repr(file)}, expected the name of a file in the same folder"
            )
    return files


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return ", ".join(names[:MANY]) + more
