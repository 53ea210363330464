"""Whether weights of one model can go on as another: what their shapes and meaning fix, and what a run may choose.

A run that continues a model takes its weights, and with them the architecture. How far positions reach, which tokens a
window shows and what training alone looks at are choices; a changed one makes another function of the same weights, so
it is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import MlaConfig, MoeConfig, RopeConfig

TRAINING_ONLY = frozenset({"attention_dropout", "dropout", "init", "init_std", "init_depth_scaling", "z_loss"})
"""Fields that do not change what the weights compute."""

BALANCE_ONLY = frozenset({"aux_loss", "aux_loss_over", "z_loss", "capacity_factor"})
"""The same of experts."""

CHOICES = frozenset(
    {
        "norm_eps",
        "rope.theta",
        "rope.scaling",
        "sliding_rope",
        "sliding_window",
        "layer_types",
        "max_positions",
        "moe.has_bias",
        "mtp.num_layers",
    }
)
"""Fields that change it, and that a run may choose anew for weights that were trained with others."""


@dataclass(frozen=True)
class Match:
    """How a model differs from the one that weights were trained as; a sentence for each difference."""

    refused: tuple[str, ...]
    """In the architecture: the weights do not fit."""
    changed: tuple[str, ...]
    """In choices."""


def match(theirs: Architecture, ours: Architecture) -> Match:
    """Compare two filled models.

    Args:
        theirs: of the weights.
        ours: of the run that takes them.
    """
    before, now = _fields(theirs), _fields(ours)
    differing = [name for name in now if before[name] != now[name]]
    if ours.positions == "rope" and ours.max_positions <= theirs.max_positions:
        differing = [name for name in differing if name != "max_positions"]  # rotary positions have no last one
    fixed = {"max_positions"} if ours.positions == "learned" else set()
    if ours.num_predictions > theirs.num_predictions > 0:
        fixed.add("mtp.num_layers")  # which begin anew together, or not
    refused = [name for name in differing if name not in CHOICES or name in fixed]
    sentences = {name: f"model.{name} is {now[name]}, the weights have {before[name]}" for name in differing}
    changed = [sentences[name] for name in differing if name not in refused]
    return Match(tuple(sentences[name] for name in refused), tuple(changed))


def _fields(model: Architecture) -> dict[str, Any]:
    """The fields that change what the weights compute, those of `rope` by themselves. Adapters and scales are added, or
    begin anew, where they differ."""
    fields = {name: getattr(model, name) for name in Architecture.model_fields if name not in TRAINING_ONLY}
    fields["sliding_rope"] = model.sliding_rope and _spelled_out(model.sliding_rope)
    fields["sliding_rope.interleaved"] = (model.sliding_rope or model.rope).interleaved
    rope, moe = _spelled_out(fields.pop("rope")), fields.pop("moe")
    fields |= {f"rope.{name}": getattr(rope, name) for name in type(rope).model_fields}
    fields |= {f"mla.{name}": getattr(fields["mla"], name, None) for name in MlaConfig.model_fields}
    fields["mtp.num_layers"] = model.num_predictions
    del fields["mla"], fields["mtp"], fields["lora"], fields["weight_scales"]
    return fields | {f"moe.{name}": value for name, value in _experts(model, moe).items()}


def _experts(model: Architecture, moe: MoeConfig | None) -> dict[str, Any]:
    """What matters of experts: which blocks have them, and whether a bias counts in the choice, in whatever terms they
    are said."""
    otherwise = BALANCE_ONLY | {"first_dense", "every", "bias_rate"}
    found = {name: getattr(moe, name, None) for name in MoeConfig.model_fields if name not in otherwise}
    sparse = [index for index, is_sparse in enumerate(model.sparse_blocks) if is_sparse]
    return {**found, "has_bias": moe is not None and moe.bias_rate is not None, "blocks": sparse}


def _spelled_out(rope: RopeConfig) -> RopeConfig:
    """The same rotation, without the null that stands for a stretch's own factor."""
    if rope.scaling is None:
        return rope
    scaling = rope.scaling.model_copy(update={"attention_factor": rope.scaling.sharpness})
    return rope.model_copy(update={"scaling": scaling})
