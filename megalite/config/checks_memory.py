"""What must hold between the settings that save memory of activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megalite.config.recompute import modes_of
from megalite.config.schema import Config
from megalite.config.stream import own_tokens
from megalite.config.wording import or_


def check_memory(config: Config) -> Iterator[str]:
    """Complaints about `train.mlp_chunk_tokens` and `train.offload_activations`; see `check_chunks` for more."""
    train, chunk = config.train, config.train.mlp_chunk_tokens
    modes = modes_of(config)
    if chunk is not None and "selective" in modes:
        yield (
            "train.mlp_chunk_tokens: recompute=selective keeps the results of the MLP's products, which chunks would "
            "make again; use recompute=full or none, or null here"
        )
    if chunk is not None and config.precision.fp8 is not None:
        yield "train.mlp_chunk_tokens: FP8 scales are of whole matrices, not of chunks; use precision.fp8=null, or null"
    if train.offload_activations and modes != {"full"}:
        others = or_(sorted(modes - {"full"}))
        yield (
            f"train.offload_activations: found with recompute={others}; what full recomputation keeps is "
            "what waits in the host's memory: use recompute=full, or false"
        )


def check_chunks(stages: Iterable[Config]) -> Iterator[str]:
    """Complain about chunks that no stage of a run has tokens for: one that has makes sense of them.

    Args:
        stages: the config of each.
    """
    given = list(stages)
    chunk, most = given[0].train.mlp_chunk_tokens, max(own_tokens(config) for config in given)
    if chunk is not None and chunk >= most:
        yield (
            f"train.mlp_chunk_tokens: {chunk} has no effect, a rank's MLP has {most} tokens of a micro-batch; use "
            "fewer, or null"
        )
