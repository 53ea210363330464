"""The low-rank adapters of a checkpoint as a folder that PEFT reads, beside the model they were trained on.

    blocks.3.attention.q.lora_a [rank, in]   ->  base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight
    blocks.3.attention.q.lora_b [out, rank]  ->  base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight

Who loads them adds them to the base's weights, so those are compared with the checkpoint's, all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import LoraConfig
from megalite.architecture.weights import Weight, adapters_of, weight_table
from megalite.checkpoint.averaged_weights import model_weights
from megalite.checkpoint.format import stored_model
from megalite.checkpoint.hf.config_json import FILE_NAME
from megalite.checkpoint.hf.families.registry import choose_family
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.folders import building, find_checkpoint, require_room
from megalite.checkpoint.hf.importer import HuggingFaceWeights
from megalite.checkpoint.hf.layout import TensorPlace, one_thread, places, row_blocks
from megalite.checkpoint.hf.stream import write_stream
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.run_config import run_config, section
from megalite.checkpoint.tensor_file import Entry
from megalite.errors import CheckpointError, ConversionError
from megalite.model.initialize import WeightSource
from megalite.model.lora import without_lora

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"

ROUNDED = (torch.bfloat16, torch.float16)
"""Formats in which a run may have kept what it did not train."""


@dataclass(frozen=True)
class ExportedAdapter:
    """What was written."""

    checkpoint: Path
    folder: Path
    base: Path
    architecture: str
    num_layers: int
    """Linear layers with an adapter."""
    num_parameters: int


def to_peft(checkpoint: Path, out: Path, *, base: Path | None = None, overwrite: bool = False) -> ExportedAdapter:
    """Export the adapters of a checkpoint.

    Args:
        checkpoint: its folder, or a run's for the newest.
        out: folder to make.
        base: Hugging Face folder of the model that was adapted; None for the one that the run began with.
        overwrite: replace an older adapter in `out`.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConversionError: it has no adapters, its class has layers that PEFT adapts otherwise, the base is another model
            or has other weights, or `out` is taken or has one of them in it.
    """
    reader = CheckpointReader(find_checkpoint(checkpoint))
    whole = stored_model(reader.folder, reader.manifest)
    if whole.lora is None:
        raise ConversionError(f"{reader.folder}: its run trained no adapters (model.lora); use megalite convert to-hf")
    model = without_lora(whole)
    family, base = choose_family(model), _base_of(reader, base)
    source = model_weights(reader)
    modules = _modules(whole, whole.lora, family)
    tensors = {
        f"base_model.model.{module}.lora_{letter}.weight": row
        for module, rows in modules.items()
        for letter, row in zip("AB", rows, strict=True)
    }
    entries = [Entry(name, row.shape, torch.float32) for name, row in sorted(tensors.items())]
    num_bytes = sum(entry.num_bytes for entry in entries)
    require_room(out, num_bytes)
    with building(out, inputs=[reader.folder, base], overwrite=overwrite) as folder:
        if problems := reader.verify():
            raise CheckpointError("\n  ".join([f"{reader.folder} is damaged; export an older one", *problems]))
        _require_equal(source, model, base)
        write_stream(folder / WEIGHTS_FILE, entries, partial(_blocks, source, tensors))
        settings = json.dumps(_settings(whole.lora, list(modules), model, base), indent=2)
        (folder / CONFIG_FILE).write_text(settings + "\n", encoding="utf-8")
    return ExportedAdapter(reader.folder, out, base, family.architecture, len(modules), num_bytes // 4)


def _base_of(reader: CheckpointReader, given: Path | None) -> Path:
    """The Hugging Face folder that a checkpoint's adapters are for.

    Raises:
        ConversionError: none is known, or it is none.
    """
    found = given
    if given is None:
        started = section(run_config(reader.folder), "train").get("init_from")
        found = None if started is None else Path(started)
    if found is None or not (found / FILE_NAME).is_file():
        where = "the run began with fresh weights" if found is None else f"{found} has no {FILE_NAME}"
        raise ConversionError(
            f"--base: {where}, and an adapter needs the Hugging Face folder that it is added to; export the model that "
            "the run began with (megalite convert to-hf), or the adapted one as a whole"
        )
    return found


def _require_equal(source: WeightSource, model: Architecture, base: Path) -> None:
    """Refuse a base whose weights are not those beside the adapters.

    Raises:
        ConversionError: with the first weight that differs.
    """
    theirs = HuggingFaceWeights(base)
    rows, others = weight_table(model), weight_table(theirs.model)
    if {name: row.shape for name, row in rows.items()} != {name: row.shape for name, row in others.items()}:
        raise ConversionError(f"--base: {base} is a model of another shape; give the one that the run began with")
    with one_thread():
        for row in rows.values():
            for rectangle in row_blocks(row.shape):
                ours, exact = source.read(row, rectangle).float(), theirs.read(row, rectangle).float()
                if not any(torch.equal(ours, each) for each in (exact, *(exact.to(kind).float() for kind in ROUNDED))):
                    raise ConversionError(
                        f"--base: {row.name} of {base} is another than in the checkpoint, so its adapters are for "
                        "another model, or the run trained more than adapters (optimizer.groups); give the model that "
                        "the run began with, or export the adapted one as a whole: megalite convert to-hf"
                    )


def _modules(whole: Architecture, lora: LoraConfig, family: Family) -> dict[str, tuple[Weight, Weight]]:
    """The adapters by the names that transformers has for their layers.

    Raises:
        ConversionError: a layer is no linear layer of its own there.
    """
    table, found = weight_table(whole), dict[str, tuple[Weight, Weight]]()
    for name, place in places(without_lora(whole), family).items():
        row = table.get(name)
        if row is None or len(row.shape) != 2 or (pair := adapters_of(row, lora.rank))[0].name not in table:
            continue
        if not _is_alone(row, place):
            raise ConversionError(
                f"{family.architecture} holds {name} in {place.tensor}, no linear layer of its own, and PEFT would "
                "adapt that as a whole; export the adapted model: megalite convert to-hf"
            )
        found[place.tensor.removesuffix(".weight")] = pair
    return found


def _is_alone(row: Weight, place: TensorPlace) -> bool:
    return place.index is None and not place.transposed and tuple(place.shape) == row.shape


def _settings(lora: LoraConfig, modules: list[str], model: Architecture, base: Path) -> dict[str, Any]:
    """PEFT's adapter_config.json."""
    # By last names, as everybody does, where no other layer has one of them
    short = sorted({module.rpartition(".")[2] for module in modules})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "target_modules": short if model.moe is None else sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_dropout": 0.0,
    }


def _blocks(source: WeightSource, tensors: dict[str, Weight], name: str) -> Iterator[Tensor]:
    row = tensors[name]
    for rectangle in row_blocks(row.shape):
        part = source.read(row, rectangle).float()
        if not bool(torch.isfinite(part).all()):
            raise ConversionError(f"{row.name} has numbers that are NaN or infinite; export an older checkpoint")
        yield part
