"""What must hold between the settings of initial weights."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.architecture.architecture import Architecture
from megalite.config.schema import ModelConfig
from megalite.config.wording import unused


def check_init(given: ModelConfig, model: Architecture) -> Iterator[str]:
    """Complaints about `model.init`, and what goes with it."""
    init = model.init
    if init.rule == "normal":
        yield from unused(init, ("gain",), "model.init", "rule=normal, whose deviation is init_std")
    elif model.mup is not None:
        yield (
            f"model.init.rule: {init.rule} makes deviations smaller with the width by itself, and mup would once more; "
            "use rule=normal, or mup=null"
        )
    if init.cut is None:
        yield from unused(init, ("cut_keeps_std",), "model.init", "cut=null")
    if model.tie_embeddings and init.head_std is not None:
        yield (
            f"model.init.head_std: found {init.head_std:g}, but the head is the embedding (tie_embeddings=true); use "
            "embedding_std, or null"
        )
    if init.rule != "normal" and init.embedding_std is not None and not model.attention_sinks:
        because = f"init.rule={init.rule} for matrices and init.embedding_std for tables"
        yield from unused(given, ("init_std",), "model", because)
