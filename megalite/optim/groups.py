"""Parameter groups: which weights decay."""

from __future__ import annotations

from typing import Any

from megalite.config.schema import OptimizerConfig
from megalite.model.initialize import local_weights
from megalite.model.transformer import Stage


def parameter_groups(stage: Stage, optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    """Torch parameter groups of a stage: decayed matrices, and norms and biases that are not.

    Embedding tables and the head are decayed unless `optimizer.decay_embeddings` is off. Empty groups are left out.
    """
    decays = {
        local.parameter_name: local.weight.decay and (optimizer.decay_embeddings or _is_inner(local.weight.layer))
        for local in local_weights(stage)
    }
    groups = []
    for decay in (True, False):
        parameters = [p for name, p in stage.named_parameters() if decays[name] == decay]
        if parameters:
            groups.append({"params": parameters, "weight_decay": optimizer.weight_decay if decay else 0.0})
    return groups


def _is_inner(layer: str) -> bool:
    return layer.startswith("blocks.")
