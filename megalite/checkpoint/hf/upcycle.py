"""A dense checkpoint as one with experts, each a copy of its block's MLP (Komatsuzaki et al. 2022).

    CKPT --every expert's matrices are the MLP's, routers are fresh--> OUT/step-0000000, weights in fp32

The weights of a token's experts add up to 1, so the new model computes what the old one did, until training has told
its experts apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import count_active_parameters, count_parameters
from megalite.architecture.settings import MoeConfig
from megalite.architecture.weights import Rectangle, Weight
from megalite.checkpoint.averaged_weights import model_weights
from megalite.checkpoint.format import folder_name, stored_model
from megalite.checkpoint.hf.folders import building, find_checkpoint, require_room
from megalite.checkpoint.hf.provenance import (
    IMPORTED_FROM,
    LICENCE,
    TOKENIZER_FINGERPRINT,
    UPCYCLED_FROM,
    UPDATES_BEFORE,
    trace,
)
from megalite.checkpoint.hf.to_checkpoint import BYTES_PER_PARAMETER, write_weights_only
from megalite.checkpoint.reader import CheckpointReader
from megalite.config.checks_moe import check_experts
from megalite.errors import CheckpointError, ConversionError
from megalite.model.initialize import FreshWeights, WeightSource
from megalite.model.lora import WithAdaptersAdded, without_lora
from megalite.model.scales import without_scales


@dataclass(frozen=True)
class Upcycled:
    """What was made."""

    checkpoint: Path
    origin: Path
    num_parameters: int
    num_active: int
    """That a token meets."""


class ExpertsOfMlps:
    """The weights of a model with experts, of those of a dense one; see `model.initialize.WeightSource`.

    Args:
        dense: the weights of the dense model.
        fresh: those of routers.
    """

    def __init__(self, dense: WeightSource, fresh: WeightSource):
        self._dense, self._fresh = dense, fresh

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        if weight.expert is not None:
            name = weight.name.replace(f".experts.{weight.expert[0]}.", ".")
            return self._dense.read(replace(weight, name=name), rectangle)
        source = self._fresh if ".mlp.router." in weight.name else self._dense
        return source.read(weight, rectangle)


def upcycle(checkpoint: Path, out: Path, settings: Mapping[str, int], *, seed: int = 0, overwrite: bool) -> Upcycled:
    """Write a checkpoint with experts.

    Args:
        checkpoint: its folder, or a run's for the newest.
        out: folder to make.
        settings: of the experts, as `model.moe` has them: how many, of which a token goes to how many, in which blocks.
        seed: of the routers.
        overwrite: replace an older checkpoint in `out`.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConversionError: its model has experts, or cannot have such, or `out` is taken or has the checkpoint in it.
    """
    reader = CheckpointReader(find_checkpoint(checkpoint))
    dense = without_scales(stored_model(reader.folder, reader.manifest))
    weights: WeightSource = model_weights(reader)
    if dense.lora is not None:
        dense, weights = without_lora(dense), WithAdaptersAdded(weights, dense)
    model = _with_experts(dense, settings)
    require_room(out, count_parameters(model) * BYTES_PER_PARAMETER)
    source = ExpertsOfMlps(weights, FreshWeights(model, seed))
    with building(out, inputs=[reader.folder], overwrite=overwrite) as partial:
        if problems := reader.verify():
            raise CheckpointError("\n  ".join([f"{reader.folder} is damaged; upcycle an older one", *problems]))
        step = partial / folder_name(0)
        step.mkdir()
        write_weights_only(step, source, model, data=_origin(reader))
    return Upcycled(out / folder_name(0), reader.folder, count_parameters(model), count_active_parameters(model))


def _with_experts(dense: Architecture, settings: Mapping[str, int]) -> Architecture:
    """The model with experts as wide as its MLPs.

    Raises:
        ConversionError: it cannot have such.
    """
    if dense.moe is not None:
        raise ConversionError("the model has experts already; upcycle a dense one")
    try:
        moe = MoeConfig.model_validate({**settings, "ffn_hidden_size": dense.ffn_hidden_size})
    except ValidationError as error:
        raise ConversionError(f"experts that no model has: {error.errors()[0]['msg']}") from error
    if moe.top_k == 1:
        raise ConversionError(
            "a token that goes to one expert brings its output weighed by 1, where the router learns nothing from the "
            "loss, or by its score, which is not what the dense model computes; use a top_k of 2 or more"
        )
    model = dense.model_copy(update={"moe": moe})
    if problems := list(check_experts(model)):
        raise ConversionError("; ".join(problems))
    return model


def _origin(reader: CheckpointReader) -> dict[str, str | int | None]:
    """What the manifest says of where the weights are from; a tokenizer is named by its whole path."""
    manifest, data = reader.manifest, dict[str, str | int | None]()
    data |= {UPCYCLED_FROM: str(reader.folder.resolve()), UPDATES_BEFORE: manifest.progress.num_updates}
    if (began := trace(reader.folder, manifest).origin) is not None:
        data |= {IMPORTED_FROM: began.name, LICENCE: began.license}
    if TOKENIZER_FINGERPRINT in manifest.data:
        data[TOKENIZER_FINGERPRINT] = manifest.data[TOKENIZER_FINGERPRINT]
    tokenizer = manifest.data.get("tokenizer")
    if isinstance(tokenizer, str):
        beside = reader.folder.parent / tokenizer
        data["tokenizer"] = str(beside.resolve()) if beside.is_dir() else tokenizer
    return data
